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
import pytest

from tests.checkpoint import kill_run
from tests.checkpoint.common import assert_same
from tests.checkpoint.kill_run import NUM_STEPS, SAVE_EVERY
from yggdrax.checkpoint import Checkpointer

ROOT = pathlib.Path(__file__).parents[2]

# ------------------------------------------------------------------ every state of the disk

_watching: list = []
_inside = threading.local()


def _audit(event, arguments):
    # What a kill at this moment would leave is what is on the disk now.
    if not _watching or getattr(_inside, "busy", False):
        return
    if event == "open" or event.split(".")[0] in ("os", "shutil"):
        _inside.busy = True
        try:
            _watching[-1]()
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
        shutil.copytree(run, target)
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

    def __init__(self, server, directory):
        self._server, self._directory = server, directory
        self._scratch = directory / "checkpoints" / ".yggdrax-tmp"
        server.stdin.write(f"{directory}\n")
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
        path = self._directory / "log.jsonl"
        return path.stat().st_size if path.exists() else 0

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
            steps = 100 * chooser.randrange(20)  # a row takes about 50 bytes
            self.wait_for(lambda: self.log_size() > size + steps)
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


def kill_once(server, directory, chooser, aimed):
    """Starts the run and kills it; returns whether that came before its end."""
    life = Life(server, directory)
    life.kill_in_a_save(chooser) if aimed else life.kill_at_random(chooser)
    status = life.end()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def progress(directory):
    """Returns the last logged step and the newest whole checkpoint."""
    path = directory / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("]")]
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return (json.loads(whole[-1])[0] if whole else 0), checkpointer.latest_step() or 0


def outcome(directory):
    """Returns the digests of the final state and the whole log."""
    step = directory / "checkpoints" / f"{NUM_STEPS:08d}" / "yggdrax.json"
    return json.loads(step.read_text())["content"]["entries"], (directory / "log.jsonl").read_text()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What the run leaves when nobody kills it."""
    directory = tmp_path_factory.mktemp("unbroken")
    kill_run.main(directory)
    entries, log = outcome(directory)
    assert [json.loads(line)[0] for line in log.splitlines()] == list(range(1, NUM_STEPS + 1))
    assert sum("sha256" in entry for entry in entries) >= 5
    return entries, log


def kill_trial(server, tmp_path, unbroken, kills, seed):
    """Kills a run again and again, every second time in the middle of a save."""
    chooser = random.Random(seed)
    survived, runs, lost_most = 0, 0, 0
    while survived < kills:
        directory = tmp_path / f"run{runs}"
        directory.mkdir()
        runs += 1
        newest = 0
        while survived < kills and kill_once(server, directory, chooser, survived % 2 == 0):
            survived += 1
            logged, latest = progress(directory)
            assert latest >= newest, "a checkpoint that was there is gone"
            newest = latest
            lost_most = max(lost_most, logged - latest)
        assert Life(server, directory).end() == 0
        assert outcome(directory) == unbroken
    # One save may be under way, and the next one waits for it.
    assert lost_most <= 2 * SAVE_EVERY
    print(f"{survived} kills survived in {runs} runs, at most {lost_most} steps lost")


def test_a_killed_run_ends_as_the_unbroken_one(server, tmp_path, unbroken):
    kill_trial(server, tmp_path, unbroken, kills=3, seed=0)


@pytest.mark.slow
def test_a_hundred_kills(server, tmp_path, unbroken):
    kill_trial(server, tmp_path, unbroken, kills=100, seed=1)
