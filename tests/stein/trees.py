"""Tree sums for tests: one compiled function per shape, whatever the inputs and tolerances."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.geometry.layout import Layout
from yggdrax.kernels import Radial
from yggdrax.stein.topology import build, evaluate
from yggdrax.stein.tree import Tree

# Expansions of second order are exact for it at any distance, so that far pairs can be tested
# to rounding.
QUADRATIC = Radial(lambda u: 1 + 0.3 * u)


def without_exact_tiles(**options) -> Tree:
    """An engine that never leaves the sum to the exact tiles."""
    return Tree(exact_above=1.0, **options)


@functools.cache
def compiled(engine: Tree, kernel, rows: int):
    """(x, s, h, theta or rtol, N) -> phi, status, numbers of near and far pairs.

    N may be less than the ``rows`` of x and s; the rows behind it must not matter.
    """
    layout = Layout.of(rows, engine.leaf_size or 32)
    plan = engine.plan(layout, kernel)

    def run(x, s, h, tolerance, num):
        topology = build(plan, dataclasses.replace(layout, num=num), x, h, tolerance)
        lists = topology.lists
        pairs = jnp.sum(lists.near_count), jnp.sum(lists.far_count)
        return evaluate(topology, x, s, h), topology.status, *pairs

    return jax.jit(run)


def phi_of(engine: Tree, kernel, x, s, h, tolerance=None, num=None):
    """phi, status, numbers of near and far pairs of one sum."""
    x, s = jnp.asarray(x), jnp.asarray(s)
    if tolerance is None:
        tolerance = engine.rtol if engine.theta is None else engine.theta
    num = len(x) if num is None else num
    numbers = (jnp.asarray(v, x.dtype) for v in (h, tolerance))
    phi, status, near, far = compiled(engine, kernel, len(x))(x, s, *numbers, num)
    return np.asarray(phi), int(status), int(near), int(far)
