r"""Kernel discrepancies in bounded memory: how far particles are from a target or a sample.

All sums run over tiles of pairs, so no (N, N) array exists; coordinates are centred first.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.kernels import RBF, Kernel, MedianRule, check_positive, resolve_kernel
from yggdrax.typing import Array, Number, ParticleTree

__all__ = ["ksd_squared", "mmd_squared"]

Statistic = Literal["v", "u"]
# Above this many coordinates, squared distances come from a matrix product of centred coordinates.
_DIFFERENCES_UP_TO = 32


def ksd_squared(
    particles: ParticleTree,
    scores: ParticleTree,
    bandwidth: Number | str | MedianRule = "median",
    *,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
    statistic: Statistic = "v",
    block_size: int = 512,
) -> Array:
    r"""The squared kernelised Stein discrepancy of particles from the target with these scores.

    With :math:`\Delta = x - y`, :math:`u = |\Delta|^2 / h^2` it is the mean over pairs of

    .. math:: \kappa_0 S_x \cdot S_y + \frac{\kappa_1}{h^2} (S_x - S_y) \cdot \Delta
              + \frac{\kappa_1 d - \kappa_2 u}{h^2} .

    It needs no normalising constant. Zero means that the particles are at a fixed point in the
    kernel's eyes, which a missed mode does not change: compare with exact samples (
    :func:`mmd_squared`) where there are some.

    Args:
      particles: a tree of leaves (N, ...).
      scores: the gradient of log p at each particle, like ``particles`` (*not* of the loss).
      bandwidth: h, or ``"median"`` for the median rule over these particles.
      kernel: ``RBF()``, ``IMQ()`` or a profile.
      statistic: ``"v"``, over all pairs, never negative; ``"u"``, over distinct pairs, unbiased.
      block_size: edge of the tiles; memory is of the order of its square.

    Returns:
      A scalar.

    Raises:
      ValueError: for trees that differ, a bad bandwidth or statistic, or ``"u"`` with one particle.

    Example:
      >>> x = jnp.array([[1.0, 2.0], [10.0, 5.0], [7.0, 3.0], [2.0, -1.0]])
      >>> round(float(ksd_squared(x, -x, 0.5**0.5)), 4)
      13.0622
    """
    x, s = _matrix(particles), _matrix(scores)
    if x.shape != s.shape:
        raise ValueError(
            f"scores must be shaped like the particles: {s.shape} against {x.shape} as matrices."
        )
    h, kernel = _bandwidth(bandwidth, x), resolve_kernel(kernel)
    centre = jnp.mean(x, axis=0)
    points = _Points((x - centre) / h, s * h)

    def stein(a: _Points, b: _Points, u: Array) -> Array:
        k0, k1, k2 = (kernel.kappa(m, u) for m in range(3))
        # (S_x - S_y) . (x - y), without forming differences of every pair in every coordinate.
        own_a, own_b = jnp.sum(a.s * a.x, axis=1), jnp.sum(b.s * b.x, axis=1)
        cross = own_a[:, None] + own_b - _product(a.s, b.x) - _product(a.x, b.s)
        return k0 * _product(a.s, b.s) + k1 * (cross + x.shape[1]) - k2 * u

    return _mean_over_pairs(stein, points, points, statistic, block_size, same=True) / h**2


def mmd_squared(
    particles: ParticleTree,
    samples: ParticleTree,
    bandwidth: Number | str | MedianRule = "median",
    *,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
    statistic: Statistic = "v",
    block_size: int = 512,
) -> Array:
    r"""The squared maximum mean discrepancy between particles and reference samples.

    .. math:: \mathrm{mean}\, k(x, x') - 2\, \mathrm{mean}\, k(x, y) + \mathrm{mean}\, k(y, y')

    Args:
      particles: a tree of leaves (N, ...).
      samples: a like tree of leaves (M, ...), such as exact samples of a toy target.
      bandwidth: h, or ``"median"`` for the median rule over ``samples``.
      kernel: ``RBF()``, ``IMQ()`` or a profile.
      statistic: ``"v"``, over all pairs, never negative; ``"u"`` leaves out each point with itself.
      block_size: edge of the tiles; memory is of the order of its square.

    Returns:
      A scalar.

    Raises:
      ValueError: for dimensions that differ, a bad bandwidth or statistic, or ``"u"`` with one
        point.

    Example:
      >>> x = jnp.array([[0.0], [1.0]])
      >>> float(mmd_squared(x, x, 1.0))
      0.0
    """
    x, y = _matrix(particles), _matrix(samples)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"particles have {x.shape[1]} coordinates and samples {y.shape[1]}: compare like trees."
        )
    h, kernel = _bandwidth(bandwidth, y), resolve_kernel(kernel)
    centre = jnp.mean(y, axis=0)
    a, b = (_Points((z - centre) / h, z[:, :0]) for z in (x, y))

    def k(_a, _b, u):
        return kernel.kappa(0, u)

    within = [_mean_over_pairs(k, z, z, statistic, block_size, same=True) for z in (a, b)]
    return within[0] - 2 * _mean_over_pairs(k, a, b, "v", block_size, same=False) + within[1]


class _Points(NamedTuple):
    """Coordinates (n, d) in units of h, and scores (n, d) per h."""

    x: Array
    s: Array


def _mean_over_pairs(function, a: _Points, b: _Points, statistic, block_size: int, *, same: bool):
    """The mean of ``function(tile of a, tile of b, u)`` over pairs, tile by tile."""
    if statistic not in ("v", "u"):
        raise ValueError(f"statistic must be 'v' or 'u', not {statistic!r}.")
    if block_size < 1:
        raise ValueError(f"block_size must be positive, not {block_size}.")
    rows, columns = a.x.shape[0], b.x.shape[0]
    distinct = same and statistic == "u"
    if distinct and rows < 2:
        raise ValueError("the U statistic needs at least 2 points: use statistic='v'.")
    tiles_a, mask_a, index_a = _tiles(a, block_size)
    tiles_b, mask_b, index_b = _tiles(b, block_size)

    def row(carry):
        tile_a, weight_a, i = carry

        def add(total, column):
            tile_b, weight_b, j = column
            value = function(tile_a, tile_b, _squared_distances(tile_a.x, tile_b.x))
            kept = weight_a[:, None] & weight_b & ~(distinct & (i[:, None] == j))
            return total + jnp.sum(jnp.where(kept, value, 0)), None

        start = jnp.zeros((), a.x.dtype)
        return jax.lax.scan(add, start, (tiles_b, mask_b, index_b))[0]

    total = jnp.sum(jax.lax.map(row, (tiles_a, mask_a, index_a)))
    return total / (rows * (rows - 1) if distinct else rows * columns)


def _tiles(points: _Points, block_size: int):
    n = points.x.shape[0]
    size = min(block_size, n)
    count = -(-n // size)

    def cut(z):
        padded = jnp.pad(z, ((0, count * size - n), *[(0, 0)] * (z.ndim - 1)))
        return padded.reshape(count, size, *z.shape[1:])

    index = jnp.arange(count * size).reshape(count, size)
    return jax.tree.map(cut, points), index < n, index


def _squared_distances(x: Array, y: Array) -> Array:
    if x.shape[1] <= _DIFFERENCES_UP_TO:
        return sum(
            ((x[:, c, None] - y[:, c]) ** 2 for c in range(x.shape[1])),
            start=jnp.zeros((x.shape[0], y.shape[0]), x.dtype),
        )
    squares = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)
    return jnp.maximum(squares - 2 * _product(x, y), 0)


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)


def _matrix(tree: ParticleTree) -> Array:
    """All leaves side by side, (N, d), in float32 at least."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    if not leaves or any(leaf.ndim == 0 or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        raise ValueError(
            "particles must be a tree whose leaves share the leading axis N; the shapes are "
            f"{[leaf.shape for leaf in leaves]}."
        )
    dtype = jnp.promote_types(jnp.result_type(*leaves), jnp.float32)
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1).astype(dtype) for leaf in leaves], 1)


def _bandwidth(bandwidth, x: Array) -> Array:
    if isinstance(bandwidth, str):
        if bandwidth != "median":
            raise ValueError(f"bandwidth must be a number or 'median', not {bandwidth!r}.")
        bandwidth = MedianRule()
    if isinstance(bandwidth, MedianRule):
        h = bandwidth.bandwidth((x,))
        # More than half of the pairs coincide: any scale tells the others apart from them.
        return jnp.where(h > 0, h, jnp.ones_like(h))
    check_positive(bandwidth, "bandwidth")
    return jnp.asarray(bandwidth, x.dtype)
