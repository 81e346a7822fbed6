"""A tile of targets and a tile of sources in the product form: all by matrix products.

Coordinates are centred on the target tile and divided by h. What belongs to one side alone is put
together once, before the loop over the tiles of sources, and what a target makes of its sums once
after it. Inside are the kernel and the products: small operations on a tile's particles, started
anew for every pair of tiles, took as long as the exponentials at N = 10,000, d = 3, on two cores.

Leaves are ``(rows, d_l)`` for targets and ``(..., columns, d_l)`` for sources.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from yggdrax.kernels import Kernel
from yggdrax.stein.pairs import Leaves, Tile, dot, present, product, squares, transposed
from yggdrax.typing import Array, PyTree

__all__ = ["Centre", "Products", "adjoint_by_products", "forward_by_products"]


class Centre(NamedTuple):
    """The middle of a tile as the first of its particles and the mean of the others from there.

    A mean that is computed twice may be summed in two orders. From the origin the two then differ
    by the rounding of the coordinates, and targets and sources are shifted by different numbers;
    from a particle of the tile they differ by the rounding of the tile's radius.
    """

    first: Leaves
    mean: Leaves

    @classmethod
    def of(cls, leaves: Leaves) -> "Centre":
        """That of a tile ``(rows, d_l)``."""
        first = tuple(leaf[0] for leaf in leaves)
        return cls(
            first, tuple(jnp.mean(a - b, axis=0) for a, b in zip(leaves, first, strict=True))
        )

    def scaled(self, tile: Tile, inverse_h: Array) -> Tile:
        """The tile with its coordinates from here, in units of h."""
        parts = zip(tile.z, self.first, self.mean, strict=True)
        return tile._replace(z=tuple(((x - a) - b) * inverse_h for x, a, b in parts))


class Products(NamedTuple):
    """A sum over pairs of tiles in the product form; all tiles are scaled from one centre."""

    targets: Callable[[Tile], PyTree]
    """The targets' factors."""
    sources: Callable[[Tile], PyTree]
    """The sources' factors, those of any number of tiles at once."""
    sums: Callable[[PyTree, PyTree], PyTree]
    """What a tile of targets gets from a tile of sources; linear in the sources."""
    finish: Callable[[Tile, PyTree], PyTree]
    """What the targets make of it, after all tiles of sources."""


def forward_by_products(kernel: Kernel, inverse_h: Array) -> Products:
    """Phi, times N: leaves ``(rows, d_l)``."""
    return Products(
        lambda own: _left_factors(own.z),
        lambda other: _forward_sources(kernel, other, inverse_h),
        lambda own, other: _forward_products(kernel, own, other),
        lambda own, sums: _finish_forward(own.z, inverse_h, sums),
    )


def adjoint_by_products(kernel: Kernel, inverse_h: Array) -> Products:
    """As :func:`yggdrax.stein.pairs.adjoint_differences`."""
    return Products(
        lambda own: _adjoint_targets(kernel, own, inverse_h),
        lambda other: _adjoint_sources(kernel, other, inverse_h),
        lambda own, other: _adjoint_products(kernel, own, other),
        lambda own, sums: _finish_adjoint(own, inverse_h, sums),
    )


def _beside(*parts: Array) -> Array:
    return jnp.concatenate(parts, axis=-1)


def _first_beside(leaves: Leaves, *columns: Array) -> Leaves:
    """The leaves, with further columns, each ``(...)``, at the end of the first."""
    return (_beside(leaves[0], *(c[..., None] for c in columns)), *leaves[1:])


def _inner(a: Leaves, b: Leaves) -> Array:
    """Inner products of the rows, ``(..., rows)``."""
    parts = [jnp.sum(x * y, axis=-1) for x, y in zip(a, b, strict=True)]
    return sum(parts[1:], parts[0])


def _left_factors(z: Leaves) -> Leaves:
    """The targets' side of ``|x|^2 + |y|^2 - 2 x.y``: the squares ride along as two columns."""
    z2 = squares(z)
    return _first_beside(z, z2, jnp.ones_like(z2))


def _right_factors(z: Leaves) -> Leaves:
    z2 = squares(z)
    return transposed(_first_beside(tuple(-2 * leaf for leaf in z), jnp.ones_like(z2), z2))


def _distances(left: Leaves, right: Leaves) -> Array:
    return jnp.maximum(product(left, right), 0)


class _ForwardSources(NamedTuple):
    """The sources' side of phi."""

    distance: Leaves
    by_k0: Leaves
    by_k1: Leaves | None
    """None for a kernel whose two profiles are one."""


def _forward_sources(kernel: Kernel, sources: Tile, inverse_h: Array) -> _ForwardSources:
    """What :func:`_forward_products` needs of the sources."""
    y, s, weight = sources.z, sources.s, sources.weight
    pull = tuple(-inverse_h * weight[..., None] * leaf for leaf in y)
    distance = _right_factors(y)
    if kernel.single_profile:
        both = tuple(a + b for a, b in zip(s, pull, strict=True))
        return _ForwardSources(distance, _first_beside(both, weight), None)
    return _ForwardSources(distance, s, _first_beside(pull, weight))


def _forward_products(
    kernel: Kernel, left: Leaves, sources: _ForwardSources
) -> tuple[Leaves, Array]:
    """Sums over the sources, ``(rows, d_l)`` and ``(rows, 1)``, for :func:`_finish_forward`."""
    u = _distances(left, sources.distance)
    k0 = kernel.kappa(0, u)
    sums = [dot(k0, leaf) for leaf in sources.by_k0]
    if sources.by_k1 is None:
        return (sums[0][:, :-1], *sums[1:]), sums[0][:, -1:]
    k1 = kernel.kappa(1, u)
    first, *rest = [dot(k1, leaf) for leaf in sources.by_k1]
    repulsion = (first[:, :-1], *rest)
    return tuple(a + b for a, b in zip(sums, repulsion, strict=True)), first[:, -1:]


def _finish_forward(z: Leaves, inverse_h: Array, sums: tuple[Leaves, Array]) -> Leaves:
    """Phi of the targets ``z``, times N."""
    leaves, weight_sum = sums
    return tuple(leaf + zl * (weight_sum * inverse_h) for leaf, zl in zip(leaves, z, strict=True))


class _AdjointTargets(NamedTuple):
    """The targets' side of the adjoint."""

    distance: Leaves
    mixed: Leaves
    """Factors of A, or of A + B where the kernel's profiles are one."""
    differences: Leaves | None
    """Factors of B elsewhere."""


class _AdjointSources(NamedTuple):
    """The sources' side of the adjoint."""

    distance: Leaves
    mixed: Leaves
    differences: Leaves | None
    by_k0: Leaves | None
    by_k1: Leaves
    by_g: Leaves


def _adjoint_targets(kernel: Kernel, targets: Tile, inverse_h: Array) -> _AdjointTargets:
    """What :func:`_adjoint_products` needs of the targets."""
    z, s, u = targets.z, targets.s, present(targets.u)
    own = _inner(u, z) * inverse_h
    one = jnp.ones_like(own)
    if kernel.single_profile:
        mixed = [_beside(ul, sl - inverse_h * zl) for ul, sl, zl in zip(u, s, z, strict=True)]
        return _AdjointTargets(_left_factors(z), _first_beside(tuple(mixed), own, one), None)
    mixed = tuple(_beside(ul, sl) for ul, sl in zip(u, s, strict=True))
    differences = tuple(_beside(ul, zl) for ul, zl in zip(u, z, strict=True))
    return _AdjointTargets(_left_factors(z), mixed, _first_beside(differences, own, one))


def _adjoint_sources(kernel: Kernel, sources: Tile, inverse_h: Array) -> _AdjointSources:
    """What :func:`_adjoint_products` needs of the sources."""
    z, s, u, weight = sources.z, sources.s, present(sources.u), sources.weight
    own = _inner(u, z)
    one = jnp.ones_like(own)
    # So far away that the square overflows the kernel is zero; zero times infinity would not be.
    z2 = jnp.minimum(squares(z), jnp.finfo(own.dtype).max)
    # Padding has weight 0, scores and cotangents of zero, and pulls on nobody.
    real = tuple(weight[..., None] * zl for zl in z)
    moments = tuple(_beside(ul, zl) for ul, zl in zip(u, real, strict=True))
    by_k1 = _first_beside(moments, weight, own)
    by_g = _first_beside(real, weight, weight * z2)
    if kernel.single_profile:
        mixed = [_beside(sl - inverse_h * zl, ul) for ul, sl, zl in zip(u, s, z, strict=True)]
        mixed = _first_beside(tuple(mixed), one, own * inverse_h)
        return _AdjointSources(_right_factors(z), transposed(mixed), None, None, by_k1, by_g)
    mixed = tuple(_beside(sl, ul) for ul, sl in zip(u, s, strict=True))
    differences = tuple(-inverse_h * _beside(zl, ul) for ul, zl in zip(u, z, strict=True))
    differences = _first_beside(differences, one, own * inverse_h)
    return _AdjointSources(
        _right_factors(z), transposed(mixed), transposed(differences), u, by_k1, by_g
    )


class _AdjointSums(NamedTuple):
    """Sums over the sources, for :func:`_finish_adjoint`."""

    k0: Leaves | None
    k1: Leaves
    g: Leaves


def _adjoint_products(
    kernel: Kernel, targets: _AdjointTargets, sources: _AdjointSources
) -> _AdjointSums:
    """The sums of the adjoint (see :func:`yggdrax.stein.pairs.adjoint_differences`).

    ``dh`` needs sums of ``k1 B`` and ``G u`` alone, and both expand into sums of columns.
    """
    u = _distances(targets.distance, sources.distance)
    k0 = kernel.kappa(0, u)
    mixed = product(targets.mixed, sources.mixed)
    if targets.differences is None or sources.differences is None:
        k1, g = k0, k0 * mixed
    else:
        k1 = kernel.kappa(1, u)
        g = k1 * mixed + kernel.kappa(2, u) * product(targets.differences, sources.differences)
    return _AdjointSums(
        None if sources.by_k0 is None else tuple(dot(k0, leaf) for leaf in sources.by_k0),
        tuple(dot(k1, leaf) for leaf in sources.by_k1),
        tuple(dot(g, leaf) for leaf in sources.by_g),
    )


def _finish_adjoint(
    targets: Tile, inverse_h: Array, sums: _AdjointSums
) -> tuple[Leaves, Leaves, Array]:
    """``(dx, ds, dh)``, times N, of a tile of targets."""
    z, u = targets.z, present(targets.u)
    k1_sum, k1_own = sums.k1[0][:, -2:-1], sums.k1[0][:, -1]
    g_sum, g_squares = sums.g[0][:, -2:-1], sums.g[0][:, -1]
    k1_u = tuple(v[:, : ul.shape[1]] for v, ul in zip(sums.k1, u, strict=True))
    k1_z = tuple(v[:, ul.shape[1] : 2 * ul.shape[1]] for v, ul in zip(sums.k1, u, strict=True))
    g_z = tuple(v[:, : zl.shape[1]] for v, zl in zip(sums.g, z, strict=True))
    k1_b = _inner(u, z) * k1_sum[:, 0] + k1_own - _inner(u, k1_z) - _inner(z, k1_u)
    g_u = squares(z) * g_sum[:, 0] + g_squares - 2 * _inner(z, g_z)
    dh = inverse_h * jnp.sum(targets.weight * (0.5 * g_u - inverse_h * k1_b))
    dx = tuple(
        inverse_h * (gz - g_sum * zl + inverse_h * (k1_sum * ul - ku))
        for gz, zl, ul, ku in zip(g_z, z, u, k1_u, strict=True)
    )
    return dx, k1_u if sums.k0 is None else sums.k0, dh
