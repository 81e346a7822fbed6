"""Orders in which neighbours in space are neighbours in memory."""

import jax
import jax.numpy as jnp

from yggdrax.typing import Array

__all__ = ["median_order"]


def median_order(z: Array, levels: int) -> Array:
    """The order of points ``z (n, d)`` after ``levels`` median splits along the widest axis.

    ``n`` is a multiple of ``2 ** levels``. Each of the ``2 ** levels`` equal runs of the order is a
    compact cell. Ties keep the order they have. Returns indices ``(n,)`` int32.

    Example:
      >>> median_order(jnp.array([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]), 1).tolist()
      [3, 1, 2, 0]
    """
    order = jnp.arange(z.shape[0], dtype=jnp.int32)
    for level in range(levels):
        cells = z[order].reshape(2**level, -1, z.shape[1])
        widest = jnp.argmax(jnp.max(cells, axis=1) - jnp.min(cells, axis=1), axis=1)
        keys = jnp.take_along_axis(cells, widest[:, None, None], axis=2)[:, :, 0]
        _, sorted_order = jax.lax.sort(
            (keys, order.reshape(keys.shape)), dimension=1, num_keys=1, is_stable=True
        )
        order = sorted_order.reshape(-1)
    return order
