"""Errors of the writer reach the caller, the last save survives the exit, one process writes."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.common import assert_same
from yggdrax.checkpoint import (
    Checkpointer,
    CheckpointLocked,
    CheckpointWarning,
    CheckpointWriteError,
)

STATE = {"x": jnp.arange(4.0)}
ROOT = pathlib.Path(__file__).parents[2]


def python(script, *arguments, **options):
    """Runs a script in a process of its own; warnings are errors there as well."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def block_scratch(directory):
    """Makes every write fail, for root as well: a file stands where a folder is needed."""
    shutil.rmtree(directory / ".yggdrax-tmp", ignore_errors=True)
    (directory / ".yggdrax-tmp").write_text("in the way")


def unblock_scratch(directory):
    (directory / ".yggdrax-tmp").unlink()


@pytest.mark.parametrize("call", ["save", "skipped save", "wait", "restore", "latest_step"])
def test_an_error_of_the_writer_reaches_the_next_call_once(tmp_path, call):
    with Checkpointer(tmp_path, save_every=2) as checkpointer:
        checkpointer.save(2, STATE)
        checkpointer.wait()
        block_scratch(tmp_path)
        assert checkpointer.save(4, {"x": STATE["x"] + 1})
        checkpointer._write.join()
        calls = {
            "save": lambda: checkpointer.save(6, STATE),
            "skipped save": lambda: checkpointer.save(5, STATE),
            "wait": checkpointer.wait,
            "restore": lambda: checkpointer.restore(STATE),
            "latest_step": checkpointer.latest_step,
        }
        with pytest.raises(CheckpointWriteError, match=f"Step 4 could not be .*{tmp_path}"):
            calls[call]()
        # The earlier checkpoint is untouched, and saving works again once the cause is gone.
        assert_same(checkpointer.restore(STATE), STATE)
        unblock_scratch(tmp_path)
        assert checkpointer.save(4, {"x": STATE["x"] + 1})
        assert_same(checkpointer.restore(STATE), {"x": STATE["x"] + 1})


def test_an_error_of_the_last_save_reaches_close(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)
    checkpointer.wait()
    block_scratch(tmp_path)
    checkpointer.save(2, STATE)
    with pytest.raises(OSError, match="Step 2"):
        checkpointer.close()
    unblock_scratch(tmp_path)
    with Checkpointer(tmp_path) as again:
        assert again.latest_step() == 1


def test_an_error_in_the_block_is_not_replaced_by_one_of_the_writer(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught, Checkpointer(tmp_path) as checkpointer:
        block_scratch(tmp_path)
        checkpointer.save(2, STATE)
        raise ZeroDivisionError
    assert "Step 2 could not be written" in caught.value.__notes__[0]


def test_a_synchronous_save_raises_at_once(tmp_path):
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, STATE)
        assert (tmp_path / "00000001").is_dir()
        block_scratch(tmp_path)
        with pytest.raises(CheckpointWriteError, match="Step 2"):
            checkpointer.save(2, STATE)


def test_a_directory_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointWriteError, match=f"{path} cannot be created"):
            Checkpointer(path)


# A file size limit is what root can be given; a tmpfs where mounting is allowed is the real thing.
OUT_OF_SPACE = """
    import resource, signal, sys
    import jax.numpy as jnp
    from yggdrax.checkpoint import Checkpointer, CheckpointWriteError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    small, large = {"x": jnp.zeros(10)}, {"x": jnp.arange(2_000_000.0)}
    with Checkpointer(sys.argv[1], keep_latest=None) as checkpointer:
        checkpointer.save(1, small)
        checkpointer.wait()
        if sys.argv[2] == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        checkpointer.save(2, large)
        try:
            checkpointer.wait()
        except CheckpointWriteError as error:
            print("ERROR", error)
        # What is in memory is intact, the earlier checkpoint is there, and a small save works.
        assert float(large["x"].sum()) == float(jnp.arange(2_000_000.0).sum())
        assert checkpointer.restore(small)["x"].shape == (10,)
        assert checkpointer.steps() == [1]
        assert checkpointer.save(3, small)
        print("STEPS", checkpointer.steps())
"""


def test_a_file_that_grows_too_large(tmp_path):
    result = python(OUT_OF_SPACE, tmp_path / "run", "limit")
    assert result.returncode == 0, result.stderr
    assert f"ERROR Step 2 could not be written to {tmp_path / 'run'}" in result.stdout
    assert "STEPS [1, 3]" in result.stdout
    assert not any((tmp_path / "run" / ".yggdrax-tmp").iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, where the process may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk):
    result = python(OUT_OF_SPACE, small_disk / "run", "disk")
    assert result.returncode == 0, result.stderr
    assert f"ERROR Step 2 could not be written to {small_disk / 'run'}" in result.stdout
    assert "STEPS [1, 3]" in result.stdout


def test_a_disk_that_becomes_read_only(small_disk):
    directory = small_disk / "run"

    def remount(mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(small_disk)], check=True)

    checkpointer = Checkpointer(directory)
    checkpointer.save(1, STATE)
    checkpointer.wait()
    # The lock is open for writing, which would keep the disk from becoming read-only.
    checkpointer._lock.release()
    try:
        remount("ro")
        checkpointer.save(2, STATE)
        with pytest.raises(CheckpointWriteError, match=f"Step 2 could not .*{directory}.*[Rr]ead-"):
            checkpointer.close()
        with pytest.raises(CheckpointWriteError, match=r"cannot be written.*read_only=True"):
            Checkpointer(directory)
        with Checkpointer(directory, read_only=True) as reader:
            assert_same(reader.restore(STATE), STATE)
    finally:
        remount("rw")


SAVE_AND_EXIT = """
    import sys
    import jax.numpy as jnp
    from yggdrax.checkpoint import Checkpointer
    checkpointer = Checkpointer(sys.argv[1])
    checkpointer.save(1, {"x": jnp.arange(4.0)})
    if sys.argv[2] == "blocked":
        import pathlib
        checkpointer.wait()
        path = pathlib.Path(sys.argv[1], ".yggdrax-tmp")
        path.rmdir()
        path.write_text("in the way")
    checkpointer.save(2, {"x": jnp.arange(4.0) + 1, "large": jnp.zeros(3_000_000)})
    if sys.argv[2] == "error":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how, code", [("normal", 0), ("error", 3)])
def test_the_last_save_is_whole_after_an_exit_without_close(tmp_path, how, code):
    result = python(SAVE_AND_EXIT, tmp_path, how)
    assert result.returncode == code, result.stderr
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 2
        restored = checkpointer.restore({"x": jnp.zeros(4), "large": jnp.zeros(3_000_000)})
    np.testing.assert_array_equal(restored["x"], np.arange(4.0) + 1)


def test_an_error_that_nobody_waits_for_is_printed_at_the_exit(tmp_path):
    result = python(SAVE_AND_EXIT, tmp_path, "blocked")
    assert "saving step 2" in result.stderr and "could not be written" in result.stderr


HOLD = """
    import os, sys, time
    import jax.numpy as jnp
    from yggdrax.checkpoint import Checkpointer
    checkpointer = Checkpointer(sys.argv[1])
    checkpointer.save(1, {"x": jnp.arange(4.0)})
    checkpointer.wait()
    child = os.fork() if sys.argv[2] == "fork" else None
    if child != 0:
        print("held", child, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path, how):
    # A forked child that outlives the holder must not keep the lock either.
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = None
    try:
        assert holder.stdout is not None
        line = holder.stdout.readline().split()
        assert line[0] == "held"
        child = int(line[1]) if how == "fork" else None
        with pytest.raises(CheckpointLocked, match=f"written by process {holder.pid}"):
            Checkpointer(tmp_path)
        with Checkpointer(tmp_path, read_only=True) as reader:
            assert_same(reader.restore(STATE), STATE)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.save(2, STATE)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        if child is not None:
            os.kill(child, signal.SIGKILL)


def test_a_second_checkpointer_of_this_process_is_refused_until_the_first_is_gone(tmp_path):
    first = Checkpointer(tmp_path)
    with pytest.raises(CheckpointLocked, match="another Checkpointer of this process"):
        Checkpointer(tmp_path)
    # A copy, which opens and closes the lock file, must not release it.
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    with pytest.raises(CheckpointLocked):
        Checkpointer(tmp_path)
    first.close()
    second = Checkpointer(tmp_path)
    second.save(1, STATE)
    second.wait()
    del second  # forgotten without close, as in a notebook
    Checkpointer(tmp_path).close()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.warns(CheckpointWarning, match="without locks"):
        Checkpointer(tmp_path).close()
