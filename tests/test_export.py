"""Particles outside the framework."""

import sys

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


def test_arviz_reads_the_particles_as_one_chain():
    particles = {
        "params": {"kernel": np.random.RandomState(0).randn(50, 2, 1)},
        "log_noise_precision": np.random.RandomState(1).randn(50),
    }
    data = export.to_arviz(
        particles,
        posterior_predictive={"y": np.zeros((50, 7))},
        log_likelihood={"y": np.zeros((50, 7))},
        observed_data={"y": np.zeros(7)},
    )
    kernel = data.posterior["params.kernel"]
    assert kernel.shape == (1, 50, 2, 1)
    np.testing.assert_array_equal(kernel[0], particles["params"]["kernel"])
    assert data.posterior_predictive["y"].shape == data.log_likelihood["y"].shape == (1, 50, 7)
    assert data.observed_data["y"].shape == (7,)


def test_arviz_refuses_what_has_no_common_axis():
    with pytest.raises(ValueError, match=r"leading axes differ.*\[4, 5\]"):
        export.to_arviz({"a": np.zeros(5)}, posterior_predictive={"y": np.zeros((4, 7))})
    with pytest.raises(ValueError, match="no leading axis"):
        export.to_arviz({"a": np.zeros(())})


def test_without_arviz_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install 'yggdrax\[arviz\]'"):
        export.to_arviz({"a": np.zeros(5)})
