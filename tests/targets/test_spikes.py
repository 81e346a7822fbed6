"""Weights and their scale sampled together: the spike, its warning, and priors without it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import yggdrax as yg
from yggdrax.targets import (
    BayesianNetwork,
    CentredGaussianPrior,
    GaussianNoise,
    GaussianPrior,
    Prior,
    SpikeWarning,
    find_spikes,
    predict,
    warn_of_spikes,
)

RANDOM = np.random.RandomState(0)
X = jnp.asarray(RANDOM.randn(160, 2), jnp.float32)
CURVE = np.sin(2 * np.asarray(X[:, 0]))
Y = jnp.asarray(CURVE[:60] + 0.3 * RANDOM.randn(60), jnp.float32)


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(2, 50, rngs=rngs)
        self.output = nnx.Linear(50, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(jnp.tanh(self.hidden(x)))


class OwnPrior(Prior):
    """Normal weights whose log precision is a leaf, with a normal prior of its own."""

    def init(self, key):
        return {"log_precision": 0.1 * jax.random.normal(key)}

    def log_prob(self, params, extra):
        t = extra["log_precision"]
        n = sum(leaf.size for leaf in jax.tree.leaves(params))
        square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return 0.5 * n * t - 0.5 * jnp.exp(t) * square - t**2 / 18


class OwnNonCentredPrior(OwnPrior):
    """Weights of unit scale, which the network multiplies by the scale."""

    def log_prob(self, params, extra):
        square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return -0.5 * square - extra["log_precision"] ** 2 / 18


def errors(target):
    """Errors of the mean on new rows after the usual steps and after ten times as many."""
    optimizer = optax.chain(yg.svgd("median"), optax.adam(0.02))
    found = []
    for steps in (400, 4000):
        run = yg.sample(target, jax.random.key(0), 10, steps, optimizer=optimizer)
        mean = predict(target, run.particles, X[60:]).mean[:, 0]
        found.append(float(np.sqrt(np.mean((mean - CURVE[60:]) ** 2))))
    return found, run.particles


def test_ten_times_the_steps_change_nothing_without_the_spike():
    (usual, long), _ = errors(BayesianNetwork(Net, prior=GaussianPrior(scale=2), data=(X[:60], Y)))
    assert usual < 0.35 * CURVE.std()
    assert long == pytest.approx(usual, rel=0.05)


def test_with_the_spike_the_network_ends_as_a_constant():
    with pytest.warns(SpikeWarning):
        target = BayesianNetwork(Net, prior=CentredGaussianPrior(), data=(X[:60], Y))
    (_, long), particles = errors(target)
    assert long > 0.95 * CURVE[60:].std()
    assert float(jnp.abs(particles["params"]["output"]["kernel"]).max()) < 0.05
    assert float(particles["log_prior_precision"].min()) > 5


def test_a_hierarchy_of_the_users_own_is_warned_of():
    with pytest.warns(SpikeWarning, match="moving log_precision"):
        BayesianNetwork(Net, prior=OwnPrior(), num_data=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BayesianNetwork(Net, prior=OwnNonCentredPrior(), num_data=60)
        BayesianNetwork(Net, num_data=60)


def test_any_target_can_be_asked():
    target = BayesianNetwork(Net, GaussianNoise(), data=(X[:60], Y))
    assert find_spikes(target, target.init(jax.random.key(0))) == {}
    with pytest.warns(SpikeWarning):
        centred = BayesianNetwork(Net, prior=CentredGaussianPrior(), data=(X[:60], Y))
    assert list(find_spikes(centred, centred.init(jax.random.key(0)))) == ["log_prior_precision"]
    with pytest.warns(SpikeWarning, match="moving log_prior_precision"):
        warn_of_spikes(centred, centred.init(jax.random.key(0)))


def test_a_vector_of_precisions_is_found_too():
    # One precision a layer is the usual hierarchy.
    class PerLayer(Prior):
        def init(self, key):
            return {"log_precisions": jnp.zeros(4)}

        def log_prob(self, params, extra):
            layers = zip(extra["log_precisions"], jax.tree.leaves(params), strict=True)
            weights = sum(
                -0.5 * jnp.exp(t) * jnp.sum(leaf**2) + 0.5 * leaf.size * t for t, leaf in layers
            )
            t = extra["log_precisions"]
            return weights + jnp.sum(t - 0.1 * jnp.exp(t))

        def sample(self, key, template):
            return jax.tree.map(jnp.ones_like, template)

    with pytest.warns(SpikeWarning, match="log_precisions"):
        BayesianNetwork(Net, prior=PerLayer(), num_data=10)
