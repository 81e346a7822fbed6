"""Where the nodes of a tree are: centres, radii, bounding boxes, and moments of weights.

Arrays over nodes are indexed by heap number (:class:`~yggdrax.geometry.layout.Layout`) along their
last axis; slots are ``(d, leaves, leaf)``. Only the levels from ``top`` down are filled. Between
them stand *stacks* ``(..., levels, leaves)``, which hold for every leaf a number about its ancestor
in each level, the leaf itself last.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.typing import Array

__all__ = [
    "Nodes",
    "ancestors",
    "centers",
    "join",
    "measure",
    "moments",
]


class Nodes(NamedTuple):
    """Geometry of all nodes."""

    center: Array
    """Centroids, ``(d, nodes)``."""
    radius: Array
    """Largest distance of a particle from its centroid, ``(nodes,)``."""
    spread: Array
    """Mean squared distance from the centroid, ``(nodes,)``."""
    low: Array
    """Lower corner of the bounding box, ``(d, nodes)``."""
    high: Array
    """Upper corner of the bounding box, ``(d, nodes)``."""


def ancestors(values: Array, layout: Layout, top: int) -> Array:
    """Hands values of nodes ``(..., nodes)`` down to their leaves: a stack."""
    stack = []
    for level in range(top, layout.depth + 1):
        here = values[..., 2**level : 2 ** (level + 1), None]
        wide = jnp.broadcast_to(here, (*here.shape[:-1], layout.leaves >> level))
        stack.append(wide.reshape(*values.shape[:-1], layout.leaves))
    return jnp.stack(stack, -2)


def join(stack: Array, layout: Layout, top: int, reduce=jnp.sum) -> Array:
    """Adds up a stack over the leaves of every node, ``(..., nodes)``: adjoint of `ancestors`."""
    shape = stack.shape[:-2]
    levels = [jnp.zeros((*shape, 2**top), stack.dtype)]
    for index in range(stack.shape[-2]):
        here = stack[..., index, :].reshape(*shape, 2 ** (top + index), -1)
        levels.append(reduce(here, -1))
    return jnp.concatenate(levels, -1)


def _share(layout: Layout, top: int) -> Array:
    """Each leaf's part in the particles of its ancestors: a stack."""
    leaf = layout.counts(layout.depth)
    above = jnp.stack(
        [
            jnp.repeat(layout.counts(level), layout.leaves >> level)
            for level in range(top, layout.depth + 1)
        ]
    )
    return leaf / jnp.maximum(above, 1)


def centers(x: Array, layout: Layout, top: int = 0) -> Array:
    """Centroids of the nodes from level ``top`` down, ``(d, nodes)``.

    Sums run over differences, so a cloud far from the origin loses nothing.
    """
    filled = layout.filled()
    reference = x[:, :, 0]
    weight = filled.astype(x.dtype) / jnp.maximum(jnp.sum(filled, 1, keepdims=True), 1)
    leaf = reference + jnp.sum((x - reference[..., None]) * weight, -1)
    first = [leaf[:, :: layout.leaves >> level] for level in range(top, layout.depth + 1)]
    first = jnp.concatenate([jnp.zeros((len(x), 2**top), x.dtype), *first], -1)
    share = _share(layout, top).astype(x.dtype)
    offset = (leaf[:, None] - ancestors(first, layout, top)) * share
    return first + join(offset, layout, top)


def measure(x: Array, layout: Layout, top: int = 0) -> Nodes:
    """Geometry of the nodes from level ``top`` down, for positions in slots (d, leaves, leaf)."""
    center = centers(x, layout, top)
    filled = layout.filled()

    def from_ancestor(middle):
        squares = jnp.sum((x - middle[..., None]) ** 2, 0)
        squares = jnp.where(filled, squares, 0)
        return jnp.max(squares, -1), jnp.sum(squares, -1)

    middles = jnp.moveaxis(ancestors(center, layout, top), 1, 0)
    largest, total = jax.lax.map(from_ancestor, middles)
    count = jnp.maximum(layout.heap_counts(), 1).astype(x.dtype)
    far = jnp.asarray(jnp.inf, x.dtype)
    low = jnp.min(jnp.where(filled, x, far), -1)
    high = jnp.max(jnp.where(filled, x, -far), -1)
    levels = (len(x), layout.depth + 1 - top, layout.leaves)
    # Rounding of the distances must not make a ball too small.
    safe = 1 + 8 * jnp.finfo(x.dtype).eps
    return Nodes(
        center=center,
        radius=jnp.sqrt(join(largest, layout, top, jnp.max)) * safe,
        spread=join(total, layout, top) / count,
        low=join(jnp.broadcast_to(low[:, None], levels), layout, top, jnp.min),
        high=join(jnp.broadcast_to(high[:, None], levels), layout, top, jnp.max),
    )


def moments(
    x: Array, weights: Array, center: Array, scale: Array, layout: Layout, degree: int, top: int = 0
) -> tuple[Array, ...]:
    """Moments of weighted particles about the centres of their nodes.

    Leaves sum over their particles; every node above sums over its leaves, whose moments are
    shifted to its centre.

    Args:
      x: positions in slots, ``(d, leaves, leaf)``.
      weights: ``(k, leaves, leaf)``, zero in empty slots.
      center: centres of the nodes, ``(d, nodes)``, as from :func:`centers`.
      scale: number that multiplies every difference of positions, ``()``.
      layout: shape of the tree.
      degree: 0, 1 or 2.
      top: first level wanted.

    Returns:
      ``degree + 1`` arrays over heap numbers: sums ``(k, nodes)``, first moments
      ``(k, d, nodes)`` and second moments ``(k, d, d, nodes)``.
    """
    middle = center[:, layout.leaves :]
    # Slots first, so that the sum runs over the major axis, which vectorises.
    offset = jnp.moveaxis((x - middle[..., None]) * scale, -1, 1)
    w = jnp.moveaxis(weights, -1, 1)
    total = jnp.sum(w, 1)[:, None]
    delta = (middle[:, None] - ancestors(center, layout, top)) * scale
    stack = [jnp.broadcast_to(total, (len(w), *delta.shape[1:]))]
    if degree > 0:
        first = jnp.sum(w[:, None] * offset[None], 2)[:, :, None]
        stack.append(first + total[:, None] * delta)
    if degree > 1:
        square = offset[:, None] * offset
        second = jnp.sum(w[:, None, None] * square, 3)[:, :, :, None]
        mixed = first[:, :, None] * delta + first[:, None] * delta[:, None]
        stack.append(second + mixed + total[:, None, None] * (delta[:, None] * delta))
    return tuple(join(level, layout, top) for level in stack)
