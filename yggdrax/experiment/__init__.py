"""Experiments: typed configurations, the run loop, and ``python -m yggdrax``.

Example:
  >>> config = ExperimentConfig(BananaProblem(), num_particles=50, num_steps=200)
  >>> config.svgd.bandwidth
  'median'
"""

from yggdrax.experiment.config import (
    ConfigError,
    ExperimentConfig,
    OptimizerConfig,
    ProblemConfig,
    SvgdConfig,
)
from yggdrax.experiment.images import DigitsProblem
from yggdrax.experiment.learning import LearnBandwidthProblem
from yggdrax.experiment.loop import Outcome, run
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.experiment.tables import ClassificationProblem, RegressionProblem
from yggdrax.experiment.toys import (
    BananaProblem,
    FunnelProblem,
    GaussianProblem,
    MixtureProblem,
)
from yggdrax.experiment.workdir import WorkdirError

__all__ = [
    "BananaProblem",
    "ClassificationProblem",
    "ConfigError",
    "DigitsProblem",
    "ExperimentConfig",
    "FunnelProblem",
    "GaussianProblem",
    "LearnBandwidthProblem",
    "MixtureProblem",
    "OptimizerConfig",
    "Outcome",
    "Problem",
    "ProblemConfig",
    "RegressionProblem",
    "RunState",
    "SvgdConfig",
    "WorkdirError",
    "run",
]
