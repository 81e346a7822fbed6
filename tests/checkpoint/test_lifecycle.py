"""Directories: found again, resumed, copied, cluttered, damaged, and never robbed of a file."""

import os
import shutil
import tarfile

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.common import assert_same
from yggdrax.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    CheckpointWarning,
    CheckpointWriteError,
    NoCheckpoint,
)


def state(value):
    # 300 values: shorter arrays are stored inside a compressed index, where no byte is theirs.
    return {"x": jnp.full((300,), float(value)), "step": jnp.int32(value)}


LIKE = state(0)


def fill(directory, *steps, **options):
    with Checkpointer(directory, keep_latest=None, **options) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, state(step))


def files(directory):
    """Returns every file below a directory with its bytes."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


# ------------------------------------------------------------------ where


def test_relative_directories_and_home_are_resolved_once(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Checkpointer("runs/one") as checkpointer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpointer.save(1, state(1))
        assert checkpointer.directory == tmp_path / "runs/one"
    with Checkpointer("~/runs/one") as checkpointer:
        monkeypatch.chdir(tmp_path)
        assert_same(checkpointer.restore(LIKE), state(1))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_url_is_refused():
    with pytest.raises(ValueError, match="gs://bucket/run"):
        Checkpointer("gs://bucket/run")


def test_a_step_folder_says_which_directory_is_meant(tmp_path):
    fill(tmp_path, 7)
    with pytest.raises(ValueError, match=f"Open {tmp_path} and restore step 7"):
        Checkpointer(tmp_path / "00000007")


def test_an_empty_directory_says_that_there_is_no_checkpoint(tmp_path):
    with Checkpointer(tmp_path / "new") as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(NoCheckpoint, match=r"There is no checkpoint in .*new"):
            checkpointer.restore(LIKE)
    missing = tmp_path / "missing"
    with (
        Checkpointer(missing, read_only=True) as checkpointer,
        pytest.raises(FileNotFoundError, match="does not exist"),
    ):
        checkpointer.restore(LIKE)
    assert not missing.exists()


def test_the_run_folder_points_to_its_checkpoints(tmp_path):
    fill(tmp_path / "checkpoints", 1)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(NoCheckpoint, match=f"Did you mean {tmp_path / 'checkpoints'}"),
    ):
        checkpointer.restore(LIKE)


def test_a_missing_step_lists_those_that_are_there(tmp_path):
    fill(tmp_path, 3, 6)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(NoCheckpoint, match=r"no step 4 in .*; there are \[3, 6\]"):
            checkpointer.restore(LIKE, step=4)
        with pytest.raises(NoCheckpoint, match="no step 4"):
            checkpointer.metadata(4)
        assert_same(checkpointer.restore(LIKE, step=3), state(3))


def test_a_directory_copied_tarred_or_renamed_restores(tmp_path):
    fill(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(tmp_path / "run", arcname="untarred")
    with tarfile.open(tmp_path / "run.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    os.rename(tmp_path / "run", tmp_path / "renamed")
    for name in ("copy", "untarred", "renamed"):
        with Checkpointer(tmp_path / name) as checkpointer:
            assert_same(checkpointer.restore(LIKE), state(2))
            assert checkpointer.save(3, state(3))
            assert_same(checkpointer.restore(LIKE), state(3))


# ------------------------------------------------------------------ which step


def test_the_same_step_twice(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(5, state(5))
        assert not checkpointer.save(5, state(5))  # the very same state: nothing to do
        changed = state(5) | {"x": jnp.full((300,), 5.0).at[2].set(6.0)}
        with pytest.raises(ValueError, match=r"Step 5 is already saved .* \['x'\].*rewind\(4\)"):
            checkpointer.save(5, changed)
        with pytest.raises(CheckpointMismatch, match=r"\['step'\]"):
            checkpointer.save(5, state(5) | {"step": jnp.float32(5)})
        assert_same(checkpointer.restore(LIKE), state(5))
        checkpointer.rewind(4)
        assert checkpointer.latest_step() is None
        assert checkpointer.save(5, changed)
        assert_same(checkpointer.restore(LIKE), changed)


def test_a_smaller_step_is_an_error_until_rewound(tmp_path):
    fill(tmp_path, 10, 20, 30)
    before = files(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"Step 15 is below the newest .* is 30.*rewind\(15\)"):
            checkpointer.save(15, state(15))
        with pytest.raises(ValueError, match="Step 15 is below"):
            checkpointer.save(15, state(15), force=True)
        assert files(tmp_path).keys() == before.keys()
        checkpointer.rewind(15)
        assert checkpointer.steps() == [10]
        assert checkpointer.save(15, state(15))
        assert_same(checkpointer.restore(LIKE), state(15))


def test_a_rerun_in_an_old_directory_is_an_error_not_a_mixture(tmp_path):
    fill(tmp_path, 100)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="new directory"):
            checkpointer.save(0, state(0))
        assert checkpointer.steps() == [100]


@pytest.mark.parametrize("step, error", [(-1, ValueError), (1.5, TypeError), (True, ValueError)])
def test_steps_that_are_none(tmp_path, step, error):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(error, match="step"):
        checkpointer.save(step, state(0))


def test_steps_may_be_arrays_and_large(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(jnp.int32(3), state(3))
        checkpointer.save(np.int64(10**9), state(4))
        assert checkpointer.steps() == [3, 10**9]
        assert_same(checkpointer.restore(LIKE), state(4))


def test_a_closed_or_read_only_checkpointer_saves_nothing(tmp_path):
    fill(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    for call in (lambda: checkpointer.save(2, state(2)), checkpointer.latest_step):
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    with Checkpointer(tmp_path, read_only=True) as reader:
        for call in (lambda: reader.save(2, state(2)), lambda: reader.rewind(0)):
            with pytest.raises(RuntimeError, match="read_only=True"):
                call()
        assert_same(reader.restore(LIKE), state(1))


# ------------------------------------------------------------------ strays and damage


def empty_folder(path):
    path.mkdir()


def foreign_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def a_file(path):
    path.write_text("mine")


def a_dangling_link(path):
    path.symlink_to("nowhere")


def half_copied(path):
    shutil.copytree(path.with_name("00000020"), path)
    (path / "yggdrax.json").unlink()


def from_another_step(path):
    shutil.copytree(path.with_name("00000020"), path)


def truncated_manifest(path):
    shutil.copytree(path.with_name("00000020"), path)
    text = (path / "yggdrax.json").read_text()
    (path / "yggdrax.json").write_text(text[: len(text) // 2])


STRAYS = [
    empty_folder,
    foreign_folder,
    a_file,
    a_dangling_link,
    half_copied,
    from_another_step,
    truncated_manifest,
]


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_step_is_skipped_said_so_and_kept(tmp_path, stray):
    fill(tmp_path, 10, 20)
    stray(tmp_path / "00000030")
    mine = files(tmp_path / "00000030")
    with Checkpointer(tmp_path, keep_latest=2) as checkpointer:
        with pytest.warns(CheckpointWarning, match=r"00000030.*skipped"):
            assert checkpointer.latest_step() == 20
        assert_same(checkpointer.restore(LIKE), state(20))
        assert checkpointer.save(25, state(25))
        with pytest.warns(CheckpointWarning, match="now 00000030.aside"):
            assert checkpointer.save(30, state(30))
        checkpointer.wait()
        assert checkpointer.steps() == [25, 30]
        assert_same(checkpointer.restore(LIKE), state(30))
    assert os.path.lexists(tmp_path / "00000030.aside")
    assert files(tmp_path / "00000030.aside") == mine
    if stray in (a_file, a_dangling_link):
        assert not (tmp_path / "00000030.aside").is_dir()


def largest_file(folder):
    return max(
        (path for path in folder.rglob("*") if path.is_file() and path.name != "yggdrax.json"),
        key=lambda path: path.stat().st_size,
    )


def truncated(folder):
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def emptied(folder):
    largest_file(folder).write_bytes(b"")


def removed(folder):
    largest_file(folder).unlink()


def flipped(folder):
    # The last byte of the values themselves; the file keeps its size.
    needle = np.full(300, 20.0, np.float32).tobytes()
    hits = [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]
    for path in hits:
        path.write_bytes(path.read_bytes().replace(needle, needle[:-1] + b"\x42"))
    assert hits


def manifest_altered(folder):
    path = folder / "yggdrax.json"
    path.write_text(path.read_text().replace('"float32"', '"float16"'))


@pytest.mark.parametrize("damage", [truncated, emptied, removed, flipped, manifest_altered])
def test_a_damaged_step_is_skipped_and_the_run_goes_on(tmp_path, damage):
    fill(tmp_path, 10, 20)
    damage(tmp_path / "00000020")
    kept = files(tmp_path / "00000020")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointDamaged, match="00000020"):
            checkpointer.restore(LIKE, step=20)
        with pytest.warns(CheckpointWarning, match=r"00000020.*skipped"):
            assert_same(checkpointer.restore(LIKE), state(10))
        assert checkpointer.restored_step == 10
        assert checkpointer.latest_step() == 10
        assert checkpointer.save(15, state(15))
        with pytest.warns(CheckpointWarning, match="now 00000020.aside"):
            checkpointer.save(20, state(21))
        assert_same(checkpointer.restore(LIKE), state(21))
    assert files(tmp_path / "00000020.aside") == kept


def test_two_strays_of_one_step_are_both_kept(tmp_path):
    for text in ("one", "two"):
        (tmp_path / "00000003").mkdir()
        (tmp_path / "00000003" / "notes.txt").write_text(text)
        with Checkpointer(tmp_path) as checkpointer:
            with pytest.warns(CheckpointWarning, match="not a whole checkpoint|skipped"):
                checkpointer.save(3, state(3))
            checkpointer.wait()
            checkpointer.rewind(0)
    assert (tmp_path / "00000003.aside" / "notes.txt").read_text() == "one"
    assert (tmp_path / "00000003.aside-2" / "notes.txt").read_text() == "two"


def test_a_later_format_is_refused_by_name_and_not_skipped(tmp_path):
    fill(tmp_path, 10, 20)
    path = tmp_path / "00000020" / "yggdrax.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with Checkpointer(tmp_path) as checkpointer:
        for call in (checkpointer.latest_step, lambda: checkpointer.restore(LIKE)):
            with pytest.raises(CheckpointError, match="format version 3"):
                call()
        assert_same(checkpointer.restore(LIKE, step=10), state(10))


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path):
    fill(tmp_path, 10)
    scratch = tmp_path / ".yggdrax-tmp"
    for name in ("00000020-0123456789ab/step", "00000020-0123456789ac/step.orbax-checkpoint-tmp"):
        (scratch / name / "state").mkdir(parents=True)
    (scratch / "mine").mkdir()
    (scratch / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "results.csv").write_text("mine")
    (tmp_path / "20").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [10]
    assert {path.name for path in scratch.iterdir()} == {"mine"}
    assert (scratch / "mine" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "results.csv").read_text() == "mine"
    assert (tmp_path / "20").is_dir()


def test_a_file_put_into_an_old_step_keeps_that_step(tmp_path):
    fill(tmp_path, 10, 20)
    (tmp_path / "00000010" / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path, keep_latest=1) as checkpointer:
        checkpointer.save(30, state(30))
        with pytest.warns(CheckpointWarning, match=r"00000010 is kept: notes\.txt"):
            checkpointer.wait()
        assert checkpointer.steps() == [10, 30]
        with pytest.raises(CheckpointWriteError, match=r"notes\.txt"):
            checkpointer.rewind(0)
    assert (tmp_path / "00000010" / "notes.txt").read_text() == "mine"
