"""Few particles of very many dimensions, such as the members of a large network, in slices.

The kernel matrix of so few is tiny, and all the time goes into moving the particles through
memory. So they are taken in slices of columns that stay in the caches, and nothing of their size is
written.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from yggdrax.typing import Array

__all__ = ["centred_slice", "is_wide", "slices", "wide_products"]

# Columns of a slice: 20 particles of them are 1.3 MB in float32.
COLUMNS = 16_384
MOST_PARTICLES = 128


def is_wide(leaves: Sequence[Array]) -> bool:
    """Whether particles ``(N, d_l)`` are few enough, with enough dimensions, for slices to pay."""
    dimension = sum(leaf.shape[1] for leaf in leaves)
    return leaves[0].shape[0] <= MOST_PARTICLES and dimension >= 2 * COLUMNS


def slices(size: int) -> tuple[int, int]:
    """Number and width of the slices; the last may begin inside the one before.

    Example:
      >>> slices(20_000)
      (2, 16384)
    """
    width = min(size, COLUMNS)
    return -(-size // max(width, 1)), width


def centred_slice(leaf: Array, start: Array, width: int) -> Array:
    """Columns from ``start`` on, from their means, ``(N, width)``."""
    part = jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=1)
    part = part - part[0]  # a mean from afar is rounded coarsely
    return part - jnp.mean(part, axis=0)


def wide_products(leaves: Sequence[Array]) -> Array:
    """Inner products of the particles from their mean, (N, N)."""
    n = leaves[0].shape[0]
    products = jnp.zeros((n, n), leaves[0].dtype)
    for leaf in leaves:
        size = leaf.shape[1]
        count, width = slices(size)

        def add(i, products, leaf=leaf, size=size, width=width):
            start = jnp.minimum(i * width, size - width)
            fresh = start + jnp.arange(width) >= i * width  # no column twice
            z = jnp.where(fresh, centred_slice(leaf, start, width), 0)
            return products + jnp.dot(z, z.T, precision=jax.lax.Precision.HIGHEST)

        products = jax.lax.fori_loop(0, count, add, products)
    return products
