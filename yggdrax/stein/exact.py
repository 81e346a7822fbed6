r"""The exact sum over all pairs, in bounded memory and without an (N, N, d) array.

Particles are put into tiles of targets and tiles of sources; :mod:`yggdrax.stein.pairs` does one
tile pair. Many particles in few dimensions are first sorted into compact tiles by median splits:
then coordinates centred on a tile are small, rounding is too, and pairs of tiles so far apart that
the kernel underflows are passed over. Partial sums are compensated (Kahan) from tile to tile.

Particles split over several devices: every shard lays out its own tiles once, and they pass round
the ring of shards while the last ones are summed, so no device holds more than two shards of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.geometry.ordering import median_order
from yggdrax.kernels import RBF, Kernel, as_bandwidth, resolve_kernel
from yggdrax.kernels.wide import is_wide
from yggdrax.sharding import Axes, over_shards, pass_round, shard_count, total
from yggdrax.stein.engine import Engine, SteinSum, no_status, require_matrices
from yggdrax.stein.leaves import check_like, layout_of
from yggdrax.stein.pairs import (
    PRODUCT_RADIUS,
    Leaves,
    Tile,
    adjoint_differences,
    agree_over_batch,
    forward_differences,
    product_is_safe,
)
from yggdrax.stein.products import Centre, Products, adjoint_by_products, forward_by_products
from yggdrax.stein.wide import wide_phi
from yggdrax.typing import Array, Number, ParticleTree, PyTree, is_whole

__all__ = ["Exact", "exact_phi"]

# Targets and sources of a tile, measured on two cores: 640 to 1024 of each keep the kernel matrix
# in the caches while the matrix products are long enough. 320 took 1.4 times as long, 1280 x 640
# 1.2 times, and twice with the gradient.
TARGETS, SOURCES = 1024, 1024
# Up to here one kernel matrix for all is at least as fast. In many dimensions, where products are
# what costs, up to a matrix of 16 MB; in few, 2000 particles took 2.4 times as long so.
ONE_TILE, ONE_TILE_OF_MANY = 1024, 2048
# Sorting pays where tiles become compact by it: not in many dimensions.
FEW_DIMENSIONS = 16
SORT_ALWAYS = 16384
COMPENSATE_DIMENSIONS = 256
ALIGN = 16


@dataclasses.dataclass(frozen=True)
class Exact(Engine):
    """The exact sum, every pair.

    Args:
      block_size: rows of the kernel matrix that exist at a time. None chooses: everything at once
        up to 1024 particles a device (2048 in more than 16 dimensions), tiles of at most 1024 by
        1024 above.

    Raises:
      ValueError: if ``block_size`` is not a positive integer.
    """

    needs_one_matrix: ClassVar[bool] = False
    shards: ClassVar[bool] = True
    block_size: int | None = None

    def __post_init__(self):
        """Validates the block size."""
        _check_block_size(self.block_size)

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """See :class:`yggdrax.stein.engine.Engine`."""
        require_matrices(x, s)
        return SteinSum(self.stein_leaves((x,), (s,), h, kernel)[0], no_status())

    def stein_leaves(self, x: Leaves, s: Leaves, h: Array, kernel: Kernel) -> Leaves:
        """The same for a particle of several leaves ``(N, d_l)``, none of them concatenated."""
        return _compiled(self.block_size, kernel, x, s, h)

    def on_shard(self, axes: Axes, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """See :class:`yggdrax.stein.engine.Engine`."""
        (phi,), _ = _forward((self.block_size, kernel), axes, (x, s), (h,))
        return SteinSum(phi, no_status())

    def on_shard_adjoint(
        self, axes: Axes, x: Array, s: Array, u: Array, h: Array, kernel: Kernel
    ) -> tuple[Array, Array, Array]:
        """See :class:`yggdrax.stein.engine.Engine`."""
        (dx, ds), (dh,) = _adjoint((self.block_size, kernel), axes, (x, s, u), (h,))
        return dx, ds, dh


def _check_block_size(block_size: int | None) -> None:
    if block_size is not None and not is_whole(block_size, 1):
        raise ValueError(f"block_size must be a positive integer or None, not {block_size!r}.")


def exact_phi(
    particles: ParticleTree,
    scores: ParticleTree,
    bandwidth: Number,
    *,
    block_size: int | None = None,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
) -> ParticleTree:
    r"""The Stein variational gradient of every particle, every pair summed.

    .. math::
        \phi_i = \frac1N \sum_j \big[ k(x_j, x_i)\, S_j + \nabla_{x_j} k(x_j, x_i) \big], \qquad
        k(x, y) = \exp(-|x - y|^2 / 2h^2)

    (Liu and Wang, 2016, with the term j = i included.) Differentiable in particles, scores and
    bandwidth in reverse mode; the gradient needs no (N, N) array either.

    Args:
      particles: pytree of floating arrays with a leading axis N.
      scores: gradients of log p at the particles, like ``particles``.
      bandwidth: h > 0, in the units of the particles.
      block_size: rows of the kernel matrix that exist at a time; None chooses.
      kernel: a radial kernel, or its name.

    Returns:
      phi, like ``particles`` in structure, shapes and dtypes.

    Raises:
      ValueError: for N = 0, trees or shapes that differ, or a bandwidth that is negative or NaN.
      TypeError: for integer leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0], [1.0], [3.0]])
      >>> [f"{v:.5f}" for v in exact_phi(x, -x, 1.0)[:, 0]]
      ['-0.42657', '-0.35672', '-0.94378']
    """
    layout = layout_of(particles)
    check_like(layout, particles, scores, "scores")
    h = as_bandwidth(bandwidth, layout.dtype)
    x, s = (layout.join(layout.matrices(tree)) for tree in (particles, scores))
    phi = Exact(block_size).stein_leaves(x, s, h, resolve_kernel(kernel))
    return layout.tree(layout.split(phi), particles)


class _Plan(NamedTuple):
    """Everything static about one sum."""

    num_particles: int
    rows: int
    """Particles in a tile of targets."""
    columns: int
    """Particles in a tile of sources; ``rows`` is a multiple of it."""
    tiles: int
    """Tiles of targets: 2 ** levels of median splits in few dimensions."""
    few_dimensions: bool
    """Tiles are sorted, and the factors of products are put together once for all of them."""
    compensated: bool

    @property
    def padded(self) -> int:
        return self.rows * self.tiles


def _plan(n: int, dimension: int, block_size: int | None) -> _Plan:
    one_tile = ONE_TILE if dimension <= FEW_DIMENSIONS else ONE_TILE_OF_MANY
    if n <= (one_tile if block_size is None else block_size):
        return _Plan(n, n, n, 1, False, False)
    rows, columns = (TARGETS, SOURCES) if block_size is None else (block_size, block_size)
    few_dimensions = dimension <= FEW_DIMENSIONS and rows >= 32
    tiles = -(-n // rows)
    if few_dimensions:
        tiles = 2 ** math.ceil(math.log2(tiles))
    rows = -(-n // tiles)  # equal tiles
    per_row = max(1, round(rows / columns))
    columns = -(-rows // per_row)
    if block_size is None:
        # Matrix products like multiples of their registers; the padding is a few per cent at most.
        columns = -(-columns // ALIGN) * ALIGN
    plan = _Plan(
        n, columns * per_row, columns, tiles, few_dimensions, dimension <= COMPENSATE_DIMENSIONS
    )
    assert plan.padded >= n, "a plan that leaves particles out"
    return plan


class _Layout(NamedTuple):
    """The particles in tiles."""

    order: Array | None
    """Padded position -> particle, or None for the caller's order."""
    mask: Array
    """1 for a particle, 0 for padding, ``(tiles, rows)``."""
    lower: Array
    upper: Array
    """Bounding boxes of the tiles, ``(tiles, d)``; without sorting, ``(tiles, 0)``."""


def _layout(plan: _Plan, x: Leaves, h: Array) -> _Layout:
    """Orders the particles. Discrete, so nothing is differentiated through it."""
    n, padded = plan.num_particles, plan.padded
    positions = jnp.minimum(jnp.arange(padded), n - 1).astype(jnp.int32)
    mask = (jnp.arange(padded) < n).astype(x[0].dtype).reshape(plan.tiles, plan.rows)
    if not plan.few_dimensions:
        empty = jnp.zeros((plan.tiles, 0), x[0].dtype)
        return _Layout(None if plan.tiles == 1 else positions, mask, empty, empty)
    points = jax.lax.stop_gradient(x[0])[positions]
    levels = int(math.log2(plan.tiles))
    if n >= SORT_ALWAYS:
        order = median_order(points, levels)
    else:
        # A cloud in which every tile may use products needs no sorting; a wider one does, for its
        # digits and its speed. Centres of unsorted tiles are nearly that of the cloud.
        radius = 0.97 * PRODUCT_RADIUS * h
        from_centre = points - jnp.mean(points, axis=0)
        wide = agree_over_batch(~(jnp.max(jnp.sum(jnp.square(from_centre), axis=1)) <= radius**2))
        order = jax.lax.cond(
            wide,
            lambda p: median_order(p, levels),
            lambda p: jnp.arange(padded, dtype=jnp.int32),
            points,
        )
    cells = points[order].reshape(plan.tiles, plan.rows, -1)
    mask = mask.reshape(-1)[order].reshape(mask.shape)
    return _Layout(positions[order], mask, jnp.min(cells, axis=1), jnp.max(cells, axis=1))


def _tiled(plan: _Plan, layout: _Layout, leaves: Leaves, *, zero_padding: bool) -> Leaves:
    """Leaves ``(N, d_l)`` as ``(tiles, rows, d_l)``."""
    tiled = []
    for leaf in leaves:
        if layout.order is not None:
            leaf = leaf[layout.order]
        leaf = leaf.reshape(plan.tiles, plan.rows, leaf.shape[1])
        tiled.append(leaf * layout.mask[:, :, None] if zero_padding else leaf)
    return tuple(tiled)


def _untiled(plan: _Plan, layout: _Layout, tiled: Leaves) -> Leaves:
    flat = tuple(leaf.reshape(plan.padded, leaf.shape[2]) for leaf in tiled)
    if layout.order is None:
        return flat
    # Where each particle stands. Padding repeats the last one, so only real places are written.
    places = jnp.arange(plan.padded, dtype=jnp.int32)
    target = jnp.where(layout.mask.reshape(-1) > 0, layout.order, plan.num_particles)
    inverse = jnp.zeros(plan.num_particles, jnp.int32).at[target].set(places, mode="drop")
    return tuple(leaf[inverse] for leaf in flat)


class _Tiles(NamedTuple):
    """One tile of particles and its bounding box, or several of them with a leading axis."""

    tile: Tile
    lower: Array
    upper: Array


class _Forms(NamedTuple):
    """One sum over pairs of tiles in both forms."""

    differences: Callable[[Tile, Tile], PyTree]
    products: Products


def _sum_over_sources(plan, kernel, h, forms: _Forms, target: _Tiles, sources: _Tiles, start):
    """Adds what ``target``, one tile, gets from all tiles of sources to the sum ``start``.

    Tiles of sources further away than the kernel reaches are passed over.
    """
    own, others = target.tile, sources.tile
    inverse_h = 1 / h
    centre = Centre.of(own.z)
    scaled = centre.scaled(own, inverse_h)
    # A margin for the rounding of the boxes' distance.
    reach = kernel.reach(own.weight.dtype) * 1.01

    def over_tiles(start, operands, evaluate):
        def add(total, source):
            operand, lower, upper = source
            if not plan.few_dimensions or not math.isfinite(reach):
                return _add(total, evaluate(operand)), None
            gap = jnp.maximum(jnp.maximum(target.lower - upper, lower - target.upper), 0)
            distance = jnp.sum(jnp.square(gap * inverse_h))
            beyond = agree_over_batch((distance > reach) & jnp.isfinite(distance))
            return jax.lax.cond(beyond, lambda: total, lambda: _add(total, evaluate(operand))), None

        operands = (operands, sources.lower, sources.upper)
        if plan.padded == plan.columns:
            # One tile: nothing to scan over.
            return add(start, jax.tree.map(lambda leaf: leaf[0], operands))[0]
        return jax.lax.scan(add, start, operands)[0]

    def by_differences():
        return over_tiles(start, others, lambda other: forms.differences(own, other))

    def by_products():
        form = forms.products
        left = form.targets(scaled)

        def factors(other):
            return form.sources(centre.scaled(other, inverse_h))

        one = jax.tree.map(lambda leaf: leaf[0], others)
        like = jax.eval_shape(lambda: form.sums(left, factors(one)))
        zero = _start(plan, like)
        if plan.few_dimensions:
            # Once for all tiles of sources; in many dimensions the copy would cost memory and
            # save nothing beside the products.
            sums = over_tiles(zero, factors(others), lambda other: form.sums(left, other))
        else:
            sums = over_tiles(zero, others, lambda other: form.sums(left, factors(other)))
        return _add(start, form.finish(scaled, sums.value))

    safe = agree_over_batch(product_is_safe(scaled.z))
    return jax.lax.cond(safe, by_products, by_differences)


class _Sum(NamedTuple):
    """A running sum and, where compensated (Kahan), the rounding it has dropped."""

    value: PyTree
    dropped: PyTree | None


def _start(plan: _Plan, value: PyTree) -> _Sum:
    zero = jax.tree.map(jnp.zeros_like, value)
    return _Sum(zero, zero if plan.compensated and plan.padded > plan.columns else None)


def _add(total: _Sum, value: PyTree) -> _Sum:
    if total.dropped is None:
        return _Sum(jax.tree.map(jnp.add, total.value, value), None)
    corrected = jax.tree.map(jnp.subtract, value, total.dropped)
    added = jax.tree.map(jnp.add, total.value, corrected)
    dropped = jax.tree.map(lambda new, old, c: (new - old) - c, added, total.value, corrected)
    return _Sum(added, dropped)


def _over_target_tiles(plan, kernel, axes, tile: Tile, h, like, forms: _Forms):
    """Runs the double loop over tiles and returns each target tile's sums, and the layout.

    ``tile`` holds all particles of the shard; ``like`` shows the shapes of one tile's sums.
    """
    layout = _layout(plan, tile.z, h)
    x = _tiled(plan, layout, tile.z, zero_padding=False)
    s = _tiled(plan, layout, tile.s, zero_padding=True)
    u = None if tile.u is None else _tiled(plan, layout, tile.u, zero_padding=True)
    targets = _Tiles(Tile(x, s, u, layout.mask), layout.lower, layout.upper)
    per_row = plan.rows // plan.columns

    def split(leaf):
        return leaf.reshape(plan.tiles * per_row, plan.columns, *leaf.shape[2:])

    sources = _Tiles(
        jax.tree.map(split, targets.tile),
        jnp.repeat(layout.lower, per_row, axis=0),
        jnp.repeat(layout.upper, per_row, axis=0),
    )

    def start(target):
        return _start(plan, like(target.tile))

    def add(target, sum_so_far, sources):
        return _sum_over_sources(plan, kernel, h, forms, target, sources, sum_so_far)

    def one(target):
        return add(target, start(target), sources).value

    def hop(carry, _):
        sums, visiting = carry
        # Sent on before it is used, so that sending and arithmetic may overlap.
        coming = pass_round(visiting, axes)
        return (over(lambda t, so_far: add(t, so_far, visiting), targets, sums), coming), None

    def over(function, *operands):
        if plan.tiles > 1:
            return jax.lax.map(lambda operand: function(*operand), operands)
        only = jax.tree.map(lambda leaf: leaf[0], operands)
        return jax.tree.map(lambda leaf: leaf[None], function(*only))

    if not axes:
        return over(one, targets), layout
    carry = (over(start, targets), sources)
    (sums, _), _ = jax.lax.scan(hop, carry, None, length=shard_count(axes))
    return sums.value, layout


def _forward(static, axes: Axes, rows: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
    """phi, leaf by leaf, at the particles of one shard; rows are the leaves of x and s."""
    block_size, kernel = static
    x, s = _halves(rows)
    (h,) = rest
    plan = _plan(x[0].shape[0], sum(leaf.shape[1] for leaf in x), block_size)
    n = plan.num_particles * shard_count(axes)

    forms = _Forms(
        lambda own, other: forward_differences(kernel, own.z, other, 1 / h),
        forward_by_products(kernel, 1 / h),
    )

    def by_tiles():
        everything = Tile(x, s, None, jnp.ones(x[0].shape[0], x[0].dtype))
        phi, layout = _over_target_tiles(
            plan, kernel, axes, everything, h, lambda tile: tile.z, forms
        )
        return tuple(leaf / n for leaf in _untiled(plan, layout, phi))

    if plan.tiles == 1 and not axes and is_wide(x):
        return wide_phi(kernel, x, s, h, by_tiles), ()
    return by_tiles(), ()


def _adjoint(static, axes: Axes, rows: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
    """Cotangents of x and s, leaf by leaf, and of h; rows are the leaves of x, s and phi's."""
    block_size, kernel = static
    third = len(rows) // 3
    x, s, u = rows[:third], rows[third : 2 * third], rows[2 * third :]
    (h,) = rest
    plan = _plan(x[0].shape[0], sum(leaf.shape[1] for leaf in x), block_size)
    n = plan.num_particles * shard_count(axes)

    forms = _Forms(
        lambda own, other: adjoint_differences(kernel, own, other, 1 / h),
        adjoint_by_products(kernel, 1 / h),
    )
    everything = Tile(x, s, u, jnp.ones(x[0].shape[0], x[0].dtype))
    (dx, ds, dh), layout = _over_target_tiles(
        plan, kernel, axes, everything, h, lambda tile: (tile.z, tile.z, h), forms
    )
    rows = tuple(leaf / n for leaf in (*_untiled(plan, layout, dx), *_untiled(plan, layout, ds)))
    return rows, (total(jnp.sum(dh), axes) / n,)


def _halves(leaves: Leaves) -> tuple[Leaves, Leaves]:
    middle = len(leaves) // 2
    return leaves[:middle], leaves[middle:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exact(block_size: int | None, kernel: Kernel, x: Leaves, s: Leaves, h: Array) -> Leaves:
    return over_shards(_forward, (block_size, kernel), (*x, *s), (h,), len(x))[0]


def _exact_fwd(block_size, kernel, x, s, h):
    return _exact(block_size, kernel, x, s, h), (x, s, h)


def _exact_bwd(block_size, kernel, residuals, cotangent):
    x, s, h = residuals
    if any(leaf.shape != u.shape for leaf, u in zip(x, cotangent, strict=True)):
        # JAX 0.10.1 takes forwarded residuals from the wrong arguments where it hoists constants.
        raise NotImplementedError(
            "JAX mixes up what the sum keeps for its derivative where a loop (lax.scan, and so "
            "unrolled) is differentiated twice: take differences of first derivatives instead."
        )
    rows = (*x, *s, *cotangent)
    both, (dh,) = over_shards(_adjoint, (block_size, kernel), rows, (h,), 2 * len(x))
    return *_halves(both), dh


_exact.defvjp(_exact_fwd, _exact_bwd)

# Conditions and scans outside of any jit would be compiled at every call.
_compiled = jax.jit(_exact, static_argnums=(0, 1))
