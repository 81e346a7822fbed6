"""Particles outside the framework."""

import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax import export


def test_archive_has_one_named_array_a_leaf(tmp_path):
    particles = {
        "params": {"hidden": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "layers": {0: jnp.ones(2)}},
        "log_noise_precision": jnp.array([1.0, 2.0], jnp.bfloat16),
    }
    export.save_npz(tmp_path / "particles.npz", particles)
    read = export.load_npz(tmp_path / "particles.npz")
    assert sorted(read) == ["log_noise_precision", "params/hidden/kernel", "params/layers/0"]
    np.testing.assert_array_equal(read["params/hidden/kernel"], np.arange(6.0).reshape(2, 3))
    assert read["log_noise_precision"].dtype == np.float32
    assert [file.name for file in tmp_path.iterdir()] == ["particles.npz"]


def test_a_bare_array_is_called_particles(tmp_path):
    export.save_npz(tmp_path / "p.npz", jnp.zeros((4, 2)))
    assert export.load_npz(tmp_path / "p.npz")["particles"].shape == (4, 2)


def test_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        export.to_arrays({"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
