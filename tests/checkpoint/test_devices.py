"""Saved from eight devices, restored on another number of them and as NumPy."""

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.checkpoint import Checkpointer, CheckpointWarning

ROOT = pathlib.Path(__file__).parents[2]

EIGHT = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from yggdrax.checkpoint import Checkpointer

    def state(devices, scale):
        mesh = Mesh(np.array(devices), ("particles",))
        rows = NamedSharding(mesh, PartitionSpec("particles"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        return {
            "x": jax.device_put(jnp.arange(72.0).reshape(24, 3) * scale, rows),
            "half": jax.device_put(jnp.arange(24, dtype=jnp.bfloat16) * scale, rows),
            "keys": jax.device_put(jax.random.split(jax.random.key(int(scale)), 24), rows),
            "step": jax.device_put(jnp.int32(scale), everywhere),
        }

    devices = jax.devices()
    assert len(devices) == 8
    saved = state(devices, 7.0)
    with Checkpointer(sys.argv[1]) as checkpointer:
        checkpointer.save(1, saved)
        for count in (1, 2, 3, 8):
            like = state(devices[-count:], 0.0)
            restored = checkpointer.restore(like)
            for name in saved:
                one, other, shape = restored[name], saved[name], like[name]
                assert one.sharding == shape.sharding and one.committed
                assert len(one.sharding.device_set) == count
                if name == "keys":
                    one, other = jax.random.key_data(one), jax.random.key_data(other)
                assert one.dtype == other.dtype
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        # An abstract state may ask for a placement as well.
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
            state(devices[:4], 0.0),
        )
        restored = checkpointer.restore(like)
        assert restored["x"].sharding == like["x"].sharding
        # A step compiled for the sharding is not compiled again for the restored state.
        step = jax.jit(lambda s: s | {"x": s["x"] + 1})
        step(saved)
        step(checkpointer.restore(state(devices, 0.0)))
        assert step._cache_size() == 1
    print("RESTORED")
"""


def test_eight_devices_to_one_two_three_eight_and_numpy(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(EIGHT), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "RESTORED" in result.stdout, result.stderr
    x = np.arange(72.0, dtype=np.float32).reshape(24, 3) * 7
    like = {
        "x": np.zeros((24, 3), np.float32),
        "half": jnp.zeros(24, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(0), 24),
        "step": jnp.int32(0),
    }
    with Checkpointer(tmp_path) as checkpointer:
        # The state is the same; whether the next steps round the same is another question.
        with pytest.warns(CheckpointWarning, match=r"devices 8, now 1; .*may round differently"):
            restored = checkpointer.restore(like)
        assert checkpointer.restored_step == 1
    assert type(restored["x"]) is np.ndarray
    np.testing.assert_array_equal(restored["x"], x)
    np.testing.assert_array_equal(restored["half"], jnp.arange(24, dtype=jnp.bfloat16) * 7)
    np.testing.assert_array_equal(
        jax.random.key_data(restored["keys"]),
        jax.random.key_data(jax.random.split(jax.random.key(7), 24)),
    )
    assert restored["step"] == 7 and len(jax.devices()) == 1
