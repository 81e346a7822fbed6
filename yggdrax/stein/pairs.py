"""What one tile of targets gets from one tile of sources: the arithmetic of all pairs, once.

There are two forms. The *product* form (:mod:`yggdrax.stein.products`) turns distances and
differences into matrix products, of coordinates centred on the target tile and divided by h; its
rounding grows with the tile's radius over h, squared. The *difference* form, here, subtracts the
coordinates as they are, pair by pair, one dimension at a time, and divides by h then: right at any
radius, but slower. :func:`product_is_safe` tells which to use.

A particle is a tuple of leaves, each ``(rows, d_l)``, so that networks are never concatenated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from yggdrax.kernels import Kernel
from yggdrax.typing import Array

__all__ = [
    "Tile",
    "adjoint_differences",
    "agree_over_batch",
    "forward_differences",
    "product_is_safe",
]

Leaves = tuple[Array, ...]

# Rounding of u in the product form is about 2 eps (radius + 3)^2 for pairs that matter; at
# radius 10 that is 2e-5 in float32, for the outermost alone, and averaged over its neighbours.
PRODUCT_RADIUS = 10.0


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
    radius = jnp.max(squares(z))
    return radius <= PRODUCT_RADIUS**2


def dot(a: Array, b: Array) -> Array:
    """A matrix product in full precision (GPUs default to TF32)."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def squares(z: Leaves) -> Array:
    """``|z_i|^2``, all leaves together, ``(..., rows)``."""
    parts = [jnp.sum(leaf * leaf, axis=-1) for leaf in z]
    return sum(parts[1:], parts[0])


def _column(v: Array) -> Array:
    return v[:, None]


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


def forward_differences(kernel: Kernel, targets: Leaves, sources: Tile, inverse_h: Array) -> Leaves:
    """Phi of the target tile from one source tile, times N, leaves ``(rows, d_l)``."""
    u = differences_squared(targets, sources.z, inverse_h)
    k0 = kernel.kappa(0, u)
    k1 = kernel.kappa(1, u) * sources.weight[None]
    return tuple(
        dot(k0, sl) + inverse_h * (inverse_h * weighted_differences(k1, xl, yl))
        for xl, yl, sl in zip(targets, sources.z, sources.s, strict=True)
    )


def transposed(leaves: Leaves) -> Leaves:
    """Leaves ``(..., rows, d_l)`` as ``(..., d_l, rows)``."""
    return tuple(jnp.swapaxes(leaf, -1, -2) for leaf in leaves)


def product(left: Leaves, right: Leaves) -> Array:
    """``(rows, columns)`` from factors ``(rows, k)`` and ``(k, columns)``, all leaves together."""
    total = dot(left[0], right[0])
    for a, b in zip(left[1:], right[1:], strict=True):
        total = total + dot(a, b)
    return total


def present(leaves: Leaves | None) -> Leaves:
    """The cotangents, which a tile of the adjoint has."""
    assert leaves is not None, "the adjoint needs cotangents in every tile"
    return leaves


def _differences_of_differences(t: Tile, y: Tile) -> Array:
    """``(U_i - U_j) . (z_i - z_j)``, pair by pair."""
    total = jnp.zeros((t.z[0].shape[0], y.z[0].shape[0]), t.z[0].dtype)

    def add(total, coordinate):
        zt, ut, zy, uy = coordinate
        return total + (_column(zt) - zy[None]) * (_column(ut) - uy[None]), None

    for zt, ut, zy, uy in zip(t.z, present(t.u), y.z, present(y.u), strict=True):
        total, _ = jax.lax.scan(add, total, (zt.T, ut.T, zy.T, uy.T))
    return total


def adjoint_differences(
    kernel: Kernel, t: Tile, y: Tile, inverse_h: Array
) -> tuple[Leaves, Leaves, Array]:
    r"""Contributions of one source tile to the adjoint of phi, times N.

    With D = (x_i - x_j) / h, A = U_i.S_j + S_i.U_j, B = (U_i - U_j).D / h and G = k1 A + k2 B,

    .. math::
        dS_i &= \sum_j k_0 U_j, \qquad
        dx_i = \frac1h \sum_j \{ -G D + k_1 (U_i - U_j) / h \}, \\
        dh &= \frac1{2h} \sum_{ij} \{ k_1 u A + (k_2 u - 2 k_1) B \} .

    Every target owns its row: nothing is scattered. Returns ``(dx, ds, dh)`` with leaves
    ``(rows, d_l)`` and ``dh`` of shape ().
    """
    u = differences_squared(t.z, y.z, inverse_h)
    tu, yu = present(t.u), present(y.u)
    b = _differences_of_differences(t, y) * inverse_h * inverse_h
    a = product(tu, transposed(y.s)) + product(t.s, transposed(yu))
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
