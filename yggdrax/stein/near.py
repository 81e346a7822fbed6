r"""Near pairs of leaves: every pair of particles, differences formed pair by pair.

Leaves are small and may be far larger than h (an outlier shares its leaf), so the product form of
:mod:`yggdrax.stein.pairs` is not safe here. Tiles are ``(group, sources, targets)``. On CPUs the
forward sum is fastest as plain sums over them, the adjoint, which has more tiles that are summed
over both axes, as products of tiles with one or a few rows (measured; docs/tree.md).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import Lists
from yggdrax.kernels import Kernel
from yggdrax.stein.sweep import sweep
from yggdrax.typing import Array

__all__ = ["STRATEGIES", "check_strategy", "near_field"]

STRATEGIES = ("scatter", "segment", "auto")

# Pairs of particles in one step, forward (tiles stay in the second-level cache) and in the adjoint,
# and sources of one target leaf in it.
_PAIRS, _ADJOINT_PAIRS = 2**15, 2**17
_SOURCES = 128
# Targets are filled up to whole vector registers.
_LANES = 8


def check_strategy(accumulate: str) -> None:
    """Raises ValueError for an unknown strategy."""
    if accumulate not in STRATEGIES:
        raise ValueError(f"accumulate must be one of {list(STRATEGIES)}, not {accumulate!r}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def near_field(
    kernel: Kernel,
    accumulate: str,
    layout: Layout,
    lists: Lists,
    x: Array,
    s: Array,
    scale: Array,
) -> Array:
    """Sum over all near pairs of ``kappa_0 S_j + kappa_1 (x_i - x_j) / h^2``.

    Args:
      kernel: the kernel.
      accumulate: ``"segment"``: directed pairs, every target leaf sums its own; ``"scatter"``:
        halved pairs, each tile evaluated once and added to both leaves; ``"auto"``: by dtype and
        platform.
      layout: shape of the tree.
      lists: from :func:`~yggdrax.geometry.lists.descend`.
      x: positions in slots, ``(d, leaves, leaf)``.
      s: scores in slots, zero in the empty ones.
      scale: 1/h, ``()``.
    """
    table = jnp.concatenate([x, s, _weights(layout, x.dtype)])
    scatter, segment = (functools.partial(f, kernel) for f in (_by_scatter, _by_segment))
    if accumulate == "auto":
        # Contended atomic additions of float32 are what "segment" avoids on GPUs; elsewhere, and
        # in float64, evaluating each tile once is worth more.
        other = segment if x.dtype == jnp.float32 else scatter
        operands = (layout, lists, table, scale)
        return jax.lax.platform_dependent(*operands, cpu=scatter, default=other)
    return (segment if accumulate == "segment" else scatter)(layout, lists, table, scale)


def _over_near(layout, lists, table, d, pairs, add, like, *, upper=False, shared=()):
    """Adds ``add((own, rows), other, ...)`` over the near pairs of every leaf, see :func:`sweep`.

    The first ``d`` channels of the table are positions. ``pairs`` of particles make a step.
    """

    def add_gathered(data, _, entry, real, shared):
        # Tiles are larger than what they are made of: gathering in place is faster than fetching.
        return add(data, _gather(table, entry, real, d), entry, real, shared)

    group, block = _sizes(layout, pairs)
    start, count = _upper_half(lists) if upper else (lists.near_start, lists.near_count)
    return sweep(
        lists.near,
        start,
        count,
        group=group,
        block=block,
        own=lambda rows: (_targets(table[:, rows], d), rows),
        fetch=lambda entry, real: (),
        add=add_gathered,
        like=like,
        axis=-2,
        shared=shared,
    )


def _by_segment(kernel, layout, lists, table, scale):
    d = len(table) // 2

    def add(data, other, entry, real, shared):
        del entry, real
        k0, k1, difference, other = _tile(kernel, data[0], other, scale)
        push = k1 * (other[-1] * scale)
        parts = [jnp.sum(k0 * other[d + c] + push * difference[c], 1) for c in range(d)]
        return jnp.stack(parts), shared

    out, _ = _over_near(layout, lists, table, d, _PAIRS, add, _targets(table[:d])[:, 0])
    return out[..., : layout.leaf]


def _by_scatter(kernel, layout, lists, table, scale):
    d = len(table) // 2

    def add(data, other, entry, real, shared):
        own, rows = data
        k0, k1, difference, other = _tile(kernel, own, other, scale)
        push = k1 * scale
        here = [jnp.sum(k0 * other[d + c] + push * other[-1] * difference[c], 1) for c in range(d)]
        mine = own[:, :, None]
        there = [jnp.sum(k0 * mine[d + c] - push * mine[-1] * difference[c], 2) for c in range(d)]
        there = jnp.stack(there).reshape(d, len(rows), len(entry), -1)
        place, _ = _others(layout, entry, real, rows)
        return jnp.stack(here), shared.at[:, place].add(there, mode="drop")

    zero = jnp.zeros((d, layout.leaves, layout.leaf), table.dtype)
    like = _targets(table[:d])[:, 0]
    out, other = _over_near(layout, lists, table, d, _PAIRS, add, like, upper=True, shared=zero)
    return out[..., : layout.leaf] + other


def _others(layout, entry, real, rows):
    """Where the tiles' sources stand, (group, block), and which of them get their sums there.

    A leaf paired with itself has been added once; nothing is added for lists that ended.
    """
    twice = real & (entry != rows)
    return jnp.where(twice, entry, layout.leaves).T, twice


def _upper_half(lists: Lists) -> tuple[Array, Array]:
    """The part of each leaf's ascending list that begins with the leaf itself, by bisection."""
    leaf = jnp.arange(len(lists.near_start), dtype=jnp.int32)
    end = lists.near_start + lists.near_count

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) // 2
        below = lists.near[jnp.minimum(middle, len(lists.near) - 1)] < leaf
        searching = low < high
        return (
            jnp.where(searching & below, middle + 1, low),
            jnp.where(searching & ~below, middle, high),
        )

    steps = max(1, len(lists.near_start).bit_length())
    first, _ = jax.lax.fori_loop(0, steps, halve, (lists.near_start, end))
    return first, end - first


def _sizes(layout: Layout, pairs: int) -> tuple[int, int]:
    block = max(1, _SOURCES // layout.leaf)
    targets = -(-layout.leaf // _LANES) * _LANES
    group = pairs // (block * layout.leaf * targets)
    return max(1, min(group, layout.leaves)), block


def _weights(layout: Layout, dtype) -> Array:
    return layout.filled().astype(dtype)[None]


def _targets(rows: Array, d: int = 0) -> Array:
    """Channels of target leaves, filled up with zeros: (channels, group, targets).

    The first ``d``, positions, are filled up with the last one, lest far differences overflow.
    """
    widths = ((0, 0), (0, 0), (0, -rows.shape[2] % _LANES))
    return jnp.concatenate([jnp.pad(rows[:d], widths, mode="edge"), jnp.pad(rows[d:], widths)])


def _gather(table: Array, entry: Array, real: Array, d: int) -> Array:
    """Particles of the leaves ``entry`` (block, group): (channels, group, block * leaf).

    All channels but the ``d`` positions are zero in leaves that are not real, the weight included.
    """
    rows = jnp.moveaxis(table, 0, 1)[entry.T]  # (group, block, channels, leaf)
    group, block, channels, leaf = rows.shape
    keep = real.T[..., None] | (jnp.arange(channels) < d)
    rows = jnp.where(keep[..., None], rows, 0)
    return rows.transpose(2, 0, 1, 3).reshape(channels, group, block * leaf)


def _tile(kernel: Kernel, own: Array, other: Array, scale: Array):
    """kappa_0, kappa_1, scaled differences by axis, and the sources; (group, sources, targets)."""
    difference, u = _differences(own, other, len(own) // 2, scale)
    return kernel.kappa(0, u), kernel.kappa(1, u), difference, other[..., None]


def _differences(own: Array, other: Array, d: int, scale: Array) -> tuple[list[Array], Array]:
    """Of targets and sources in units of h, by axis, and the sum of their squares."""
    difference = [(own[c][:, None] - other[c][..., None]) * scale for c in range(d)]
    return difference, sum((q * q for q in difference), jnp.zeros((), scale.dtype))


def _near_forward(kernel, accumulate, layout, lists, x, s, scale):
    value = near_field(kernel, accumulate, layout, lists, x, s, scale)
    return value, (layout, lists, x, s, scale)


def _near_backward(kernel, accumulate, kept, cotangent):
    """The adjoint: a sum over the same pairs, so that no gather is transposed."""
    layout, lists, x, s, scale = kept
    weights = _weights(layout, x.dtype)
    table = jnp.concatenate([x, s, cotangent * weights, weights])
    halved, directed = (functools.partial(f, kernel) for f in (_adjoint_by_scatter, _adjoint))
    operands = (layout, lists, table, scale)
    if accumulate == "segment":
        dx, ds, dscale = directed(*operands)
    else:  # elsewhere than on CPUs additions to shared rows may cost more than tiles
        dx, ds, dscale = jax.lax.platform_dependent(*operands, cpu=halved, default=directed)
    total = jnp.sum(jnp.where(layout.filled(), dscale[0], 0)) / scale
    return None, None, dx * scale * weights, ds * weights, total


def _adjoint(kernel, layout, lists, table, scale):
    """Directed pairs: every target leaf owns its rows."""
    d = len(table) // 3

    def add(data, other, entry, real, shared):
        del entry, real
        k0, dx, dscale = _adjoint_tile(kernel, data[0], other, scale)
        weight = other[-1:]
        dx = _each(_over_sources, weight, dx)
        ds = _over_sources(other[2 * d : -1], k0)
        # Half, since both members of a pair meet it.
        return (dx, ds, _over_sources(0.5 * weight, dscale)), shared

    row = _targets(table[:d])[:, 0]
    sums, _ = _over_near(layout, lists, table, d, _ADJOINT_PAIRS, add, (row, row, row[:1]))
    return tuple(v[..., : layout.leaf] for v in sums)


def _adjoint_by_scatter(kernel, layout, lists, table, scale):
    """Halved pairs: every tile is evaluated once and added to both leaves."""
    d = len(table) // 3

    def add(data, other, entry, real, shared):
        own, rows = data
        k0, dx, dscale = _adjoint_tile(kernel, own, other, scale)
        here = [_each(_over_sources, other[-1:], dx), _over_sources(other[2 * d : -1], k0)]
        there = [-_each(_over_targets, own[-1:], dx), _over_targets(own[2 * d : -1], k0)]
        place, twice = _others(layout, entry, real, rows)
        there = jnp.concatenate(there).reshape(2 * d, *place.shape, -1)
        half = jnp.where(twice.T, 1.0, 0.5).astype(scale.dtype)
        half = jnp.repeat(half, layout.leaf, 1) * other[-1:]
        sums = jnp.concatenate(here), _over_sources(half, dscale)
        return sums, shared.at[:, place].add(there, mode="drop")

    zero = jnp.zeros((2 * d, layout.leaves, layout.leaf), table.dtype)
    like = _targets(table[: 2 * d])[:, 0]
    (out, dscale), other = _over_near(
        layout, lists, table, d, _ADJOINT_PAIRS, add, (like, like[:1]), upper=True, shared=zero
    )
    out, dscale = out[..., : layout.leaf] + other, dscale[..., : layout.leaf]
    return out[:d], out[d:], dscale


def _over_sources(rows: Array, tile: Array) -> Array:
    """What the targets get: rows (channels, group, sources), tile (group, sources, targets)."""
    return jnp.einsum("cgs,gst->cgt", rows, tile, precision=jax.lax.Precision.HIGHEST)


def _over_targets(rows: Array, tile: Array) -> Array:
    """What the sources get: rows (channels, group, targets), tile (group, sources, targets)."""
    return jnp.einsum("cgt,gst->cgs", rows, tile, precision=jax.lax.Precision.HIGHEST)


def _each(over: Callable[[Array, Array], Array], weight: Array, tiles: list[Array]) -> Array:
    """The same for tiles that have one channel each."""
    return jnp.concatenate([over(weight, tile) for tile in tiles])


def _adjoint_tile(kernel, own, other, scale):
    """kappa_0, the cotangents of positions by axis, and that of 1/h; (group, sources, targets).

    The second are what the targets get; the sources get the opposite.
    """
    d = len(own) // 3
    difference, u = _differences(own, other, d, scale)
    k0, k1, k2 = (kernel.kappa(m, u) for m in range(3))
    own, other = own[:, :, None], other[..., None]
    score, pull = other[d : 2 * d], other[2 * d : 3 * d]
    own_score, own_pull = own[d : 2 * d], own[2 * d : 3 * d]
    work = sum(own_pull[c] * score[c] + own_score[c] * pull[c] for c in range(d))
    stretch = scale * sum((own_pull[c] - pull[c]) * difference[c] for c in range(d))
    along = k1 * work + k2 * stretch
    dx = [k1 * scale * (own_pull[c] - pull[c]) - along * difference[c] for c in range(d)]
    # 1/h multiplies once more than x does.
    return k0, dx, 2 * k1 * stretch - along * u


near_field.defvjp(_near_forward, _near_backward)
