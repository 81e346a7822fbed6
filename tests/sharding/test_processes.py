"""Real processes on the loopback interface, started and ended by the tests, with time limits."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Starting Python, JAX and a mesh takes some ten seconds a process, more on a busy machine.
LIMIT = 300
SILENCE = 5


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def environment():
    return os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


class Processes:
    """The processes of one run; all that still live are killed at the end."""

    def __init__(self, count, workdir, *flags, own=None):
        port = free_port()
        self.workdir = workdir
        self.members = []
        for index in range(count):
            if own is not None and index not in own:
                continue
            command = [
                *(sys.executable, "-m", "yggdrax", "--config=configs/default.py"),
                *(f"--workdir={workdir}", "--noprogress", "--config.plots=False"),
                *("--config.num_particles=16", "--config.checkpoint_every=10"),
                *(f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"),
                *(f"--process_id={index}", f"--silence_seconds={SILENCE}"),
                *flags,
                *((own or {}).get(index, ())),
            ]
            self.members.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for member in self.members:
            member.kill()
            member.wait()
            member.stdout.close()

    def ends(self):
        """(status, output) of every process, once all have ended."""
        texts = [member.communicate(timeout=LIMIT)[0] for member in self.members]
        return [(member.returncode, text) for member, text in zip(self.members, texts, strict=True)]

    def wait_for_checkpoint(self):
        end = time.monotonic() + LIMIT
        while not list(pathlib.Path(self.workdir).glob("checkpoints/0*/yggdrax.json")):
            assert all(member.poll() is None for member in self.members), self.ends()
            assert time.monotonic() < end
            time.sleep(0.1)


def final(workdir):
    return np.load(workdir / "particles.npz")["particles"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The particles of one process that is never stopped."""
    workdir = tmp_path_factory.mktemp("alone")
    command = [
        *(sys.executable, "-m", "yggdrax", "--config=configs/default.py", "--noprogress"),
        *(f"--workdir={workdir}", "--config.plots=False", "--config.num_particles=16"),
        *("--config.checkpoint_every=10", "--config.num_steps=40"),
    ]
    subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    return final(workdir)


def test_two_processes_then_one_end_where_one_alone_does(alone, tmp_path):
    flags = ("--config.num_steps=40", "--config.stop_at=20", "--config.mesh=automatic")
    with Processes(2, tmp_path, *flags) as run:
        for status, text in run.ends():
            assert status == 75, text
    manifest = json.loads((tmp_path / "checkpoints" / "00000020" / "yggdrax.json").read_text())
    assert manifest["version"] == 2
    # The same command with another number of processes goes on from there.
    with Processes(1, tmp_path, *flags) as run:
        ((status, text),) = run.ends()
    assert status == 0 and "devices 2, now 1" in text, text
    # Rounding of sums in another order, over forty steps of Adam.
    np.testing.assert_allclose(final(tmp_path), alone, atol=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 10, 20, 30, 40]


@pytest.mark.slow
def test_eight_then_four_then_two_processes(alone, tmp_path):
    # The first stops itself; the second is asked to, by a signal to one of its processes.
    flags = ("--config.num_steps=40", "--config.stop_at=10", "--config.mesh=automatic")
    with Processes(8, tmp_path, *flags) as run:
        assert [status for status, _ in run.ends()] == [75] * 8
    with Processes(4, tmp_path, *flags) as run:
        for _ in range(600):
            if (tmp_path / "checkpoints" / "00000020").exists():
                break
            time.sleep(0.1)
        run.members[2].send_signal(signal.SIGTERM)
        # Or it was faster than the signal.
        assert {status for status, _ in run.ends()} in ({75}, {0})
    with Processes(2, tmp_path, *flags) as run:
        assert [status for status, _ in run.ends()] == [0] * 2
    np.testing.assert_allclose(final(tmp_path), alone, atol=1e-5)


def test_a_killed_process_is_named_and_the_other_goes_on_alone(tmp_path):
    flags = ("--config.num_steps=100000", "--config.mesh=automatic")
    with Processes(2, tmp_path, *flags) as run:
        run.wait_for_checkpoint()
        run.members[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        text = run.members[0].communicate(timeout=LIMIT)[0]
        # The silence, and some seconds to say goodbye; the rest is for busy machines.
        assert time.monotonic() - killed < SILENCE + 30
        assert run.members[0].returncode == 1
        assert "process 1 of 2 has died" in text
    with Processes(1, tmp_path, *flags) as run:
        step = max(int(p.name) for p in (tmp_path / "checkpoints").glob("0*"))
        end = time.monotonic() + LIMIT
        while max(int(p.name) for p in (tmp_path / "checkpoints").glob("0*")) <= step:
            assert run.members[0].poll() is None and time.monotonic() < end
            time.sleep(0.1)
        run.members[0].send_signal(signal.SIGTERM)
        ((status, text),) = run.ends()
    assert status == 75, text


def test_a_process_that_never_comes_is_named(tmp_path):
    with Processes(3, tmp_path, "--start_seconds=8", own={0: (), 1: ()}) as run:
        for status, text in run.ends():
            assert status == 1
            assert re.search(r"process 2 of 3 did not come within 8 s", text), text


def test_another_number_of_processes_is_refused_at_the_start(tmp_path):
    started = time.monotonic()
    own = {0: (), 1: ("--num_processes=3",)}
    with Processes(2, tmp_path, "--start_seconds=100", own=own) as run:
        for status, text in run.ends():
            assert status == 2, text
            assert re.search(r"process \d .*--num_processes=\d, and process \d", text), text
    assert time.monotonic() - started < 100


def test_a_number_that_is_given_twice_is_refused(tmp_path):
    own = {0: (), 1: ("--process_id=0",)}
    with Processes(2, tmp_path, "--start_seconds=12", own=own) as run:
        ends = sorted(run.ends())
    assert [status for status, _ in ends] == [1, 2]
    assert "process 1 of 2 did not come within 12 s" in ends[0][1]
    assert "two processes say that they are number 0" in ends[1][1]


def test_another_configuration_is_refused_at_the_start(tmp_path):
    own = {0: ("--config.mesh=automatic",), 1: ("--config.mesh=automatic", "--config.seed=3")}
    with Processes(2, tmp_path, own=own) as run:
        for status, text in run.ends():
            assert status == 2
            assert "process 1 of 2" in text and "another configuration" in text
            assert "seed is 0 in process 0 and 3 in process 1" in text
    assert not (tmp_path / "config.json").exists()


def test_the_example_ends_in_the_same_particles():
    done = subprocess.run(
        [sys.executable, "examples/06_two_processes.py"],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("difference of a coordinate:")[1].split()[0])
    # Rounding over 200 steps of Adam, of coordinates up to about 5.
    assert difference < 2e-4
