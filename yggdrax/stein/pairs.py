r"""What one tile of targets gets from one tile of sources: the arithmetic of all pairs, once.

There are two forms. The *product* form turns distances and differences into matrix products, of
coordinates centred on the target tile and divided by h; its rounding grows with the tile's radius
over h, squared. The *difference* form subtracts the coordinates as they are, pair by pair, one
dimension at a time, and divides by h then: right at any radius, but slower.
:func:`product_is_safe` tells which to use.

A particle is a tuple of leaves, each ``(rows, d_l)``, so that networks are never concatenated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from yggdrax.kernels import Kernel
from yggdrax.typing import Array

__all__ = ["Tile", "adjoint_tile", "agree_over_batch", "forward_tile", "product_is_safe"]

Leaves = tuple[Array, ...]

# Rounding of u in the product form is about 2 eps (radius + 3)^2 for pairs that matter; at
# radius 8 that is 1.5e-5 in float32, averaged over neighbours in the sum.
PRODUCT_RADIUS = 8.0


class Tile(NamedTuple):
    """Particles of one tile."""

    z: Leaves
    """Leaves ``(rows, d_l)``: (x - centre) / h in the product form, x in the difference form."""
    s: Leaves
    """Scores; zero for padding."""
    u: Leaves | None
    """Cotangents of phi; zero for padding; None in the forward sum."""
    weight: Array
    """1 for a particle, 0 for padding, ``(rows,)``."""


@custom_vmap
def agree_over_batch(predicate: Array) -> Array:
    """The predicate itself; under ``vmap``, whether it holds for the whole batch, unbatched.

    A ``lax.cond`` on a batched predicate becomes a select that runs both branches. On this one it
    stays a branch.
    """
    return predicate


@agree_over_batch.def_vmap
def _agree_over_batch(axis_size, in_batched, predicate):
    del axis_size
    if in_batched[0]:
        # Through the function again, so that nested vmaps reduce over every batch axis.
        return agree_over_batch(jnp.all(predicate, axis=0)), False
    return agree_over_batch(predicate), False


def product_is_safe(z: Leaves) -> Array:
    """Whether the product form keeps its digits for targets ``z`` (False if any is NaN)."""
    radius = jnp.max(_squares(z))
    return radius <= PRODUCT_RADIUS**2


def dot(a: Array, b: Array) -> Array:
    """A matrix product in full precision (GPUs default to TF32)."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _squares(z: Leaves) -> Array:
    return sum((jnp.sum(leaf * leaf, axis=1) for leaf in z), jnp.zeros(z[0].shape[0], z[0].dtype))


def _column(v: Array) -> Array:
    return v[:, None]


def _distances_by_products(x: Leaves, y: Leaves, inverse_h: Array) -> Array:
    del inverse_h  # the coordinates are scaled already
    x2, y2 = _column(_squares(x)), _column(_squares(y))
    # One product gives |x|^2 + |y|^2 - 2 x.y: the two squares ride along as extra columns.
    left = jnp.concatenate([x[0], x2, jnp.ones_like(x2)], axis=1)
    right = jnp.concatenate([-2 * y[0], jnp.ones_like(y2), y2], axis=1)
    u = dot(left, right.T)
    for a, b in zip(x[1:], y[1:], strict=True):
        u = u - 2 * dot(a, b.T)
    return jnp.maximum(u, 0)


def differences_squared(x: Leaves, y: Leaves, inverse_h: Array) -> Array:
    """``u = |x_i - y_j|^2 / h^2`` of leaves ``(rows, d_l)``, subtracted pair by pair."""
    u = jnp.zeros((x[0].shape[0], y[0].shape[0]), x[0].dtype)

    def add(u, coordinate):
        a, b = coordinate
        return u + jnp.square((_column(a) - b[None]) * inverse_h), None

    for a, b in zip(x, y, strict=True):
        u, _ = jax.lax.scan(add, u, (a.T, b.T))
    return u


def weighted_differences(weights: Array, x: Array, y: Array) -> Array:
    """``sum_j weights_ij (x_i - y_j)``, pair by pair, in the units of x, ``(rows, d_l)``."""

    def coordinate(pair):
        a, b = pair
        return jnp.sum(weights * (_column(a) - b[None]), axis=1)

    return jax.lax.map(coordinate, (x.T, y.T)).T


def forward_tile(
    kernel: Kernel, targets: Leaves, sources: Tile, inverse_h: Array, *, products: bool
) -> tuple[Leaves, Array]:
    r"""Contributions of one source tile to phi of the target tile, times N.

    Returns leaves ``(rows, d_l)`` and ``weight_sum (rows, 1)``: phi is
    ``leaf + targets * inverse_h * weight_sum``, which the caller adds once, after all source
    tiles. In the difference form ``weight_sum`` is zero.
    """
    y, s, weight = sources.z, sources.s, sources.weight
    distances = _distances_by_products if products else differences_squared
    u = distances(targets, y, inverse_h)
    k0 = kernel.kappa(0, u)
    if not products:
        k1 = kernel.kappa(1, u) * weight[None]
        leaves = tuple(
            dot(k0, sl) + inverse_h * (inverse_h * weighted_differences(k1, xl, yl))
            for xl, yl, sl in zip(targets, y, s, strict=True)
        )
        return leaves, jnp.zeros((u.shape[0], 1), u.dtype)
    column = _column(weight)
    pull = tuple(-inverse_h * column * yl for yl in y)
    if kernel.single_profile:
        weights = [sl + pl for sl, pl in zip(s, pull, strict=True)]
        first = dot(k0, jnp.concatenate([weights[0], column], axis=1))
        rest = tuple(dot(k0, w) for w in weights[1:])
        return (first[:, :-1], *rest), first[:, -1:]
    k1 = kernel.kappa(1, u)
    first = dot(k1, jnp.concatenate([pull[0], column], axis=1))
    rest = [dot(k1, p) for p in pull[1:]]
    repulsion = [first[:, :-1], *rest]
    leaves = tuple(dot(k0, sl) + r for sl, r in zip(s, repulsion, strict=True))
    return leaves, first[:, -1:]


def _bilinear(a: Leaves, b: Leaves) -> Array:
    total = dot(a[0], b[0].T)
    for al, bl in zip(a[1:], b[1:], strict=True):
        total = total + dot(al, bl.T)
    return total


def _present(leaves: Leaves | None) -> Leaves:
    assert leaves is not None, "the adjoint needs cotangents in every tile"
    return leaves


def _differences_of_differences(t: Tile, y: Tile) -> Array:
    """``(U_i - U_j) . (z_i - z_j)``, pair by pair."""
    total = jnp.zeros((t.z[0].shape[0], y.z[0].shape[0]), t.z[0].dtype)

    def add(total, coordinate):
        zt, ut, zy, uy = coordinate
        return total + (_column(zt) - zy[None]) * (_column(ut) - uy[None]), None

    for zt, ut, zy, uy in zip(t.z, _present(t.u), y.z, _present(y.u), strict=True):
        total, _ = jax.lax.scan(add, total, (zt.T, ut.T, zy.T, uy.T))
    return total


def adjoint_tile(
    kernel: Kernel, targets: Tile, sources: Tile, inverse_h: Array, *, products: bool
) -> tuple[Leaves, Leaves, Array]:
    r"""Contributions of one source tile to the adjoint of phi, times N.

    With D = z_i - z_j, A = U_i.S_j + S_i.U_j, B = (U_i - U_j).D / h and G = k1 A + k2 B,

    .. math::
        dS_i &= \sum_j k_0 U_j, \qquad
        dx_i = \frac1h \sum_j \{ -G D + k_1 (U_i - U_j) / h \}, \\
        dh &= \frac1{2h} \sum_{ij} \{ k_1 u A + (k_2 u - 2 k_1) B \} .

    Every target owns its row: nothing is scattered. Returns ``(dx, ds, dh)`` with leaves
    ``(rows, d_l)`` and ``dh`` of shape ().
    """
    if products:
        return _adjoint_by_products(kernel, targets, sources, inverse_h)
    t, y = targets, sources
    u = differences_squared(t.z, y.z, inverse_h)
    tu, yu = _present(t.u), _present(y.u)
    b = _differences_of_differences(t, y) * inverse_h * inverse_h
    a = _bilinear(tu, y.s) + _bilinear(t.s, yu)
    # Padding pulls on nobody, and nothing is added up for it.
    mask = _column(t.weight) * y.weight[None]
    k0, k1, k2 = (kernel.kappa(m, u) * mask for m in range(3))
    g = k1 * a + k2 * b
    dh = 0.5 * inverse_h * jnp.sum(k1 * u * a + (k2 * u - 2 * k1) * b)
    ds = tuple(dot(k0, ul) for ul in yu)
    k1_sum = jnp.sum(k1, axis=1, keepdims=True)
    pulls = [-inverse_h * weighted_differences(g, tz, yz) for tz, yz in zip(t.z, y.z, strict=True)]
    dx = tuple(
        inverse_h * (pull + inverse_h * (k1_sum * tl - dot(k1, yl)))
        for pull, tl, yl in zip(pulls, tu, yu, strict=True)
    )
    return dx, ds, dh


def _adjoint_by_products(
    kernel: Kernel, t: Tile, y: Tile, inverse_h: Array
) -> tuple[Leaves, Leaves, Array]:
    """:func:`adjoint_tile` with every sum over a row or column as part of a matrix product.

    What is left to do for each pair is the kernel and one product; passes over the tile are what
    costs. ``dh`` needs sums of ``k1 B`` and ``G u`` alone, and both expand into such products.
    """
    u = _distances_by_products(t.z, y.z, inverse_h)
    tu, yu = _present(t.u), _present(y.u)
    own_t, own_y = _inner(tu, t.z), _inner(yu, y.z)
    one_t, one_y = jnp.ones_like(own_t), jnp.ones_like(own_y)
    # A = U_i.S_j + S_i.U_j and B = (U_i.z_i + U_j.z_j - U_i.z_j - z_i.U_j) / h.
    columns = jnp.stack([own_t * inverse_h, one_t], axis=1)
    rows = jnp.stack([one_y, own_y * inverse_h], axis=1)
    k0 = kernel.kappa(0, u)
    if kernel.single_profile:
        k1 = k0
        left = [_beside(ul, sl - inverse_h * zl) for ul, sl, zl in zip(tu, t.s, t.z, strict=True)]
        right = [_beside(sl - inverse_h * zl, ul) for ul, sl, zl in zip(yu, y.s, y.z, strict=True)]
        g = k0 * _bilinear(_first_beside(left, columns), _first_beside(right, rows))
    else:
        k1 = kernel.kappa(1, u)
        a = _bilinear(tu, y.s) + _bilinear(t.s, yu)
        left = [_beside(ul, zl) for ul, zl in zip(tu, t.z, strict=True)]
        right = [-inverse_h * _beside(zl, ul) for ul, zl in zip(yu, y.z, strict=True)]
        b = _bilinear(_first_beside(left, columns), _first_beside(right, rows))
        g = k1 * a + kernel.kappa(2, u) * b
    weight = _column(y.weight)
    # So far away that the square overflows the kernel is zero; zero times infinity would not be.
    squares = jnp.minimum(_squares(y.z), jnp.finfo(u.dtype).max)
    # Padding has weight 0, scores and cotangents of zero, and pulls on nobody.
    by_k1 = _first_beside(
        [_beside(ul, weight * zl) for ul, zl in zip(yu, y.z, strict=True)],
        jnp.stack([y.weight, own_y], axis=1),
    )
    by_g = _first_beside(
        [weight * zl for zl in y.z], jnp.stack([y.weight, y.weight * squares], axis=1)
    )
    k1_sums, g_sums = [dot(k1, v) for v in by_k1], [dot(g, v) for v in by_g]
    k1_sum, k1_own = k1_sums[0][:, -2:-1], k1_sums[0][:, -1]
    g_sum, g_squares = g_sums[0][:, -2:-1], g_sums[0][:, -1]
    k1_u = tuple(v[:, : ul.shape[1]] for v, ul in zip(k1_sums, tu, strict=True))
    k1_z = tuple(v[:, ul.shape[1] : 2 * ul.shape[1]] for v, ul in zip(k1_sums, tu, strict=True))
    g_z = tuple(v[:, : zl.shape[1]] for v, zl in zip(g_sums, t.z, strict=True))
    k1_b = own_t * k1_sum[:, 0] + k1_own - _inner(tu, k1_z) - _inner(t.z, k1_u)
    g_u = _squares(t.z) * g_sum[:, 0] + g_squares - 2 * _inner(t.z, g_z)
    dh = inverse_h * jnp.sum(t.weight * (0.5 * g_u - inverse_h * k1_b))
    ds = k1_u if kernel.single_profile else tuple(dot(k0, ul) for ul in yu)
    dx = tuple(
        inverse_h * (gz - g_sum * zl + inverse_h * (k1_sum * ul - ku))
        for gz, zl, ul, ku in zip(g_z, t.z, tu, k1_u, strict=True)
    )
    return dx, ds, dh


def _inner(a: Leaves, b: Leaves) -> Array:
    """Inner products of the rows, ``(rows,)``."""
    parts = [jnp.sum(x * y, axis=1) for x, y in zip(a, b, strict=True)]
    return sum(parts, jnp.zeros(a[0].shape[0], a[0].dtype))


def _beside(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], axis=1)


def _first_beside(leaves: list[Array], columns: Array) -> Leaves:
    """The leaves, with further columns at the end of the first."""
    return (_beside(leaves[0], columns), *leaves[1:])
