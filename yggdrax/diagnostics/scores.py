"""Scores of a predictive distribution: how good, how sharp, how calibrated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.stats import norm
from jax.typing import ArrayLike

from yggdrax.typing import Array

__all__ = [
    "brier_score",
    "calibration_curve",
    "classification_scores",
    "crps_gaussian_mixture",
    "crps_samples",
    "expected_calibration_error",
    "interval_coverage",
    "regression_scores",
    "rmse",
]


def rmse(mean: ArrayLike, y: ArrayLike) -> Array:
    """Root mean squared error.

    Raises:
      ValueError: if the shapes differ (they would broadcast).

    Example:
      >>> float(rmse([1.0, 2.0], [4.0, 5.0]))
      3.0
    """
    mean, y = _alike("mean", mean, "y", y)
    return jnp.sqrt(jnp.mean((mean - y) ** 2))


def crps_gaussian_mixture(means: ArrayLike, variances: ArrayLike, y: ArrayLike) -> Array:
    r"""Continuous ranked probability score of an equal mixture of normals, in the units of y.

    With :math:`A(\mu, \sigma^2) = E|Z|` for :math:`Z \sim N(\mu, \sigma^2)` (Grimit et al., 2006)

    .. math:: \mathrm{CRPS} = \frac1N \sum_i A(y - \mu_i, \sigma_i^2)
              - \frac{1}{2N^2} \sum_{ij} A(\mu_i - \mu_j, \sigma_i^2 + \sigma_j^2).

    Args:
      means: the members' means, (N, B, ...).
      variances: the members' variances, (N, B, ...).
      y: observations, (B, ...).

    Returns:
      One score an observation, (B, ...); smaller is better.

    Raises:
      ValueError: if the shapes do not fit.

    Example:
      >>> round(float(crps_gaussian_mixture([[0.0]], [[1.0]], [0.0])[0]), 4)
      0.2337
    """
    means, variances = _alike("means", means, "variances", variances)
    _, y = _alike("one member", means[0], "y", y)
    error = jnp.mean(_mean_absolute(y - means, variances), axis=0)

    # One member against all at a time, so that no (N, N, B) array exists.
    def one(member):
        mean, variance = member
        return jnp.mean(_mean_absolute(mean - means, variance + variances), axis=0)

    return error - 0.5 * jnp.mean(jax.lax.map(one, (means, variances)), axis=0)


def _mean_absolute(mean: Array, variance: Array) -> Array:
    deviation = jnp.sqrt(variance)
    z = mean / deviation
    return 2 * deviation * norm.pdf(z) + mean * (2 * norm.cdf(z) - 1)


def crps_samples(samples: ArrayLike, y: ArrayLike) -> Array:
    r"""Continuous ranked probability score of N equally weighted samples, in the units of y.

    .. math:: \frac1N \sum_i |x_i - y| - \frac{1}{2N^2} \sum_{ij} |x_i - x_j|

    Args:
      samples: (N, B, ...).
      y: observations, (B, ...).

    Returns:
      One score an observation, (B, ...); smaller is better.

    Raises:
      ValueError: if the shapes do not fit.

    Example:
      >>> crps_samples([[0.0], [2.0]], [1.0]).tolist()
      [0.5]
    """
    samples = jnp.asarray(samples)
    _, y = _alike("one sample", samples[0], "y", y)
    n = samples.shape[0]
    # The mean absolute difference of sorted numbers is a weighted sum of them.
    weight = (2 * jnp.arange(1, n + 1) - n - 1).reshape(-1, *[1] * (samples.ndim - 1))
    half_difference = jnp.sum(weight * jnp.sort(samples, axis=0), axis=0) / n**2
    return jnp.mean(jnp.abs(samples - y), axis=0) - half_difference


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> Array:
    """Mean squared distance between probabilities and the truth.

    Args:
      probabilities: of label 1, (B,), or of every class, (B, C); then the squares are summed over
        the classes.
      labels: (B,), 0 or 1, or 0 to C - 1.

    Raises:
      ValueError: if the shapes do not fit, or for labels outside their range.

    Example:
      >>> float(brier_score([0.5, 1.0], [1, 1]))
      0.125
    """
    probabilities, labels = jnp.asarray(probabilities), jnp.asarray(labels)
    if probabilities.ndim == 1:
        probabilities, labels = _alike("probabilities", probabilities, "labels", labels)
        _check_labels(labels, 2)
        return jnp.mean((probabilities - labels) ** 2)
    _check_classes(probabilities, labels)
    truth = jax.nn.one_hot(labels, probabilities.shape[1], dtype=probabilities.dtype)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=1))


def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15
) -> Array:
    r"""Mean gap between confidence and accuracy over bins of equal width.

    .. math:: \sum_b \frac{n_b}{B} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    Args:
      probabilities: of label 1, (B,), or of every class, (B, C).
      labels: (B,).
      bins: how many bins the confidences, in (0, 1], are put into.

    Raises:
      ValueError: if the shapes do not fit, for labels outside their range, or if ``bins`` is not
        positive.

    Example:
      >>> float(expected_calibration_error([0.75, 0.75], [1, 0]))
      0.25
    """
    probabilities, labels = jnp.asarray(probabilities), jnp.asarray(labels)
    if bins < 1:
        raise ValueError(f"bins must be positive, not {bins}.")
    if probabilities.ndim == 1:
        probabilities, labels = _alike("probabilities", probabilities, "labels", labels)
        probabilities = jnp.stack([1 - probabilities, probabilities], axis=1)
    _check_classes(probabilities, labels)
    confidence = jnp.max(probabilities, axis=1)
    correct = (jnp.argmax(probabilities, axis=1) == labels).astype(confidence.dtype)
    index = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = jax.ops.segment_sum(correct - confidence, index, bins)
    return jnp.sum(jnp.abs(gaps)) / labels.shape[0]


def calibration_curve(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Mean confidence and accuracy in bins of equal width, empty ones left out; on the host.

    Args:
      probabilities: of every class, (B, C).
      labels: (B,).
      bins: how many bins the confidences, in (0, 1], are put into.

    Returns:
      Confidences and accuracies, (b,) each with b at most ``bins``.

    Example:
      >>> confidence, accuracy = calibration_curve([[0.75, 0.25], [0.75, 0.25]], [0, 1])
      >>> confidence.tolist(), accuracy.tolist()
      ([0.75], [0.5])
    """
    probabilities, labels = jnp.asarray(probabilities), jnp.asarray(labels)
    _check_classes(probabilities, labels)
    confidence = np.asarray(jnp.max(probabilities, axis=1), np.float64)
    correct = np.asarray(jnp.argmax(probabilities, axis=1) == labels, np.float64)
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = [np.bincount(index, weights, minlength=bins) for weights in (confidence, correct)]
    confidences, accuracies = (total[counts > 0] / counts[counts > 0] for total in sums)
    return confidences, accuracies


def interval_coverage(lower: ArrayLike, upper: ArrayLike, y: ArrayLike) -> Array:
    """Share of the observations inside their intervals, both ends included.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> float(interval_coverage([0.0, 0.0], [1.0, 1.0], [0.5, 3.0]))
      0.5
    """
    lower, upper = _alike("lower", lower, "upper", upper)
    lower, y = _alike("lower", lower, "y", y)
    return jnp.mean((lower <= y) & (y <= upper))


def regression_scores(predictive: Any, y: ArrayLike, *, level: float = 0.9) -> dict[str, float]:
    """RMSE, log-likelihood, CRPS and the coverage of the central interval.

    Args:
      predictive: from ``yggdrax.targets.predict``, of a Gaussian likelihood.
      y: observations in the units of the predictive, (B,) or (B, out).
      level: of the central interval, such as 0.9 for the 5 % to 95 % quantiles.

    Returns:
      ``rmse``, ``log_likelihood`` (mean over the rows), ``crps`` and ``coverage``.

    Example:
      >>> from yggdrax.targets import GaussianNoise, Predictive
      >>> members = jnp.zeros((1, 2, 1))
      >>> likelihood = GaussianNoise(precision=1.0)
      >>> scores = regression_scores(Predictive(likelihood, {}, members), [1.0, -1.0])
      >>> scores["rmse"], scores["coverage"]
      (1.0, 1.0)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, not {level}.")
    y = jnp.asarray(y)
    mean = predictive.mean
    column = y[:, None] if mean.shape == (*y.shape, 1) else y
    means, variances = predictive.member_moments
    lower, upper = (predictive.quantile(q) for q in ((1 - level) / 2, (1 + level) / 2))
    return {
        "rmse": float(rmse(mean, column)),
        "log_likelihood": float(jnp.mean(predictive.log_density(y))),
        "crps": float(jnp.mean(crps_gaussian_mixture(means, variances, column))),
        "coverage": float(interval_coverage(lower, upper, column)),
    }


def classification_scores(predictive: Any, labels: ArrayLike) -> dict[str, float]:
    """Accuracy, log-likelihood, Brier score and expected calibration error.

    Args:
      predictive: from ``yggdrax.targets.predict``, of a likelihood with classes.
      labels: (B,).

    Returns:
      ``accuracy``, ``log_likelihood`` (mean over the rows), ``brier`` and ``calibration_error``.

    Example:
      >>> from yggdrax.targets import Bernoulli, Predictive
      >>> scores = classification_scores(Predictive(Bernoulli(), {}, jnp.zeros((1, 2, 1))), [0, 1])
      >>> scores["brier"]
      0.25
    """
    labels = jnp.asarray(labels)
    probabilities = predictive.probabilities
    if probabilities.shape == (*labels.shape, 1):
        probabilities = probabilities[:, 0]
    binary = probabilities.ndim == 1
    predicted = probabilities > 0.5 if binary else jnp.argmax(probabilities, axis=1)
    return {
        "accuracy": float(jnp.mean(predicted == labels)),
        "log_likelihood": float(jnp.mean(predictive.log_density(labels))),
        "brier": float(brier_score(probabilities, labels)),
        "calibration_error": float(expected_calibration_error(probabilities, labels)),
    }


def _alike(name_a: str, a: ArrayLike, name_b: str, b: ArrayLike) -> tuple[Array, Array]:
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} and {name_b} must share one shape, not {a.shape} and {b.shape}."
        )
    return a, b


def _check_classes(probabilities: Array, labels: Array) -> None:
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(
            f"probabilities must have shape (B,) or (B, C) and labels (B,), not "
            f"{probabilities.shape} and {labels.shape}."
        )
    _check_labels(labels, probabilities.shape[1])


def _check_labels(labels: Array, classes: int) -> None:
    if isinstance(labels, Tracer):
        return
    values = np.asarray(labels)
    if wrong := values[~np.isin(values, np.arange(classes))].tolist():
        raise ValueError(
            f"labels must be integers from 0 to {classes - 1}, but {len(wrong)} of {values.size} "
            f"are not: {wrong[0]!r} is the first."
        )
