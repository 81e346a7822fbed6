"""Stacks of particles: drawing, gradients summed over particles, keys, carried collections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from yggdrax.particles import (
    EqualParticlesWarning,
    init_model_state,
    init_particles,
    particle_grads,
    warn_if_equal,
)
from yggdrax.targets import BayesianNetwork, Gaussian, LogDensity, Target


class Net(nnx.Module):
    """Linear, BatchNorm, dropout, linear: all the collections at once."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


class Dropout(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.drop(x))


BATCH = (jnp.asarray(np.random.RandomState(0).randn(6, 3), jnp.float32), jnp.arange(6.0))


def test_particles_are_distinct_and_a_function_of_the_key():
    target = BayesianNetwork(Net, num_data=6)
    first = init_particles(jax.random.key(0), target, 5)
    again = init_particles(jax.random.key(0), target, 5)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), first, again))
    kernels = np.asarray(first["params"]["first"]["kernel"]).reshape(5, -1)
    distances = np.linalg.norm(kernels[:, None] - kernels, axis=-1)
    assert np.all(distances[~np.eye(5, dtype=bool)] > 0.1)


@pytest.mark.parametrize("number", [0, -3, 2.5, True])
def test_a_bad_number_of_particles_is_refused(number):
    with pytest.raises(ValueError, match=f"positive integer, not {number!r}"):
        init_particles(jax.random.key(0), Gaussian([0.0], 1.0), number)


def test_gradients_are_summed_over_particles_not_averaged():
    particles = jnp.array([[1.0], [3.0], [-2.0]])
    grads = particle_grads(Gaussian([0.0], 1.0), particles)
    np.testing.assert_allclose(grads, particles)  # the mean of the losses would give a third


def test_minibatch_likelihood_is_scaled_by_num_data_over_batch():
    """Prior N(0, 1), 100 unit-variance data of mean 1: mean 0.990099, variance 0.009901."""

    class Location(Target):
        num_data = 100

        def __call__(self, particle, batch=None, *, key=None):
            from yggdrax.targets.base import likelihood_scale

            scale = likelihood_scale(self.num_data, len(batch))
            return -0.5 * particle**2 - scale * 0.5 * jnp.sum((batch - particle) ** 2)

    batch = jnp.ones(10)
    slope, at_zero = 101.0, particle_grads(Location(), jnp.zeros(1), batch)
    assert float(-at_zero[0] / slope) == pytest.approx(0.990099, abs=1e-6)
    difference = particle_grads(Location(), jnp.ones(1), batch) - at_zero
    assert float(1 / difference[0]) == pytest.approx(0.009901, abs=1e-6)


class Bias(nnx.Module):
    """A network that is only a constant, so that its posterior is known in closed form."""

    def __init__(self, *, rngs):
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return jnp.broadcast_to(self.bias[...], (x.shape[0], 1))


@pytest.mark.parametrize(
    ("rows", "num_data", "mean", "variance"),
    [(10, 100, 0.990099, 0.009901), (4, None, 0.8, 0.2), (4, 4, 0.8, 0.2)],
)
def test_network_posterior_has_prior_and_scaled_likelihood(rows, num_data, mean, variance):
    from yggdrax.targets import GaussianNoise

    target = BayesianNetwork(Bias, GaussianNoise(precision=1.0), num_data=num_data)
    batch = jnp.zeros((rows, 1)), jnp.ones(rows)
    grads = particle_grads(target, {"params": {"bias": jnp.array([0.0, 1.0])}}, batch)
    at_zero, at_one = grads["params"]["bias"]
    curvature = float(at_one - at_zero)
    assert 1 / curvature == pytest.approx(variance, abs=1e-6)
    assert -float(at_zero) / curvature == pytest.approx(mean, abs=1e-6)


def test_each_particle_has_a_key_of_its_own():
    target = BayesianNetwork(Dropout, num_data=6)
    one = target.init(jax.random.key(0))
    equal = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), one)
    step = jax.jit(lambda key: particle_grads(target, equal, BATCH, key=key))
    grads = step(jax.random.key(1))
    kernels = np.asarray(grads["params"]["linear"]["kernel"])[..., 0]
    assert len({tuple(row) for row in kernels}) == 8
    same = step(jax.random.key(1))
    np.testing.assert_array_equal(kernels, same["params"]["linear"]["kernel"][..., 0])
    other = step(jax.random.key(2))
    assert not np.array_equal(kernels, other["params"]["linear"]["kernel"][..., 0])
    legacy = step(jax.random.PRNGKey(1))
    np.testing.assert_array_equal(kernels, legacy["params"]["linear"]["kernel"][..., 0])


def test_noise_without_a_key_is_refused():
    target = BayesianNetwork(Dropout, num_data=6)
    particles = init_particles(jax.random.key(0), target, 2)
    with pytest.raises(ValueError, match="pass key="):
        particle_grads(target, particles, BATCH)


def test_batch_statistics_are_carried_per_member():
    target = BayesianNetwork(Net, num_data=6)
    particles = init_particles(jax.random.key(0), target, 4)
    state = init_model_state(jax.random.key(0), target, 4)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(state))
    assert "norm" not in particles or "mean" not in particles["params"]["norm"]
    grads, new_state = jax.jit(
        lambda p, s, k: particle_grads(target, p, BATCH, key=k, model_state=s)
    )(particles, state, jax.random.key(3))
    assert jax.tree.structure(grads) == jax.tree.structure(particles)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    # The running mean of member i is half the batch mean of its own first layer (momentum 0.5).
    for i in range(4):
        kernel = np.asarray(particles["params"]["first"]["kernel"][i])
        bias = np.asarray(particles["params"]["first"]["bias"][i])
        expected = 0.5 * (np.asarray(BATCH[0]) @ kernel + bias).mean(0)
        np.testing.assert_allclose(new_state["norm"]["mean"][i], expected, rtol=1e-5, atol=1e-6)
    assert np.asarray(new_state["drop"]["rngs"]["count"]).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="model_state=init_model_state"):
        particle_grads(target, particles, BATCH, key=jax.random.key(3))


def test_a_batch_for_each_particle():
    target = LogDensity(lambda p, batch: -jnp.sum((p - batch) ** 2), init=jnp.zeros(()))
    grads = particle_grads(target, jnp.zeros(3), jnp.array([[1.0], [2.0], [3.0]]), batch_axis=0)
    np.testing.assert_allclose(grads, [-2.0, -4.0, -6.0])


def test_a_target_that_returns_a_vector_is_refused():
    class Vector(Target):
        def __call__(self, particle, batch=None, *, key=None):
            return -0.5 * particle**2

    with pytest.raises(ValueError, match=r"must be a scalar, but has shape \(2,\)"):
        particle_grads(Vector(), jnp.zeros((5, 2)))


@pytest.mark.parametrize(
    ("particles", "error", "words"),
    [
        ({"a": jnp.zeros((3, 1)), "b": jnp.zeros((2, 1))}, ValueError, "leading axes differ"),
        ({"a": jnp.zeros(3), "step": jnp.zeros(3, int)}, TypeError, r"'step'.*int32"),
        ({"a": jnp.zeros(())}, ValueError, "needs the leading axis N"),
        ({"a": jnp.zeros((0, 2))}, ValueError, "0 particles"),
        ({}, ValueError, "empty tree"),
    ],
)
def test_malformed_particles_are_refused_by_name(particles, error, words):
    with pytest.raises(error, match=words):
        particle_grads(LogDensity(lambda p: p["a"].sum(), init=jnp.zeros(1)), particles)


def test_leaf_dtypes_are_kept():
    particles = {"a": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(3)}
    target = LogDensity(
        lambda p: -jnp.sum(p["a"].astype(jnp.float32) ** 2) - p["b"] ** 2, particles
    )
    grads = particle_grads(target, particles)
    assert grads["a"].dtype == jnp.bfloat16 and grads["b"].dtype == jnp.float32


def test_equal_members_at_the_start_give_a_warning():
    constant = LogDensity(lambda x: -jnp.sum(x**2), init=lambda key: {"x": jnp.ones(3)})
    with pytest.warns(EqualParticlesWarning, match="only 1 of 4 particles differ"):
        init_particles(jax.random.key(0), constant, 4)
    # Equal sums are no equal particles, and one pair among many is found.
    warn_if_equal(jnp.array([[1.0, 2.0], [2.0, 1.0], [3.0, 0.0]]))
    many = np.random.RandomState(0).randn(500, 2)
    many[77] = many[401]
    with pytest.warns(EqualParticlesWarning, match="only 499 of 500"):
        warn_if_equal({"a": many[:, :1], "b": many[:, 1:]})
    jax.jit(lambda key: init_particles(key, constant, 4))(jax.random.key(0))  # silent inside jit
