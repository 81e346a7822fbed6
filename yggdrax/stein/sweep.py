"""Runs over interaction lists in blocks of static size, with work proportional to their length.

Rows (nodes or leaves) are sorted by the length of their lists and taken in groups, so that the rows
of a group end together; each group adds up its own rows and is written once. Nothing is scattered.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from yggdrax.typing import Array, PyTree

__all__ = ["sweep"]


def sweep(
    flat: Array,
    start: Array,
    count: Array,
    *,
    group: int,
    block: int,
    own: Callable[[Array], PyTree],
    fetch: Callable[[Array, Array], PyTree],
    add: Callable[[PyTree, PyTree, Array, Array, PyTree], tuple[PyTree, PyTree]],
    like: PyTree,
    axis: int = -1,
    shared: PyTree = (),
) -> tuple[PyTree, PyTree]:
    """Adds up, for every row, what the entries of its list contribute.

    Args:
      flat: all lists end to end.
      start: where each row's list begins, ``(rows,)``.
      count: its length, ``(rows,)``.
      group: rows taken together.
      block: entries of each taken at a time.
      own: gets row numbers ``(group,)`` and returns the rows' own data.
      fetch: gets entries ``(block, group)`` and which of them are real, and returns what is to
        be in memory before ``add`` is called.
      add: gets both data, the entries, which of them are real, and ``shared``;
        returns the contributions, a pytree of arrays with an axis over the group, and ``shared``.
      like: one row of such a pytree, for its shapes.
      axis: where the axis over rows stands in the contributions, counted from the end.
      shared: arrays that every step may change.

    Returns:
      The sums over the lists, with an axis over all rows, and ``shared``.
    """
    rows = count.shape[0]
    group = min(group, rows)
    groups = -(-rows // group)
    ranking = jnp.argsort(-count).astype(jnp.int32)
    padded = jnp.zeros(groups * group, jnp.int32).at[:rows].set(ranking)
    length = jnp.where(jnp.arange(groups * group) < rows, count[padded], 0)
    lane = jnp.arange(block, dtype=jnp.int32)[:, None]

    def zeros(size):
        def of(v):
            place = v.ndim + 1 + axis
            return jnp.zeros((*v.shape[:place], size, *v.shape[place:]), v.dtype)

        return jax.tree.map(of, like)

    def one_group(carry):
        index, out, shared = carry
        members = jax.lax.dynamic_slice_in_dim(padded, index * group, group)
        lengths = jax.lax.dynamic_slice_in_dim(length, index * group, group)
        begins = start[members]
        data = own(members)

        def one_block(carry):
            done, total, shared = carry
            place = done + lane
            real = place < lengths
            entry = flat[jnp.where(real, begins + place, 0)]
            entry = jnp.where(real, entry, 0)
            other = fetch(entry, real)

            def evaluate(_, sums):
                total, shared = sums
                new, shared = add(data, other, entry, real, shared)
                return jax.tree.map(jnp.add, total, new), shared

            # Always one round, but the compiler does not know: without the loop it would fuse what
            # is fetched into each of its consumers and fetch it several times over.
            rounds = jnp.minimum(lengths[0] - done, 1)
            total, shared = jax.lax.fori_loop(0, rounds, evaluate, (total, shared))
            return done + block, total, shared

        _, total, shared = jax.lax.while_loop(
            lambda carry: carry[0] < lengths[0], one_block, (jnp.int32(0), zeros(group), shared)
        )

        def write(whole, part):
            place = whole.ndim + axis
            return jax.lax.dynamic_update_slice_in_dim(whole, part, index * group, place)

        return index + 1, jax.tree.map(write, out, total), shared

    def unfinished(carry):
        begin = jnp.minimum(carry[0], groups - 1) * group
        return (carry[0] < groups) & (length[begin] > 0)

    start_carry = (jnp.int32(0), zeros(groups * group), shared)
    _, out, shared = jax.lax.while_loop(unfinished, one_group, start_carry)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    back = jnp.zeros(rows, jnp.int32).at[ranking].set(numbers, unique_indices=True)
    return jax.tree.map(lambda whole: jnp.take(whole, back, axis=whole.ndim + axis), out), shared
