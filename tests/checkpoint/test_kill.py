"""A run killed at any moment and started again ends in the same bits as one never stopped."""

import contextlib
import json
import pathlib
import random
import shutil
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
from yggdrax.checkpoint.lock import LOCK_NAME

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


def command(directory):
    return [sys.executable, "-m", "tests.checkpoint.kill_run", str(directory)]


def start(directory):
    return subprocess.Popen(
        command(directory), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def kill_once(directory, chooser, aimed):
    """Starts the run and kills it; returns whether it was still running."""
    process = start(directory)
    lock = directory / "checkpoints" / LOCK_NAME
    scratch = directory / "checkpoints" / ".yggdrax-tmp"
    deadline = time.monotonic() + 300
    try:
        # The import takes most of a short life; the random moment starts when the run does.
        while process.poll() is None and time.monotonic() < deadline:
            if lock.exists() and f"process {process.pid} " in lock.read_text():
                break
            time.sleep(0.002)
        if aimed:
            # A write that is seen under way is killed at once or within its usual duration.
            wait_until = time.monotonic() + chooser.uniform(0.0, 1.0)
            while process.poll() is None and time.monotonic() < wait_until:
                time.sleep(0.002)
            while process.poll() is None and not (scratch.exists() and any(scratch.iterdir())):
                time.sleep(0.0002)
            time.sleep(chooser.choice((0.0, chooser.uniform(0.0, 0.1))))
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chooser.uniform(0.0, 2.5))
        killed = process.poll() is None
    finally:
        process.kill()  # SIGKILL
        _, errors = process.communicate()
    assert killed or process.returncode == 0, errors
    return killed


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


def kill_trial(tmp_path, unbroken, kills, seed, report=False):
    """Kills a run again and again, every second time in the middle of a save."""
    chooser = random.Random(seed)
    survived, runs, lost_most = 0, 0, 0
    while survived < kills:
        directory = tmp_path / f"run{runs}"
        directory.mkdir()
        runs += 1
        newest = 0
        while survived < kills and kill_once(directory, chooser, aimed=survived % 2 == 1):
            survived += 1
            logged, latest = progress(directory)
            assert latest >= newest, "a checkpoint that was there is gone"
            newest = latest
            lost_most = max(lost_most, logged - latest)
        process = start(directory)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert outcome(directory) == unbroken
    # One save may be under way, and the next one waits for it.
    assert lost_most <= 2 * SAVE_EVERY
    if report:
        print(f"{survived} kills survived in {runs} runs, at most {lost_most} steps lost")


def test_a_killed_run_ends_as_the_unbroken_one(tmp_path, unbroken):
    kill_trial(tmp_path, unbroken, kills=2, seed=0)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path, unbroken):
    kill_trial(tmp_path, unbroken, kills=100, seed=1, report=True)
