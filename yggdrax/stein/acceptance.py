r"""When an expansion serves for a pair of nodes: by opening angle, or by a bound of its error.

Both nodes are expanded, so the difference x - y of two particles lies within
``a = radius + radius`` of the difference r of the centres, and the Taylor remainder along the way
is bounded by a power of ``a`` and the supremum of one derivative over all distances of the pair:

======= ============================ =============================
order   attraction, per sum of |S|   repulsion, per particle
======= ============================ =============================
0       a K_1                        a^2/2 K_3
1       a^2/2 K_2                    a^2/2 K_3
2       a^3/6 K_3                    a^3/6 K_4
======= ============================ =============================

(The repulsion keeps one degree in order 0, since the first moments about centroids vanish.)
With ``rtol`` these are compared with the mean kernel value, and the mean size of a single
repulsion, at the nodes. Nothing of this depends on the scores.
"""

import math

import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import Classify, Meeting
from yggdrax.geometry.nodes import Nodes
from yggdrax.kernels import Kernel
from yggdrax.kernels.bounds import derivative_bound
from yggdrax.typing import Array

__all__ = ["by_angle", "by_bound", "expansion_errors"]

# Negligible nodes all err in the same direction, so they get a share of rtol. (Remainders of far
# ones mostly cancel, but not where scores follow the positions, or where most particles lie in a
# few dense heaps: to count on it, the more the smaller the nodes are, missed rtol 18 times over.)
_SKIPPED = 0.25
_STRENGTH_LEVEL = 9


def expansion_errors(
    kernel: Kernel, order: int, reach: Array, low: Array, high: Array
) -> tuple[Array, Array]:
    """Bounds of the table above, in scaled distances: attraction and repulsion."""
    degree = max(order, 1)
    attraction = reach ** (order + 1) / math.factorial(order + 1)
    repulsion = reach ** (degree + 1) / math.factorial(degree + 1)
    return (
        attraction * derivative_bound(kernel, order + 1, low, high),
        repulsion * derivative_bound(kernel, degree + 2, low, high),
    )


def by_angle(theta: Array) -> Classify:
    """Far where the radii together are below ``theta`` times the distance of the centres."""

    def classify(meeting: Meeting) -> tuple[Array, Array]:
        far = meeting.reach < theta * meeting.distance
        return far, jnp.zeros_like(far)

    return classify


def by_bound(
    kernel: Kernel, nodes: Nodes, layout: Layout, h: Array, rtol: Array, order: int
) -> Classify:
    """Far where the bounds of the module's table allow it for ``rtol``."""
    negligible = _negligible(kernel, nodes, layout, h, _SKIPPED * rtol)
    density, force = _strengths(kernel, nodes, layout, h)

    def classify(meeting: Meeting) -> tuple[Array, Array]:
        reach, low, high = (v / h for v in (meeting.reach, meeting.low, meeting.high))
        attraction, repulsion = expansion_errors(kernel, order, reach, low, high)
        smallest = high * high
        value = jnp.maximum(_both(density, meeting), kernel.kappa(0, smallest))
        push = jnp.maximum(_both(force, meeting), kernel.kappa(1, smallest) * low)
        far = (attraction <= rtol * value) & (repulsion <= rtol * push)
        return far, negligible(meeting)

    return classify


def _negligible(kernel, nodes, layout, h, tolerance):
    density, force = _strengths(kernel, nodes, layout, h)

    def negligible(meeting: Meeting) -> Array:
        low, high = meeting.low / h, meeting.high / h
        value = derivative_bound(kernel, 0, low, high)
        push = derivative_bound(kernel, 1, low, high)
        weak = value <= tolerance * _both(density, meeting)
        return weak & (push <= tolerance * _both(force, meeting))

    return negligible


def _both(strength: Array, meeting: Meeting) -> Array:
    return jnp.minimum(strength[meeting.target], strength[meeting.source])


def _strengths(kernel: Kernel, nodes: Nodes, layout: Layout, h: Array) -> tuple[Array, Array]:
    """Mean kernel value and mean size of a repulsion that each node meets, by heap number.

    For two nodes the mean of u over all pairs of particles is (distance^2 + spread + spread) / h^2,
    and the profile is convex in u, so the kernel there is at most the mean kernel (Jensen).
    Computed for one level; nodes below inherit, nodes above take the smaller child.
    """
    level = min(layout.depth, _STRENGTH_LEVEL)
    here = slice(2**level, 2 ** (level + 1))
    center, spread = nodes.center[:, here] / h, nodes.spread[here] / h / h
    u = sum((c[:, None] - c[None]) ** 2 for c in center) + spread[:, None] + spread[None]
    weight = (layout.counts(level) / layout.num).astype(u.dtype)
    density = jnp.sum(kernel.kappa(0, u) * weight, 1)
    # Every particle meets itself, with the kernel's largest value.
    density = jnp.maximum(density, kernel.kappa(0, jnp.zeros((), u.dtype)) / layout.num)
    force = jnp.sum(kernel.kappa(1, u) * jnp.sqrt(u) * weight, 1)
    return _to_all_levels(density, level, layout), _to_all_levels(force, level, layout)


def _to_all_levels(values: Array, level: int, layout: Layout) -> Array:
    """Values of one level for all: the smallest child's above it, the ancestor's below."""
    levels = [values]
    for _ in range(level):
        levels.insert(0, jnp.minimum(levels[0][0::2], levels[0][1::2]))
    for _ in range(layout.depth - level):
        levels.append(jnp.repeat(levels[-1], 2))
    return jnp.concatenate([jnp.zeros(1, values.dtype), *levels])
