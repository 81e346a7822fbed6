"""Median splits of a cloud by counting: no sort, any dimension, one loop over the levels."""

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.typing import Array

__all__ = ["median_slots"]


def median_slots(x: Array, layout: Layout) -> Array:
    """Halves every node at the median of its widest axis, level by level.

    The median is found by bisection on the bits of the coordinates (one count a step), and nodes
    are divided by a stable partition from running counts. Ties at the median are divided in the
    order they come.

    Args:
      x: finite positions, ``(rows, d)``.
      layout: shape of the tree.

    Returns:
      The particle in every slot, ``(slots,)`` int32, ``rows`` in the empty ones.
    """
    place = jnp.arange(layout.slots, dtype=jnp.int32)
    slots = jnp.where(place < layout.num, place, layout.rows)
    counts = layout.heap_counts()

    def halve(level, slots):
        return _halve(x, slots, counts, layout, level)

    # One loop, so that compilation does not take longer for a deeper tree.
    return jax.lax.fori_loop(0, layout.depth, halve, slots)


def _halve(x: Array, slots: Array, counts: Array, layout: Layout, level: Array) -> Array:
    """Splits all nodes of a level, each of which is a run of leaves ("blocks" here)."""
    blocks, width = layout.leaves, layout.leaf
    block = jnp.arange(blocks, dtype=jnp.int32)
    run = jnp.left_shift(jnp.int32(1), layout.depth - level)  # blocks of a node
    node = block // run
    first = node * run
    count = counts[jnp.left_shift(jnp.int32(1), level) + node]

    def node_sum(per_block):
        """Sums over the blocks of a node, for every block."""
        running = jnp.cumsum(per_block)
        before = running[first] - per_block[first]
        return running[first + run - 1] - before

    column = jnp.arange(width, dtype=jnp.int32)[None] + ((block - first) * width)[:, None]
    real = column < count[:, None]
    position = x[jnp.minimum(slots, layout.rows - 1)].T.reshape(-1, blocks, width)
    axis = _widest_axis(position, real, node)
    key = _sortable(jnp.take_along_axis(position, axis[None, :, None], 0)[0])

    left_count = (count + 1) // 2
    pivot = _select(key, real, left_count, node_sum)[:, None]
    less, equal = (key < pivot) & real, (key == pivot) & real
    ties = (left_count - node_sum(jnp.sum(less, 1, dtype=jnp.int32)))[:, None]
    start = first * width
    less_before, equal_before = (_running_count(flags, start) for flags in (less, equal))
    left_before = less_before + jnp.minimum(equal_before, ties)
    left = less | (equal & (equal_before < ties))
    within = jnp.where(left, left_before, run * width // 2 + column - left_before)
    place = jnp.where(real, start[:, None] + within, layout.slots).reshape(-1)
    empty = jnp.full(layout.slots, layout.rows, jnp.int32)
    return empty.at[place].set(slots, mode="drop")


def _widest_axis(position: Array, real: Array, node: Array) -> Array:
    """The widest axis of the node of every block, for positions (d, blocks, width)."""
    far = jnp.asarray(jnp.inf, position.dtype)
    low = jnp.min(jnp.where(real, position, far), -1)
    high = jnp.max(jnp.where(real, position, -far), -1)
    low = jnp.full_like(low, far).at[:, node].min(low)[:, node]
    high = jnp.full_like(high, -far).at[:, node].max(high)[:, node]
    # Half of each, since the extent of finite numbers may overflow.
    return jnp.argmax(0.5 * high - 0.5 * low, 0)


def _running_count(flags: Array, start: Array) -> Array:
    """How many flags are set before each place since the place ``start`` of its block."""
    flat = flags.reshape(-1).astype(jnp.int32)
    before = jnp.cumsum(flat) - flat
    return before.reshape(flags.shape) - before[start][:, None]


def _sortable(x: Array) -> Array:
    """Unsigned integers in the order of the finite numbers ``x``; -0 counts as 0."""
    bits = 8 * x.dtype.itemsize
    unsigned = jnp.dtype(f"uint{bits}")
    code = jax.lax.bitcast_convert_type(x + jnp.zeros((), x.dtype), unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    return jnp.where(code >= sign, ~code, code | sign)


def _select(key: Array, real: Array, rank: Array, node_sum) -> Array:
    """The ``rank``-th smallest real key of every node (from one), by bisection; one per block."""
    top = jnp.asarray(jnp.iinfo(key.dtype).max, key.dtype)
    key = jnp.where(real, key, top)

    def unfinished(bracket):
        low, high = bracket
        return jnp.any(low < high)

    def halve(bracket):
        low, high = bracket
        middle = low + (high - low) // 2
        below = jnp.sum(key <= middle[:, None], 1, dtype=jnp.int32)
        enough = node_sum(below) >= rank
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    ends = jnp.full_like(rank, jnp.min(key), key.dtype), jnp.full_like(rank, top, key.dtype)
    return jax.lax.while_loop(unfinished, halve, ends)[0]
