"""The measured error of an engine: the exact sum at 64 targets."""

import jax
import jax.numpy as jnp

from yggdrax.kernels import Kernel
from yggdrax.sharding import Axes, fetch, over_shards, shard_count, total
from yggdrax.stein.pairs import differences_squared, dot
from yggdrax.typing import Array

__all__ = ["measured_error"]

TARGETS = 64
# Rows of the kernel matrix that exist at a time.
_ROWS = 8
# Terms added up in a row: sums over all particles of float32 numbers of one sign would drift by
# more than an rtol of 1e-5.
_BLOCK = 1024
_SEED = 20160815


def measured_error(x: Array, s: Array, h: Array, kernel: Kernel, phi: Array, count: Array) -> Array:
    r"""The error of ``phi (N, d)`` at 64 particles, measured by the exact sum there.

    .. math:: \|\tilde\phi - \phi\| \,/\, \sqrt{ \|attraction\|^2 + \|repulsion\|^2 }

    with root sums of squares over the 64 targets, which are drawn (with replacement) from a fixed
    seed and the step ``count``. Costs 64 N pairs; nothing is differentiated through it. Of
    particles split over devices each shard adds its own part.

    Returns:
      The error, ``()`` float32; NaN if anything is not finite.

    Example:
      >>> from yggdrax.kernels import RBF
      >>> x = jnp.array([[0.0], [1.0], [3.0]])
      >>> exact = jnp.array([[-0.42657177], [-0.35671525], [-0.94377924]])
      >>> float(measured_error(x, -x, jnp.array(1.0), RBF(), exact, jnp.array(0))) < 1e-6
      True
    """
    x, s, h, phi = jax.lax.stop_gradient((x, s, h, phi))
    return over_shards(_on_shard, kernel, (x, s, phi), (h, count), 0)[1][0]


def _on_shard(kernel: Kernel, axes: Axes, rows_of_all, rest):
    (x, s, phi), (h, count) = rows_of_all, rest
    n = x.shape[0] * shard_count(axes)
    key = jax.random.fold_in(jax.random.key(_SEED), count)
    rows = jax.random.randint(key, (TARGETS,), 0, n)
    inverse_h = 1 / h

    def some(targets: Array) -> tuple[Array, Array]:
        u = differences_squared((targets,), (x,), inverse_h)
        k0, k1 = kernel.kappa(0, u), kernel.kappa(1, u)
        attraction = jax.lax.map(lambda column: _row_sums(k0 * column), s.T)
        repulsion = jax.lax.map(
            lambda ab: _row_sums(k1 * (ab[0][:, None] - ab[1])), (targets.T, x.T)
        )
        return attraction.T / n, repulsion.T * inverse_h * inverse_h / n

    targets = fetch(x, rows, axes).reshape(-1, _ROWS, x.shape[1])
    attraction, repulsion = total(jax.lax.map(some, targets), axes)
    exact = (attraction + repulsion).reshape(TARGETS, -1)
    wrong = _norm(fetch(phi, rows, axes) - exact)
    gross = jnp.hypot(_norm(attraction), _norm(repulsion))
    # Nothing to be wrong about: no score and no repulsion.
    return (), (jnp.where(wrong == 0, 0, wrong / gross).astype(jnp.float32),)


def _row_sums(values: Array) -> Array:
    """Sums of the rows, block by block."""
    rows, n = values.shape
    blocks = jnp.pad(values, ((0, 0), (0, -n % _BLOCK))).reshape(rows, -1, _BLOCK)
    # As a product, which the compiler does not merge with the sum over blocks.
    return jnp.sum(dot(blocks, jnp.ones(_BLOCK, values.dtype)), -1)


def _norm(values: Array) -> Array:
    """Root sum of squares, of numbers whose squares may over- or underflow."""
    largest = jnp.max(jnp.abs(values))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum((values / unit) ** 2))
