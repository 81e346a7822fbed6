"""Prediction: members (N, B, ...) and the mixture that they form."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from yggdrax.targets.likelihoods import Likelihood
from yggdrax.typing import Array, Key, ParticleTree, PyTree

__all__ = ["Predictive", "predict"]


@dataclasses.dataclass(frozen=True)
class Predictive:
    r"""The posterior predictive, an equal mixture over the members.

    .. math:: p(y \mid x) = \frac1N \sum_{i=1}^N p(y \mid x, \theta_i)

    So probabilities are averaged, not logits; the log density is the log of the averaged density.

    ``mean``, ``variance``, ``probabilities`` and ``member_moments`` are properties;
    ``quantile(q)``, ``cdf(y)`` and ``log_density(y)`` are methods. Means and quantiles are shaped
    like one member's outputs: a network with one output gives (B, 1), also for observations y of
    shape (B,), so take ``mean[:, 0]`` before you subtract. (``log_density`` and the scores
    of ``yggdrax.diagnostics`` never broadcast one against the other.)

    Attributes:
      likelihood: the target's likelihood.
      particles: the members, whose own leaves (a noise precision) belong to the density.
      members: the members' outputs as the network gives them, (N, B, ...); logits for classifiers.
      scale: the observations' unit; 1 unless :meth:`rescale` was called.
      shift: the observations' origin; 0 unless :meth:`rescale` was called.
    """

    likelihood: Likelihood
    particles: ParticleTree
    members: Array
    scale: Any = 1.0
    shift: Any = 0.0

    def rescale(self, scale: ArrayLike, shift: ArrayLike) -> "Predictive":
        """The predictive of ``scale * y + shift``, to undo standardised targets.

        Raises:
          TypeError: for a likelihood of labels or counts, which has no units.
        """
        self.likelihood.require("rescale", "is_continuous")
        return dataclasses.replace(
            self,
            scale=jnp.asarray(scale) * self.scale,
            shift=jnp.asarray(scale) * self.shift + jnp.asarray(shift),
        )

    @property
    def member_moments(self) -> tuple[Array, Array]:
        """Mean and variance of each member, (N, B, ...) each."""
        mean, variance = self._map(self.likelihood.moments)
        return self.scale * mean + self.shift, self.scale**2 * variance

    @property
    def mean(self) -> Array:
        """Mean of the mixture, (B, ...)."""
        return jnp.mean(self.member_moments[0], axis=0)

    @property
    def variance(self) -> Array:
        """Variance of the mixture, within plus between the members, (B, ...)."""
        mean, variance = self.member_moments
        return jnp.mean(variance, axis=0) + jnp.var(mean, axis=0)

    @property
    def probabilities(self) -> Array:
        """Averaged class probabilities, (B, C); for binary labels that of 1, (B, ...).

        Raises:
          TypeError: for a likelihood without classes.
        """
        return jnp.mean(self._map(self.likelihood.probabilities), axis=0)

    def log_density(self, y: ArrayLike) -> Array:
        """Log density of the mixture at observations (B, ...), one number a row, (B,).

        Raises:
          ValueError: if the shapes do not fit, or for observations outside their range (NaN inside
            ``jit``, where nothing can be raised).
        """
        values = jnp.asarray(y)
        self.likelihood.check(self.members.shape[1:], values.shape)
        if not isinstance(values, Tracer):
            self.likelihood.validate_labels(values)
        if self.likelihood.is_continuous:
            values = (values - self.shift) / self.scale
        rows = self._map(lambda extra, outputs: self.likelihood.log_prob(extra, outputs, values))
        log_unit = jnp.sum(jnp.broadcast_to(jnp.log(jnp.asarray(self.scale)), values.shape[1:]))
        return logsumexp(rows, axis=0) - math.log(rows.shape[0]) - log_unit

    def cdf(self, y: ArrayLike) -> Array:
        """P(Y <= y) under the mixture, elementwise; y and the result are shaped like ``mean``.

        Raises:
          TypeError: for a likelihood whose values have no order.
        """
        self.likelihood.require("cdf", "is_ordered")
        values = (self._like_mean(y) - self.shift) / self.scale
        members = self._map(lambda extra, outputs: self.likelihood.cdf(extra, outputs, values))
        return jnp.mean(members, axis=0)

    def quantile(self, q: float) -> Array:
        """The mixture's q-quantile by bisection of its distribution function, like ``mean``.

        Args:
          q: a probability strictly between 0 and 1.

        Raises:
          ValueError: for q outside (0, 1).
          TypeError: for a likelihood whose values have no order.
        """
        if jnp.ndim(q) != 0:
            raise ValueError(
                f"q must be one number, not of shape {jnp.shape(q)}: call it for each."
            )
        if not 0 < q < 1:
            raise ValueError(f"q must lie strictly between 0 and 1, not {q}.")
        self.likelihood.require("quantile", "is_ordered")
        # Chebyshev's one-sided inequality bounds the quantile by mean and standard deviation.
        mean, deviation = self.mean, jnp.sqrt(self.variance)
        low = mean - deviation * (math.sqrt((1 - q) / q) + 1)
        high = mean + deviation * (math.sqrt(q / (1 - q)) + 1)

        def halve(_, interval):
            low, high = interval
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < q
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        low, high = jax.lax.fori_loop(0, 40, halve, (low, high))
        return 0.5 * (low + high) if self.likelihood.is_continuous else jnp.floor(high)

    def _like_mean(self, y: ArrayLike) -> Array:
        """Observations (B,) beside outputs (B, 1) must not broadcast to (B, B)."""
        values, shape = jnp.asarray(y), self.mean.shape
        return values.reshape(shape) if shape == (*values.shape, 1) else values

    def _map(self, function):
        return jax.vmap(function)(self.particles, self.members)


def predict(
    target: Any,
    particles: ParticleTree,
    x: ArrayLike,
    *,
    model_state: PyTree | None = None,
    batch_size: int | None = None,
    key: Key | None = None,
) -> Predictive:
    """The posterior predictive at inputs x.

    Args:
      target: a target with a likelihood, such as ``BayesianNetwork`` or ``LogisticRegression``.
      particles: a tree whose leaves have the leading axis N.
      x: inputs (B, ...); any B, 1 included.
      model_state: the members' mutable collections, for networks that have some.
      batch_size: rows at a time, to bound memory; all at once by default.
      key: only to draw the network's noise in prediction as well; without it noise is off.

    Returns:
      A :class:`Predictive`; its ``members`` have shape (N, B, ...).

    Raises:
      TypeError: for a target without a likelihood.
      ValueError: if mutable collections are needed and missing, or ``batch_size`` is not positive.

    Example:
      >>> from yggdrax.targets import LogisticRegression
      >>> target = LogisticRegression([[1.0], [-1.0]], [1, 0])
      >>> particles = jnp.array([[0.0, 4.0], [0.0, -1.0]])
      >>> round(float(predict(target, particles, [[0.0]]).probabilities[0]), 6)
      0.625478
    """
    if not hasattr(target, "likelihood") or not hasattr(target, "forward"):
        raise TypeError(f"{type(target).__name__} has no likelihood, so it cannot predict.")
    x = jnp.asarray(x)
    rows = x.shape[0]
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be positive, not {batch_size}.")
    num_particles = jax.tree.leaves(particles)[0].shape[0]
    keys = None if key is None else jax.random.split(key, num_particles)

    def outputs(particle, state, member_key, chunk):
        train = member_key is not None
        return target.forward(particle, chunk, state, train=train, key=member_key)[0]

    axes = (0, None if model_state is None else 0, None if keys is None else 0, None)
    mapped = jax.vmap(outputs, in_axes=axes)
    starts = range(0, rows, batch_size or max(rows, 1))
    chunks = [
        mapped(particles, model_state, keys, x[start : start + (batch_size or rows)])
        for start in starts
    ] or [mapped(particles, model_state, keys, x)]
    return Predictive(target.likelihood, particles, jnp.concatenate(chunks, axis=1))
