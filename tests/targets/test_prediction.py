"""The predictive mixture against SciPy, and its shapes for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize as so
import scipy.stats as st
from flax import nnx

from yggdrax.particles import init_particles
from yggdrax.targets import (
    BayesianNetwork,
    Categorical,
    Gaussian,
    LogisticRegression,
    likelihoods,
    predict,
)
from yggdrax.targets.prediction import Predictive

MEANS = np.array([[[0.0], [1.0]], [[2.0], [-1.0]], [[0.5], [0.2]]])  # (N, B, 1)
LOG_PRECISION = np.array([0.0, 1.0, -1.0])


def gaussian_mixture():
    particles = {"log_noise_precision": jnp.asarray(LOG_PRECISION, jnp.float32)}
    return Predictive(likelihoods.GaussianNoise(), particles, jnp.asarray(MEANS, jnp.float32))


def reference(function, *arguments):
    parts = [
        getattr(st.norm(MEANS[i, :, 0], np.exp(-v / 2)), function)(*arguments)
        for i, v in enumerate(LOG_PRECISION)
    ]
    return np.mean(parts, axis=0)


def test_moments_density_and_distribution_of_a_gaussian_mixture():
    predictive, y = gaussian_mixture(), np.array([0.3, -2.0])
    np.testing.assert_allclose(predictive.mean[:, 0], MEANS.mean(0)[:, 0], rtol=1e-6)
    second = (MEANS[..., 0] ** 2 + np.exp(-LOG_PRECISION)[:, None]).mean(0)
    variance = second - MEANS.mean(0)[:, 0] ** 2
    np.testing.assert_allclose(predictive.variance[:, 0], variance, rtol=1e-5)
    np.testing.assert_allclose(predictive.log_density(y), np.log(reference("pdf", y)), rtol=1e-5)
    np.testing.assert_allclose(predictive.cdf(y)[:, 0], reference("cdf", y), rtol=1e-5)


@pytest.mark.parametrize("q", [0.001, 0.025, 0.5, 0.9, 0.999])
def test_quantiles_invert_the_distribution(q):
    found = np.asarray(gaussian_mixture().quantile(q))[:, 0]
    for row in range(2):
        exact = so.brentq(lambda y, i=row: reference("cdf", np.full(2, y))[i] - q, -30, 30)
        assert found[row] == pytest.approx(exact, abs=2e-4)  # float32 bisection in the tails


def test_rescaling_undoes_standardised_targets():
    plain, scaled = gaussian_mixture(), gaussian_mixture().rescale(3.0, 10.0)
    y = np.array([0.3, -2.0])
    np.testing.assert_allclose(scaled.mean, 3 * plain.mean + 10, rtol=1e-6)
    np.testing.assert_allclose(scaled.variance, 9 * plain.variance, rtol=1e-6)
    expected = plain.log_density(y) - np.log(3)
    np.testing.assert_allclose(scaled.log_density(3 * y + 10), expected, rtol=1e-5)
    np.testing.assert_allclose(scaled.quantile(0.1), 3 * plain.quantile(0.1) + 10, rtol=1e-5)
    np.testing.assert_allclose(scaled.cdf(3 * y + 10), plain.cdf(y), rtol=1e-5)
    twice = plain.rescale(3.0, 10.0).rescale(2.0, 1.0)
    np.testing.assert_allclose(twice.mean, 2 * (3 * plain.mean + 10) + 1, rtol=1e-6)


def test_probabilities_are_averaged_not_logits():
    target = LogisticRegression([[1.0], [-1.0]], [1, 0])
    predictive = predict(target, jnp.array([[0.0, 4.0], [0.0, -1.0]]), [[0.0]])
    assert float(predictive.probabilities[0]) == pytest.approx(0.625478, abs=1e-6)
    assert predictive.members.tolist() == [[4.0], [-1.0]]
    assert float(predictive.log_density([1])[0]) == pytest.approx(np.log(0.625478), abs=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_members_keep_their_axes_for_any_number_of_rows(rows):
    target = BayesianNetwork(lambda rngs: nnx.Linear(3, 4, rngs=rngs), Categorical(4))
    particles = init_particles(jax.random.key(0), target, 5)
    predictive = predict(target, particles, jnp.ones((rows, 3)))
    assert predictive.members.shape == (5, rows, 4)
    assert predictive.probabilities.shape == (rows, 4)
    np.testing.assert_allclose(predictive.probabilities.sum(-1), 1, rtol=1e-6)
    assert predictive.log_density(jnp.zeros(rows, int)).shape == (rows,)


def test_chunks_change_nothing():
    target = BayesianNetwork(lambda rngs: nnx.Linear(3, 1, rngs=rngs))
    particles = init_particles(jax.random.key(0), target, 5)
    x = jax.random.normal(jax.random.key(1), (10, 3))
    whole = predict(target, particles, x)
    for size in (1, 3, 10, 64):
        chunked = predict(target, particles, x, batch_size=size)
        np.testing.assert_allclose(chunked.members, whole.members, rtol=1e-6, atol=1e-6)
    assert whole.mean.shape == (10, 1) and whole.quantile(0.5).shape == (10, 1)


def test_poisson_mixture_quantiles_are_counts():
    rates = np.array([2.0, 5.0])
    members = jnp.asarray(np.log(rates), jnp.float32).reshape(2, 1, 1)
    predictive = Predictive(likelihoods.Poisson(), {"unused": jnp.zeros(2)}, members)
    for q in (0.05, 0.5, 0.95):
        counts = np.arange(40)
        exact = counts[np.argmax(st.poisson(rates[:, None]).cdf(counts).mean(0) >= q)]
        assert float(predictive.quantile(q)[0, 0]) == exact
    assert float(predictive.cdf([[-1.0]])[0, 0]) == 0


def test_heteroscedastic_predictive_has_means_of_half_the_outputs():
    members = jnp.array([[[1.0, 0.0]], [[3.0, np.log(4.0)]]])
    predictive = Predictive(
        likelihoods.HeteroscedasticGaussian(), {"unused": jnp.zeros(2)}, members
    )
    assert predictive.mean.tolist() == [[2.0]]
    assert float(predictive.variance[0, 0]) == pytest.approx(2.5 + 1.0, rel=1e-6)


def test_what_makes_no_sense_is_refused():
    target = LogisticRegression([[1.0], [-1.0]], [1, 0])
    predictive = predict(target, jnp.zeros((2, 2)), [[0.0]])
    with pytest.raises(TypeError, match="quantile makes no sense for the likelihood Bernoulli"):
        predictive.quantile(0.5)
    with pytest.raises(TypeError, match="rescale makes no sense"):
        predictive.rescale(2.0, 0.0)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1, not 1\.5"):
        gaussian_mixture().quantile(1.5)
    with pytest.raises(TypeError, match="has no classes"):
        _ = gaussian_mixture().probabilities
    with pytest.raises(ValueError, match="not"):
        gaussian_mixture().log_density(np.zeros(3))
    with pytest.raises(TypeError, match="Gaussian has no likelihood"):
        predict(Gaussian([0.0], 1.0), jnp.zeros((2, 1)), [[0.0]])
    with pytest.raises(ValueError, match="batch_size must be positive, not 0"):
        predict(target, jnp.zeros((2, 2)), [[0.0]], batch_size=0)


def test_logistic_regression_against_scipy_and_its_bad_input():
    x, y = np.random.RandomState(0).randn(8, 2), np.array([0, 1, 1, 0, 1, 0, 0, 1])
    target = LogisticRegression(x, y, prior_precision=0.5)
    particle = np.array([0.4, -1.0, 0.2])
    logits = x @ particle[:2] + particle[2]
    expected = st.bernoulli(1 / (1 + np.exp(-logits))).logpmf(y).sum()
    prior = st.norm(0, 0.5**-0.5).logpdf(particle).sum()
    assert float(target(jnp.asarray(particle))) == pytest.approx(expected + prior, rel=1e-5)
    batch = (jnp.asarray(x[:4]), jnp.asarray(y[:4]))
    part = st.bernoulli(1 / (1 + np.exp(-logits[:4]))).logpmf(y[:4]).sum()
    assert float(target(jnp.asarray(particle), batch)) == pytest.approx(2 * part + prior, rel=1e-5)
    for bad_x, bad_y, words in [
        (x, y + 1, "labels must be 0 or 1"),
        (x, y[:3], "same rows"),
        (x[:, 0], y, r"x must have shape \(rows, features\)"),
        (np.where(x > 1, np.nan, x), y, "not finite"),
    ]:
        with pytest.raises(ValueError, match=words):
            LogisticRegression(bad_x, bad_y)
