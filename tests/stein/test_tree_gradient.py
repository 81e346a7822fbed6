"""Gradients of the tree sum: exact for what is computed, in bounded memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.stein.trees import without_exact_tiles
from yggdrax.kernels import IMQ
from yggdrax.stein.topology import build, evaluate

N, D = 60, 3


def _case(order):
    rng = np.random.default_rng(0)
    x, s, weights, *directions = rng.normal(size=(5, N, D))
    engine = without_exact_tiles(leaf_size=4, theta=0.9, order=order)
    topology = engine.topology(jnp.asarray(x), 0.8, IMQ())
    assert int(jnp.sum(topology.lists.far_count)) > 20
    assert int(jnp.sum(topology.lists.near_count)) > 20
    return topology, *(jnp.asarray(v) for v in (x, s, weights, *directions))


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_central_differences(order):
    """In float64 the differences have an error of 1e-9 or so; the promise is 1e-6."""
    topology, x, s, weights, dx, ds = _case(order)
    h = jnp.asarray(0.8)

    def loss(x, s, h):
        return jnp.sum(evaluate(topology, x, s, h) * weights)

    step = 1e-5
    changes = ((dx, 0 * s, 0 * h), (0 * x, ds, 0 * h), (0 * x, 0 * s, h))

    def difference(change):
        ends = [
            loss(x + e * change[0], s + e * change[1], h + e * change[2]) for e in (step, -step)
        ]
        return (ends[0] - ends[1]) / (2 * step)

    stacked = jax.tree.map(lambda *v: jnp.stack(v), *changes)
    differences = jax.jit(lambda c: jax.lax.map(difference, c))(stacked)
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))(x, s, h)
    for change, slope in zip(changes, differences, strict=True):
        expected = sum(jnp.sum(g * c) for g, c in zip(gradient, change, strict=True))
        assert abs(float(slope - expected)) <= 1e-6 * abs(float(slope))


@pytest.mark.usefixtures("x64")
def test_both_strategies_compute_the_same():
    """Values and gradients: halved pairs added to both leaves, and directed ones, agree."""
    topology, x, s, weights, *_ = _case(2)
    values = []
    for strategy in ("scatter", "segment", "auto"):
        plan = dataclasses.replace(topology.plan, accumulate=strategy)
        held = dataclasses.replace(topology, plan=plan)

        def both(x, s, h, held=held):
            value, pull = jax.vjp(lambda *a: evaluate(held, *a), x, s, h)
            return value, pull(weights)

        values.append(jax.tree.leaves(jax.jit(both)(x, s, jnp.asarray(0.8))))
    for others in values[1:]:
        for value, first in zip(others, values[0], strict=True):
            np.testing.assert_allclose(value, first, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_gradients_do_not_reach_for_other_particles_under_vmap():
    """A batch over bandwidths gives the gradients of its members."""
    topology, x, s, weights, *_ = _case(0)
    layout, plan = topology.layout, topology.plan

    def loss(h):
        fresh = build(plan, layout, x, h, topology.tolerance)
        return jnp.sum(evaluate(fresh, x, s, h) * weights)

    widths = jnp.asarray([0.5, 0.8, 1.3])
    batched = jax.jit(jax.vmap(jax.grad(loss)))(widths)
    one = jax.jit(jax.grad(loss))
    single = jnp.stack([one(h) for h in widths])
    assert np.all(np.asarray(batched) != 0)
    np.testing.assert_allclose(batched, single, rtol=1e-12)


def _largest_array(jaxpr) -> int:
    """Elements of the largest array that a program makes, inner programs included."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            largest = max(largest, int(np.prod(getattr(variable.aval, "shape", ()), dtype=float)))
        for parameter in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                largest = max(largest, _largest_array(inner))
    return largest


def test_no_array_of_near_pairs_in_the_gradient():
    """N = 20,000: the largest array is a list of pairs of leaves, not of their particles.

    The descent has room for two such lists, that of a level and that of the one above.
    """
    engine = without_exact_tiles(theta=0.7)
    n = 20_000
    x = jnp.zeros((n, 3))

    def loss(x, s, h):
        return jnp.sum(engine.stein(x, s, h, IMQ()).phi ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, jnp.float32(1.0))
    leaves = 2**10
    assert 0 < _largest_array(jaxpr.jaxpr) <= 2 * leaves**2
