"""Likelihoods: how the outputs of a network become densities of the data.

A likelihood is a small frozen object. It may bring parameters of its own, such as the precision of
the noise, as unconstrained leaves of the particle; their priors carry the log-Jacobian.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import gammaincc, gammaln, ndtr, xlogy

from yggdrax.typing import Array, Key

__all__ = [
    "Bernoulli",
    "Categorical",
    "GaussianNoise",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_MIN_LOG_VARIANCE = -10.0


class Likelihood:
    """Base of the likelihoods.

    ``outputs`` are a network's, (B, ...); ``extra`` is the dictionary of the likelihood's own
    unconstrained leaves (empty for most).
    """

    is_continuous: ClassVar[bool] = False
    """Whether observations have units, so that they can be rescaled."""
    is_ordered: ClassVar[bool] = False
    """Whether there are a distribution function and quantiles."""

    def init(self, key: Key) -> dict[str, Array]:
        """Draws the likelihood's own leaves for one particle."""
        del key
        return {}

    def log_prior(self, extra: dict[str, Array]) -> Array:
        """Log density of the own leaves, log-Jacobian included; a scalar."""
        del extra
        return jnp.zeros(())

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log density of each row, (B,)."""
        raise NotImplementedError

    def moments(self, extra: dict[str, Array], outputs: Array) -> tuple[Array, Array]:
        """Mean and variance of each observation, shaped like the outputs."""
        del extra, outputs
        raise TypeError(f"{type(self).__name__} has no mean and variance: use probabilities.")

    def probabilities(self, extra: dict[str, Array], outputs: Array) -> Array:
        """Class probabilities, (B, C), or that of label 1."""
        del extra, outputs
        raise TypeError(f"{type(self).__name__} has no classes: use mean and variance.")

    def cdf(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """P(Y <= y), elementwise."""
        del extra, outputs, y
        raise TypeError(f"{type(self).__name__} has no distribution function.")

    def require(self, what: str, attribute: str) -> None:
        """Raises a TypeError unless the likelihood has the attribute that ``what`` needs."""
        if not getattr(self, attribute):
            raise TypeError(f"{what} makes no sense for the likelihood {type(self).__name__}.")

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """Raises a ValueError if outputs and observations of these shapes do not fit."""
        raise NotImplementedError

    def validate_labels(self, y: Array) -> None:
        """Raises a ValueError for observations outside their range; on the host only."""
        _require(np.all(np.isfinite(np.asarray(y))), "y", "finite numbers", y)


@dataclasses.dataclass(frozen=True)
class GaussianNoise(Likelihood):
    r"""Normal noise of unknown precision, with a Gamma prior on the precision.

    The leaf ``log_noise_precision`` holds :math:`\ell = \log\gamma`; its density is that of
    :math:`\gamma \sim \mathrm{Gamma}(a, b)` times the Jacobian :math:`\gamma`:

    .. math:: \log p(\ell) = a \ell - b e^{\ell} + a \log b - \log\Gamma(a)

    Args:
      concentration: a.
      rate: b.
      precision: a known precision; then there is no leaf and no prior.

    Raises:
      ValueError: for numbers that are not positive.

    Example:
      >>> float(GaussianNoise(precision=1.0).log_prob({}, jnp.zeros((1, 1)), jnp.zeros(1))[0])
      -0.9189385175704956
    """

    concentration: float = 1.0
    rate: float = 0.1
    precision: float | Array | None = None

    is_continuous: ClassVar[bool] = True
    is_ordered: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("concentration", "rate", "precision"):
            value = getattr(self, name)
            traced = isinstance(value, Tracer)  # such as a precision fitted inside jit
            if value is not None and not traced and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}.")

    def init(self, key: Key) -> dict[str, Array]:
        """A log precision near 0, the precision of standardised targets."""
        if self.precision is not None:
            return {}
        return {"log_noise_precision": 0.1 * jax.random.normal(key)}

    def log_prior(self, extra: dict[str, Array]) -> Array:
        """The Gamma prior in the logarithm."""
        if self.precision is not None:
            return jnp.zeros(())
        return log_gamma_prior(extra["log_noise_precision"], self.concentration, self.rate)

    def log_precision(self, extra: dict[str, Array]) -> Array:
        """The log precision, known or of this particle."""
        if self.precision is not None:
            return jnp.log(self.precision)
        return extra["log_noise_precision"]

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log density of each row, summed over the columns of y; (B,)."""
        log_precision = self.log_precision(extra)
        squares = (_like(outputs, y) - y) ** 2
        return _rows(0.5 * log_precision - _HALF_LOG_2PI - 0.5 * jnp.exp(log_precision) * squares)

    def moments(self, extra: dict[str, Array], outputs: Array) -> tuple[Array, Array]:
        """The outputs, and the variance of the noise."""
        return outputs, jnp.broadcast_to(jnp.exp(-self.log_precision(extra)), outputs.shape)

    def cdf(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """The normal distribution function."""
        return ndtr((y - outputs) * jnp.exp(0.5 * self.log_precision(extra)))

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """One output for each entry of y."""
        _fit("GaussianNoise", outputs, y)


@dataclasses.dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""Normal noise whose variance the network predicts as well.

    The last axis of the outputs holds the means and then the log variances,
    :math:`y \sim N(m(x), e^{s(x)})`; s is held above -10 so that no row can take all the density.

    Example:
      >>> outputs = jnp.array([[0.0, 0.0]])
      >>> float(HeteroscedasticGaussian().log_prob({}, outputs, jnp.zeros(1))[0])
      -0.9189385175704956
    """

    is_continuous: ClassVar[bool] = True
    is_ordered: ClassVar[bool] = True

    def split(self, outputs: Array) -> tuple[Array, Array]:
        """Means and log variances, each half of the last axis."""
        mean, log_variance = jnp.split(outputs, 2, axis=-1)
        return mean, jnp.maximum(log_variance, _MIN_LOG_VARIANCE)

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log density of each row, (B,)."""
        del extra
        mean, log_variance = (_like(part, y) for part in self.split(outputs))
        squares = (mean - y) ** 2
        return _rows(-0.5 * (log_variance + jnp.exp(-log_variance) * squares) - _HALF_LOG_2PI)

    def moments(self, extra: dict[str, Array], outputs: Array) -> tuple[Array, Array]:
        """Means and variances, (B, half of the outputs)."""
        del extra
        mean, log_variance = self.split(outputs)
        return mean, jnp.exp(log_variance)

    def cdf(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """The normal distribution function."""
        mean, variance = self.moments(extra, outputs)
        return ndtr((y - mean) / jnp.sqrt(variance))

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """Two outputs for each entry of y."""
        wanted = (*y[:-1], 2 * y[-1]) if len(y) > 1 else (*y, 2)
        if outputs != wanted:
            raise ValueError(
                f"HeteroscedasticGaussian needs a mean and a log variance for each entry of y: for "
                f"y of shape {y} the network must return {wanted}, not {outputs}."
            )


@dataclasses.dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""Binary labels 0 and 1; the outputs are logits, :math:`P(y=1) = \sigma(f(x))`.

    Example:
      >>> float(Bernoulli().log_prob({}, jnp.zeros((1, 1)), jnp.ones(1))[0])
      -0.6931471824645996
    """

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log probability of each row, (B,)."""
        del extra
        logits = _like(outputs, y)
        y = jnp.asarray(y, logits.dtype)
        log_prob = y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits)
        return _rows(_poisoned(log_prob, (y == 0) | (y == 1)))

    def moments(self, extra: dict[str, Array], outputs: Array) -> tuple[Array, Array]:
        """Probability of 1, and the variance of the label."""
        p = self.probabilities(extra, outputs)
        return p, p * (1 - p)

    def probabilities(self, extra: dict[str, Array], outputs: Array) -> Array:
        """Probability of label 1, shaped like the outputs."""
        del extra
        return jax.nn.sigmoid(outputs)

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """One logit for each label."""
        _fit("Bernoulli", outputs, y)

    def validate_labels(self, y: Array) -> None:
        """Labels must be 0 or 1."""
        _require(np.all(np.isin(np.asarray(y), (0, 1))), "labels", "0 or 1", y)


@dataclasses.dataclass(frozen=True)
class Categorical(Likelihood):
    r"""Labels 0 to C - 1; the outputs are C logits.

    Args:
      num_classes: C, at least 2.

    Example:
      >>> y = jnp.zeros(1, int)
      >>> float(Categorical(4).log_prob({}, jnp.zeros((1, 4)), y)[0])
      -1.3862943649291992
    """

    num_classes: int

    def __post_init__(self):
        if self.num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, not {self.num_classes}.")

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log probability of each row, (B,)."""
        del extra
        logits = jax.nn.log_softmax(outputs)
        y = jnp.asarray(y)
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise TypeError(
                f"labels must be integers from 0 to {self.num_classes - 1}, not {y.dtype}."
            )
        chosen = jnp.take_along_axis(logits, y[..., None], axis=-1, mode="clip")[..., 0]
        return _rows(_poisoned(chosen, (y >= 0) & (y < self.num_classes)))

    def probabilities(self, extra: dict[str, Array], outputs: Array) -> Array:
        """Class probabilities, (B, C)."""
        del extra
        return jax.nn.softmax(outputs)

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """C logits for each label."""
        if outputs != (*y, self.num_classes):
            raise ValueError(
                f"Categorical({self.num_classes}) needs {self.num_classes} logits for each label: "
                f"for labels of shape {y} the network must return {(*y, self.num_classes)}, not "
                f"{outputs}."
            )

    def validate_labels(self, y: Array) -> None:
        """Labels must be integers from 0 to C - 1."""
        labels = np.asarray(y)
        fits = np.issubdtype(labels.dtype, np.integer) and np.all(
            (labels >= 0) & (labels < self.num_classes)
        )
        _require(fits, "labels", f"integers from 0 to {self.num_classes - 1}", y)


@dataclasses.dataclass(frozen=True)
class Poisson(Likelihood):
    r"""Counts; the outputs are log rates, :math:`y \sim \mathrm{Poisson}(e^{f(x)})`.

    Example:
      >>> round(float(Poisson().log_prob({}, jnp.zeros((1, 1)), jnp.zeros(1))[0]), 4)
      -1.0
    """

    is_ordered: ClassVar[bool] = True

    def log_prob(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """Log probability of each row, (B,)."""
        del extra
        log_rate = _like(outputs, y)
        y = jnp.asarray(y, log_rate.dtype)
        log_prob = y * log_rate - jnp.exp(log_rate) - gammaln(jnp.maximum(y, 0) + 1)
        return _rows(_poisoned(log_prob, (y >= 0) & (y == jnp.floor(y))))

    def moments(self, extra: dict[str, Array], outputs: Array) -> tuple[Array, Array]:
        """The rate is both."""
        del extra
        return jnp.exp(outputs), jnp.exp(outputs)

    def cdf(self, extra: dict[str, Array], outputs: Array, y: Array) -> Array:
        """The regularised incomplete gamma function at whole numbers."""
        del extra
        probability = gammaincc(jnp.floor(jnp.maximum(y, 0)) + 1, jnp.exp(outputs))
        return jnp.where(y < 0, 0, probability)

    def check(self, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
        """One log rate for each count."""
        _fit("Poisson", outputs, y)

    def validate_labels(self, y: Array) -> None:
        """Counts must be whole numbers from 0."""
        counts = np.asarray(y)
        _require(np.all((counts >= 0) & (counts == np.floor(counts))), "counts", "0, 1, 2, ...", y)


def log_gamma_prior(log_value: Array, concentration: float, rate: float) -> Array:
    r"""Density of :math:`\ell = \log v` for :math:`v \sim \mathrm{Gamma}(a, b)`, with Jacobian.

    Example:
      >>> float(log_gamma_prior(jnp.array(0.0), 1.0, 1.0))
      -1.0
    """
    constant = xlogy(concentration, rate) - math.lgamma(concentration)
    return concentration * log_value - rate * jnp.exp(log_value) + constant


def _like(outputs: Array, y: Array) -> Array:
    """Outputs (B, 1) for observations (B,) lose their last axis."""
    return jnp.reshape(outputs, jnp.shape(y))


def _poisoned(log_prob: Array, allowed: Array) -> Array:
    """NaN, as is its gradient, for observations that are none: jit cannot raise."""
    return log_prob * jnp.where(allowed, 1.0, jnp.nan).astype(log_prob.dtype)


def _rows(values: Array) -> Array:
    """Sums over every axis but the first."""
    return jnp.sum(values, axis=tuple(range(1, values.ndim)))


def _fit(name: str, outputs: tuple[int, ...], y: tuple[int, ...]) -> None:
    if outputs != y and outputs != (*y, 1):
        raise ValueError(
            f"{name} needs one output for each entry of y: for y of shape {y} the network must "
            f"return {y} or {(*y, 1)}, not {outputs}."
        )


def _require(condition, name: str, wanted: str, values) -> None:
    if not condition:
        values = np.asarray(values)
        finite = np.isfinite(values)
        if not finite.all():
            rows = np.unique(np.nonzero(~finite)[0]) if values.ndim else []
            where = f" in {len(rows)} rows, the first of them row {rows[0]}" if len(rows) else ""
            raise ValueError(
                f"{name} must be {wanted}; found values that are not finite{where}: drop or fill "
                "them."
            )
        raise ValueError(
            f"{name} must be {wanted}; found values from {values.min()} to {values.max()} of type "
            f"{values.dtype}."
        )
