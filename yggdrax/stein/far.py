r"""Far pairs of nodes: moments, translated to local expansions, evaluated at the particles.

A source node with the moments M^0, M^1, M^2 of its weights [S, 1] about its centre acts on a target
node through the Taylor polynomial of the kernel in the difference x - y about the difference r of
both centres, cut at a total degree: ``order`` for the attraction, and for the kernel sum whose
negative gradient the repulsion is, one more. It is summed over sources as a local expansion of the
target node, passed down to the leaves and evaluated there. All distances are scaled by 1/h, so only
:math:`\kappa_m(|r|^2)` enters:

.. math::
    \nabla k = -\kappa_1 r, \quad \nabla\nabla k = \kappa_2 r r^T - \kappa_1 I, \quad
    \nabla\nabla\nabla k = -\kappa_3 r r r + \kappa_2 (I r + \ldots)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import Lists, first_level
from yggdrax.geometry.nodes import ancestors, centers, moments
from yggdrax.kernels import Kernel
from yggdrax.stein.sweep import sweep
from yggdrax.typing import Array

__all__ = ["far_field"]

# Numbers in flight in one step of the translation; a few such arrays fit into the caches.
_NUMBERS = 2**17
_BLOCK = 16


class Sources(NamedTuple):
    """What a translation needs of the source nodes; the last axis runs over nodes."""

    center: Array
    """(d, nodes), in the units of x."""
    total: Array
    """Sums of [S, 1], (d + 1, nodes)."""
    first: Array | None
    """First moments, scaled, (d + 1, d, nodes)."""
    second: Array | None
    """Second moments, (d + 1, d, d, nodes)."""


class Expansion(NamedTuple):
    """A local expansion; symmetric tensors are kept in full, so that nothing is gathered."""

    value: Array
    """Attraction at the centre, (d, nodes)."""
    push: Array
    """Repulsion at the centre, (d, nodes)."""
    bend: Array
    """Second derivatives of the kernel sum, (d, d, nodes)."""
    slope: Array | None
    """Gradient of the attraction, (d, d, nodes)."""
    curve: Array | None
    """Second derivatives of the attraction, (d, d, d, nodes)."""
    twist: Array | None
    """Second derivatives of the repulsion, (d, d, d, nodes)."""


def translate(kernel: Kernel, order: int, r: Array, source: Sources) -> Expansion:
    """The expansion about a centre that lies ``r`` (d, ...) away from that of the source."""
    d = len(r)
    u = jnp.sum(r * r, 0)
    k = [kernel.kappa(m, u) for m in range(4 if order > 1 else 3)]
    score, count = source.total[:d], source.total[d]
    # A kernel factor goes first into each product: powers of a huge r alone would overflow.
    k1r, k2r = k[1] * r, k[2] * r
    unit = _unit(r)
    hessian = k2r[:, None] * r - k[1] * unit
    value, push, bend = k[0] * score, count * k1r, count * hessian
    slope = curve = twist = None
    if source.first is not None:
        along = jnp.sum(source.first * r, 1)
        dipole = source.first[d]
        value = value + k[1] * along[:d]
        push = push - k[1] * dipole + along[d] * k2r
        slope = -score[:, None] * k1r
    if source.first is not None and source.second is not None and slope is not None:
        turned = jnp.sum(source.second * k2r, 2)
        trace = jnp.sum(source.second * unit, (1, 2))
        value = value + 0.5 * (jnp.sum(turned * r, 1)[:d] - k[1] * trace[:d])
        slope = slope + k[1] * source.first[:d] - along[:d, None] * k2r
        curve = score[:, None, None] * hessian
        k3r = k[3] * r
        squeeze = jnp.sum(jnp.sum(source.second[d] * k3r, 1) * r, 0) - k[2] * trace[d]
        push = push + 0.5 * squeeze * r - turned[d]
        mixed = k2r[:, None] * dipole + dipole[:, None] * k2r + unit * (k[2] * along[d])
        bend = bend + along[d] * (k3r[:, None] * r) - mixed
        ties = unit[:, :, None] * k2r + unit[:, None] * k2r[:, None] + unit * k2r[:, None, None]
        twist = count * (k3r[:, None, None] * (r[:, None] * r) - ties)
    return Expansion(value, push, bend, slope, curve, twist)


def _unit(like: Array) -> Array:
    """The unit matrix, shaped to multiply vectors (d, ...)."""
    d = len(like)
    return jnp.eye(d, dtype=like.dtype).reshape(d, d, *(1,) * (like.ndim - 1))


def evaluate(local: Expansion, offset: Array) -> tuple[Array, Array]:
    """Attraction and repulsion at scaled offsets (d, ...) from the centre, each (d, ...)."""
    attraction = local.value
    repulsion = local.push - jnp.sum(local.bend * offset, 1)
    if local.slope is not None:
        attraction = attraction + jnp.sum(local.slope * offset, 1)
    if local.curve is not None and local.twist is not None:
        attraction = attraction + 0.5 * _twice(local.curve, offset)
        repulsion = repulsion + 0.5 * _twice(local.twist, offset)
    return attraction, repulsion


def _twice(tensor: Array, offset: Array) -> Array:
    return jnp.sum(jnp.sum(tensor * offset, 2) * offset, 1)


def _move(local: Expansion, offset: Array) -> Expansion:
    """The same polynomial about a centre at ``offset``."""
    value, push = evaluate(local, offset)
    slope, bend = local.slope, local.bend
    if slope is not None and local.curve is not None and local.twist is not None:
        slope = slope + jnp.sum(local.curve * offset, 2)
        bend = bend - jnp.sum(local.twist * offset, 2)
    return local._replace(value=value, push=push, slope=slope, bend=bend)


def far_field(
    kernel: Kernel, order: int, layout: Layout, lists: Lists, x: Array, s: Array, scale: Array
) -> tuple[Array, Array]:
    """Sums of attraction and of scaled repulsion over all far pairs.

    Args:
      kernel: the kernel.
      order: 0, 1 or 2.
      layout: shape of the tree.
      lists: from :func:`~yggdrax.geometry.lists.descend`.
      x: positions in slots, ``(d, leaves, leaf)``.
      s: scores in slots, zero in the empty ones.
      scale: 1/h, ``()``.

    Returns:
      Two arrays like ``x``: sums of ``kappa_0 S_j`` and of ``kappa_1 (x_i - x_j) / h``.
    """
    top = first_level(layout)
    center = centers(x, layout, top)
    ones = layout.filled().astype(x.dtype)[None]
    weights = jnp.concatenate([s, ones])
    weighted = moments(x, weights, center, scale, layout, order, top)
    sources = Sources(center, *weighted, *[None] * (2 - order))
    arriving = _translate_all(kernel, order, layout, lists, sources, scale)
    # Every leaf takes the expansions of all its ancestors, about its own centre.
    above = jax.tree.map(lambda v: ancestors(v, layout, top), arriving)
    middle = center[:, layout.leaves :]
    delta = (middle[:, None] - ancestors(center, layout, top)) * scale
    local = jax.tree.map(lambda v: jnp.sum(v, -2), _move(above, delta))
    offset = (x - middle[..., None]) * scale
    return evaluate(jax.tree.map(lambda v: v[..., None], local), offset)


def _group(layout: Layout, sources: Sources) -> int:
    numbers = sum(v[..., 0].size for v in jax.tree.leaves(sources))
    return max(8, min(layout.nodes, 1024, _NUMBERS // (numbers * _BLOCK)))


def _blank(order: int, sources: Sources) -> Expansion:
    """An expansion of the right shapes, without the axis of nodes."""
    d = len(sources.center)
    vector, matrix, tensor = (jnp.zeros((d,) * n, sources.center.dtype) for n in (1, 2, 3))
    slope = matrix if order > 0 else None
    curve, twist = (tensor, tensor) if order > 1 else (None, None)
    return Expansion(vector, vector, matrix, slope, curve, twist)


def _pick(sources, index):
    return jax.tree.map(lambda v: v[..., index], sources)


def _fetch(sources, index):
    """The same, number by number.

    A gather of all of them lays each node's numbers side by side on CPUs, where the translation,
    which runs over pairs, then finds every number in another cache line.
    """

    def of(v):
        numbers = jax.lax.map(lambda number: number[index], v.reshape(-1, v.shape[-1]))
        return numbers.reshape(*v.shape[:-1], *index.shape)

    return jax.tree.map(of, sources)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _translate_all(kernel, order, layout, lists: Lists, sources: Sources, scale) -> Expansion:
    """The sum of all translated sources for every node."""

    def add(center, source, entry, real, shared):
        del entry
        r = (center[:, None] - source.center) * scale
        arriving = translate(kernel, order, r, source)
        return jax.tree.map(lambda v: jnp.sum(jnp.where(real, v, 0), -2), arriving), shared

    arrived, _ = sweep(
        lists.far,
        lists.far_start,
        lists.far_count,
        group=_group(layout, sources),
        block=_BLOCK,
        own=lambda rows: sources.center[:, rows],
        fetch=lambda entry, real: _fetch(sources, entry),
        add=add,
        like=_blank(order, sources),
    )
    return arrived


def _translate_forward(kernel, order, layout, lists, sources, scale):
    kept = (layout, lists, sources, scale)
    return _translate_all(kernel, order, *kept), kept


def _translate_backward(kernel, order, kept, cotangent: Expansion):
    """The adjoint in row form.

    A far pair of nodes is on the lists of both. What the nodes i and j contribute to the scalar
    product of result and cotangent, together, is a function of the data of i; its gradient there,
    summed over the list of i, is all of the cotangent of i.
    """
    layout, lists, sources, scale = kept

    def product(own: Sources, scale, other: Sources, own_cotangent, other_cotangent, real):
        own = jax.tree.map(lambda v: v[..., None, :], own)
        r = (own.center - other.center) * scale
        there = translate(kernel, order, -r, own)
        here = translate(kernel, order, r, other)
        own_cotangent = jax.tree.map(lambda v: v[..., None, :], own_cotangent)
        terms = jax.tree.map(jnp.multiply, there, other_cotangent)
        terms += jax.tree.map(jnp.multiply, here, own_cotangent)
        return sum(jnp.sum(jnp.where(real, v, 0)) for v in jax.tree.leaves(terms))

    def add(data, others, entry, real, shared):
        del entry
        own, own_cotangent = data
        other, other_cotangent = others
        lanes = jnp.broadcast_to(scale, own.center.shape[-1:])
        gradient = jax.grad(product, (0, 1))
        return gradient(own, lanes, other, own_cotangent, other_cotangent, real), shared

    (own_sources, by_row), _ = sweep(
        lists.far,
        lists.far_start,
        lists.far_count,
        group=max(8, _group(layout, sources) // 2),
        block=_BLOCK,
        own=lambda rows: (_pick(sources, rows), _pick(cotangent, rows)),
        fetch=lambda entry, real: _fetch((sources, cotangent), entry),
        add=add,
        like=(jax.tree.map(lambda v: v[..., 0], sources), sources.center[0, 0]),
    )
    # Every pair was met twice, once from each side.
    return None, None, own_sources, 0.5 * jnp.sum(by_row)


_translate_all.defvjp(_translate_forward, _translate_backward)
