r"""The engine that chooses: the fastest sum that keeps the accuracy asked for.

By shape, kernel and dtype alone, while tracing: particles of more than three dimensions, kernels
other than RBF and IMQ, accuracies that the dtype's transforms do not reach, and sums so small that
the exact one is the fastest. Then the graph is that of :class:`yggdrax.Exact` and nothing else.
Otherwise by the particles, at every call: the Fourier modes that their extent over the bandwidth
asks for have a price, and so has the exact sum, which passes over tiles beyond the kernel's reach.
The cheaper one is run. Both are compiled once. ``docs/engines.md`` has the measured prices.
"""

import dataclasses
import functools
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.kernels import RBF, Kernel
from yggdrax.sharding import Axes, fetch, shard_count
from yggdrax.stein import nufft
from yggdrax.stein.engine import Engine, SteinSum
from yggdrax.stein.exact import Exact
from yggdrax.stein.fourier import Fourier
from yggdrax.typing import Array

__all__ = ["Auto"]

# Pairs whose distances tell how many pairs the kernel reaches; the sample repeats at every call.
_PAIRS = 2048
# A sampled share of s pairs is wrong by sqrt(s / 2048); where the exact sum is taken to be cheaper
# than this share of all pairs its loop over tiles is what costs.
_LEAST_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Price:
    """What a sum costs, in nanoseconds on two cores; ratios are what is used of it."""

    pair: float
    """The exact sum, per pair."""
    particle: float
    """The transforms, per particle."""
    mode: float
    """The transforms and the symbol, per mode."""
    call: float
    """The transforms, per call."""

    @classmethod
    def of(cls, d: int, dtype, kernel: Kernel) -> "Price":
        """The price in ``d`` dimensions (measured; see ``docs/engines.md``)."""
        wide = np.dtype(dtype).itemsize / 4
        gaussian = isinstance(kernel, RBF)
        return cls(
            pair=(0.5 if gaussian else 0.8) * wide,
            particle={1: 100.0, 2: 140.0, 3: 280.0}[d] * wide,
            mode={1: 150.0, 2: 180.0, 3: 200.0}[d] * wide,
            call=1.5e6,
        )

    def exact(self, n: int, share: float = 1.0) -> float:
        """The exact sum over a share of all pairs."""
        return self.pair * share * n * n

    def fourier(self, n: int, modes: int, d: int) -> float:
        """The transforms with a number of modes along each axis."""
        return self.call + self.particle * n + self.mode * modes**d


@dataclasses.dataclass(frozen=True)
class Auto(Engine):
    """The fastest engine that keeps ``rtol``; never chosen against the exact sum's own time.

    Args:
      rtol: what the error should stay below, in the norm of ``|phi' - phi|`` over
        ``sqrt(|attraction|^2 + |repulsion|^2)``, root sums of squares over all particles.
      check_every: measure the error at 64 particles every so many steps; 0 for never. Only where
        shape alone has not decided for the exact sum.

    Raises:
      ValueError: for an ``rtol`` or ``check_every`` out of range.

    Example:
      >>> Auto().choose(1000, 10, np.dtype("float32"), RBF())
      Exact(block_size=None)
    """

    needs_one_matrix: ClassVar[bool] = False
    shards: ClassVar[bool] = True
    rtol: float = 1e-3
    check_every: int = 100

    def __post_init__(self):
        """Checks the options."""
        Fourier(rtol=self.rtol, check_every=self.check_every)

    def choose(self, n: int, d: int, dtype, kernel: Kernel) -> Engine:
        """The engine for particles (n, d): the exact one where shape alone decides for it."""
        return self.decide(n, d, dtype, kernel)[0]

    def decide(self, n: int, d: int, dtype, kernel: Kernel) -> tuple[Engine, str]:
        """The engine for particles (n, d), and why."""
        exact = Exact()
        fourier = Fourier(rtol=self.rtol, check_every=self.check_every)
        problem = fourier.refuses((n, d), dtype, kernel)
        if problem:
            return exact, problem.split(": choose")[0].split(": raise")[0]
        price = Price.of(d, dtype, kernel)
        rungs = fourier.ladder(d, dtype, kernel)
        worth = [m for m in rungs if price.fourier(n, m, d) < price.exact(n)]
        if not worth:
            return exact, f"N = {n} is so small that the exact sum is the fastest"
        missing = nufft.missing()
        if missing:
            _say_what_is_missing(missing)
            return exact, missing
        cheaper = _Cheaper(rtol=self.rtol, max_modes=worth[-1], check_every=self.check_every)
        return cheaper, "the particles decide at every call between Fourier and exact sums"

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """See :class:`yggdrax.stein.engine.Engine`."""
        return self.choose(x.shape[0], x.shape[1], x.dtype, kernel).stein(x, s, h, kernel)


@functools.cache
def _say_what_is_missing(problem: str) -> None:
    warnings.warn(
        f"engine='auto' does without Fourier sums, which would be faster here: {problem}.",
        stacklevel=2,
    )


@dataclasses.dataclass(frozen=True)
class _Cheaper(Fourier):
    """Fourier sums where they are cheaper than the exact one, which serves otherwise."""

    fallback_status: ClassVar[int] = 0

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """On CPUs; elsewhere the library has no transforms and the exact sum serves."""
        return jax.lax.platform_dependent(
            x,
            s,
            jnp.asarray(h, x.dtype),
            cpu=lambda x, s, h: super(_Cheaper, self).stein(x, s, h, kernel),
            default=lambda x, s, h: Exact().stein(x, s, h, kernel),
        )

    def serves(self, points: Array, kernel: Kernel, axes: Axes = ()) -> Array:
        """Which of :meth:`Fourier.reaches` are cheaper than the exact sum, (rungs,) bool."""
        n, d = points.shape[0] * shard_count(axes), points.shape[1]
        price = Price.of(d, points.dtype, kernel)
        ladder = self.ladder(d, points.dtype, kernel)
        costs = np.array([price.fourier(n, m, d) for m in (ladder[0], *ladder)])
        share = jnp.maximum(share_within_reach(points, kernel, axes), _LEAST_SHARE)
        return jnp.asarray(costs / price.exact(n), share.dtype) < share


def share_within_reach(points: Array, kernel: Kernel, axes: Axes = ()) -> Array:
    """The share of pairs that the kernel reaches, of points in units of h, from a fixed sample."""
    rng = np.random.default_rng(_PAIRS)
    n = points.shape[0] * shard_count(axes)
    left, right = rng.integers(0, n, (2, _PAIRS)).astype(np.int32)
    u = jnp.sum(jnp.square(fetch(points, left, axes) - fetch(points, right, axes)), axis=1)
    return jnp.mean((u <= kernel.reach(points.dtype)).astype(points.dtype))
