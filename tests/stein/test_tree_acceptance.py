"""The bounds that accept nodes, against sampled nodes; and rtol against the measured error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.stein.trees import phi_of, without_exact_tiles
from yggdrax.kernels import IMQ, RBF
from yggdrax.stein.acceptance import expansion_errors
from yggdrax.stein.far import Sources, evaluate, translate

KERNELS = {"rbf": RBF(), "imq": IMQ()}
RTOLS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


def _two_nodes(rng, d, kernel, order):
    """Errors of one expansion between two random balls, beside the bounds, in scaled distances."""
    centre = rng.normal(size=d) * rng.uniform(0.5, 3)
    x = rng.uniform(-1, 1, size=(40, d)) * rng.uniform(0.05, 0.6)
    y = rng.uniform(-1, 1, size=(40, d)) * rng.uniform(0.05, 0.6)
    x, y = x - x.mean(0), y - y.mean(0)
    s = rng.normal(size=(40, d))
    difference = centre + x[:, None] - y[None]
    u = (difference**2).sum(-1)
    k0, k1 = kernel.kappa(0, u), kernel.kappa(1, u)
    attraction, repulsion = k0 @ s, (k1[..., None] * difference).sum(1)

    weights = np.concatenate([s, np.ones((40, 1))], 1).T
    moments = [weights.sum(1), weights @ y, np.einsum("kn,na,nb->kab", weights, y, y)][: order + 1]
    source = Sources(jnp.zeros(d), *(jnp.asarray(m) for m in moments), *[None] * (2 - order))
    node = jax.tree.map(lambda v: v[..., None], source)
    local = translate(kernel, order, jnp.asarray(centre)[:, None], node)
    pull, push = evaluate(local, jnp.asarray(x.T))

    reach = np.linalg.norm(x, axis=1).max() + np.linalg.norm(y, axis=1).max()
    distance = np.linalg.norm(centre)
    bounds = expansion_errors(
        kernel, order, reach, jnp.asarray(max(distance - reach, 0.0)), jnp.asarray(distance + reach)
    )
    worst = np.linalg.norm(attraction.T - pull, axis=0).max() / np.linalg.norm(s, axis=1).sum()
    worst_push = np.linalg.norm(repulsion.T - push, axis=0).max() / len(y)
    return (worst, worst_push), bounds


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("x64")
def test_bounds_hold_for_sampled_nodes(name, order):
    rng = np.random.default_rng(order)
    closest = np.zeros(2)
    for _ in range(40):
        errors, bounds = _two_nodes(rng, 3, KERNELS[name], order)
        for error, bound in zip(errors, bounds, strict=True):
            assert error <= float(bound) * (1 + 1e-9) + 1e-14
        closest = np.maximum(closest, np.array(errors) / np.array(bounds, float))
    # A bound that is never within a factor of 500 would accept nothing.
    assert np.all(closest > 2e-3), closest


@pytest.mark.parametrize(("name", "d"), [("rbf", 2), ("rbf", 3), ("rbf", 5), ("imq", 3)])
def test_the_measured_error_is_below_rtol_and_falls_with_it(name, d):
    """N = 2000 in float32, whose rounding is below 1e-5 in the norm."""
    engine = without_exact_tiles(leaf_size=16, rtol=0.5)
    x = np.asarray(jax.random.normal(jax.random.key(d), (2000, d)))
    rows = np.arange(0, 2000, 25)
    far_pairs, rounding = 0, 1e-5
    # Scores of random sign cancel in wide kernels, and the error does less: the hard case.
    scores = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    for h in (1e-3, 0.1, 1.0, 3.0, 100.0):
        coarser = np.inf
        for rtol in RTOLS:
            phi, status, _, far = phi_of(engine, KERNELS[name], x, scores, h, rtol)
            error = reference.error(phi, x, scores, h, kernel=name, rows=rows)
            assert status == 0
            assert error <= max(rtol, rounding), (h, rtol)
            assert error <= max(1.5 * coarser, rounding), (h, rtol)
            coarser, far_pairs = error, far_pairs + far
    assert far_pairs > 10_000


@pytest.mark.parametrize(
    ("d", "order", "h", "rtol"), [(1, 0, 30.0, 1e-4), (2, 1, 0.3, 1e-4), (2, 2, 0.3, 1e-6)]
)
@pytest.mark.usefixtures("x64")
def test_rtol_does_not_count_on_remainders_that_cancel(d, order, h, rtol):
    """Most particles in a few dense heaps, or scores that follow the positions; deep trees."""
    n = 10_000
    rng = np.random.default_rng([1, d, 6])
    centres, widths = 3 * rng.normal(size=(12, d)), 10.0 ** rng.uniform(-3, 0, size=12)
    heap = rng.integers(0, 12, n)
    x = centres[heap] + widths[heap][:, None] * rng.normal(size=(n, d))
    s = 1 - x if d == 1 else rng.normal(size=x.shape)
    engine = without_exact_tiles(leaf_size=16, rtol=0.5, order=order)
    phi, status, _, far = phi_of(engine, RBF(), x, s, h, rtol)
    error = reference.error(phi, x, s, h, rows=np.arange(0, n, 100))
    assert status == 0 and far > 1000
    assert error <= rtol


@pytest.mark.parametrize("d", [2, 3])
def test_smaller_angles_are_more_accurate_and_angle_zero_is_exact(d):
    engine = without_exact_tiles(leaf_size=16, theta=0.5)
    x = np.asarray(jax.random.normal(jax.random.key(d), (2000, d)))
    rows = np.arange(0, 2000, 25)
    for h in (0.1, 1.0, 100.0):
        coarser = np.inf
        for theta in (0.9, 0.6, 0.3, 0.0):
            phi, _, _, far = phi_of(engine, IMQ(), x, 1 - x, h, theta)
            error = reference.error(phi, x, 1 - x, h, kernel="imq", rows=rows)
            assert (far > 100) == (theta > 0.5) or 0 < theta < 0.5
            assert error <= max(1.5 * coarser, 1e-5)
            coarser = error
        assert coarser <= 1e-5
        # The repulsion adds up to nothing.
        push, *_ = phi_of(engine, IMQ(), x, 0 * x, h, 0.6)
        size = np.abs(push).sum(0)
        assert np.all(np.abs(push.sum(0)) <= 1e-4 * size)
