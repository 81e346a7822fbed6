"""What both orderings, the nodes above them and the lists promise, whatever the cloud."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import descend, first_level
from yggdrax.geometry.nodes import measure, moments
from yggdrax.geometry.slots import fill_slots, order_slots, places

CASES = [("morton", 1), ("morton", 2), ("morton", 3), ("median", 1), ("median", 3), ("median", 7)]
N, LEAF = 203, 8


def _clouds(d):
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(N, d)).astype(np.float32)
    yield "normal", normal
    yield "all equal", np.full((N, d), 2.5, np.float32)
    yield "ties", np.round(normal)
    yield "outlier", np.where(np.arange(N)[:, None] == 5, np.float32(1e30), normal)
    yield "signed zeros", np.where(normal > 0, 0.0, -0.0).astype(np.float32)


def _members(layout):
    """For each heap number the slots below it."""
    leaves = np.arange(layout.slots).reshape(layout.leaves, layout.leaf)
    members = {}
    for level in range(layout.depth + 1):
        for node, run in enumerate(np.split(leaves, 2**level)):
            members[2**level + node] = run.reshape(-1)
    return members


@pytest.mark.parametrize(("ordering", "d"), CASES)
def test_conformance_of_the_orderings(ordering, d):
    layout = Layout.of(N, LEAF)
    order = jax.jit(lambda x: order_slots(x, layout, ordering))
    filled = np.asarray(layout.filled()).reshape(-1)
    for name, x in _clouds(d):
        slots = np.asarray(order(x))
        assert sorted(slots[filled]) == list(range(N)), name
        assert np.all(slots[~filled] == N), name
        assert np.array_equal(slots[np.asarray(places(jnp.asarray(slots), layout))], np.arange(N))
    assert order._cache_size() == 1  # new positions compile nothing


def test_median_splits_separate_along_the_widest_axis():
    layout = Layout.of(N, LEAF)
    x = np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32) * [1, 2, 3]
    slots = np.asarray(order_slots(jnp.asarray(x, jnp.float32), layout, "median"))
    members = _members(layout)
    for node in range(1, layout.leaves):
        points = [
            x[slots[run][slots[run] < N]] for run in (members[2 * node], members[2 * node + 1])
        ]
        both = np.concatenate(points)
        axis = np.ptp(both, axis=0).argmax()
        assert points[0][:, axis].max() <= points[1][:, axis].min()
        assert len(points[0]) - len(points[1]) in (0, 1)


def test_morton_keeps_neighbours_together():
    """Cells of a grid of 4^3 that hold eight points each come out as leaves."""
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3).repeat(8, 0)
    x = grid + np.random.default_rng(0).uniform(0.1, 0.9, grid.shape)
    x[0], x[-1] = 0, 4  # the curve's cube is that of the grid
    x = x[np.random.default_rng(1).permutation(len(x))].astype(np.float32)
    layout = Layout.of(len(x), 8)
    slots = np.asarray(order_slots(jnp.asarray(x), layout, "morton"))
    cells = np.minimum(x[slots], 3.999).astype(int).reshape(64, 8, 3)
    assert np.all(cells == cells[:, :1])


def test_unknown_ordering_and_too_many_dimensions_are_refused():
    layout = Layout.of(4, 1)
    with pytest.raises(ValueError, match=r"'hilbert'.*median"):
        order_slots(jnp.zeros((4, 2)), layout, "hilbert")
    with pytest.raises(ValueError, match=r"not 4.*ordering='median'"):
        order_slots(jnp.zeros((4, 4)), layout, "morton")
    with pytest.raises(ValueError, match="at least one particle"):
        Layout.of(0, 1)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_nodes_and_moments_are_those_of_their_particles(offset):
    """In float32; an offset of 1e4 costs the rounding of the coordinates, 1e-3, and no more."""
    layout = Layout.of(N, LEAF)
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(N, 3)) + offset).astype(np.float32)
    s = rng.normal(size=(N, 2)).astype(np.float32)
    slots = order_slots(jnp.asarray(x), layout, "median")
    filled = layout.filled().astype(jnp.float32)
    xs, weights = (
        fill_slots(jnp.asarray(x), slots, layout),
        fill_slots(jnp.asarray(s), slots, layout),
    )
    nodes = measure(xs, layout)
    sums = moments(xs, weights * filled, nodes.center, jnp.float32(0.5), layout, 2)
    tolerance = 1e-5 if offset == 0 else 2e-3
    slots = np.asarray(slots)
    counts = np.asarray(layout.heap_counts())
    for node, run in _members(layout).items():
        who = slots[run][slots[run] < N]
        points, w = x[who].astype(float), s[who].astype(float)
        assert counts[node] == len(who)
        center = np.asarray(nodes.center[:, node], float)
        np.testing.assert_allclose(center, points.mean(0), atol=tolerance)
        offsets = 0.5 * (points - center)
        sizes = 2 * np.linalg.norm(offsets, axis=1)
        np.testing.assert_allclose(nodes.radius[node], sizes.max(), rtol=1e-4, atol=tolerance)
        assert nodes.radius[node] >= sizes.max() * (1 - 1e-6)
        np.testing.assert_allclose(nodes.spread[node], (sizes**2).mean(), rtol=1e-4, atol=tolerance)
        np.testing.assert_array_equal(nodes.low[:, node], x[who].min(0))
        np.testing.assert_array_equal(nodes.high[:, node], x[who].max(0))
        np.testing.assert_allclose(sums[0][:, node], w.sum(0), atol=1e-4)
        np.testing.assert_allclose(sums[1][:, :, node], w.T @ offsets, atol=1e-3 + 50 * tolerance)
        second = np.einsum("nk,na,nb->kab", w, offsets, offsets)
        np.testing.assert_allclose(sums[2][..., node], second, atol=1e-3 + 50 * tolerance)


def _lists(layout, classify, near, far):
    x = jax.random.normal(jax.random.key(3), (N, 2))
    slots = order_slots(x, layout, "median")
    nodes = measure(fill_slots(x, slots, layout), layout, first_level(layout))
    lists = descend(nodes, layout, classify, near_capacity=near, far_capacity=far)
    return jax.tree.map(np.asarray, lists)


def _by_angle(meeting):
    far = meeting.reach < 0.6 * meeting.distance
    return far, jnp.zeros_like(far)


def test_lists_cover_every_pair_of_leaves_once_and_are_symmetric():
    layout = Layout.of(N, 2)
    lists = _lists(layout, _by_angle, layout.leaves**2, 2 * layout.leaves**2)
    assert not bool(lists.overflow)
    covered = np.zeros((layout.leaves, layout.leaves), int)
    for leaf in range(layout.leaves):
        start = int(lists.near_start[leaf])
        entries = lists.near[start : start + int(lists.near_count[leaf])]
        assert np.all(np.diff(entries) > 0)
        covered[leaf, entries] += 1
    far_pairs = set()
    for node in range(1, layout.nodes):
        start, level = int(lists.far_start[node]), node.bit_length() - 1
        width, first = layout.leaves >> level, node - 2**level
        for other in lists.far[start : start + int(lists.far_count[node])]:
            column = (other - 2**level) * width
            covered[first * width : (first + 1) * width, column : column + width] += 1
            far_pairs.add((node, int(other)))
    assert np.all(covered == 1)
    assert far_pairs == {(b, a) for a, b in far_pairs}
    assert len(far_pairs) > 1000


@pytest.mark.parametrize(("near", "far"), [(40, 10**5), (10**4, 40)])
def test_a_list_too_long_for_its_room_is_flagged(near, far):
    assert bool(_lists(Layout.of(N, 2), _by_angle, near, far).overflow)
