r"""Bandwidth rules: how h follows from the particles.

Rules are objects without ``__call__``: a plain callable given to ``svgd`` is an Optax schedule.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from yggdrax.kernels.distances import (
    FEW_DIMENSIONS,
    SAMPLED_PAIRS,
    all_squared_distances,
    sampled_squared_distances,
)
from yggdrax.typing import Array, Number

__all__ = [
    "BandwidthRule",
    "MedianRule",
    "as_bandwidth",
    "ceiling_of",
    "check_positive",
    "floor_of",
    "nan_unless_positive",
]

# All distinct pairs are used up to this N; above, a fixed sample of pairs. In many dimensions one
# matrix product for all pairs is cheaper than gathering the sample, up to a larger N.
ALL_PAIRS = 512
ALL_PAIRS_BY_PRODUCT = 1024


def floor_of(dtype) -> float:
    """The smallest bandwidth used: 1e-15 in float32, 1e-120 in float64."""
    return 1e-15 if jnp.finfo(dtype).bits <= 32 else 1e-120


def ceiling_of(dtype) -> float:
    """The largest bandwidth used, by which no square overflows; every kernel value is 1 there."""
    return 1e30 if jnp.finfo(dtype).bits <= 32 else 1e150


def check_positive(value: Number, name: str) -> None:
    """Raises ValueError if ``value`` is a concrete number that is not positive and finite.

    Traced values pass; the step flags them by its status.
    """
    if isinstance(value, Tracer):
        return
    if np.ndim(value) != 0:
        raise ValueError(f"{name} must be one number, but its shape is {np.shape(value)}.")
    if not (isinstance(value, (int, float, np.number, np.ndarray, jax.Array))) or isinstance(
        value, bool
    ):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}.")
    if not isinstance(value, (int, float)) and value.dtype == bool:
        raise TypeError(f"{name} must be a number, not a truth value.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive and finite, not {number!r}.")


def as_bandwidth(value: Number, dtype) -> Array:
    """A bandwidth given as a number: checked as far as it is known, and raised to the floor; ().

    A traced one that is not positive becomes NaN, and so will the sum.

    Raises:
      ValueError: if it is known and not positive and finite.
      TypeError: if it is no number.
    """
    if isinstance(value, str):
        raise TypeError(
            f"bandwidth must be a number, not {value!r}. Only svgd takes a rule by its name: "
            "MedianRule().bandwidth((x,)) is the median rule's number for x (N, d)."
        )
    check_positive(value, "bandwidth")
    h = jnp.clip(jnp.asarray(value, dtype), floor_of(dtype), ceiling_of(dtype))
    if not isinstance(value, Tracer):
        return h
    return h * jnp.where(value > 0, 1, jnp.nan).astype(h.dtype)


def nan_unless_positive(values: Array) -> Array:
    """NaN for every number that is not positive, which its gradient becomes as well."""
    return values * jnp.where(values > 0, 1, jnp.nan).astype(values.dtype)


@dataclasses.dataclass(frozen=True)
class MedianRule:
    r"""The median rule of Liu and Wang (2016), over distinct pairs.

    .. math:: h = \sqrt{ \mathrm{median}_{i<j} |x_i - x_j|^2 \,/\, (2 \ln (N + 1)) }

    All pairs for N up to 512, and above 16 dimensions up to 1024 (for an even count the two middle
    squared distances are averaged).
    Above, the median of 32769 pairs drawn once from a fixed seed: the same pairs at every call and
    on every device, within 1 % of the median in rank. The value is found by bisection, without a
    sort. Its derivative is that of the pair that is the median. Particles split over devices stay
    where they are, and every device finds the same value.

    Example:
      >>> import jax.numpy as jnp
      >>> f"{MedianRule().bandwidth((jnp.array([[0.0], [1.0], [3.0], [7.0]]),)):.5f}"
      '1.97062'
    """

    def bandwidth(self, leaves: Sequence[Array]) -> Array:
        """h for particles given as matrices ``(N, d_l)``; ``()``, and 0 if the median is 0."""
        n = leaves[0].shape[0]
        if n == 1:
            # No pair: any bandwidth gives phi = S.
            return jnp.ones((), leaves[0].dtype)
        many = sum(leaf.shape[1] for leaf in leaves) > FEW_DIMENSIONS
        limit = ALL_PAIRS_BY_PRODUCT if many else ALL_PAIRS
        median = (_median_of_all if n <= limit else _median_of_sample)(tuple(leaves))
        # The square root's derivative at 0 is taken as 0, as at the floor.
        positive = median > 0
        root = jnp.sqrt(jnp.where(positive, median, 1) / (2 * math.log(n + 1)))
        return jnp.where(positive | jnp.isnan(median), root + 0 * median, 0)


@dataclasses.dataclass(frozen=True)
class BandwidthRule:
    """A user's own rule: ``fn(particles) -> h``, any traceable function of the particles' tree.

    Example:
      >>> rule = BandwidthRule(lambda particles: particles.std())
    """

    fn: Callable[..., Number]

    def __post_init__(self):
        """Refuses what cannot be called."""
        if not callable(self.fn):
            raise TypeError(f"BandwidthRule takes a function of the particles, not {self.fn!r}.")


# Compiled, so that calls outside of any jit do not compile the scan inside each time.
@jax.jit
def _median_of_sample(leaves: Sequence[Array]) -> Array:
    return _kth_smallest(sampled_squared_distances(leaves), SAMPLED_PAIRS // 2)


@jax.jit
def _median_of_all(leaves: Sequence[Array]) -> Array:
    n = leaves[0].shape[0]
    distances = all_squared_distances(leaves)
    # Every pair stands twice in the symmetric matrix; its diagonal is moved out of the way.
    off = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, distances).ravel()
    count = n * (n - 1) // 2
    lower = _kth_smallest(off, 2 * ((count - 1) // 2))
    if count % 2:
        return lower
    # The next one up: the same again if it occurs often enough, else the smallest that is larger.
    again = jnp.sum(off <= lower) > 2 * (count // 2)
    return 0.5 * (lower + jnp.where(again, lower, jnp.min(jnp.where(off > lower, off, jnp.inf))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _kth_smallest(values: Array, k: int) -> Array:
    """The k-th smallest (from 0) of non-negative floats; NaN if any is NaN.

    Non-negative floats order like the integers of the same bits, so the answer's bits are found
    one by one, from the highest, by counting.
    """
    bits = jnp.finfo(values.dtype).bits
    integer = {32: jnp.int32, 64: jnp.int64}[bits]
    keys = jax.lax.bitcast_convert_type(values, integer)

    # Rows of 256 are counted column by column, which is what CPUs do fast.
    padding = (0, -keys.shape[0] % 256)
    rows = jnp.pad(keys, padding, constant_values=jnp.iinfo(integer).max).reshape(-1, 256)

    def step(i, answer):
        place = jax.lax.shift_left(jnp.ones((), integer), (bits - 2 - i).astype(integer))
        candidate = answer | place
        return jnp.where(jnp.sum(jnp.sum(rows < candidate, axis=0)) <= k, candidate, answer)

    answer = jax.lax.fori_loop(0, bits - 1, step, jnp.zeros((), integer))
    value = jax.lax.bitcast_convert_type(answer, values.dtype)
    return jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, value)


@_kth_smallest.defjvp
def _kth_smallest_jvp(k, primals, tangents):
    (values,), (tangent,) = primals, tangents
    value = _kth_smallest(values, k)
    # The derivative of an order statistic is that of the entry it is. The nearest, not the equal:
    # a compiler may compute the distances twice with different rounding.
    nearest = jnp.argmin(jnp.abs(values - value))
    return value, jnp.sum(jnp.where(jnp.arange(values.shape[0]) == nearest, tangent, 0))
