"""Where the number of processes comes from, and checksums that parts add up to."""

import json
import re

import jax
import numpy as np
import pytest

from yggdrax.checkpoint.together import checksum
from yggdrax.experiment import ConfigError, ExperimentConfig, GaussianProblem
from yggdrax.experiment import launch as launching
from yggdrax.experiment.launch import Launch, agree_on, launch_of, take_flags
from yggdrax.experiment.places import Places
from yggdrax.processes import Group, ProcessLost

RNG = np.random.default_rng(0)
TWO = {"coordinator": "a:1", "count": 2, "index": 0}


@pytest.mark.parametrize(
    "environment",
    [
        {
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "2",
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "node[1-4]",
        },
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
        },
        {"PMI_SIZE": "4", "PMI_RANK": "2", "JAX_COORDINATOR_ADDRESS": "one:1"},
        {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "one:1"},
    ],
)
def test_launchers_say_how_many_and_which(environment):
    launch = launch_of(environment)
    assert launch is not None and (launch.count, launch.index) == (4, 2)


def test_flags_come_before_the_environment_and_the_rest_is_left():
    argv = ["x", "--coordinator=a:1", "--num_processes=2", "--process_id=1", "--config=f.py"]
    launch, rest = take_flags([*argv, "--silence_seconds=7", "--noprogress"])
    assert launch == Launch("a:1", 2, 1, silence_seconds=7.0)
    assert rest == ["x", "--config=f.py", "--noprogress"]
    assert take_flags(["x", "--config=f.py"])[0] is None
    # One process, and a batch script of SLURM that is no task of a step, are on their own.
    assert launch_of({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    assert launch_of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "a:1"}, "--num_processes and --process_id"),
        ({"coordinator": "a:1", "count": 2}, "--num_processes and --process_id"),
        ({"coordinator": "a:1", "count": 2, "index": 2}, "between 0 and 1, not 2"),
        ({"count": 2, "index": 1}, "--coordinator=HOST:PORT"),
        ({"coordinator": "a:1", "count": 0, "index": 0}, "at least 1, not 0"),
        ({"count": 1, "index": 5}, "between 0 and 0, not 5"),
        ({"coordinator": "a", "count": 2, "index": 0}, "HOST:PORT, .* not 'a'"),
        ({"coordinator": "", "count": 2, "index": 0}, "HOST:PORT, .* not ''"),
        ({"coordinator": "a:b", "count": 2, "index": 0}, "HOST:PORT, .* not 'a:b'"),
        ({"coordinator": "a:99999", "count": 2, "index": 0}, "from 1 to 65535, not 'a:99999'"),
        (TWO | {"start_seconds": float("nan")}, "start_seconds must be a positive .* not nan"),
        (TWO | {"silence_seconds": -3.0}, "silence_seconds must be a positive .* not -3"),
    ],
)
def test_incomplete_flags_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        launch_of({}, **arguments)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        # Newer versions of Open MPI, and others whose coordinator JAX does not find.
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "--coordinator=HOST:PORT"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "--coordinator=HOST:PORT"),
        ({"PMI_SIZE": "2", "PMI_RANK": "x"}, "PMI_RANK must be a whole number, not 'x'"),
    ],
)
def test_an_environment_that_says_too_little_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        launch_of(environment)


def test_a_coordinator_whose_host_is_unknown_is_refused_at_once(tmp_path):
    launch = Launch("no.such.host.invalid:1234", 2, 0)
    with (
        pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:1234 is unknown"),
        launching.together(launch, tmp_path),
    ):
        pass
    assert not jax.distributed.is_initialized()


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="num_processes"):
        take_flags(["x", "--num_processes=two"])


def test_a_mesh_of_the_configuration():
    config = ExperimentConfig(GaussianProblem(), mesh="ring")
    with pytest.raises(ConfigError, match="mesh must be one of none, automatic, not 'ring'"):
        config.freeze()
    places = Places(ExperimentConfig(GaussianProblem(), mesh="automatic").freeze())
    assert places.mesh is not None and places.mesh.axis_names == ("particles",)
    assert Places(ExperimentConfig(GaussianProblem()).freeze()).mesh is None


@pytest.mark.parametrize("name", ["version of jax", "version of yggdrax", "enable_x64"])
def test_a_host_with_another_version_or_option_is_refused(monkeypatch, name):
    # What two hosts say is exchanged as JSON; here the second one says all but one thing alike.
    def gather(self, value):
        other = json.loads(json.dumps(value))
        assert name in other["settings"]
        other |= {"host": "node7", "settings": other["settings"] | {name: "0.0.1"}}
        return [json.loads(json.dumps(value)), other]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(Group, "gather", gather)
    message = f"process 1 of 2 .on node7. has another version than process 0 .*{name}.*0.0.1"
    with pytest.raises(ConfigError, match=message):
        agree_on(ExperimentConfig(GaussianProblem()).freeze())


def test_a_number_is_given_once_as_long_as_its_process_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_SECONDS_TO_LEAVE", 0.3)
    launch = Launch("a:1", 3, 1)
    with launching._Presence(launch, tmp_path) as first:
        message = r"two processes say that they are number 1: .* and process \d+ on .*--process_id"
        with pytest.raises(ConfigError, match=message):
            launching._Presence(launch, tmp_path).__enter__()
        with launching._Presence(Launch("a:1", 3, 2), tmp_path) as other:
            other.leave()
    first.leave()
    with launching._Presence(launch, tmp_path) as again:  # what a dead process left means nothing
        again.leave()


def test_another_number_of_processes_is_refused_while_both_live(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr(launching, "_SECONDS_TO_HEAR", 0.0)
    monkeypatch.setattr(launching, "_exit", lambda text, status=1: ends.append((text, status)))
    with launching._Presence(Launch("a:1", 8, 7), tmp_path) as gone:
        gone.leave()
    one = launching._Presence(Launch("a:1", 2, 0), tmp_path)
    with one:
        pass
    assert ends == []
    with launching._Presence(Launch("a:1", 3, 1), tmp_path) as two:
        pass
    (text, status), *_ = ends
    assert status == 2
    assert re.search(r"process 0 .*--num_processes=2, and process 1 .*with 3\. Start all", text)
    one.leave()
    two.leave()


def test_one_process_talks_to_itself():
    group = Group("test")
    assert (group.leads, group.gather(1), group.agree({"a": 2})) == (True, [1], {"a": 2})
    with pytest.raises(ZeroDivisionError):
        group.lead(lambda: 1 // 0)
    assert issubclass(ProcessLost, RuntimeError)


@pytest.mark.parametrize(
    "whole",
    [
        RNG.normal(size=(7, 5)).astype(np.float32),
        RNG.normal(size=(6, 2, 3)),
        (RNG.normal(size=(7, 2)) + 1j).astype(np.complex128),
        RNG.normal(size=(7, 2)) > 0,
        np.arange(9, dtype=np.int8),
    ],
)
def test_the_checksums_of_parts_add_up(whole):
    start = (0,) * whole.ndim
    expected = checksum(whole, start, whole.shape)
    cuts = [
        checksum(whole[a:b], (a, *start[1:]), whole.shape) for a, b in ((0, 2), (2, 3), (3, None))
    ]
    assert sum(cuts) % 2**64 == expected
    columns = [checksum(part, (0,), (len(part),)) for part in (whole.ravel(), whole.ravel()[::-1])]
    assert columns[0] == expected != columns[1]  # the place of every element counts


def test_a_checksum_notices_one_bit_and_two_exchanged_elements():
    whole = RNG.normal(size=(20, 3)).astype(np.float32)
    expected = checksum(whole, (0, 0), whole.shape)
    flipped, exchanged = whole.copy(), whole.copy()
    flipped.view(np.uint32)[7, 1] ^= 1
    exchanged[[3, 11]] = exchanged[[11, 3]]
    assert checksum(flipped, (0, 0), whole.shape) != expected
    assert checksum(exchanged, (0, 0), whole.shape) != expected
    assert checksum(np.float32(0), (), ()) != checksum(np.float32(1), (), ())
