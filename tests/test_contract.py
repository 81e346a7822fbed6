"""Optax's contract for a gradient transformation, as one table of checks.

Each check takes a factory of a chain with ``svgd`` in it and must hold for every row of CHAINS.
"""

import chex
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import yggdrax as yg

EXACT = {"engine": "exact"}


def particles(dtype=jnp.float32, n=6):
    a, b = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(a, (n, 2, 3)).astype(dtype),
        "b": jax.random.normal(b, (n,)).astype(dtype),
    }


CHAINS = {
    "svgd alone": lambda: yg.svgd(**EXACT),
    "a number": lambda: yg.svgd(0.7, **EXACT),
    "a schedule": lambda: yg.svgd(optax.linear_schedule(1.0, 0.1, 10), **EXACT),
    "a rule": lambda: yg.svgd(yg.BandwidthRule(lambda p: 1 + p["b"].std()), **EXACT),
    "annealed": lambda: yg.svgd(temperature=optax.linear_schedule(5.0, 1.0, 10), **EXACT),
    "whitened": lambda: yg.svgd(scale=yg.RunningScale(), **EXACT),
    "some distances": lambda: yg.svgd(distances=["w"], **EXACT),
    "by leaf": lambda: yg.svgd(per="leaf", **EXACT),
    "by coordinate": lambda: yg.svgd(per="coordinate", kernel=yg.IMQ(), **EXACT),
    "auto": lambda: yg.svgd(),
    "svgd and adam": lambda: optax.chain(yg.svgd(**EXACT), optax.adam(0.1)),
}


@pytest.fixture(params=list(CHAINS))
def tx(request):
    return CHAINS[request.param]()


# Checks of what wraps a whole step: it is the same for every option, and each costs a compilation.
WRAPPED = ("a number", "whitened", "by coordinate", "svgd and adam")
wrapped = pytest.mark.parametrize("tx", WRAPPED, indirect=True)


def avals(tree):
    return jax.tree.map(lambda v: (v.shape, v.dtype, v.aval.weak_type), tree)


def test_state_keeps_its_shapes_dtypes_and_weak_types(tx):
    x = particles()
    state = jax.jit(tx.init)(x)
    assert avals(state) == avals(tx.init(x))
    _, after = jax.jit(tx.update)(x, state, x)
    assert avals(after) == avals(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_one_trace_in_ten_steps_and_scan_equals_the_loop(tx):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(x, state):
        updates, state = tx.update(x, state, x)
        return optax.apply_updates(x, updates), state

    start = particles()
    x, state = start, jax.jit(tx.init)(start)
    for _ in range(10):
        x, state = step(x, state)
    scanned, _ = jax.lax.scan(
        lambda carry, _: (step(*carry), None), (start, tx.init(start)), None, 10
    )
    # Ten steps of two compilations of the same sum: rounding only.
    chex.assert_trees_all_close((x, state), scanned, rtol=2e-4, atol=2e-5)
    assert int(yg.get_state(state).count) == 10


@wrapped
def test_cond_donation_and_unknown_extras(tx):
    x = particles()
    state = tx.init(x)
    expected, _ = jax.jit(tx.update)(x, state, x)
    branch = jax.jit(
        lambda go: jax.lax.cond(
            go, lambda: tx.update(x, state, x, value=1.0, unknown="x"), lambda: (x, state)
        )
    )
    chex.assert_trees_all_close(branch(True)[0], expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(branch(False)[0], x)
    donated = jax.jit(tx.update, donate_argnums=(0, 1))
    copy = jax.tree.map(jnp.copy, (x, state))
    chex.assert_trees_all_close(donated(*copy, x)[0], expected, rtol=1e-5, atol=1e-6)


@wrapped
def test_vmap_over_ensembles_equals_the_loop(tx):
    ensembles = jax.tree.map(lambda v: jnp.stack([v, 2 * v, v - 1]), particles())
    states = jax.vmap(tx.init)(ensembles)
    batched, _ = jax.jit(jax.vmap(tx.update))(ensembles, states, ensembles)
    for i in range(3):
        x = jax.tree.map(lambda v: v[i], ensembles)  # noqa: B023  (used at once)
        single, _ = jax.jit(tx.update)(x, tx.init(x), x)
        chex.assert_trees_all_close(
            jax.tree.map(lambda v: v[i], batched),  # noqa: B023
            single,
            rtol=1e-4,
            atol=1e-5,
        )


def test_missing_params_and_wrong_gradients_are_refused(tx):
    x = particles()
    state = tx.init(x)
    with pytest.raises(
        ValueError, match=r"(?s)not passing `params`.*svgd needs the current params"
    ):
        tx.update(x, state)
    with pytest.raises(ValueError, match=r"\['w'\]: \(2, 3\) against \(6, 2, 3\)"):
        tx.update({**x, "w": x["w"][0]}, state, x)
    with pytest.raises(ValueError, match="different trees"):
        tx.update({"w": x["w"]}, state, x)


def test_integer_leaves_are_refused_by_name(tx):
    with pytest.raises(TypeError, match=r"\['b'\] has dtype int32"):
        tx.init({**particles(), "b": jnp.arange(6)})


@pytest.mark.parametrize("wrapper", ["chain", "MultiSteps", "apply_if_finite"])
def test_missing_params_are_refused_inside_wrappers(wrapper):
    inner = yg.svgd(**EXACT)
    tx = {
        "chain": lambda: optax.chain(inner, optax.sgd(1.0)),
        "MultiSteps": lambda: optax.MultiSteps(inner, 1).gradient_transformation(),
        "apply_if_finite": lambda: optax.apply_if_finite(inner, 5),
    }[wrapper]()
    x = particles()
    with pytest.raises(ValueError, match="svgd needs the current params"):
        tx.update(x, tx.init(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
def test_leaves_keep_their_dtype(x64, dtype):
    x = {**particles(dtype), "f": jnp.ones((6, 2), jnp.float32)}
    tx = yg.svgd(**EXACT)
    updates, state = jax.jit(tx.update)(x, tx.init(x), x)
    assert jax.tree.map(lambda v: v.dtype, updates) == jax.tree.map(lambda v: v.dtype, x)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    assert state.bandwidth.dtype == wide


def test_one_step_with_adam_and_with_sgd():
    x = jnp.array([[1.0], [-1.0]])
    for optimizer, expected in ((optax.adam(0.1), 0.9), (optax.sgd(0.1), 0.984977)):
        tx = optax.chain(yg.svgd("median", **EXACT), optimizer)
        updates, state = tx.update(x, tx.init(x), x)
        np.testing.assert_allclose(
            optax.apply_updates(x, updates)[:, 0], [expected, -expected], atol=1e-6
        )
        assert float(yg.get_state(state).bandwidth) == pytest.approx(1.349251, abs=1e-6)


def test_zero_nans_before():
    x, g = jnp.array([[1.0], [-1.0]]), jnp.array([[1.0], [jnp.nan]])
    tx = optax.chain(optax.zero_nans(), yg.svgd(0.5**0.5, **EXACT), optax.sgd(1.0))
    updates, _ = tx.update(g, tx.init(x), x)
    np.testing.assert_allclose(updates[:, 0], [-0.463369, -0.045789], atol=1e-6)


def test_masked_leaves_keep_their_raw_gradient():
    x = particles()
    tx = optax.masked(yg.svgd(0.7, **EXACT), {"w": True, "b": False})
    updates, _ = tx.update(x, tx.init(x), x)
    np.testing.assert_array_equal(updates["b"], x["b"])
    alone = yg.svgd(0.7, **EXACT)
    expected, _ = alone.update({"w": x["w"]}, alone.init({"w": x["w"]}), {"w": x["w"]})
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)


def test_multi_transform_gives_each_label_its_own_svgd():
    x = particles()
    tx = optax.multi_transform(
        {"a": yg.svgd(0.7, **EXACT), "b": yg.svgd(0.3, **EXACT), "unused": yg.svgd(**EXACT)},
        {"w": "a", "b": "b"},
    )
    updates, state = jax.jit(tx.update)(x, tx.init(x), x)
    for name, h in (("w", 0.7), ("b", 0.3)):
        expected = yg.exact_phi(x[name], -x[name], h)
        np.testing.assert_allclose(updates[name], -expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="found 3"):
        yg.get_state(state)


def test_multi_steps_accumulates_the_gradients():
    x = particles()
    tx = optax.MultiSteps(yg.svgd(0.7, **EXACT), 2).gradient_transformation()
    state = tx.init(x)
    first, state = tx.update(jax.tree.map(lambda v: 2 * v, x), state, x)
    second, state = tx.update(jax.tree.map(jnp.zeros_like, x), state, x)
    chex.assert_trees_all_equal(first, jax.tree.map(jnp.zeros_like, x))
    alone = yg.svgd(0.7, **EXACT)
    chex.assert_trees_all_close(second, alone.update(x, alone.init(x), x)[0], rtol=1e-5, atol=1e-6)
    assert int(yg.get_state(state).count) == 1


def test_injected_bandwidths_are_traced_once():
    x = particles()
    tx = optax.inject_hyperparams(yg.svgd)(bandwidth=1.0, engine="exact")
    state = tx.init(x)
    traces = []

    @jax.jit
    def update(state):
        traces.append(1)
        return tx.update(x, state, x)

    for h in (0.3, 0.7, 1.0, 2.0, 5):
        state.hyperparams["bandwidth"] = jnp.asarray(h, jnp.float32)
        updates, state = update(state)
        fresh = yg.svgd(h, **EXACT)
        chex.assert_trees_all_close(
            updates, jax.jit(fresh.update)(x, fresh.init(x), x)[0], rtol=1e-5, atol=1e-6
        )
    assert len(traces) == 1
    assert float(yg.get_state(state).bandwidth) == 5.0


def test_inject_hyperparams_leaves_rules_kernels_and_engines_alone():
    x = particles()
    tx = optax.inject_hyperparams(yg.svgd)(
        bandwidth=yg.BandwidthRule(lambda p: p["b"].std()), kernel=yg.IMQ(), engine=yg.Exact()
    )
    assert set(tx.init(x).hyperparams) == {"temperature"}
    updates, _ = tx.update(x, tx.init(x), x)
    expected = yg.exact_phi(x, jax.tree.map(jnp.negative, x), x["b"].std(), kernel="imq")
    chex.assert_trees_all_close(updates, jax.tree.map(jnp.negative, expected), rtol=1e-5)


def test_injected_schedules_follow_the_step():
    x = particles()
    tx = optax.inject_hyperparams(yg.svgd)(
        bandwidth=optax.linear_schedule(1.0, 2.0, 10), engine="exact"
    )
    state = tx.init(x)
    for _ in range(3):
        _, state = tx.update(x, state, x)
    assert float(yg.get_state(state).bandwidth) == pytest.approx(1.2)


def test_apply_if_finite_refuses_one_step_and_goes_on():
    x = jax.random.normal(jax.random.key(0), (64, 2))
    tx = optax.apply_if_finite(optax.chain(yg.svgd(**EXACT), optax.adam(0.1)), 5)
    update = jax.jit(tx.update)
    _, state = update(x, tx.init(x), x)
    refused, after = update(x.at[3, 0].set(jnp.nan), state, x)
    np.testing.assert_array_equal(refused, 0)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    normal, _ = update(x, after, x)
    chex.assert_trees_all_equal(normal, update(x, state, x)[0])


def test_neighbours_that_need_a_value_work():
    x = particles()
    tx = optax.chain(yg.svgd(**EXACT), optax.adam(0.1), optax.contrib.reduce_on_plateau())
    updates, _ = tx.update(x, tx.init(x), x, value=jnp.asarray(1.0))
    chex.assert_tree_all_finite(updates)


def test_train_state():
    x = particles()
    state = flax.training.train_state.TrainState.create(
        apply_fn=None, params=x, tx=optax.chain(yg.svgd(**EXACT), optax.sgd(0.5))
    )
    after = jax.jit(lambda s: s.apply_gradients(grads=x))(state)
    phi = yg.exact_phi(x, jax.tree.map(jnp.negative, x), yg.get_state(after.opt_state).bandwidth)
    chex.assert_trees_all_close(
        after.params, jax.tree.map(lambda v, p: v + 0.5 * p, x, phi), rtol=1e-5, atol=1e-6
    )


def test_nnx_optimizer():
    @nnx.vmap
    def members(key):
        return nnx.Linear(3, 2, rngs=nnx.Rngs(key))

    model = members(jax.random.split(jax.random.key(0), 5))
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    tx = optax.chain(yg.svgd(0.7, **EXACT), optax.sgd(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))  # a standard normal: G = x
    phi = yg.exact_phi(before, jax.tree.map(jnp.negative, before), 0.7)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(after, jax.tree.map(jnp.add, before, phi), rtol=1e-5, atol=1e-6)
