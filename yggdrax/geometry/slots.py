"""Orders of particles in which contiguous runs are close in space, as slots of a tree's leaves.

``"median"`` halves every node at the median of its widest axis, in any dimension; ``"morton"``
sorts once along a Z-curve, for at most three.
"""

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.splits import median_slots
from yggdrax.typing import Array

__all__ = ["ORDERINGS", "fill_slots", "morton_slots", "order_slots", "places"]


def order_slots(x: Array, layout: Layout, ordering: str) -> Array:
    """The particle in every slot, ``(slots,)`` int32, and ``rows`` in the empty ones.

    Args:
      x: finite positions, ``(rows, d)``.
      layout: shape of the tree.
      ordering: ``"median"`` or ``"morton"``.

    Raises:
      ValueError: for an unknown name, or the Morton order in more than three dimensions.

    Example:
      >>> x = jnp.array([[3.0], [1.0], [2.0], [0.0]])
      >>> order_slots(x, Layout.of(4, leaf_size=1), "median").tolist()
      [3, 1, 2, 0]
    """
    if ordering not in ORDERINGS:
        raise ValueError(f"unknown ordering {ordering!r}: choose one of {sorted(ORDERINGS)}.")
    return ORDERINGS[ordering](x, layout)


def places(slots: Array, layout: Layout) -> Array:
    """The slot of every row, ``(rows,)`` int32: the inverse of :func:`order_slots`."""
    index = jnp.arange(layout.slots, dtype=jnp.int32)
    return jnp.zeros(layout.rows, jnp.int32).at[slots].set(index, mode="drop")


def fill_slots(values: Array, slots: Array, layout: Layout) -> Array:
    """Moves rows ``(rows, c)`` into their slots, ``(c, leaves, leaf)``; empty ones repeat a row."""
    rows = values[jnp.minimum(slots, layout.rows - 1)]
    return rows.T.reshape(-1, layout.leaves, layout.leaf)


def morton_slots(x: Array, layout: Layout) -> Array:
    """Sorts once along the Z-curve of a cube around all particles, then cuts into equal leaves."""
    d = x.shape[1]
    if d > 3:
        raise ValueError(
            f"the Morton order serves up to three dimensions, not {d}: choose ordering='median'."
        )
    index = jnp.arange(layout.rows, dtype=jnp.int32)
    absent = (index >= layout.num).astype(jnp.uint32)
    by_curve = jax.lax.sort((absent, *_morton_keys(x, layout), index), num_keys=3)[-1]
    counts = layout.counts(layout.depth)
    source = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(layout.leaf)
    source = jnp.where(layout.filled(), source, layout.rows).reshape(-1)
    return jnp.append(by_curve, jnp.int32(layout.rows))[source]


def _morton_keys(x: Array, layout: Layout) -> tuple[Array, Array]:
    """The interleaved bits of the coordinates in two words, the high one first."""
    d = x.shape[1]
    bits = {1: 31, 2: 31, 3: 21}[d]
    present = (jnp.arange(layout.rows) < layout.num)[:, None]
    x = jnp.where(present, x, x[:1])
    low = jnp.min(x, 0)
    # Half of each, since the extent of finite numbers may overflow.
    extent = jnp.max(0.5 * jnp.max(x, 0) - 0.5 * low)
    fraction = (0.5 * x - 0.5 * low) / jnp.maximum(extent, jnp.finfo(x.dtype).tiny)
    cell = jnp.minimum(fraction * 2.0**bits, 2.0**bits - 2.0 ** max(bits - 24, 0))
    cell = cell.astype(jnp.uint32)
    words = [jnp.zeros(len(x), jnp.uint32), jnp.zeros(len(x), jnp.uint32)]
    for bit in range(bits):
        for axis in range(d):
            word, place = divmod(bit * d + axis, 32)
            words[word] |= ((cell[:, axis] >> bit) & 1) << place
    return words[1], words[0]


ORDERINGS = {"median": median_slots, "morton": morton_slots}
