"""Log densities as Flax modules: toy targets, networks, priors, likelihoods, prediction."""

from yggdrax.targets import likelihoods, priors
from yggdrax.targets.base import LogDensity, Target
from yggdrax.targets.likelihoods import (
    Bernoulli,
    Categorical,
    GaussianNoise,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from yggdrax.targets.modules import LinenNetwork, NNXNetwork
from yggdrax.targets.network import BayesianNetwork
from yggdrax.targets.prediction import Predictive, predict
from yggdrax.targets.priors import (
    CentredGaussianPrior,
    GaussianPrior,
    LeafPriors,
    Prior,
    StudentTPrior,
)
from yggdrax.targets.regression import LogisticRegression
from yggdrax.targets.spikes import SpikeWarning, find_spikes, warn_of_spikes
from yggdrax.targets.toy import Banana, Funnel, Gaussian, Mixture, ToyTarget
from yggdrax.targets.whitened import Whitened

__all__ = [
    "Banana",
    "BayesianNetwork",
    "Bernoulli",
    "Categorical",
    "CentredGaussianPrior",
    "Funnel",
    "Gaussian",
    "GaussianNoise",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "LeafPriors",
    "Likelihood",
    "LinenNetwork",
    "LogDensity",
    "LogisticRegression",
    "Mixture",
    "NNXNetwork",
    "Poisson",
    "Predictive",
    "Prior",
    "SpikeWarning",
    "StudentTPrior",
    "Target",
    "ToyTarget",
    "Whitened",
    "find_spikes",
    "likelihoods",
    "predict",
    "priors",
    "warn_of_spikes",
]
