"""What comes back is what was saved, and the next step cannot tell the difference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.checkpoint.common import assert_same, rich_state
from yggdrax.checkpoint import Checkpointer
from yggdrax.transform import get_state, svgd


def save_and_restore(directory, state, like):
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.save(5, state)
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore(like)


def test_every_kind_of_leaf_and_container_comes_back_the_same(tmp_path):
    state = rich_state(1)
    assert_same(save_and_restore(tmp_path, state, rich_state(2)), state)


def test_an_abstract_state_is_enough_to_restore(tmp_path):
    state = {"key": jax.random.key(3), "x": jnp.arange(3.0), "weak": jnp.full((2,), 1.0)}
    like = jax.eval_shape(lambda: state)
    assert_same(save_and_restore(tmp_path, state, like), state)


@pytest.mark.parametrize("state", [{}, (), None, {"step": 3}, 1.5, jnp.zeros((0,))])
def test_states_without_arrays(tmp_path, state):
    assert_same(save_and_restore(tmp_path, state, state), state)


def test_a_root_that_is_one_array(tmp_path):
    assert_same(save_and_restore(tmp_path, jnp.arange(4), jnp.zeros(4, jnp.int32)), jnp.arange(4))


def test_float64_comes_back_as_float64(tmp_path, x64):
    state = {"x": jnp.linspace(0, 1, 7), "n": jnp.asarray(2**40)}
    assert_same(save_and_restore(tmp_path, state, jax.tree.map(jnp.zeros_like, state)), state)


def test_numpy_like_gives_numpy_and_jax_like_gives_jax(tmp_path):
    state = {"a": jnp.arange(3.0), "b": np.arange(3, dtype=np.float32)}
    like = {"a": np.zeros(3, np.float32), "b": jnp.zeros(3)}
    restored = save_and_restore(tmp_path, state, like)
    assert type(restored["a"]) is np.ndarray
    assert isinstance(restored["b"], jax.Array)
    np.testing.assert_array_equal(restored["a"], np.arange(3.0))
    np.testing.assert_array_equal(restored["b"], np.arange(3.0))


def test_random_streams_go_on(tmp_path):
    state = {
        "typed": jax.random.key(1),
        "rbg": jax.random.key(1, impl="rbg"),
        "batch": jax.random.split(jax.random.key(2), 8),
        "legacy": jax.random.PRNGKey(3),
    }
    like = {
        "typed": jax.random.key(0),
        "rbg": jax.random.key(0, impl="rbg"),
        "batch": jax.random.split(jax.random.key(0), 8),
        "legacy": jax.random.PRNGKey(0),
    }
    restored = save_and_restore(tmp_path, state, like)
    assert_same(restored, state)

    def draw(keys):
        one = [jax.random.normal(keys[name], (4,)) for name in ("typed", "rbg", "legacy")]
        return [*one, jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys["batch"])]

    assert_same(draw(restored), draw(state))


def test_a_jitted_step_does_not_compile_again_after_a_restore(tmp_path):
    tx = optax.adam(optax.cosine_decay_schedule(0.1, 100))
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        params, opt_state, count, scale = state
        updates, opt_state = tx.update(params, opt_state)
        return optax.apply_updates(params, updates), opt_state, count + 1, scale * 0.5

    params = {"w": jnp.ones(5)}
    start = (params, tx.init(params), jnp.asarray(0), jnp.asarray(1.0))
    assert start[2].weak_type and start[3].weak_type
    state = step(step(start))
    restored = save_and_restore(tmp_path, state, start)
    assert_same(step(restored), step(state))
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_a_restored_state_can_be_donated(tmp_path):
    state = {"x": jnp.arange(1024.0)}
    restored = save_and_restore(tmp_path, state, state)
    stepped = jax.jit(lambda s: {"x": s["x"] + 1}, donate_argnums=0)(restored)
    np.testing.assert_array_equal(stepped["x"], np.arange(1024.0) + 1)


def test_the_saved_state_may_be_donated_and_overwritten_at_once(tmp_path):
    # Large enough that the writer is still busy when the steps below run.
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    x, host = step(jnp.arange(2_000_000.0)), np.arange(5.0)
    expected = np.array(x)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x, "host": host})
        for _ in range(20):
            x = step(x)
        host += 1
        assert not np.array_equal(np.asarray(x), expected)
        restored = checkpointer.restore({"x": np.zeros_like(expected), "host": host})
    np.testing.assert_array_equal(restored["x"], expected)
    np.testing.assert_array_equal(restored["host"], np.arange(5.0))


CHAINS = {
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9),
    # Above some 500 particles the median is taken over sampled pairs.
    "sampled pairs": lambda: optax.chain(svgd("median"), optax.adam(0.1)),
    "schedules": lambda: optax.chain(
        svgd(optax.linear_schedule(2.0, 0.5, 10)), optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_six_steps_resume_and_four_equal_ten(tmp_path, name):
    tx = CHAINS[name]()

    @jax.jit
    def step(state):
        x, opt_state, key, count = state
        key, noise = jax.random.split(key)
        # Minibatch noise and dropout.
        grads = x + jax.random.normal(noise, x.shape) * jax.random.bernoulli(key, 0.5, x.shape)
        updates, opt_state = tx.update(grads, opt_state, x)
        return optax.apply_updates(x, updates), opt_state, key, count + 1

    x = jax.random.normal(jax.random.key(5), (600, 2))
    start_state = (x, tx.init(x), jax.random.key(0), jnp.int32(0))
    unbroken = start_state
    for _ in range(10):
        unbroken = step(unbroken)
    state = start_state
    with Checkpointer(tmp_path / name) as checkpointer:
        for _ in range(6):
            state = step(state)
        checkpointer.save(state[3], state)
    # Restoring into a disturbed state leaves nothing of the disturbance.
    like = jax.tree.map(lambda leaf: leaf, (x * jnp.nan, tx.init(x), jax.random.key(9), state[3]))
    with Checkpointer(tmp_path / name) as checkpointer:
        state = checkpointer.restore(like)
    for _ in range(10 - int(state[3])):
        state = step(state)
    assert int(state[3]) == 10
    assert_same(state, unbroken)
    if name != "momentum":
        assert int(get_state(state[1]).count) == 10
    if name == "schedules":  # the tenth step used the bandwidth at 9
        np.testing.assert_allclose(get_state(state[1]).bandwidth, 0.65, rtol=1e-6)


def test_plain_orbax_reads_a_step_folder(tmp_path):
    from orbax.checkpoint import v1

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"layer": {"w": jnp.arange(4.0)}})
    loaded = v1.load(str(tmp_path / "00000003"))
    assert list(loaded) == ["00002-layer-w"]
    np.testing.assert_array_equal(loaded["00002-layer-w"], np.arange(4.0))
