"""The Fourier engine: smooth kernels in one, two and three dimensions at a cost linear in N."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from yggdrax.kernels import IMQ, RBF, Kernel
from yggdrax.sharding import Axes, every, over_shards
from yggdrax.status import Status
from yggdrax.stein import modes, nufft
from yggdrax.stein.engine import (
    Engine,
    SteinSum,
    require_interval,
    require_matrices,
    require_number,
)
from yggdrax.stein.exact import Exact
from yggdrax.typing import Array, is_whole

__all__ = ["Fourier"]

# Sizes of the library's fine grid, products of small primes; a rung of the ladder has the most
# odd modes that fit at the upsampling 1.25.
_GRIDS = (24, 30, 36, 45, 54, 64, 80, 100, 120, 144, 180, 216, 256, 320, 400, 500, 640, 800, 1000)
_GRIDS += (1250, 1536, 2000, 3000, 4000, 6000, 8000, 12000, 16000)
# Neighbours of the ladder grow by this factor at least: the cost of a rung grows with its power d.
_GROWTH = {1: 1.9, 2: 1.4, 3: 1.15}
_MAX_MODES = {1: 12801, 2: 1601, 3: 173}

# Of boxes no longer than this many bandwidths the density is too flat for its gradient.
_SMALL = 2.0
# Below this the second derivatives that the adjoint needs are lost as well.
_TINY = 0.05


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How ``rtol`` becomes the settings of one rung (docs/engines.md has the measurements)."""

    tolerance: float
    eps: float

    @classmethod
    def of(cls, rtol: float, kernel: Kernel, small: bool = False) -> "_Rule":
        """Half of rtol for what is cut off, nine tenths for the library, a hundredth if small.

        The library asks for a spreading kernel of 5 points at 8.9e-4 and of 6 just below. What is
        cut off of the inverse multiquadric has a heavier tail, and is taken four times smaller.
        """
        if small:
            return cls(0.01 * rtol, 0.01 * rtol)
        return cls((0.5 if isinstance(kernel, RBF) else 0.125) * rtol, 0.89 * rtol)


@dataclasses.dataclass(frozen=True)
class Fourier(Engine):
    r"""The sum over all pairs by non-uniform Fourier transforms, for d = 1, 2, 3.

    A smooth kernel has few Fourier modes, so the sum over all pairs is a transform of the weights
    to modes, a product with the kernel's symbol, and a transform back to the particles
    (:mod:`yggdrax.stein.modes` has the formula). The number of modes an axis is the smallest of a
    fixed, short ladder that the extent of the particles over the bandwidth asks for; one of the
    ladder is run (``jax.lax.switch``), and no new position or bandwidth compiles again.

    If even the last of the ladder is too small, ``Status.MODES`` is set and ``fallback`` serves in
    the same call; one far outlier is the usual cause. Points that are not finite never reach the
    transforms: the result is NaN and ``Status.NONFINITE`` is set. For one number of threads
    results repeat bit for bit. Differentiable once in reverse mode, by the same transforms.

    Under ``jax.vmap`` the batch is a loop, so that each member runs one rung alone.

    Particles split over several devices: each shard transforms its own, the modes are added, and
    each shard evaluates its own. What is exchanged is the modes, whatever N.

    Args:
      rtol: what the error should stay below, in the norm of ``|phi' - phi|`` over
        ``sqrt(|attraction|^2 + |repulsion|^2)``, root sums of squares over all particles.
      max_modes: most modes along an axis; None for 12801, 1601 and 173 in one, two and three
        dimensions.
      fallback: the engine that serves where the modes do not suffice.
      check_every: measure the error at 64 particles every so many steps; 0 for never.

    Raises:
      ImportError: on use, if the extra ``nufft`` is not installed.
      ValueError: on use, for d > 3, for a kernel other than RBF and IMQ, or for an ``rtol`` that
        the dtype cannot reach.

    Example:
      >>> import jax
      >>> x = jax.random.normal(jax.random.key(0), (2000, 2))
      >>> phi, status = Fourier().stein(x, -x, jnp.float32(0.5), RBF())
      >>> phi.shape, int(status)
      ((2000, 2), 0)
    """

    shards: ClassVar[bool] = True
    fallback_status: ClassVar[int] = Status.MODES.value
    """The bit to set where the fallback serves."""

    rtol: float = 1e-3
    max_modes: int | None = None
    fallback: Engine = Exact()  # noqa: RUF009  (frozen)
    check_every: int = 100

    def __post_init__(self):
        """Checks the options."""
        require_number("rtol", self.rtol, 1e-14, 0.1)
        if self.max_modes is not None and not is_whole(self.max_modes, 19):
            raise ValueError(f"max_modes must be an integer, 19 at least, got {self.max_modes!r}.")
        if not isinstance(self.fallback, Engine):
            raise TypeError(f"fallback must be an engine, such as Exact(), not {self.fallback!r}.")
        require_interval(self.check_every)

    def choose(self, n: int, d: int, dtype, kernel: Kernel) -> Engine:
        """Itself, if the library is installed: see :class:`yggdrax.stein.engine.Engine`."""
        nufft.require()
        return self

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """phi for particles and scores (N, d), d <= 3, and a bandwidth ()."""
        require_matrices(x, s)
        nufft.require()
        problem = self.refuses((x.shape[0], x.shape[1]), x.dtype, kernel)
        if problem:
            raise ValueError(problem)
        return _stein(self, kernel, x, s, jnp.asarray(h, x.dtype))

    def on_shard(self, axes: Axes, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """See :class:`yggdrax.stein.engine.Engine`."""
        (phi,), (status,) = _forward((self, kernel), axes, (x, s), (h,))
        return SteinSum(phi, status)

    def on_shard_adjoint(
        self, axes: Axes, x: Array, s: Array, u: Array, h: Array, kernel: Kernel
    ) -> tuple[Array, Array, Array]:
        """See :class:`yggdrax.stein.engine.Engine`."""
        (dx, ds), (dh,) = _backward((self, kernel), axes, (x, s, u), (h,))
        return dx, ds, dh

    def refuses(self, shape: tuple[int, int], dtype, kernel: Kernel) -> str | None:
        """Why this engine cannot serve such particles, or None if it can."""
        n, d = shape
        if n == 0:
            return "there are no particles: N = 0."
        if not 1 <= d <= 3:
            return (
                f"the Fourier engine serves one to three dimensions, not d = {d}: choose "
                "engine='tree', engine='exact' or engine='auto'."
            )
        if not isinstance(kernel, RBF | IMQ):
            return (
                f"the Fourier engine serves the kernels RBF and IMQ, not {type(kernel).__name__}, "
                "whose smoothness it cannot know: choose engine='tree' or engine='exact'."
            )
        floor = rtol_floor(dtype)
        if self.rtol < floor:
            return (
                f"rtol = {self.rtol:g} is below what {np.dtype(dtype)} transforms reach "
                f"({floor:g}): raise rtol, use float64, or choose engine='exact'."
            )
        return None

    def ladder(self, d: int, dtype, kernel: Kernel) -> tuple[int, ...]:
        """The mode counts along an axis, ascending, for boxes that are not small."""
        most = self.max_modes or _MAX_MODES[d]
        # The places of the particles are rounded in units of the box.
        most = min(most, int(self.rtol / np.finfo(dtype).eps))
        tolerance = _Rule.of(self.rtol, kernel).tolerance
        rungs: list[int] = []
        for count in (_odd_below(grid / 1.25) for grid in _GRIDS):
            grown = not rungs or count >= _GROWTH[d] * rungs[-1]
            if grown and count <= most and modes.reach(kernel, tolerance, count) > _SMALL:
                rungs.append(count)
        return tuple(rungs)

    def modes_of(self, rung: int, d: int, dtype, kernel: Kernel) -> int:
        """The mode count along an axis of one of :meth:`reaches`."""
        if rung == 0:
            return _small_modes(kernel, _Rule.of(self.rtol, kernel, small=True))
        return self.ladder(d, dtype, kernel)[rung - 1]

    def serves(self, points: Array, kernel: Kernel, axes: Axes = ()) -> Array | bool:
        """Which of :meth:`reaches` may serve ``points`` (in units of h), (rungs,) bool."""
        del points, kernel, axes
        return True

    def reaches(self, d: int, dtype, kernel: Kernel) -> np.ndarray:
        """The longest extents over h that the small-box rung and those of the ladder serve."""
        tolerance = _Rule.of(self.rtol, kernel).tolerance
        ladder = self.ladder(d, dtype, kernel)
        return np.array([_SMALL, *(modes.reach(kernel, tolerance, m) for m in ladder)])


def rtol_floor(dtype) -> float:
    """The smallest rtol that the Fourier engine accepts for a dtype."""
    return 20 * float(np.finfo(dtype).eps)


def _odd_below(value: float) -> int:
    """The largest odd number up to a value."""
    return int((value + 1) // 2) * 2 - 1


def _small_modes(kernel: Kernel, rule: _Rule) -> int:
    """The fewest odd modes that reach a box of ``_SMALL`` bandwidths."""
    count = 13
    while modes.reach(kernel, rule.tolerance, count) < _SMALL:
        count += 2
    return count


# --- one call: guard, choose a rung, run it --------------------------------------------------


def _guard(x: Array, s: Array, h: Array, axes: Axes) -> tuple[Array, Array, Array]:
    """Particles and scores with zeros for what is not finite, and whether all was finite."""
    fine_x, fine_s = jnp.isfinite(x), jnp.isfinite(s)
    finite = every(jnp.all(fine_x) & jnp.all(fine_s), axes) & ~jnp.isnan(h)
    return jnp.where(fine_x, x, 0), jnp.where(fine_s, s, 0), finite


def _rung(engine: Fourier, kernel: Kernel, box: modes.Box, axes: Axes) -> tuple[Array, int]:
    """The index of the rung to run, and the index that stands for the fallback."""
    d = box.points.shape[1]
    reaches = engine.reaches(d, box.points.dtype, kernel)
    limit = len(reaches)
    index = jnp.sum(box.extent > jnp.asarray(reaches, box.extent.dtype))
    # A bandwidth of 0 and an overflowing extent give NaN or infinity, in the points as well.
    usable = every(jnp.isfinite(box.extent) & jnp.all(jnp.isfinite(box.points)), axes)
    serves = jnp.broadcast_to(engine.serves(box.points, kernel, axes), (limit,))
    usable &= serves[jnp.minimum(index, limit - 1)]
    return jnp.where(usable, index, limit).astype(jnp.int32), limit


def _forward(static, axes: Axes, rows, rest):
    """((phi,), (status,)) of one shard's x and s, for h."""
    engine, kernel = static
    (x, s), (h,) = rows, rest
    d = x.shape[1]
    x, s, finite = _guard(x, s, h, axes)
    box = modes.bounding_box(x, h, axes)
    index, limit = _rung(engine, kernel, box, axes)
    points = jnp.where(index == limit, 0, box.points)

    def small(operands):
        _, s, h, box = operands
        rule = _Rule.of(engine.rtol, kernel, small=True)
        count = _small_modes(kernel, rule)
        phi = modes.forward_sum_of_a_small_box(box, s, h, kernel, count, rule, axes)
        return phi, jnp.zeros((), jnp.int32)

    def run(count, operands):
        _, s, h, box = operands
        phi = modes.forward_sum(box, s, h, kernel, count, _Rule.of(engine.rtol, kernel), axes)
        return phi, jnp.zeros((), jnp.int32)

    def other(operands):
        x, s, h, _ = operands
        phi, status = engine.fallback.on_shard(axes, x, s, h, kernel)
        return phi, status | jnp.int32(engine.fallback_status)

    ladder = engine.ladder(d, x.dtype, kernel)
    branches = [small, *(functools.partial(run, m) for m in ladder), other]
    phi, status = jax.lax.switch(index, branches, (x, s, h, box._replace(points=points)))
    status = jnp.where(finite, status, jnp.int32(Status.NONFINITE))
    return (jnp.where(finite, phi, jnp.nan),), (status,)


def _backward(static, axes: Axes, rows, rest):
    """((dx, ds), (dh,)) of one shard's x and s, and of h, for the cotangent of its phi."""
    engine, kernel = static
    (x, s, u), (h,) = rows, rest
    d = x.shape[1]
    x, s, finite = _guard(x, s, h, axes)
    box = modes.bounding_box(x, h, axes)
    index, limit = _rung(engine, kernel, box, axes)
    index = jnp.where(box.extent < _TINY, limit, index)
    points = jnp.where(index == limit, 0, box.points)

    def run(count, rule, operands):
        _, s, h, u, box = operands
        return modes.adjoint_sum(box, s, h, u, kernel, count, rule, axes)

    def other(operands):
        x, s, h, u, _ = operands
        return engine.fallback.on_shard_adjoint(axes, x, s, u, h, kernel)

    fine, coarse = _Rule.of(engine.rtol, kernel, small=True), _Rule.of(engine.rtol, kernel)
    rungs = [(_small_modes(kernel, fine), fine)]
    rungs += [(m, coarse) for m in engine.ladder(d, x.dtype, kernel)]
    branches = [*(functools.partial(run, *rung) for rung in rungs), other]
    cotangents = jax.lax.switch(index, branches, (x, s, h, u, box._replace(points=points)))
    dx, ds, dh = (jnp.where(finite, c, jnp.nan) for c in cotangents)
    return (dx, ds), (dh,)


# A batch is a loop: a batched switch would run every rung, and the exact sum, for every member.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stein(engine: Fourier, kernel: Kernel, x: Array, s: Array, h: Array) -> SteinSum:
    def one(x, s, h):
        (phi,), (status,) = over_shards(_forward, (engine, kernel), (x, s), (h,), 1)
        return SteinSum(phi, status)

    return sequential_vmap(one)(x, s, h)


def _stein_forward(engine, kernel, x, s, h):
    return _stein(engine, kernel, x, s, h), (x, s, h)


def _stein_backward(engine, kernel, residuals, cotangents):
    def one(x, s, h, u):
        (dx, ds), (dh,) = over_shards(_backward, (engine, kernel), (x, s, u), (h,), 2)
        return dx, ds, dh

    return sequential_vmap(one)(*residuals, cotangents.phi)


_stein.defvjp(_stein_forward, _stein_backward)
