"""Predictive scores against integrals, scikit-learn and hand counts."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from sklearn.metrics import brier_score_loss, root_mean_squared_error

from yggdrax import diagnostics
from yggdrax.targets import Categorical, GaussianNoise, Predictive

RANDOM = np.random.RandomState(0)


def test_rmse_against_scikit_learn_and_no_broadcasting():
    a, b = RANDOM.randn(2, 9)
    assert float(diagnostics.rmse(a, b)) == pytest.approx(root_mean_squared_error(a, b), rel=1e-5)
    with pytest.raises(ValueError, match=r"one shape, not \(9, 1\) and \(9,\)"):
        diagnostics.rmse(a[:, None], b)


def test_crps_of_a_mixture_is_the_integral_of_its_definition():
    means, deviations, y = RANDOM.randn(3), np.array([0.5, 1.0, 2.0]), 0.7
    axis = np.linspace(-30, 30, 200_001)
    cdf = st.norm(means[:, None], deviations[:, None]).cdf(axis).mean(0)
    exact = np.trapezoid((cdf - (axis >= y)) ** 2, axis)
    found = diagnostics.crps_gaussian_mixture(means[:, None], deviations[:, None] ** 2, [y])
    # A step of 3e-4 in the integral, and float32.
    assert float(found[0]) == pytest.approx(exact, abs=3e-4)


def test_crps_of_samples_is_that_of_their_distribution():
    samples, y = RANDOM.randn(7, 2), np.array([0.2, -3.0])
    difference = np.abs(samples[:, None] - samples).mean((0, 1))
    exact = np.abs(samples - y).mean(0) - 0.5 * difference
    np.testing.assert_allclose(diagnostics.crps_samples(samples, y), exact, rtol=1e-5)


def test_brier_against_scikit_learn():
    p, labels = RANDOM.rand(20), RANDOM.randint(0, 2, 20)
    exact = brier_score_loss(labels, p)
    assert float(diagnostics.brier_score(p, labels)) == pytest.approx(exact, rel=1e-5)
    both = np.stack([1 - p, p], 1)
    assert float(diagnostics.brier_score(both, labels)) == pytest.approx(2 * exact, rel=1e-5)


def test_calibration_error_by_hand():
    # Two bins of ten: confidences 0.95, 0.95 with one right; 0.55, 0.55 with two right.
    p = [0.95, 0.95, 0.55, 0.45]
    labels = [1, 0, 1, 0]
    by_hand = 0.5 * abs(0.5 - 0.95) + 0.5 * abs(1.0 - 0.55)
    found = diagnostics.expected_calibration_error(p, labels, bins=10)
    assert float(found) == pytest.approx(by_hand, rel=1e-6)
    sure = np.eye(3)[[0, 1, 2]]
    assert float(diagnostics.expected_calibration_error(sure, [0, 1, 2])) == 0
    with pytest.raises(ValueError, match="bins must be positive, not 0"):
        diagnostics.expected_calibration_error(p, labels, bins=0)
    with pytest.raises(ValueError, match=r"labels \(B,\), not \(3, 3\) and \(2,\)"):
        diagnostics.expected_calibration_error(sure, [0, 1])


def test_scores_of_a_predictive():
    y = RANDOM.randn(500)
    perfect = Predictive(
        GaussianNoise(precision=1.0), {"unused": jnp.zeros(1)}, jnp.zeros((1, 500, 1))
    )
    found = diagnostics.regression_scores(perfect, y)
    assert found["rmse"] == pytest.approx(np.sqrt((y**2).mean()), rel=1e-5)
    assert found["log_likelihood"] == pytest.approx(st.norm.logpdf(y).mean(), rel=1e-5)
    bound = st.norm.ppf(0.95)
    assert found["coverage"] == pytest.approx(np.mean(np.abs(y) <= bound), abs=1e-6)
    exact = y * (2 * st.norm.cdf(y) - 1) + 2 * st.norm.pdf(y) - 1 / np.sqrt(np.pi)
    assert found["crps"] == pytest.approx(exact.mean(), rel=1e-4)
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
        diagnostics.regression_scores(perfect, y, level=1.0)


@pytest.mark.parametrize("labels", [[0, 1, 3], [0, -1, 2], [0, 1.5, 2]])
def test_labels_out_of_range_are_refused(labels):
    thirds = jnp.full((3, 3), 1 / 3)
    for score in (
        diagnostics.brier_score,
        diagnostics.expected_calibration_error,
        diagnostics.calibration_curve,
    ):
        with pytest.raises(ValueError, match="labels must be integers from 0 to 2, but 1 of 3"):
            score(thirds, labels)
    with pytest.raises(ValueError, match="labels must be integers from 0 to 1"):
        diagnostics.brier_score(thirds[0], labels)
    predictive = Predictive(Categorical(3), {"unused": jnp.zeros(1)}, jnp.zeros((1, 3, 3)))
    with pytest.raises(ValueError, match="labels"):
        predictive.log_density(np.array(labels))


def test_scores_of_a_classifier():
    labels = np.array([0, 1, 2])
    logits = jnp.log(jnp.array([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]]]))
    predictive = Predictive(Categorical(3), {"unused": jnp.zeros(1)}, logits)
    found = diagnostics.classification_scores(predictive, labels)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["log_likelihood"] == pytest.approx(np.log([0.7, 0.8, 0.2]).mean(), rel=1e-5)
    p = np.exp(np.asarray(logits[0]))
    exact = ((p - np.eye(3)[labels]) ** 2).sum(1).mean()
    assert found["brier"] == pytest.approx(exact, rel=1e-5)
