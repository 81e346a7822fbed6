"""The tree as an engine of svgd and as functions: fallbacks, batches, reuse, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import yggdrax as yg
from tests import reference
from yggdrax.kernels import IMQ, RBF
from yggdrax.status import Status
from yggdrax.stein.exact import Exact
from yggdrax.stein.tree import Tree

N = 240
X = jax.random.normal(jax.random.key(0), (N, 2))
TREE = Tree(leaf_size=8, theta=0.8, rtol=0.05, exact_above=1.0)


def test_a_step_of_svgd_compiles_once_and_measures_its_error():
    tx = optax.chain(yg.svgd("median", kernel="imq", engine=TREE), optax.sgd(0.1))
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        updates, state = tx.update(x - 1, state, x)
        return state, optax.apply_updates(x, updates)

    state, x = tx.init(X), X
    for _ in range(3):
        state, x = step(state, x)
    assert len(traces) == 1 and step._cache_size() == 1
    found = yg.get_state(state)
    assert int(found.status) == 0
    assert 1e-6 < float(found.error) < 0.05  # far pairs exist: not the error of rounding
    yg.check(state)


def test_names_and_options():
    assert yg.svgd(engine="tree")
    for options, message in (
        ({"leaf_size": 0}, "leaf_size"),
        ({"theta": -0.1}, "theta"),
        ({"rtol": 2.0}, "rtol"),
        ({"order": 3}, "order"),
        ({"accumulate": "atomic"}, "accumulate"),
        ({"ordering": "hilbert"}, "ordering"),
        ({"near_capacity": 0}, "near_capacity"),
        ({"exact_above": 1.5}, "exact_above"),
        ({"check_every": -1}, "check_every"),
    ):
        with pytest.raises(ValueError, match=message):
            Tree(**options)
    with pytest.raises(ValueError, match="N = 0"):
        Tree().stein(jnp.zeros((0, 2)), jnp.zeros((0, 2)), jnp.float32(1), RBF())
    with pytest.raises(ValueError, match="not 4"):
        Tree(ordering="morton").stein(*[jnp.zeros((9, 4))] * 2, jnp.float32(1), RBF())


@pytest.mark.parametrize("options", [{"near_capacity": 100}, {"far_capacity": 100}])
def test_too_short_a_list_is_flagged_and_the_exact_sum_serves(options):
    engine = Tree(leaf_size=4, theta=0.8, **options)
    h = jnp.float32(0.7)

    (phi, status), gradient = jax.jit(lambda s: _value_and_pull(engine, s, h))(1 - X)
    (expected, _), expected_gradient = jax.jit(lambda s: _value_and_pull(Exact(), s, h))(1 - X)
    assert int(status) == Status.CAPACITY
    # The same sum in another compilation; the tree errs by more than 1e-4 here.
    np.testing.assert_allclose(phi, expected, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def _value_and_pull(engine, s, h):
    def phi_and_status(s):
        result = engine.stein(X, s, h, IMQ())
        return result.phi, result.status

    phi, pull, status = jax.vjp(phi_and_status, s, has_aux=True)
    return (phi, status), pull(X)[0]


def test_where_most_pairs_are_near_the_exact_tiles_serve():
    """A Gaussian as wide as the cloud's spacing: no far pair, and no status bit."""
    engine = Tree(leaf_size=8)
    h = jnp.float32(0.8)
    topology = engine.topology(X, h, RBF())
    assert bool(topology.exact_serves)
    phi, status = jax.jit(lambda s: engine.stein(X, s, h, RBF()))(1 - X)
    assert int(status) == 0
    expected = jax.jit(lambda s: Exact().stein(X, s, h, RBF()).phi)(1 - X)
    np.testing.assert_allclose(phi, expected, atol=1e-6)


def test_a_batch_is_its_members_one_by_one_and_runs_one_branch():
    def phi(x, h):
        return Tree(leaf_size=8, theta=0.8).stein(x, 1 - x, h, IMQ()).phi

    x = jax.random.normal(jax.random.key(1), (3, N, 2))
    widths = jnp.array([0.3, 1.0, 3.0])
    batched = jax.jit(jax.vmap(phi))(x, widths)
    one = jax.jit(phi)
    for i in range(3):
        np.testing.assert_allclose(batched[i], one(x[i], widths[i]), rtol=1e-5, atol=1e-6)
    assert np.all(np.abs(batched).max((1, 2)) > 0.1)
    text = str(jax.make_jaxpr(jax.vmap(phi))(x, widths))
    assert "cond[" in text  # the choice between tree and tiles is still a choice
    assert f"f32[3,{N},{N}]" not in text


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 100)])
def test_few_particles_in_one_and_in_many_dimensions(n, d):
    x = np.random.default_rng(n).normal(size=(n, d)).astype(np.float32)
    phi = yg.svgd_phi(jnp.asarray(x), jnp.asarray(-x), 5.0, leaf_size=1)
    np.testing.assert_allclose(phi, reference.phi(x, -x, 5.0), atol=1e-6)


def test_functions_serve_trees_of_particles_in_their_dtypes():
    particles = {"a": X[:, :1].astype(jnp.bfloat16), "b": X[:, 1]}
    scores = jax.tree.map(lambda v: 1 - v, particles)
    topology = yg.build_svgd_topology(particles, 0.5, kernel="imq", leaf_size=8, rtol=1e-2)
    phi = yg.svgd_phi_from_topology(particles, scores, 0.5, topology)
    assert jax.tree.map(lambda v: (v.shape, v.dtype), phi) == jax.tree.map(
        lambda v: (v.shape, v.dtype), particles
    )
    x = np.concatenate([np.asarray(particles["a"], float), np.asarray(X[:, 1:])], 1)
    full = np.concatenate([np.asarray(phi["a"], float), np.asarray(phi["b"])[:, None]], 1)
    assert reference.error(full, x, 1 - x, 0.5, kernel="imq") < 1e-2


def test_a_topology_is_used_again_only_where_it_holds():
    """Particles moved within the margin keep it; beyond, or at another h with rtol, it is new."""
    options = {"kernel": "imq", "leaf_size": 2, "rtol": 0.1, "reuse": 0.25, "exact_above": 1.0}
    build = jax.jit(lambda x, h: yg.build_svgd_topology(x, h, **options))
    phi = jax.jit(yg.svgd_phi_from_topology)
    topology = build(X, 1.0)
    assert int(jnp.sum(topology.lists.far_count)) > 1000
    step = jax.random.normal(jax.random.key(2), X.shape)
    step = 0.99 * topology.margin * step / jnp.linalg.norm(step, axis=1, keepdims=True)
    near, beyond = X + step, X + 40 * step
    assert bool(topology.serves(near, topology.h))
    assert not bool(topology.serves(beyond, topology.h))
    assert not bool(topology.serves(near, 2 * topology.h))
    np.testing.assert_array_equal(topology.refresh(near).slots, topology.slots)
    fresh = topology.refresh(beyond)
    assert bool(fresh.serves(beyond, fresh.h))
    assert np.any(fresh.slots != topology.slots)
    for x, h in ((near, 1.0), (beyond, 1.0), (near, 2.0)):
        value = phi(x, 1 - x, h, topology)
        assert reference.error(value, x, 1 - x, h, kernel="imq") < 0.1
    np.testing.assert_array_equal(
        phi(beyond, 1 - beyond, 1.0, topology), phi(beyond, 1 - beyond, 1.0, fresh)
    )
    assert phi._cache_size() == 1


def test_topologies_of_other_shapes_and_missing_bandwidths_are_refused():
    topology = yg.build_svgd_topology(X, theta=0.5, leaf_size=8)
    with pytest.raises(ValueError, match=r"\(240, 2\).*\(239, 2\)"):
        yg.svgd_phi_from_topology(X[:-1], X[:-1], 1.0, topology)
    with pytest.raises(ValueError, match=r"\(240, 2\).*\(239, 2\)"):
        topology.refresh(X[:-1])
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        topology.refresh(X, -1.0)
    with pytest.raises(TypeError, match="scores must be floating, but are int32"):
        yg.svgd_phi_from_topology(X, jnp.zeros(X.shape, jnp.int32), 1.0, topology)
    with pytest.raises(ValueError, match="accumulate"):
        yg.svgd_phi_from_topology(X, X, 1.0, topology, accumulate="atomic")
    with pytest.raises(ValueError, match="pass bandwidth, or theta"):
        yg.build_svgd_topology(X)
    with pytest.raises(ValueError, match="reuse"):
        yg.build_svgd_topology(X, 1.0, reuse=-1)
    with pytest.raises(ValueError, match="scores"):
        yg.svgd_phi(X, X[:, :1], 1.0)


def test_a_descent_that_would_end_crowded_is_given_up():
    x = jax.random.normal(jax.random.key(0), (4000, 3))
    for h, crowded in ((1.0, True), (0.05, False)):
        found = jax.jit(lambda h: Tree(leaf_size=8).topology(x, h, RBF()))(h)
        whole = jax.jit(lambda h: Tree(leaf_size=8, exact_above=1.0).topology(x, h, RBF()))(h)
        assert bool(found.lists.crowded) is crowded and bool(found.exact_serves) is crowded
        assert not bool(whole.lists.crowded) and not bool(whole.exact_serves)
        # As it would have ended, and at a fraction of the pairs tested.
        near = int(whole.lists.near_count.sum())
        assert (near > 0.25 * whole.layout.leaves**2) is crowded
        if crowded:
            assert int(found.lists.near_count.sum()) < 0.1 * near
        else:
            np.testing.assert_array_equal(found.lists.near_count, whole.lists.near_count)
