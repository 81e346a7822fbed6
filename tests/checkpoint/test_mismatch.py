"""A state that does not fit is refused before anything is assigned, and the message names it."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState

from tests.checkpoint.common import Moments, assert_same
from yggdrax.checkpoint import Checkpointer, CheckpointMismatch


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with one state."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory, config={"seed": 1, "net": {"width": 50}}) as checkpointer:
        checkpointer.save(1, state())
    return directory


def state(**changes):
    tree = {
        "key": jax.random.key(0),
        "layers": {"dense": jnp.zeros((64, 3)), "out": jnp.zeros(3)},
        "moments": Moments(jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)),
        "step": jnp.int32(4),
    }
    return tree | changes


CASES = {
    "fewer particles": (
        {"layers": {"dense": jnp.zeros((32, 3)), "out": jnp.zeros(3)}},
        "['layers']['dense'] differs: {where} holds float32[64,3], the program expects "
        "float32[32,3]",
    ),
    "more particles": (
        {"layers": {"dense": jnp.zeros((128, 3)), "out": jnp.zeros(3)}},
        "holds float32[64,3], the program expects float32[128,3]",
    ),
    "one layer more": (
        {"layers": {"dense": jnp.zeros((64, 3)), "more": jnp.zeros(1), "out": jnp.zeros(3)}},
        "the program expects ['layers']['more'] (float32[1]), which {where} does not hold",
    ),
    "one layer less": (
        {"layers": {"dense": jnp.zeros((64, 3))}},
        "{where} holds ['layers']['out'] (float32[3]), which the program does not expect",
    ),
    "a layer renamed": (
        {"layers": {"dense": jnp.zeros((64, 3)), "head": jnp.zeros(3)}},
        "{where} holds ['layers']['out'] (float32[3]) where the program expects "
        "['layers']['head'] (float32[3])",
    ),
    "float into int": (
        {"layers": {"dense": jnp.zeros((64, 3), jnp.int32), "out": jnp.zeros(3)}},
        "holds float32[64,3], the program expects int32[64,3]",
    ),
    "float32 into float64 of NumPy": (
        {"layers": {"dense": np.zeros((64, 3)), "out": jnp.zeros(3)}},
        "holds float32[64,3], the program expects float64[64,3]",
    ),
    "bfloat16 into float16": (
        {"moments": Moments(jnp.zeros(2), jnp.zeros(2, jnp.float16))},
        "['moments'].second differs: {where} holds bfloat16[2], the program expects float16[2]",
    ),
    "another container": (
        {"layers": FrozenDict({"dense": jnp.zeros((64, 3)), "out": jnp.zeros(3)})},
        "['layers'] differs: {where} holds a container dict, the program expects a container "
        "FrozenDict",
    ),
    "a tuple for a named tuple": (
        {"moments": (jnp.zeros(2), jnp.zeros(2, jnp.bfloat16))},
        "holds a container Moments, the program expects a container tuple",
    ),
    "another key implementation": (
        {"key": jax.random.key(0, impl="rbg")},
        "['key'] differs: {where} holds key<fry>[], the program expects key<rbg>[]",
    ),
    "a legacy key for a typed one": (
        {"key": jax.random.PRNGKey(0)},
        "holds key<fry>[], the program expects uint32[2]",
    ),
    "a number for an array": ({"step": 4.0}, "holds int32[], the program expects a Python float"),
    "a container for a leaf": ({"step": ()}, "holds int32[], the program expects a container tup"),
    "nothing for a leaf": ({"step": None}, "the program expects a container NoneType"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_named_with_both_sides(saved, name):
    changes, message = CASES[name]
    like = state(**changes)
    before = jax.tree.map(lambda leaf: leaf, like)
    message = message.format(where=saved / "00000001")
    with Checkpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(CheckpointMismatch, match=re.escape(message)):
            checkpointer.restore(like)
        assert checkpointer.restored_step is None
    assert_same(like, before)


def test_integer_keys_are_not_string_keys(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {1: jnp.zeros(2)})
        with pytest.raises(CheckpointMismatch, match=re.escape("expects ['1'] (float32[2])")):
            checkpointer.restore({"1": jnp.zeros(2)})
        assert list(checkpointer.restore({1: jnp.zeros(2)})) == [1]


def test_ordered_dictionaries_keep_their_order(tmp_path):
    ordered = collections.OrderedDict
    one = ordered(b=jnp.zeros(1), a=jnp.zeros(1))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, one)
        with pytest.raises(CheckpointMismatch, match="another order"):
            checkpointer.restore(ordered(a=jnp.zeros(1), b=jnp.zeros(1)))
        assert list(checkpointer.restore(one)) == ["b", "a"]


def test_a_python_number_fits_the_array_that_a_jitted_step_made_of_it(tmp_path):
    start = {"step": 0, "scale": 1.0}
    later = jax.jit(lambda s: {"step": s["step"] + 1, "scale": s["scale"] / 2})(start)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, later)
        assert_same(checkpointer.restore(start), later)
        # An int is no float, and the dtype must be the one that JAX gives the number.
        with pytest.raises(CheckpointMismatch, match="expects a Python int"):
            checkpointer.restore({"step": 0, "scale": 1})
        with pytest.raises(CheckpointMismatch, match=re.escape("expects float64[]")):
            checkpointer.restore({"step": 0, "scale": np.float64(1)})


def test_64_bit_arrays_are_not_halved_where_64_bits_are_off(tmp_path):
    with jax.enable_x64(True):
        value = {"x": jnp.linspace(0.0, 1.0, 3)}
        like = jax.eval_shape(lambda: value)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, value)
    assert value["x"].dtype == jnp.float64
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointMismatch, match="jax_enable_x64"),
    ):
        checkpointer.restore(like)


def test_another_configuration_is_refused_by_field(saved):
    config = {"seed": 1, "net": {"width": 20}}
    with (
        Checkpointer(saved, read_only=True, config=config) as checkpointer,
        pytest.raises(CheckpointMismatch, match=r"net\.width was 50 and is now 20"),
    ):
        checkpointer.restore(state())
    with (
        Checkpointer(saved, read_only=True, config={"seed": 1}) as checkpointer,
        pytest.raises(CheckpointMismatch, match=r"net was .* and is now missing"),
    ):
        checkpointer.restore(state())
    config = {"net": {"width": 50}, "seed": 1}
    with Checkpointer(saved, read_only=True, config=config) as checkpointer:
        assert_same(checkpointer.restore(state()), state())


def test_flax_train_state_comes_back_as_one(tmp_path):
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    tx = optax.adam(0.1)
    like = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    trained = like.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, trained)
        restored = checkpointer.restore(like)
    assert isinstance(restored, TrainState) and restored.step == 1
    assert_same(restored, trained)


@pytest.mark.parametrize(
    "leaf, message",
    [
        (object(), r"\['bad'\] is of type object"),
        (jnp.tanh, r"\['bad'\] is of type"),
        (np.array(["a"]), r"\['bad'\] has the NumPy dtype <U1"),
        (np.array([None]), r"\['bad'\] has the NumPy dtype \|O"),
        (np.zeros(2, ">f4"), r"\['bad'\] has the NumPy dtype >f4"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), r"\['bad'\] is a shape without values"),
    ],
)
def test_leaves_that_cannot_be_saved_are_refused_by_name(tmp_path, leaf, message):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=message):
            checkpointer.save(1, {"bad": leaf, "good": jnp.zeros(2)})
        assert checkpointer.latest_step() is None


def test_traced_and_donated_arrays_are_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="outside jit"):
            jax.jit(lambda x: checkpointer.save(1, {"x": x}))(jnp.zeros(2))
        x = jnp.zeros(2)
        x.delete()
        with pytest.raises(ValueError, match=r"\['x'\] was donated"):
            checkpointer.save(1, {"x": x})
