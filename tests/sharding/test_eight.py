"""Particles on eight fake CPU devices: values, shardings, compilations, and what is exchanged."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
# Rounding of float32 sums in another order; the issue asks for 1e-5, 1e-6 is what is seen.
CLOSE = 5e-6


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """The answers of eight.py: one process for all tests, of all workers that share them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with open(shared / "eight.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answers = shared / "eight.json"
        if not answers.exists():
            answers.write_text(ask_eight())
        return json.loads(answers.read_text())


def ask_eight():
    flags = "--xla_force_host_platform_device_count=8"
    # What is compiled once is run once: the compiler need not try hard.
    flags += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "eight.py")],
        cwd=HERE.parents[1],
        env=environment | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def of(results, name):
    assert "exception" not in results[name], results[name]["exception"]
    return results[name]


@pytest.mark.parametrize(
    "name",
    [
        "tree auto",
        "tree explicit",
        "wide auto",
        "wide explicit",
        "fourier auto",
        "fourier explicit",
        "leaf explicit",
        "coordinate auto",
        "scale explicit",
    ],
)
def test_updates_of_sharded_particles_are_those_of_one_device(results, name):
    result = of(results, name)
    assert result["difference"] < CLOSE
    # The pairs of the median are the same, and so are its bits.
    assert result["bandwidth"] and result["status"]
    assert result["split"] and result["replicated"]
    assert result["compiled"] == 1


@pytest.mark.parametrize("name", ["tree auto", "wide auto", "fourier auto"])
def test_no_device_sees_all_particles(results, name):
    result = of(results, name)
    assert "all-reduce" in result["collectives"]
    assert "all-gather" not in result["collectives"]
    assert result["wholes"] == []


def test_the_measured_error_is_that_of_one_device(results):
    sharded, single = of(results, "fourier auto")["error"]
    # A measured error near 1e-6 is rounding; both must stay far below rtol.
    assert 0 < sharded < 1e-4 and abs(sharded - single) < 1e-5


def test_a_training_loop_on_one_axis_of_a_mesh(results):
    result = of(results, "loop")
    # Twenty steps of Adam on rounding of 1e-7.
    assert result["difference"] < 1e-5
    assert result["compiled"] == 1 and "'p'" in result["spec"]


def test_in_shardings_and_particles_that_are_everywhere(results):
    result = of(results, "placed")
    assert result["difference"] < CLOSE and result["collectives"] == ["collective-permute"]
    # Not split: computed as on one device, bit for bit, and left where they are.
    assert result["replicated"] == [0.0, "P()"]


@pytest.mark.parametrize("name", ["gradients auto", "gradients explicit"])
def test_gradients_of_sharded_particles_are_those_of_one_device(results, name):
    for result in of(results, name).values():
        assert max(result["difference"]) < CLOSE
        assert result["split"]


def test_one_nan_and_too_few_modes_in_a_sharded_fourier_sum(results):
    result = of(results, "not finite")
    assert result["fine"] == [True, 0]
    assert result["broken"] == [True, 1]
    assert result["narrow"][0] < CLOSE and result["narrow"][1] == 4
    assert result["compiled"] == 1


def test_the_traffic_of_a_fourier_sum_does_not_grow_with_n(results):
    result = of(results, "traffic")
    assert result["small"] == result["large"]
    assert any(shape.startswith("c64") for shape in result["small"])


def test_the_median_of_many_particles_without_a_ring(results):
    result = of(results, "medians")
    assert result["equal"] and result["devices"] == 1
    assert result["slope"] < CLOSE
    assert result["collectives"] == ["all-reduce"] and result["wholes"] == []


def test_what_is_refused_says_what_to_do(results):
    messages = of(results, "refusals")
    assert "take 24 or 32 particles, or a mesh of 6 devices" in messages["uneven"]
    assert "take 8 particles, or a mesh of 5 devices" in messages["few"]
    assert "no axis 'data'" in messages["axis"]
    assert "engine Tree does not serve" in messages["tree"] and "'auto'" in messages["tree"]


@pytest.mark.parametrize("name", ["networks auto", "networks explicit"])
def test_members_keep_their_parameters(results, name):
    result = of(results, name)
    assert result["difference"] < CLOSE and result["prediction"] < CLOSE
    # Probabilities are gathered (or their sums); no device has the weights of all members.
    assert "all-gather" not in result["collectives"] and result["parameters"] == []
