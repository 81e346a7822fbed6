"""Which nodes meet which: far pairs of nodes and near pairs of leaves, by descent from the top.

Every ordered pair of particles lies in exactly one pair of nodes of the same level that is far,
skipped, or (at the leaves) near. The test is symmetric, so a node is on the list of each node on
its own list; adjoints rely on that. Lists are ascending and stored end to end, so that work is
proportional to their real length although the shapes are static.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.nodes import Nodes
from yggdrax.typing import Array

__all__ = ["Classify", "Lists", "Meeting", "descend", "first_level"]

_CHUNK = 8192
_SHIFT = 2 * _CHUNK
_FIRST_LEVEL = 5


class Meeting(NamedTuple):
    """Candidate pairs of nodes, one number each per pair, distances in the units of x.

    The numbers hold for every configuration in which no particle has moved by more than a margin.
    """

    target: Array
    """Heap number of one node."""
    source: Array
    """Heap number of the other."""
    reach: Array
    """Sum of both radii: how far a difference of particles can be from that of the centres."""
    distance: Array
    """Distance of the centres."""
    low: Array
    """No two particles of the pair are closer than this."""
    high: Array
    """No two particles of the pair are further apart than this."""


Classify = Callable[[Meeting], tuple[Array, Array]]
"""Says for each pair whether an expansion serves (far) and whether it is negligible (skipped)."""


class Lists(NamedTuple):
    """Interaction lists; a list is ``flat[start : start + count]``."""

    far: Array
    """Source nodes of all target nodes, by heap number, ``(far_capacity,)`` int32."""
    far_start: Array
    """``(nodes,)`` int32."""
    far_count: Array
    """``(nodes,)`` int32."""
    near: Array
    """Source leaves of all target leaves, ``(near_capacity,)`` int32."""
    near_start: Array
    """``(leaves,)`` int32."""
    near_count: Array
    """``(leaves,)`` int32."""
    overflow: Array
    """Whether a list was longer than its capacity; then the lists are useless. ``()`` bool."""
    crowded: Array
    """Whether so many pairs were near that the descent was given up; useless too. ``()`` bool."""


def first_level(layout: Layout) -> int:
    """The level at which the descent starts, with all pairs of its nodes."""
    return min(layout.depth, _FIRST_LEVEL)


class _Frontier(NamedTuple):
    near: Array
    """Two rows that levels take in turn: while one is read, the other one is written."""
    count: Array
    far: Array
    far_count: Array
    far_total: Array
    overflow: Array
    crowded: Array


def descend(
    nodes: Nodes,
    layout: Layout,
    classify: Classify,
    margin: Array | float = 0.0,
    *,
    near_capacity: int,
    far_capacity: int,
    most_near: float = 1.0,
) -> Lists:
    """Builds the lists.

    Args:
      nodes: geometry, from :func:`~yggdrax.geometry.nodes.measure` at :func:`first_level`.
      layout: shape of the tree.
      classify: the acceptance, symmetric in the two nodes.
      margin: how far particles may move before the lists stop being right, in the units of x.
      near_capacity: room for pairs of leaves.
      far_capacity: room for pairs of nodes.
      most_near: part of all pairs of leaves that may be near; beyond it the descent is given up.

    Returns:
      The lists; ``overflow`` is set if the room was too small, ``crowded`` if it was given up.
    """
    top, leaves = first_level(layout), layout.leaves
    # All pairs of the level above the first one, so that their children are its candidates.
    above = 2 ** max(top - 1, 0)
    limits = _near_limits(layout.depth, most_near)
    # A chunk more than may be near: it is noticed there, before the room is short.
    room = max(min(near_capacity, int(limits.max()) + _CHUNK), above * above)
    every = jnp.asarray(np.tile(np.arange(above, dtype=np.int32), above))
    state = _Frontier(
        near=jnp.zeros((2, room), jnp.int32).at[(top - 1) % 2, : above * above].set(every),
        count=jnp.zeros(leaves, jnp.int32).at[:above].set(above),
        far=jnp.zeros(far_capacity, jnp.int32),
        far_count=jnp.zeros(layout.nodes, jnp.int32),
        far_total=jnp.zeros((), jnp.int32),
        overflow=jnp.zeros((), bool),
        crowded=jnp.zeros((), bool),
    )
    table = jnp.concatenate([nodes.center, nodes.low, nodes.high, nodes.radius[None]]).T
    populated = layout.heap_counts() > 0

    def meet(target, source):
        return classify(_meet(table, target, source, margin))

    def one_level(level, state):
        limit = jnp.asarray(limits)[level]
        return _one_level(level, state, limit, populated, layout, meet)

    state = jax.lax.fori_loop(top, layout.depth + 1, one_level, state)
    return Lists(
        far=state.far,
        far_start=_starts(state.far_count),
        far_count=state.far_count,
        near=state.near[layout.depth % 2],
        near_start=_starts(state.count),
        near_count=state.count,
        overflow=state.overflow,
        crowded=state.crowded,
    )


def _near_limits(depth: int, most_near: float) -> np.ndarray:
    """How many pairs of each level may stay near, ``(depth + 1,)`` int32.

    Fewer do on the next level, by a factor that is about 3/4 where most are near; so the last
    levels, which cost most, need not be looked at to know how it will end.
    """
    slack = np.ones(depth + 1)
    last = np.array([2 / 3, 1 / 2, 1 / 3, 0])[-(depth + 1) :]
    slack[-len(last) :] = last
    share = most_near + (1 - most_near) * slack
    return np.minimum(share * 4.0 ** np.arange(depth + 1), 2**31 - 1).astype(np.int32)


def _starts(counts: Array) -> Array:
    return jnp.cumsum(counts) - counts


def _running(values: Array) -> Array:
    """Cumulative sums; on CPUs twice as fast as ``jnp.cumsum``."""
    return jax.lax.associative_scan(jnp.add, values)


def _one_level(level, state: _Frontier, limit, populated, layout: Layout, meet) -> _Frontier:
    """Tests the children of all near pairs of the level above."""
    rows = jnp.arange(layout.leaves, dtype=jnp.int32)
    base = jnp.left_shift(jnp.int32(1), level)
    # With a single leaf there is no level above: it is its own and only candidate.
    fan = 2 if layout.depth else 1
    parent = rows // fan
    alive = (rows < base) & populated[jnp.where(rows < base, base + rows, 0)]
    candidates = jnp.where(alive, fan * state.count[parent], 0)
    ends = jnp.cumsum(candidates)
    begins, parent_start = ends - candidates, _starts(state.count)[parent]
    total = jnp.where(state.overflow | state.crowded, 0, ends[-1])
    lane = jnp.arange(_CHUNK, dtype=jnp.int32)
    read, write = (level + 1) % 2, level % 2

    def more(carry):
        done, _, new = carry
        return (done < total) & ~new.overflow & ~new.crowded

    def one_chunk(carry):
        done, near_total, new = carry
        item = done + lane
        # How many rows have begun: cheaper than to search for every item.
        begun = jnp.zeros(_CHUNK, jnp.int32)
        begun = begun.at[jnp.maximum(begins - done, 0)].add(1, mode="drop")
        row = _running(begun) - 1
        within = item - begins[row]
        column = new.near[read, parent_start[row] + within // fan] * fan + within % fan
        target, source = base + row, base + column
        valid = (item < total) & populated[source]
        far, skip = meet(target, source)
        far, near = valid & far & ~skip, valid & ~far & ~skip
        # Both counts in one sum: neither is larger than a chunk.
        both = _running(near.astype(jnp.int32) + _SHIFT * far.astype(jnp.int32))
        far_place = new.far_total + both // _SHIFT - 1
        near_place = near_total + both % _SHIFT - 1
        far_total, near_total = far_place[-1] + 1, near_place[-1] + 1
        room_far, room_near = len(new.far), new.near.shape[1]
        place = jnp.where(near, near_place, room_near)
        new = _Frontier(
            near=new.near.at[write, place].set(column, mode="drop"),
            count=new.count.at[row].add(near.astype(jnp.int32)),
            far=new.far.at[jnp.where(far, far_place, room_far)].set(source, mode="drop"),
            far_count=new.far_count.at[target].add(far.astype(jnp.int32)),
            far_total=far_total,
            overflow=(far_total > room_far) | (near_total > room_near),
            crowded=near_total > limit,
        )
        return done + _CHUNK, near_total, new

    new = state._replace(count=jnp.zeros_like(state.count))
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(more, one_chunk, (zero, zero, new))[2]


def _meet(table: Array, target: Array, source: Array, margin: Array | float) -> Meeting:
    """Distances between the nodes of each pair, from one row of numbers a node."""
    d = (table.shape[1] - 1) // 3
    a, b = table[target], table[source]
    distance = jnp.sqrt(jnp.sum((a[:, :d] - b[:, :d]) ** 2, 1))
    radii = a[:, -1] + b[:, -1]
    gap = jnp.maximum(a[:, d : 2 * d] - b[:, 2 * d : 3 * d], b[:, d : 2 * d] - a[:, 2 * d : 3 * d])
    gap = jnp.sqrt(jnp.sum(jnp.maximum(gap, 0) ** 2, 1))
    low = jnp.maximum(gap, distance - radii)
    # Two particles approach each other by two margins at most, and so do two centroids; a particle
    # and its own centroid part by two.
    return Meeting(
        target=target,
        source=source,
        reach=radii + 4 * margin,
        distance=jnp.maximum(distance - 2 * margin, 0),
        low=jnp.maximum(low - 2 * margin, 0),
        high=distance + radii + 2 * margin,
    )
