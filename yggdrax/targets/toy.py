"""Toy targets with exact samples and moments in closed form, to test samplers on."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from yggdrax.targets.base import Target
from yggdrax.typing import Array, Key, is_whole

__all__ = ["Banana", "Funnel", "Gaussian", "Mixture", "ToyTarget"]


def _is_known_false(condition: Array) -> bool:
    """Whether a condition fails; traced ones (parameters that are learned) are not checked."""
    return not isinstance(condition, Tracer) and not bool(condition)


class ToyTarget(Target):
    """A normalised density on R^d that can also draw exact samples and knows its moments."""

    dimension: int

    def init(self, key: Key) -> Array:
        """One draw from N(0, I), shape (d,)."""
        return jax.random.normal(key, (self.dimension,))

    def sample(self, key: Key, n: int) -> Array:
        """Exact, independent samples, shape (n, d)."""
        raise NotImplementedError

    def mean(self) -> Array:
        """The mean, shape (d,)."""
        raise NotImplementedError

    def covariance(self) -> Array:
        """The covariance, shape (d, d)."""
        raise NotImplementedError

    def _check(self, particle: ArrayLike) -> Array:
        particle = jnp.asarray(particle)
        if particle.shape != (self.dimension,):
            raise ValueError(
                f"{type(self).__name__} of dimension {self.dimension} takes one particle of shape "
                f"({self.dimension},), not {particle.shape}: map it over the particles."
            )
        return particle


class Gaussian(ToyTarget):
    r"""The normal distribution with a full covariance.

    .. math:: \log p(x) = -\tfrac12 (x-m)^T C^{-1} (x-m) - \tfrac12 \log\det(2 \pi C)

    Args:
      mean: (d,).
      covariance: (d, d), symmetric positive definite; or (d,), its diagonal; or a number.

    Raises:
      ValueError: if the shapes do not fit or the covariance is not positive definite.

    Example:
      >>> target = Gaussian([0.0, 1.0], [[1.0, 0.5], [0.5, 2.0]])
      >>> target.mean().tolist()
      [0.0, 1.0]
    """

    def __init__(self, mean: ArrayLike, covariance: ArrayLike):
        """Factors the covariance once."""
        location = jnp.atleast_1d(_floating(mean))
        matrix = _floating(covariance)
        if location.ndim != 1:
            raise ValueError(f"mean must have shape (d,), not {location.shape}.")
        self.dimension = location.shape[0]
        if matrix.ndim < 2:
            matrix = jnp.diag(jnp.broadcast_to(matrix, (self.dimension,)))
        if matrix.shape != (self.dimension, self.dimension):
            raise ValueError(
                f"covariance must have shape ({self.dimension}, {self.dimension}) to fit the mean, "
                f"not {matrix.shape}."
            )
        factor = jnp.linalg.cholesky(matrix)
        if _is_known_false(jnp.all(jnp.isfinite(location))):
            raise ValueError(f"mean must be finite, not {location}.")
        valid = jnp.all(jnp.isfinite(factor)) & jnp.allclose(matrix, matrix.T)
        if _is_known_false(valid):
            raise ValueError("covariance must be symmetric and positive definite.")
        self.location, self.matrix, self.factor = location, matrix, factor

    def __call__(self, particle: ArrayLike, batch=None, *, key: Key | None = None) -> Array:
        """Log density of one particle (d,)."""
        del batch, key
        difference = self._check(particle) - self.location
        z = jax.scipy.linalg.solve_triangular(self.factor, difference, lower=True)
        normaliser = jnp.sum(jnp.log(jnp.diag(self.factor))) + self.dimension * _HALF_LOG_2PI
        return -0.5 * jnp.sum(z**2) - normaliser

    def sample(self, key: Key, n: int) -> Array:
        """Exact samples, (n, d)."""
        z = jax.random.normal(key, (n, self.dimension), self.location.dtype)
        return self.location + jnp.matmul(z, self.factor.T, precision=jax.lax.Precision.HIGHEST)

    def mean(self) -> Array:
        """The mean, (d,)."""
        return self.location

    def covariance(self) -> Array:
        """The covariance, (d, d)."""
        return self.matrix


class Mixture(ToyTarget):
    r"""A mixture of toy targets, :math:`p(x) = \sum_k w_k p_k(x)`.

    Args:
      weights: (K,), positive; they are normalised.
      components: K toy targets of one dimension.

    Raises:
      ValueError: for weights that are not positive or do not match the components.

    Example:
      >>> target = Mixture([1, 2], [Gaussian([-2.0], 1.0), Gaussian([2.0], 1.0)])
      >>> round(float(target.mean()[0]), 4)
      0.6667
    """

    def __init__(self, weights: ArrayLike, components: Sequence[ToyTarget]):
        """Normalises the weights."""
        weights = _floating(weights)
        fine = jnp.all((weights > 0) & jnp.isfinite(weights))
        if weights.shape != (len(components),) or _is_known_false(fine):
            raise ValueError(
                f"weights must be {len(components)} positive numbers, one for each component, "
                f"not {weights}."
            )
        dimensions = {component.dimension for component in components}
        if len(dimensions) != 1:
            raise ValueError(f"components must share one dimension, not {sorted(dimensions)}.")
        self.dimension = dimensions.pop()
        self.weights = weights / jnp.sum(weights)
        self.components = nnx.List(components)

    def __call__(self, particle: ArrayLike, batch=None, *, key: Key | None = None) -> Array:
        """Log density of one particle (d,)."""
        del batch, key
        particle = self._check(particle)
        parts = jnp.stack([component(particle) for component in self.components])
        return jax.scipy.special.logsumexp(parts + jnp.log(self.weights))

    def sample(self, key: Key, n: int) -> Array:
        """Exact samples, (n, d)."""
        choice_key, *keys = jax.random.split(key, len(self.components) + 1)
        choice = jax.random.choice(choice_key, len(self.components), (n,), p=self.weights)
        draws = jnp.stack([c.sample(k, n) for c, k in zip(self.components, keys, strict=True)])
        return draws[choice, jnp.arange(n)]

    def mean(self) -> Array:
        """The mean, (d,)."""
        return self.weights @ jnp.stack([c.mean() for c in self.components])

    def covariance(self) -> Array:
        """Within plus between the components, (d, d)."""
        centred = jnp.stack([c.mean() for c in self.components]) - self.mean()
        within = jnp.stack([c.covariance() for c in self.components])
        between = centred[:, :, None] * centred[:, None, :]
        return jnp.einsum("k,kij->ij", self.weights, within + between)


class Banana(ToyTarget):
    r"""A bent Gaussian in the plane, skewed in its second coordinate.

    .. math:: x_1 \sim N(0, s^2), \qquad x_2 \mid x_1 \sim N(b (x_1^2 - s^2), 1)

    Its mean is 0 and its covariance diag(s^2, 1 + 2 b^2 s^4).

    Args:
      scale: s, the standard deviation along the banana.
      curvature: b, how much it bends; 0 is a Gaussian.

    Example:
      >>> Banana(2.0, 0.5).covariance().tolist()
      [[4.0, 0.0], [0.0, 9.0]]
    """

    def __init__(self, scale: float = 2.0, curvature: float = 0.5):
        """Keeps both numbers."""
        _check_positive("scale", scale)
        if not math.isfinite(curvature):
            raise ValueError(f"curvature must be a finite number, not {curvature}.")
        self.dimension = 2
        self.scale, self.curvature = float(scale), float(curvature)

    def __call__(self, particle: ArrayLike, batch=None, *, key: Key | None = None) -> Array:
        """Log density of one particle (2,)."""
        del batch, key
        x1, x2 = self._check(particle)
        residual = x2 - self.curvature * (x1**2 - self.scale**2)
        log_density = -0.5 * (x1 / self.scale) ** 2 - 0.5 * residual**2
        return log_density - math.log(self.scale) - 2 * _HALF_LOG_2PI

    def sample(self, key: Key, n: int) -> Array:
        """Exact samples, (n, 2)."""
        z1, z2 = jax.random.normal(key, (2, n))
        x1 = self.scale * z1
        return jnp.stack([x1, z2 + self.curvature * (x1**2 - self.scale**2)], axis=1)

    def mean(self) -> Array:
        """The mean, 0."""
        return jnp.zeros(2)

    def covariance(self) -> Array:
        """The covariance, (2, 2)."""
        return jnp.diag(jnp.array([self.scale**2, 1 + 2 * self.curvature**2 * self.scale**4]))


class Funnel(ToyTarget):
    r"""A funnel: the first coordinate sets the width of all the others.

    .. math:: v \sim N(0, s^2), \qquad x_i \mid v \sim N(0, e^v), \quad i = 1 \dots d - 1

    A particle is (v, x_1, ..., x_{d-1}); the covariance is diag(s^2, e^{s^2/2}, ...).

    Args:
      dimension: d, at least 2.
      scale: s, the standard deviation of v.

    Example:
      >>> Funnel(2, scale=1.5).mean().tolist()
      [0.0, 0.0]
    """

    def __init__(self, dimension: int = 2, scale: float = 1.5):
        """Keeps both numbers."""
        _check_positive("scale", scale)
        if not is_whole(dimension, 2):
            raise ValueError(f"dimension must be an integer, at least 2, not {dimension!r}.")
        self.dimension, self.scale = int(dimension), float(scale)

    def __call__(self, particle: ArrayLike, batch=None, *, key: Key | None = None) -> Array:
        """Log density of one particle (d,)."""
        del batch, key
        particle = self._check(particle)
        v, x = particle[0], particle[1:]
        log_v = -0.5 * (v / self.scale) ** 2 - math.log(self.scale) - _HALF_LOG_2PI
        log_x = -0.5 * jnp.exp(-v) * jnp.sum(x**2) - x.size * (0.5 * v + _HALF_LOG_2PI)
        return log_v + log_x

    def sample(self, key: Key, n: int) -> Array:
        """Exact samples, (n, d)."""
        z = jax.random.normal(key, (n, self.dimension))
        v = self.scale * z[:, :1]
        return jnp.concatenate([v, jnp.exp(v / 2) * z[:, 1:]], axis=1)

    def mean(self) -> Array:
        """The mean, 0."""
        return jnp.zeros(self.dimension)

    def covariance(self) -> Array:
        """The covariance, (d, d)."""
        others = [math.exp(self.scale**2 / 2)] * (self.dimension - 1)
        return jnp.diag(jnp.array([self.scale**2, *others]))


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _floating(value: ArrayLike) -> Array:
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{name} must be a positive number, not {value}.")
