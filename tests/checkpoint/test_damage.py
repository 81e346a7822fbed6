"""A step known to be damaged counts for nothing, and what is not ours is neither written nor lost.

Several threads and Checkpointers of one process are here too.
"""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.common import assert_same
from tests.checkpoint.test_lifecycle import LIKE, fill, state
from tests.checkpoint.test_writing import python
from yggdrax.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointMismatch,
    CheckpointWarning,
    CheckpointWriteError,
    NoCheckpoint,
)
from yggdrax.checkpoint import arrays as orbax_arrays
from yggdrax.checkpoint import checkpointer as checkpointing


def flip(root, step):
    """Changes the values of a step and not the size of any file."""
    needle = np.full(300, step, np.float32).tobytes()
    folder = root / f"{step:08d}"
    hits = [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]
    assert hits
    for path in hits:
        path.write_bytes(path.read_bytes().replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))


# ------------------------------------------------------------------ rules of what is kept


@pytest.mark.parametrize("latest", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_damaged_step_takes_no_place_among_the_latest(tmp_path, latest, asynchronous):
    fill(tmp_path, 20, 40, 60)
    flip(tmp_path, 60)
    options = {"keep_latest": latest, "asynchronous": asynchronous}
    with Checkpointer(tmp_path, **options) as checkpointer:
        with pytest.warns(CheckpointWarning, match=r"00000060.*skipped"):
            assert_same(checkpointer.restore(LIKE), state(40))
        assert checkpointer.save(50, state(50))
        assert checkpointer.steps() == [40, 50][-latest:]
        assert (tmp_path / "00000060").is_dir()
    with (
        Checkpointer(tmp_path, **options) as checkpointer,
        pytest.warns(CheckpointWarning, match=r"00000060.*skipped"),
    ):
        assert_same(checkpointer.restore(LIKE), state(50))


def test_a_damaged_step_takes_no_place_among_the_best(tmp_path):
    with Checkpointer(tmp_path, keep_latest=None) as checkpointer:
        for step, loss in ((20, 2.0), (40, 3.0), (60, 1.0)):
            checkpointer.save(step, state(step), metrics={"loss": loss})
    flip(tmp_path, 60)
    with Checkpointer(tmp_path, keep_latest=1, best="loss") as checkpointer:
        with pytest.warns(CheckpointWarning, match="skipped"):
            checkpointer.restore(LIKE)
        for step in (45, 50):
            checkpointer.save(step, state(step), metrics={"loss": 9.0})
        assert checkpointer.steps() == [20, 50]


def test_the_step_just_written_stays_whatever_the_rules_say(tmp_path):
    """Here beside a newer one that this program cannot know to be damaged."""
    fill(tmp_path, 40, 60)
    hidden = tmp_path / "00000060" / "yggdrax.json"
    text = hidden.read_text()
    hidden.unlink()
    with Checkpointer(tmp_path, keep_latest=1) as checkpointer:
        with pytest.warns(CheckpointWarning, match="skipped"):
            assert checkpointer.latest_step() == 40
        real = checkpointer._keep.apply

        def appears(*arguments):
            hidden.write_text(text)
            return real(*arguments)

        object.__setattr__(checkpointer._keep, "apply", appears)
        checkpointer.save(50, state(50))
        assert checkpointer.steps() == [50, 60]


# ------------------------------------------------------------------ saving over damage


def test_a_step_found_damaged_by_its_number_is_written_again(tmp_path):
    fill(tmp_path, 40, 60)
    flip(tmp_path, 60)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointDamaged, match="00000060"):
            checkpointer.restore(LIKE, 60)
        with pytest.warns(CheckpointWarning) as warned:
            assert checkpointer.latest_step() == 40
            assert checkpointer.save(60, state(60))
        assert "now 00000060.aside" in str(warned[-1].message)
        assert_same(checkpointer.restore(LIKE, 60), state(60))
        assert checkpointer.steps() == [40, 60]


def test_a_reader_takes_a_damaged_step_again_once_it_has_been_written_again(tmp_path):
    fill(tmp_path, 40, 60)
    flip(tmp_path, 60)
    with Checkpointer(tmp_path, read_only=True) as reader:
        with pytest.warns(CheckpointWarning, match="skipped"):
            assert_same(reader.restore(LIKE), state(40))
        with Checkpointer(tmp_path) as writer, pytest.warns(CheckpointWarning):
            writer.restore(LIKE)
            writer.save(60, state(60))
        assert_same(reader.restore(LIKE), state(60))


@pytest.mark.parametrize("how", ["values", "manifest"])
def test_where_all_are_damaged_the_message_says_so_and_what_to_do(tmp_path, how):
    fill(tmp_path, 40, 60)
    for step in (40, 60):
        if how == "values":
            flip(tmp_path, step)
        else:
            (tmp_path / f"{step:08d}" / "yggdrax.json").write_text("{")
    message = r"All steps in .* are damaged \(40, 60\).*another directory or move this one away"
    with Checkpointer(tmp_path) as checkpointer, pytest.warns(CheckpointWarning):
        with pytest.raises(NoCheckpoint, match=message):
            checkpointer.restore(LIKE)
        with pytest.raises(NoCheckpoint, match=message):
            checkpointer.info()


# ------------------------------------------------------------------ not ours


def test_links_in_the_place_of_our_own_files_are_not_followed(tmp_path):
    fill(tmp_path / "a", 1)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a" / ".yggdrax-lock").unlink()
    (tmp_path / "a" / ".yggdrax-lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointWriteError, match=r"\.yggdrax-lock is a symbolic link.*Remove"):
        Checkpointer(tmp_path / "a")
    assert (tmp_path / "precious").read_text() == "precious"

    leftover = tmp_path / "mine" / "00000001-abcdefabcdef"
    leftover.mkdir(parents=True)
    (leftover / "notes.txt").write_text("mine")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".yggdrax-tmp").symlink_to(tmp_path / "mine")
    checkpointer = Checkpointer(tmp_path / "b")
    checkpointer.save(1, state(1))
    with pytest.raises(CheckpointWriteError, match=r"\.yggdrax-tmp is a symbolic link.*Remove"):
        checkpointer.close()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [leftover.name]
    assert (leftover / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["mine", "state/mine/deeper"])
def test_an_empty_folder_in_a_step_keeps_it(tmp_path, place):
    fill(tmp_path, 10, 20)
    (tmp_path / "00000010" / place).mkdir(parents=True)
    with Checkpointer(tmp_path, keep_latest=1) as checkpointer:
        checkpointer.save(30, state(30))
        with pytest.warns(CheckpointWarning, match=r"00000010 is kept: .*mine is not part"):
            checkpointer.wait()
        assert checkpointer.steps() == [10, 30]
    assert (tmp_path / "00000010" / place).is_dir()


# ------------------------------------------------------------------ arguments


def test_another_configuration_is_refused_at_the_save(tmp_path):
    with Checkpointer(tmp_path, config={"seed": 1, "rate": 0.1}) as checkpointer:
        checkpointer.save(1, state(1))
    with Checkpointer(tmp_path, config={"seed": 2, "rate": 0.1}) as checkpointer:
        with pytest.raises(CheckpointMismatch, match="seed was 1 and is now 2"):
            checkpointer.save(2, state(2))
        assert checkpointer.steps() == [1]
        checkpointer.rewind(-1)
        assert checkpointer.save(2, state(2))
    with Checkpointer(tmp_path) as checkpointer:  # without one anything goes, as in restore
        assert checkpointer.save(3, state(3))


@pytest.mark.parametrize("dtype", ["uint2", "uint4", "float8_e4m3"])
@pytest.mark.parametrize("make", [jnp.zeros, np.zeros])
def test_types_that_orbax_cannot_write_are_refused_by_name(tmp_path, dtype, make):
    tree = {"fine": jnp.zeros(2), "q": make(3, jnp.dtype(dtype))}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=rf"\['q'\] is {dtype}\[3\].*cannot hold {dtype}"):
            checkpointer.save(1, tree)
        assert checkpointer.save(1, tree | {"q": make(3, jnp.int4)})
        assert_same(checkpointer.restore(tree | {"q": make(3, jnp.int4)})["fine"], tree["fine"])


def test_step_zero_is_replaced_as_the_message_says(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state(0))
        with pytest.raises(ValueError, match=r"call rewind\(-1\) first"):
            checkpointer.save(0, state(1) | {"step": jnp.int32(0)})
        checkpointer.rewind(-1)
        assert checkpointer.save(0, state(1))


def test_arguments_that_are_none(tmp_path):
    for directory, error in (("", ValueError), (b"dir", TypeError), (3, TypeError)):
        with pytest.raises(error, match=r"directory|os\.PathLike"):
            Checkpointer(directory)
    with pytest.raises(CheckpointWriteError, match="too long"):
        Checkpointer(tmp_path / ("x" * 300))
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with Checkpointer(path, read_only=True) as reader:
            assert reader.latest_step() is None and reader.steps() == []
            with pytest.raises(NoCheckpoint, match=r"is a file|does not exist"):
                reader.restore(LIKE)
    options = {"save_every": np.int64(2), "keep_latest": np.int64(2), "keep_every": np.int32(5)}
    with Checkpointer(tmp_path / "run", **options) as checkpointer:
        with pytest.raises(TypeError, match=r"metrics must be a dictionary.*\[1\]"):
            checkpointer.save(2, state(2), metrics=[1])
        with pytest.raises(TypeError, match=r"metadata must be a dictionary.*\[1\]"):
            checkpointer.save(2, state(2), metadata=[1])
        with pytest.raises(ValueError, match="'a' is beyond the range"):
            checkpointer.save(2, state(2), metrics={"a": 10**400})
        assert [checkpointer.save(step, state(step)) for step in (1, 2, 4, 6)] == [
            *(False, True, True, True)
        ]
        assert checkpointer.steps() == [4, 6]


# ------------------------------------------------------------------ threads


def test_steps_that_several_threads_save_are_all_there(tmp_path, monkeypatch):
    accepted, refused, inside, most = [], [], [], []
    real = checkpointing.snapshot

    def slow(tree):
        inside.append(None)
        time.sleep(0.005)  # in which another thread would come in between
        most.append(len(inside))
        inside.pop()
        return real(tree)

    monkeypatch.setattr(checkpointing, "snapshot", slow)
    with Checkpointer(tmp_path, keep_latest=None) as checkpointer:

        def save(first):
            for step in range(first, 30, 3):
                try:
                    if checkpointer.save(step, state(step)):
                        accepted.append(step)
                except ValueError as error:  # another thread has saved a later one
                    refused.append(str(error))

        threads = [threading.Thread(target=save, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert checkpointer.steps() == sorted(accepted)
        assert all("is below the newest" in text for text in refused)
    assert set(most) == {1}


def test_orbax_is_called_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """Also while a step is written in the background: two at once make saves fail at random."""
    inside, most = [], []

    def counted(function):
        def call(*arguments, **options):
            inside.append(None)
            most.append(len(inside))
            try:
                return function(*arguments, **options)
            finally:
                inside.pop()

        return call

    monkeypatch.setattr(orbax_arrays.v1, "save", counted(orbax_arrays.v1.save))
    monkeypatch.setattr(orbax_arrays.v1, "load", counted(orbax_arrays.v1.load))
    large = {"x": jnp.zeros(500_000)}
    fill(tmp_path / "read", 1)
    done = threading.Event()

    def read():
        while not done.is_set():
            with Checkpointer(tmp_path / "read", read_only=True) as reader:
                reader.restore(LIKE)

    reading = threading.Thread(target=read)
    reading.start()
    writers = [Checkpointer(tmp_path / name) for name in ("one", "two")]
    for step in range(8):
        for writer in writers:
            writer.save(step, large)
    for writer in writers:
        writer.close()
    done.set()
    reading.join()
    assert set(most) == {1} and len(most) > 16


def test_saving_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """The lock around Orbax is taken by the thread that writes, not by the one that computes."""
    release = threading.Event()
    real = orbax_arrays.v1.save

    def slow(*arguments, **options):
        assert release.wait(60)
        real(*arguments, **options)

    monkeypatch.setattr(orbax_arrays.v1, "save", slow)
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, state(1))
    assert not (tmp_path / "00000001").exists()
    jax.block_until_ready(jnp.ones(3) + 1)
    release.set()
    checkpointer.close()
    assert (tmp_path / "00000001").is_dir()


WARNED_AT = """
import sys
from yggdrax.checkpoint import Checkpointer
import os
os.mkdir(os.path.join(sys.argv[1], "00000003"))
with Checkpointer(sys.argv[1]) as checkpointer:
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.latest_step()
        checkpointer.steps()
print([os.path.basename(one.filename) for one in caught])
"""


def test_a_warning_points_at_the_line_of_the_program(tmp_path):
    result = python(WARNED_AT, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['<string>']"
    assert os.path.isdir(tmp_path / "00000003")
