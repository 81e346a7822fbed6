"""Squared distances of pairs of particles, on one device and over several.

Of particles split over shards no more than two shards of them are ever on one device: their blocks
pass round a ring, or, where particles outnumber the pairs by far, the pairs' differences are added
up over the shards. The distances themselves are then the same on every device.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.kernels.wide import is_wide, wide_products
from yggdrax.sharding import (
    Axes,
    fetch,
    offset,
    on_one_device,
    over_shards,
    pass_round,
    shard_count,
    smallest,
    total,
)
from yggdrax.typing import Array

__all__ = ["FEW_DIMENSIONS", "SAMPLED_PAIRS", "all_squared_distances", "sampled_squared_distances"]

# Up to here distances come from differences, above from one matrix product.
FEW_DIMENSIONS = 16
# Odd, so that the sample has one middle. The sampled median's rank has a standard deviation of
# 0.5 / sqrt(32769) = 0.28 % of all pairs.
SAMPLED_PAIRS = 32769
_SEED = 20160815
# Numbers gathered at a time, so that networks are never gathered 32769 times over.
_GATHERED = 4_194_304

Leaves = tuple[Array, ...]


def all_squared_distances(leaves: Sequence[Array]) -> Array:
    """``|x_i - x_j|^2`` of all particles with matrices ``(N, d_l)``; (N, N)."""
    if not on_one_device(leaves[0]):
        return _all_over_shards(tuple(leaves))
    if not is_wide(leaves):
        return _block(*_centred(tuple(leaves), ()))
    gram = wide_products(leaves)
    squares = jnp.diagonal(gram)
    pair = squares[:, None] + squares[None]
    return _without_noise(pair - 2 * gram, pair)


def sampled_squared_distances(leaves: Sequence[Array]) -> Array:
    """``|x_i - x_j|^2`` of the fixed sample of pairs, (32769,)."""
    if on_one_device(leaves[0]):
        return _sampled(tuple(leaves))
    return _sampled_over_shards(tuple(leaves))


@functools.lru_cache(maxsize=32)
def sampled_pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs, drawn once from a fixed seed: the same for every call and device."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    left = rng.integers(0, n, SAMPLED_PAIRS)
    right = (left + rng.integers(1, n, SAMPLED_PAIRS)) % n
    return left.astype(np.int32), right.astype(np.int32)


def _dimension(leaves: Leaves) -> int:
    return sum(leaf.shape[1] for leaf in leaves)


# --- all pairs -------------------------------------------------------------------------------


def _centred(leaves: Leaves, axes: Axes) -> tuple[Leaves, Leaves]:
    """The particles twice; from their mean where distances come from a matrix product."""
    if _dimension(leaves) <= FEW_DIMENSIONS:
        return leaves, leaves
    # First from a place among them: a mean from afar is rounded coarsely, and the compiler may
    # compute it more than once.
    local = [leaf - smallest(leaf[0], axes) for leaf in leaves]
    count = shard_count(axes)
    centred = tuple(leaf - total(jnp.mean(leaf, axis=0), axes) / count for leaf in local)
    return centred, centred


def _block(x: Leaves, y: Leaves) -> Array:
    """Distances of particles ``(n, d_l)`` from particles ``(m, d_l)``; (n, m)."""
    if _dimension(x) <= FEW_DIMENSIONS:
        squares = [
            jnp.sum(jnp.square(a[:, None] - b[None]), axis=-1) for a, b in zip(x, y, strict=True)
        ]
        return functools.reduce(jnp.add, squares)
    # One matrix product on centred particles; what is lost in its rounding counts as coincident.
    distances, scale = 0.0, 0.0
    for a, b in zip(x, y, strict=True):
        pair = jnp.sum(jnp.square(a), axis=1)[:, None] + jnp.sum(jnp.square(b), axis=1)[None]
        gram = jnp.dot(a, b.T, precision=jax.lax.Precision.HIGHEST)
        distances, scale = distances + (pair - 2 * gram), scale + pair
    return _without_noise(jnp.asarray(distances), jnp.asarray(scale))


def _without_noise(distances: Array, scale: Array) -> Array:
    """Zero where a distance from a matrix product is within its rounding."""
    noise = 16 * float(jnp.finfo(distances.dtype).eps)
    return jnp.where(distances > noise * scale, distances, 0 * distances)


class _Ring(NamedTuple):
    """Which rows of all a block of this shard's ring is."""

    axes: Axes
    rows: int

    @property
    def count(self) -> int:
        return shard_count(self.axes)

    def visitor(self, hop: Array) -> Array:
        """The number of the shard whose block visits at a hop; its own at hop 0."""
        return (jax.lax.axis_index(self.axes) - hop) % self.count


def _all_on_shard(static, axes: Axes, leaves: Leaves, rest) -> tuple[Leaves, Leaves]:
    del static, rest
    own, visiting = _centred(leaves, axes)
    if not axes:
        return (), (_block(own, visiting),)
    ring = _Ring(axes, leaves[0].shape[0])

    def hop(carry, number):
        rows, visiting = carry
        column = ring.visitor(number) * ring.rows
        rows = jax.lax.dynamic_update_slice_in_dim(rows, _block(own, visiting), column, 1)
        return (rows, pass_round(visiting, axes)), None

    everybody = ring.rows * ring.count
    start = jnp.zeros((ring.rows, everybody), leaves[0].dtype)
    (rows, _), _ = jax.lax.scan(hop, (start, visiting), jnp.arange(ring.count))
    matrix = jnp.zeros((everybody, everybody), rows.dtype)
    matrix = jax.lax.dynamic_update_slice_in_dim(matrix, rows, offset(axes, ring.rows), 0)
    return (), (total(matrix, axes),)


def _all_adjoint_on_shard(static, axes: Axes, leaves: Leaves, rest) -> tuple[Leaves, Leaves]:
    r"""dx_i = 2 sum_j (C_ij + C_ji) (x_i - x_j), for the cotangents C (N, N)."""
    del static
    (cotangent,) = rest
    ring = _Ring(axes, leaves[0].shape[0])
    weights = 2 * (cotangent + cotangent.T)
    weights = jax.lax.dynamic_slice_in_dim(weights, offset(axes, ring.rows), ring.rows, 0)

    def pull(visiting, columns):
        return tuple(
            jnp.sum(columns, axis=1)[:, None] * a
            - jnp.dot(columns, b, precision=jax.lax.Precision.HIGHEST)
            for a, b in zip(leaves, visiting, strict=True)
        )

    if not axes:
        return pull(leaves, weights), ()

    def hop(carry, number):
        sums, visiting = carry
        start = ring.visitor(number) * ring.rows
        columns = jax.lax.dynamic_slice_in_dim(weights, start, ring.rows, 1)
        sums = jax.tree.map(jnp.add, sums, pull(visiting, columns))
        return (sums, pass_round(visiting, axes)), None

    start = (jax.tree.map(jnp.zeros_like, leaves), leaves)
    return jax.lax.scan(hop, start, jnp.arange(ring.count))[0][0], ()


@jax.custom_vjp
def _all_over_shards(leaves: Leaves) -> Array:
    return over_shards(_all_on_shard, (), leaves, (), 0)[1][0]


def _all_forward(leaves):
    return _all_over_shards(leaves), leaves


def _all_backward(leaves, cotangent):
    return (over_shards(_all_adjoint_on_shard, (), leaves, (cotangent,), len(leaves))[0],)


_all_over_shards.defvjp(_all_forward, _all_backward)


# --- a sample of the pairs -------------------------------------------------------------------


def _batched(function, index: tuple[Array, ...], dimension: int) -> Array:
    """``function(i, j)`` for all entries of (K,) arrays, as many at a time as may be gathered."""
    count = index[0].shape[0]
    batch = max(1, _GATHERED // dimension)
    if count <= batch:
        return function(*index)
    chunks = -(-count // batch)
    padded = [jnp.pad(i, (0, chunks * batch - count)).reshape(chunks, batch) for i in index]
    return jax.lax.map(lambda chunk: function(*chunk), tuple(padded)).reshape(-1)[:count]


def _squares(differences: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(v), axis=1) for v in differences])


def _sampled(leaves: Leaves) -> Array:
    left, right = (jnp.asarray(side) for side in sampled_pairs(leaves[0].shape[0]))
    return _batched(
        lambda i, j: _squares([leaf[i] - leaf[j] for leaf in leaves]),
        (left, right),
        _dimension(leaves),
    )


def _sampled_on_shard(static, axes: Axes, leaves: Leaves, rest) -> tuple[Leaves, Leaves]:
    del static, rest
    if not axes:
        return (), (_sampled(leaves),)
    if leaves[0].shape[0] * shard_count(axes) > 2 * SAMPLED_PAIRS:
        return (), (_sampled_by_sums(axes, leaves),)
    return (), (_sampled_by_ring(axes, leaves),)


def _sampled_by_sums(axes: Axes, leaves: Leaves) -> Array:
    """Every shard adds what it holds of each difference: the traffic does not grow with N."""
    rows = leaves[0].shape[0]
    left, right = (jnp.asarray(side) for side in sampled_pairs(rows * shard_count(axes)))
    first = offset(axes, rows)

    def mine(leaf, number):
        here = number - first
        inside = (here >= 0) & (here < rows)
        return jnp.where(inside[:, None], leaf[jnp.where(inside, here, 0)], 0)

    def distances(i, j):
        # One of the two terms is exact zero on all shards but one, so nothing is rounded twice.
        return _squares([total(mine(leaf, i) - mine(leaf, j), axes) for leaf in leaves])

    return _batched(distances, (left, right), _dimension(leaves))


class _Table(NamedTuple):
    """Which pairs a shard evaluates at which hop of the ring; (shards, hops, most) each."""

    left: Any
    right: Any
    place: Any
    """Where in the sample the pair stands; beyond its end for padding."""


@functools.lru_cache(maxsize=32)
def _table(rows: int, count: int) -> _Table:
    left, right = sampled_pairs(rows * count)
    shard, hop = left // rows, (left // rows - right // rows) % count
    cell = shard * count + hop
    order = np.argsort(cell, kind="stable")
    sizes = np.bincount(cell, minlength=count * count)
    within = np.arange(SAMPLED_PAIRS) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    columns = []
    for values, padding in ((left % rows, 0), (right % rows, 0), (np.arange(len(left)), len(left))):
        column = np.full((count * count, sizes.max()), padding, np.int32)
        column[cell[order], within] = values[order]
        columns.append(column.reshape(count, count, -1))
    return _Table(*columns)


def _sampled_by_ring(axes: Axes, leaves: Leaves) -> Array:
    """The blocks pass round, and each shard takes the pairs whose first particle it holds."""
    ring = _Ring(axes, leaves[0].shape[0])
    here = jax.lax.axis_index(axes)
    table = _Table(*(jnp.asarray(column)[here] for column in _table(ring.rows, ring.count)))

    def hop(visiting, pairs):
        def distances(i, j):
            return _squares([a[i] - b[j] for a, b in zip(leaves, visiting, strict=True)])

        values = _batched(distances, (pairs.left, pairs.right), _dimension(leaves))
        return pass_round(visiting, axes), values

    _, values = jax.lax.scan(hop, leaves, table)
    sample = jnp.zeros(SAMPLED_PAIRS, leaves[0].dtype)
    sample = sample.at[table.place.reshape(-1)].set(values.reshape(-1), mode="drop")
    return total(sample, axes)


def _sampled_adjoint_on_shard(static, axes: Axes, leaves: Leaves, rest) -> tuple[Leaves, Leaves]:
    """Of a cotangent with one entry that is not zero, as that of an order statistic is."""
    del static
    (cotangent,) = rest
    rows = leaves[0].shape[0]
    left, right = (jnp.asarray(side) for side in sampled_pairs(rows * shard_count(axes)))
    entry = jnp.argmax(jnp.abs(cotangent))
    i, j = left[entry], right[entry]
    number = offset(axes, rows) + jnp.arange(rows)
    sign = (number == i).astype(cotangent.dtype) - (number == j)

    def pull(leaf):
        difference = fetch(leaf, i, axes) - fetch(leaf, j, axes)
        return sign[:, None] * (2 * cotangent[entry] * difference)

    return tuple(pull(leaf) for leaf in leaves), ()


@jax.custom_vjp
def _sampled_over_shards(leaves: Leaves) -> Array:
    return over_shards(_sampled_on_shard, (), leaves, (), 0)[1][0]


def _sampled_forward(leaves):
    return _sampled_over_shards(leaves), leaves


def _sampled_backward(leaves, cotangent):
    rest = (cotangent,)
    return (over_shards(_sampled_adjoint_on_shard, (), leaves, rest, len(leaves))[0],)


_sampled_over_shards.defvjp(_sampled_forward, _sampled_backward)
