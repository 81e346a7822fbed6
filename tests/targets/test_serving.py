"""Members of a network as plain Flax, and targets in whitened coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from yggdrax.particles import init_model_state, init_particles
from yggdrax.targets import (
    BayesianNetwork,
    Gaussian,
    LinenNetwork,
    LogDensity,
    LogisticRegression,
    Whitened,
    predict,
)

X = np.random.RandomState(0).randn(6, 3).astype(np.float32)


class Net(nnx.Module):
    """All the collections at once."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dense(2)(linen.relu(x))


def members(network):
    target = BayesianNetwork(network)
    particles = init_particles(jax.random.key(0), target, 4)
    state = init_model_state(jax.random.key(1), target, 4)
    # Statistics that differ between the members and from their start.
    noise = np.random.RandomState(1)
    state = jax.tree.map(
        lambda v: v + noise.rand(*v.shape).astype(v.dtype) if v.dtype == np.float32 else v, state
    )
    expected = predict(target, particles, X, model_state=state).members
    return target.flax_state(particles, state), expected


def test_an_nnx_state_serves_in_the_users_own_module():
    state, expected = members(Net)
    module = Net(rngs=nnx.Rngs(5))
    module.eval()
    for i in range(4):
        nnx.update(module, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        np.testing.assert_allclose(module(X), expected[i], rtol=1e-5, atol=1e-6)
    graph = nnx.graphdef(module)
    stacked = jax.vmap(lambda s: nnx.merge(graph, s)(X))(state)
    np.testing.assert_allclose(stacked, expected, rtol=1e-5, atol=1e-6)


def test_linen_variables_serve_in_apply():
    variables, expected = members(LinenNetwork(LinenNet(), X[:1]))
    assert set(variables) == {"params", "batch_stats"}
    outputs = jax.vmap(lambda v: LinenNet().apply(v, X))(variables)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_statistics_cannot_be_forgotten():
    target = BayesianNetwork(Net)
    particles = init_particles(jax.random.key(0), target, 2)
    with pytest.raises(ValueError, match="pass the model_state"):
        target.flax_state(particles)


def logistic():
    x = np.random.RandomState(2).randn(60, 3)
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]  # strongly correlated coefficients
    return LogisticRegression(x, x[:, 0] + 0.5 * np.random.RandomState(3).randn(60) > 0)


def test_the_laplace_approximation_is_the_mode_and_the_inverse_curvature(x64):
    target = logistic()
    white = Whitened.laplace(target, jnp.zeros(4))
    np.testing.assert_allclose(jax.grad(target)(white.shift), 0, atol=1e-6)
    covariance = np.linalg.inv(-np.asarray(jax.hessian(target)(white.shift)))
    np.testing.assert_allclose(white.factor @ white.factor.T, covariance, rtol=1e-8)
    # Around the mode the whitened density is a standard normal.
    np.testing.assert_allclose(jax.hessian(white)(jnp.zeros(4)), -np.eye(4), atol=1e-8)


def test_a_whitened_tree_keeps_its_structure_and_density():
    def log_density(p):
        return -0.5 * jnp.sum((p["w"] - 1) ** 2) - 2.0 * (p["b"] + 3) ** 2

    target = LogDensity(log_density, {"w": jnp.zeros(2), "b": jnp.zeros(())})
    white = Whitened.laplace(target, {"w": jnp.zeros(2), "b": jnp.zeros(())})
    z = jax.random.normal(jax.random.key(0), (5, 3))
    particles = white.restore(z)
    assert particles["w"].shape == (5, 2) and particles["b"].shape == (5,)
    values = jax.vmap(target)(particles)
    np.testing.assert_allclose(jax.vmap(white)(z), values, rtol=1e-6)
    np.testing.assert_allclose(values, -0.5 * (z**2).sum(1), rtol=1e-4, atol=1e-5)
    assert white.init(jax.random.key(1)).shape == (3,)


def test_variances_alone_scale_each_coordinate():
    target = Gaussian([0.0, 0.0], [[4.0, 0.0], [0.0, 9.0]])
    white = Whitened(target, jnp.array([1.0, 2.0]), [4.0, 9.0])
    np.testing.assert_allclose(white.restore([[1.0, -1.0]]), [[3.0, -1.0]])


def test_what_cannot_be_whitened_is_refused():
    with pytest.raises(ValueError, match=r"must have shape \(2, 2\) or \(2,\), not \(3,\)"):
        Whitened(logistic(), jnp.zeros(2), jnp.ones(3))
    for bad in ([[1.0, 2.0], [2.0, 1.0]], [1.0, 0.0], [1.0, -1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="positive definite"):
            Whitened(logistic(), jnp.zeros(2), bad)
    flat = LogDensity(lambda p: -jnp.sum(p[0] ** 2), jnp.zeros(2))
    with pytest.raises(ValueError, match="found no mode"):
        Whitened.laplace(flat, jnp.ones(2))
