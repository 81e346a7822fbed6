"""What the tests of checkpoints share: exact comparison of states, and a rich state."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.core import FrozenDict

from yggdrax.checkpoint.manifest import describe


class Moments(NamedTuple):
    """A user's own state."""

    first: jax.Array
    second: jax.Array


def rich_state(seed: int) -> dict:
    """Returns a state with every kind of leaf and container that a checkpoint promises to keep."""
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    return {
        "adam": optax.adam(optax.linear_schedule(0.1, 0.0, 10)).init(params),
        "bool": jnp.array([True, False]),
        "bfloat16": jnp.asarray(rng.normal(size=(2, 2)), jnp.bfloat16),
        "complex": jnp.asarray(rng.normal(size=2) + 1j, jnp.complex64),
        "empty": jnp.zeros((0, 3)),
        "empty_keys": jax.random.split(jax.random.key(seed), 3)[:0],
        "float8": jnp.ones((3,), jnp.float8_e4m3fn),
        "frozen": FrozenDict({"a": jnp.int8(seed)}),
        "int4": jnp.asarray([1, -2], jnp.int4),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 8),
        "legacy": jax.random.PRNGKey(seed),
        "list": [jnp.uint32(seed), (), None, {}],
        "moments": Moments(jnp.zeros(2), jnp.asarray(1.5)),
        "nan": jnp.array([0x7FC12345, 0x80000000], jnp.uint32).view(jnp.float32),
        "numpy": rng.normal(size=(3,)),
        "numpy_fortran": np.asfortranarray(rng.normal(size=(3, 2))),
        "numpy_scalar": np.float64(rng.normal()),
        "numpy_bfloat16": ml_dtypes.bfloat16(1.5),
        "ordered": collections.OrderedDict(z=jnp.ones(1), a=jnp.ones(2)),
        "python": (3 + seed, 0.1, -0.0, True, 1 + 2j, "naïve", 10**30),
        "weak": jnp.asarray(2.0) * 3,
        "weak_array": jnp.full((3,), 0.5),
    }


def leaf_bits(leaf: object) -> tuple:
    """Returns what must be equal for two leaves to be the same: type, dtype, weak type, bytes."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(leaf))
            return ("key", str(leaf.dtype), leaf.shape, data.tobytes())
        array = np.asarray(leaf)
        return ("jax", leaf.weak_type, array.dtype.name, array.shape, array.tobytes())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return (type(leaf).__name__, leaf.dtype.name, leaf.shape, leaf.tobytes())
    return (type(leaf).__name__, repr(leaf))


def assert_same(actual: object, expected: object) -> None:
    """Fails unless two states are the same to the last bit, containers and types included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [str(entry) for entry in describe(actual)] == [str(e) for e in describe(expected)]
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert leaf_bits(one) == leaf_bits(other), jax.tree_util.keystr(path)
