"""The exact sum over few particles of very many dimensions, in slices of columns.

The leaves are read once for the distances and once for phi, and nothing of a leaf's size is written
but phi itself.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from yggdrax.kernels import Kernel
from yggdrax.kernels.wide import centred_slice, slices, wide_products
from yggdrax.stein.pairs import PRODUCT_RADIUS, Leaves, agree_over_batch, dot
from yggdrax.typing import Array

__all__ = ["wide_phi"]


def wide_phi(
    kernel: Kernel, x: Leaves, s: Leaves, h: Array, otherwise: Callable[[], Leaves]
) -> Leaves:
    """phi, leaf by leaf, in the product form; ``otherwise()`` where that form loses digits."""
    n = x[0].shape[0]
    inverse_h = 1 / h
    products = wide_products(x) * inverse_h * inverse_h
    squares = jnp.diagonal(products)

    def by_products() -> Leaves:
        u = jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)
        # A particle is at no distance from itself, whatever the rounding.
        u = jnp.where(jnp.eye(n, dtype=bool), 0, u)
        k1 = kernel.kappa(1, u)
        # sum_j k1_ij (x_i - x_j) / h^2 as one product with the coordinates.
        repulsion = (jnp.diag(jnp.sum(k1, axis=1)) - k1) * inverse_h
        both = jnp.concatenate([kernel.kappa(0, u), repulsion], axis=1) / n
        return tuple(
            _apply(both, leaf, scores, inverse_h) for leaf, scores in zip(x, s, strict=True)
        )

    safe = agree_over_batch(jnp.max(squares) <= PRODUCT_RADIUS**2)  # False for NaN
    return jax.lax.cond(safe, by_products, otherwise)


def _apply(both: Array, leaf: Array, scores: Array, inverse_h: Array) -> Array:
    """Kernel and repulsion matrix times scores and coordinates of one leaf."""
    size = leaf.shape[1]
    count, width = slices(size)

    def fill(i, phi):
        start = jnp.minimum(i * width, size - width)
        part = jax.lax.dynamic_slice_in_dim(scores, start, width, axis=1)
        stacked = jnp.concatenate([part, centred_slice(leaf, start, width) * inverse_h])
        return jax.lax.dynamic_update_slice_in_dim(phi, dot(both, stacked), start, axis=1)

    return jax.lax.fori_loop(0, count, fill, jnp.zeros_like(leaf))
