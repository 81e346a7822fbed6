"""Toy targets against their own samples, moments and normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.targets import Banana, Funnel, Gaussian, LogDensity, Mixture

TARGETS = {
    "gaussian": Gaussian([1.0, -2.0], [[2.0, 0.6], [0.6, 0.5]]),
    "mixture": Mixture(
        [1, 2], [Gaussian([-2.0, 0.0], [1.0, 2.0]), Gaussian([2.0, 1.0], [[1.0, 0.5], [0.5, 1.0]])]
    ),
    "banana": Banana(1.5, 0.4),
    "funnel": Funnel(2, scale=1.0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_samples_have_the_closed_form_moments(name):
    target = TARGETS[name]
    n = 200_000
    samples = np.asarray(target.sample(jax.random.key(1), n), np.float64)
    mean, covariance = np.asarray(target.mean()), np.asarray(target.covariance())
    # Five standard errors, those of the squares estimated from the samples themselves.
    standard_error = samples.std(0) / np.sqrt(n)
    assert np.all(np.abs(samples.mean(0) - mean) < 5 * standard_error)
    centred = samples - mean
    products = centred[:, :, None] * centred[:, None, :]
    assert np.all(np.abs(products.mean(0) - covariance) < 5 * products.std(0) / np.sqrt(n) + 1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_density_is_normalised_and_agrees_with_the_samples(name):
    target = TARGETS[name]
    side, cells = 30.0, 1200
    axis = (jnp.arange(cells) + 0.5) / cells * 2 * side - side
    grid = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    density = jnp.exp(jax.vmap(target)(grid)) * (2 * side / cells) ** 2
    # Midpoint sum over cells of 0.05; the funnel's neck and tails lose the most.
    assert float(density.sum()) == pytest.approx(1, abs=2e-3)
    # The probability of a skew region tells a wrong sign of the bend, which moments do not.
    inside = (grid[:, 1] > 0.3) & (grid[:, 0] < 1)
    samples = target.sample(jax.random.key(2), 200_000)
    share = jnp.mean((samples[:, 1] > 0.3) & (samples[:, 0] < 1))
    assert float(jnp.sum(density * inside)) == pytest.approx(float(share), abs=5e-3)


def test_score_of_the_banana_points_up_its_arms():
    target = Banana(2.0, 0.5)
    score = jax.grad(target)(jnp.array([4.0, 0.0]))
    # d/dx2 at (4, 0): -(0 - 0.5 (16 - 4)) = 6; d/dx1: -4/4 + (-6) * 4 ... = -1 - 6 * 4 = -25.
    np.testing.assert_allclose(score, [-25.0, 6.0], rtol=1e-6)


def test_exponential_in_the_logarithm_carries_its_jacobian():
    target = LogDensity(lambda u: u - jnp.exp(u), init=jnp.zeros(()))
    points = jnp.array([-2.0, 0.0, 1.0])
    np.testing.assert_allclose(jax.vmap(jax.grad(target))(points), 1 - np.exp(points), rtol=1e-6)
    axis = jnp.linspace(-30, 5, 20_001)
    weight = jnp.exp(jax.vmap(target)(axis))
    weight /= weight.sum()
    mean = float(jnp.sum(weight * axis))
    assert mean == pytest.approx(-0.577216, abs=1e-4)
    assert float(jnp.sum(weight * (axis - mean) ** 2)) == pytest.approx(1.644934, abs=1e-3)


def test_float64_inputs_give_float64(x64):
    target = Gaussian(np.zeros(2), np.eye(2))
    assert target(np.ones(2)).dtype == jnp.float64
    assert float(target(np.ones(2))) == pytest.approx(-1 - np.log(2 * np.pi), rel=1e-15)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gaussian([0.0, 0.0], np.eye(3)), r"covariance must have shape \(2, 2\)"),
        (lambda: Gaussian([0.0, 0.0], [[1.0, 2.0], [2.0, 1.0]]), "positive definite"),
        (lambda: Gaussian([0.0, 0.0], [[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (lambda: Mixture([1.0, -1.0], [Gaussian([0.0], 1.0)] * 2), "positive"),
        (lambda: Mixture([1.0], [Gaussian([0.0], 1.0)] * 2), "2 positive numbers"),
        (lambda: Mixture([1, 1], [Gaussian([0.0], 1.0), Banana()]), "one dimension"),
        (lambda: Banana(scale=-1.0), "scale must be a positive number, not -1.0"),
        (lambda: Funnel(1), "dimension must be an integer, at least 2, not 1"),
        (lambda: Banana()(jnp.zeros((5, 2))), r"one particle of shape \(2,\), not \(5, 2\)"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_log_density_refuses_a_vector_and_no_function():
    target = LogDensity(lambda x: -0.5 * x**2, init=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"scalar, but has shape \(3,\): sum it"):
        target(jnp.zeros(3))
    with pytest.raises(TypeError, match="callable, not float"):
        LogDensity(1.0, init=jnp.zeros(3))  # pyright: ignore[reportArgumentType]


def test_log_density_draws_around_an_example_or_by_a_function():
    example = {"a": jnp.full(4, 100.0), "n": jnp.array(3)}
    drawn = LogDensity(lambda p: p["a"].sum(), init=example).init(jax.random.key(0))
    assert int(drawn["n"]) == 3
    assert np.all(np.abs(drawn["a"] - 100) < 10) and len(set(drawn["a"].tolist())) == 4
    by_function = LogDensity(lambda p: p.sum(), init=lambda key: jnp.full(2, 7.0))
    assert by_function.init(jax.random.key(0)).tolist() == [7.0, 7.0]
