"""A run killed at any moment and started again ends in the same bits as one never stopped."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.common import assert_same
from tests.checkpoint.kill_run import NUM_STEPS, SAVE_EVERY
from yggdrax.checkpoint import Checkpointer

ROOT = pathlib.Path(__file__).parents[2]

# ------------------------------------------------------------------ every state of the disk

_watching: list = []
_inside = threading.local()
_one_copy = threading.Lock()  # the writer has several threads, and each copy is of one moment


def _audit(event, arguments):
    # What a kill at this moment would leave is what is on the disk now.
    if not _watching or getattr(_inside, "busy", False):
        return
    if event == "open" or event.split(".")[0] in ("os", "shutil"):
        _inside.busy = True
        try:
            with _one_copy:
                for watch in _watching:
                    watch()
        finally:
            _inside.busy = False


sys.addaudithook(_audit)


def tree(step):
    return {"x": jnp.full((300,), float(step)), "step": jnp.int32(step)}


def test_every_state_that_a_kill_can_leave_on_the_disk_is_resumed(tmp_path):
    """Copies the directory before each file operation of a save and of a deletion."""
    run = tmp_path / "run"
    copies = []

    def copy():
        target = tmp_path / f"copy{len(copies)}"
        try:
            shutil.copytree(run, target)
        except OSError:  # TensorStore renamed a file meanwhile: not the state of one moment
            shutil.rmtree(target, ignore_errors=True)
            return
        copies.append(target)

    with Checkpointer(run, keep_latest=2, asynchronous=False) as checkpointer:
        checkpointer.save(10, tree(10))
        checkpointer.save(20, tree(20))
        _watching.append(copy)
        try:
            checkpointer.save(30, tree(30))  # and deletes 10
        finally:
            _watching.clear()
    assert len(copies) > 30
    seen = set()
    for target in copies:
        with Checkpointer(target, asynchronous=False) as checkpointer:
            latest = checkpointer.latest_step()
            assert_same(checkpointer.restore(tree(0)), tree(latest))
            seen.add(tuple(checkpointer.steps()))
            assert list((target / ".yggdrax-tmp").iterdir()) == []
    # All three stages were met, and none without the last completed save.
    assert seen == {(10, 20), (10, 20, 30), (20, 30)}


# ------------------------------------------------------------------ real kills


# All runs log every step, one row each.
LOGS = {"loop": "log.jsonl", "banana": "metrics.jsonl", "regression": "metrics.jsonl"}


@pytest.fixture(scope="module")
def server():
    """A process that forks runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.kill_run"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.stdin.close()


class Life:
    """One process of the run, from its start to its end."""

    def __init__(self, server, name, directory):
        self._server, self._log = server, directory / LOGS[name]
        self._scratch = directory / "checkpoints" / ".yggdrax-tmp"
        server.stdin.write(f"{name} {directory}\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())
        self._status = None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        self._status = int(self._server.stdout.readline())

    def alive(self):
        return self._reader.is_alive()

    def end(self):
        """Waits for the end and returns the exit status."""
        self._reader.join()
        return self._status

    def log_size(self):
        return self._log.stat().st_size if self._log.exists() else 0

    def writes(self):
        """Returns the names of the writes and deletions under way."""
        try:
            return {path.name for path in self._scratch.iterdir()}
        except FileNotFoundError:
            return set()

    def wait_for(self, condition):
        while self.alive() and not condition():
            time.sleep(0.0005)

    def kill_at_random(self, chooser):
        """Kills between the start of the process and some steps later."""
        if chooser.random() < 0.8:  # else while it starts and restores
            size = self.log_size()
            more = 50 * chooser.randrange(40)  # a row takes 50 bytes or more
            self.wait_for(lambda: self.log_size() > size + more)
        self._kill_within(chooser.uniform(0.0, 0.5))

    def kill_in_a_save(self, chooser):
        """Kills at the beginning, in the middle or right after the n-th write that is seen."""
        seen, count = set(), chooser.randint(1, 4)

        def met():
            seen.update(self.writes())
            return len(seen) >= count

        self.wait_for(met)
        last = self.writes()
        where = chooser.random()
        if where > 0.9:
            self.wait_for(lambda: not last & self.writes())
        elif where > 0.2:
            self._kill_within(chooser.uniform(0.0, 0.1))
        self._kill_within(0.0)

    def _kill_within(self, seconds):
        self._reader.join(seconds)
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)


def kill_once(server, name, directory, chooser, aimed):
    """Starts the run and kills it; returns whether that came before its end."""
    life = Life(server, name, directory)
    life.kill_in_a_save(chooser) if aimed else life.kill_at_random(chooser)
    status = life.end()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def rows(name, directory):
    path = directory / LOGS[name]
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_lost(name, directory):
    """Returns the last logged step minus the newest whole checkpoint, and the latter."""
    logged = rows(name, directory)
    last = 0 if not logged else logged[-1][0] if name == "loop" else logged[-1]["step"]
    if not (directory / "checkpoints").exists():
        return last, 0
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        latest = checkpointer.latest_step() or 0
    return last - latest, latest


def outcome(name, directory):
    """Returns the digests of the final state, all rows of the log, and the particles."""
    step = directory / "checkpoints" / f"{NUM_STEPS:08d}" / "yggdrax.json"
    entries = json.loads(step.read_text())["content"]["entries"]
    particles = directory / "particles.npz"
    arrays = {}
    if particles.exists():
        with np.load(particles) as archive:
            arrays = {key: archive[key].tobytes() for key in archive.files}
    return entries, rows(name, directory), arrays


def kill_trial(server, name, tmp_path, kills, seed):
    """Kills a run again and again, every second time in the middle of a save."""
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    assert Life(server, name, unbroken).end() == 0
    expected = outcome(name, unbroken)
    assert sum("sha256" in entry for entry in expected[0]) >= 5
    assert len(expected[1]) >= NUM_STEPS  # minibatches or metrics of every step
    assert (len(expected[2]) > 0) == (name != "loop")
    chooser = random.Random(seed)
    survived, runs, lost_most = 0, 0, 0
    while survived < kills:
        directory = tmp_path / f"run{runs}"
        directory.mkdir()
        runs += 1
        newest = 0
        while survived < kills and kill_once(server, name, directory, chooser, survived % 2 == 0):
            survived += 1
            lost, latest = steps_lost(name, directory)
            assert latest >= newest, "a checkpoint that was there is gone"
            newest, lost_most = latest, max(lost_most, lost)
        assert Life(server, name, directory).end() == 0
        assert outcome(name, directory) == expected
        shutil.rmtree(directory)
        print(f"{name}: {survived} kills survived in {runs} runs, at most {lost_most} steps lost")
    # One save may be under way, and the next one waits for it.
    assert lost_most <= 2 * SAVE_EVERY


# The report at the end of an experiment takes most of its time, so one kill has to do.
@pytest.mark.parametrize("name, kills", [("loop", 2), ("banana", 1)])
def test_a_killed_run_ends_as_the_unbroken_one(server, tmp_path, name, kills):
    kill_trial(server, name, tmp_path, kills, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "regression"])
def test_a_hundred_kills(server, tmp_path, name):
    kill_trial(server, name, tmp_path, kills=100, seed=1)
