r"""Near pairs of leaves: every pair of particles, differences formed pair by pair.

Leaves are small and may be far larger than h (an outlier shares its leaf), so the product form of
:mod:`yggdrax.stein.pairs` is not safe here, and tiles are too small for matrix products to pay.
Tiles are ``(group, sources, targets)``: sums run over the middle axis, so that they vectorise.
"""

import functools

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import Lists
from yggdrax.kernels import Kernel
from yggdrax.stein.sweep import sweep
from yggdrax.typing import Array

__all__ = ["STRATEGIES", "check_strategy", "near_field"]

STRATEGIES = ("scatter", "segment", "auto")

# Pairs of particles in one step, and sources of one target leaf in it.
_PAIRS = 2**17
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


def _over_near(layout, lists, table, share, add, like, *, upper=False, shared=()):
    """Adds up ``add((own, rows), ...)`` over the near pairs of every leaf, see :func:`sweep`.

    ``share`` is how many like it would fit into a step: more channels, fewer pairs at a time.
    """
    group, block = _sizes(layout, share)
    start, count = _upper_half(lists) if upper else (lists.near_start, lists.near_count)
    return sweep(
        lists.near,
        start,
        count,
        group=group,
        block=block,
        own=lambda rows: (_targets(table[:, rows]), rows),
        fetch=_nothing,
        add=add,
        like=like,
        axis=-2,
        shared=shared,
    )


def _by_segment(kernel, layout, lists, table, scale):
    d = len(table) // 2

    def add(data, _, entry, real, shared):
        own, _ = data
        k0, k1, difference, other = _tile(kernel, own, _gather(table, entry, real), scale)
        push = k1 * (other[-1] * scale)
        parts = [jnp.sum(k0 * other[d + c] + push * difference[c], 1) for c in range(d)]
        return jnp.stack(parts), shared

    out, _ = _over_near(layout, lists, table, 1, add, _targets(table[:d])[:, 0])
    return out[..., : layout.leaf]


def _by_scatter(kernel, layout, lists, table, scale):
    d = len(table) // 2

    def add(data, _, entry, real, shared):
        own, rows = data
        k0, k1, difference, other = _tile(kernel, own, _gather(table, entry, real), scale)
        push = k1 * scale
        here = [jnp.sum(k0 * other[d + c] + push * other[-1] * difference[c], 1) for c in range(d)]
        mine = own[:, :, None]
        there = [jnp.sum(k0 * mine[d + c] - push * mine[-1] * difference[c], 2) for c in range(d)]
        there = jnp.stack(there).reshape(d, len(rows), len(entry), -1)
        # A leaf paired with itself has been added once; nothing is added for lists that ended.
        twice = real & (entry != rows)
        place = jnp.where(twice, entry, layout.leaves).T
        return jnp.stack(here), shared.at[:, place].add(there, mode="drop")

    zero = jnp.zeros((d, layout.leaves, layout.leaf), table.dtype)
    like = _targets(table[:d])[:, 0]
    out, other = _over_near(layout, lists, table, 2, add, like, upper=True, shared=zero)
    return out[..., : layout.leaf] + other


def _nothing(entry: Array, real: Array) -> tuple[()]:
    """Tiles are larger than what they are made of: gathering in place was faster."""
    del entry, real
    return ()


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


def _sizes(layout: Layout, share: int) -> tuple[int, int]:
    block = max(1, _SOURCES // layout.leaf)
    targets = -(-layout.leaf // _LANES) * _LANES
    group = _PAIRS // (share * block * layout.leaf * targets)
    return max(1, min(group, layout.leaves)), block


def _weights(layout: Layout, dtype) -> Array:
    return layout.filled().astype(dtype)[None]


def _targets(rows: Array) -> Array:
    """Channels of target leaves, filled up with zeros: (channels, group, targets)."""
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % _LANES)))


def _gather(table: Array, entry: Array, real: Array) -> Array:
    """Particles of the leaves ``entry`` (block, group): (channels, group, block * leaf).

    All channels are zero in leaves that are not real; so is the weight, the last one.
    """
    rows = jnp.moveaxis(table, 0, 1)[entry.T]  # (group, block, channels, leaf)
    group, block, channels, leaf = rows.shape
    rows = jnp.where(real.T[..., None, None], rows, 0)
    return rows.transpose(2, 0, 1, 3).reshape(channels, group, block * leaf)


def _tile(kernel: Kernel, own: Array, other: Array, scale: Array):
    """kappa_0, kappa_1 and scaled differences by axis, (group, sources, targets) each."""
    other = other[..., None]
    d = len(own) // 2
    difference = [(own[c][:, None] - other[c]) * scale for c in range(d)]
    u = sum((q * q for q in difference), jnp.zeros((), scale.dtype))
    return kernel.kappa(0, u), kernel.kappa(1, u), difference, other


def _near_forward(kernel, accumulate, layout, lists, x, s, scale):
    value = near_field(kernel, accumulate, layout, lists, x, s, scale)
    return value, (layout, lists, x, s, scale)


def _near_backward(kernel, accumulate, kept, cotangent):
    """The adjoint: every target owns its row, so there is no transposed gather to scatter."""
    del accumulate
    layout, lists, x, s, scale = kept
    d = len(x)
    weights = _weights(layout, x.dtype)
    table = jnp.concatenate([x, s, cotangent * weights, weights])

    def add(data, _, entry, real, shared):
        other, own = _gather(table, entry, real)[..., None], data[0][:, :, None]
        difference = [(own[c] - other[c]) * scale for c in range(d)]
        u = sum(q * q for q in difference)
        k0, k1, k2 = (kernel.kappa(m, u) * other[-1] for m in range(3))
        score, pull = other[d : 2 * d], other[2 * d : 3 * d]
        own_score, own_pull = own[d : 2 * d], own[2 * d : 3 * d]
        work = sum(own_pull[c] * score[c] + own_score[c] * pull[c] for c in range(d))
        stretch = scale * sum((own_pull[c] - pull[c]) * difference[c] for c in range(d))
        along = k1 * work + k2 * stretch
        dx = [k1 * scale * (own_pull[c] - pull[c]) - along * difference[c] for c in range(d)]
        dx = jnp.stack([jnp.sum(v, 1) for v in dx])
        ds = jnp.stack([jnp.sum(k0 * pull[c], 1) for c in range(d)])
        # Half, since both members of a pair meet it; 1/h multiplies once more than x does.
        dscale = jnp.sum(2 * k1 * stretch - along * u, 1) * 0.5
        return (dx, ds, dscale), shared

    row = _targets(table[:d])[:, 0]
    (dx, ds, dscale), _ = _over_near(layout, lists, table, 2, add, (row, row, row[0]))
    dx, ds, dscale = (v[..., : layout.leaf] for v in (dx, ds, dscale))
    total = jnp.sum(jnp.where(layout.filled(), dscale, 0)) / scale
    return None, None, dx * scale * weights, ds * weights, total


near_field.defvjp(_near_forward, _near_backward)
