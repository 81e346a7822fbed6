"""One step, one folder: written whole or not at all, checked when read, deleted only if ours.

Layout of a run's directory::

    00000060/            a step: an Orbax checkpoint that `orbax.checkpoint.v1.load` reads too,
      yggdrax.json       and our manifest, written last
    .yggdrax-tmp/        steps being written or deleted; leftovers of a kill are removed
    .yggdrax-lock        carries the lock
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from yggdrax.checkpoint import arrays as orbax_arrays
from yggdrax.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointWriteError
from yggdrax.checkpoint.manifest import Entry, array_names, digest

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "Manifest",
    "clean_scratch",
    "delete_step",
    "finish_step",
    "looks_like_a_run",
    "make_room",
    "new_scratch",
    "numbered_folders",
    "read_manifest",
    "read_step",
    "step_folder",
    "write_step",
]

FORMAT = "yggdrax-checkpoint"
FORMAT_VERSION = 1
# A step that several processes wrote, whose arrays have checksums instead of digests.
FORMAT_VERSION_TOGETHER = 2
MANIFEST = "yggdrax.json"
SCRATCH = ".yggdrax-tmp"

_LEFTOVER = re.compile(r"\d{8,}-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step folder says of itself.

    Attributes:
      step: number of steps completed when it was saved.
      entries: the saved tree.
      files: relative path and size of every other file in the folder.
      metrics: numbers given to ``save``.
      metadata: the caller's own JSON value given to ``save``.
      config: the configuration of the run, or None.
      settings: machine, versions and options at the time of saving.
      time: seconds since 1970.
      arrays: of a step that several processes wrote, checksum and shape of every array.
    """

    step: int
    entries: list[Entry]
    files: dict[str, int]
    metrics: dict[str, float]
    metadata: dict[str, Any]
    config: dict[str, Any] | None
    settings: dict[str, Any]
    time: float
    arrays: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        """The version of the format that holds this."""
        return FORMAT_VERSION if self.arrays is None else FORMAT_VERSION_TOGETHER

    def of_processes(self, arrays: dict[str, Any]) -> "Manifest":
        """The same with the record of arrays that several processes wrote."""
        return dataclasses.replace(self, arrays=arrays)

    def dumps(self) -> str:
        """Returns the text of the manifest file, which carries its own digest."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["entries"] = [entry.to_json() for entry in self.entries]
        if self.arrays is None:
            del content["arrays"]
        head = {"format": FORMAT, "version": self.version, "sha256": _content_digest(content)}
        return json.dumps(head | {"content": content}, indent=1)


def _content_digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def step_folder(root: pathlib.Path, step: int) -> pathlib.Path:
    """Returns where step ``step`` is or would be."""
    return root / f"{step:08d}"


def numbered_folders(root: pathlib.Path) -> list[int]:
    """Returns the steps for which there is something of the right name, whole or not, ascending."""
    steps = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in root.iterdir():
            if re.fullmatch(r"\d{8,}", path.name) and step_folder(root, int(path.name)) == path:
                steps.append(int(path.name))
    return sorted(steps)


def looks_like_a_run(folder: pathlib.Path) -> bool:
    """Whether a folder holds at least one step with a manifest."""
    with contextlib.suppress(OSError):
        steps = numbered_folders(folder)
        return any((step_folder(folder, step) / MANIFEST).is_file() for step in steps)
    return False


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads the manifest of a step and checks that every file is there in its full size.

    Raises:
      CheckpointDamaged: something is missing, truncated or altered; the message says what.
      CheckpointError: a later version of yggdrax wrote it.
    """
    try:
        record = json.loads((folder / MANIFEST).read_text())
        recognised = record["format"] == FORMAT
        version = record["version"]
    except OSError as error:
        raise CheckpointDamaged(f"{folder} has no readable {MANIFEST}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{folder / MANIFEST} is not a whole manifest") from error
    if not recognised:
        raise CheckpointDamaged(f"{folder / MANIFEST} was not written by yggdrax")
    if version not in (FORMAT_VERSION, FORMAT_VERSION_TOGETHER):
        raise CheckpointError(
            f"{folder} has format version {version}, and this yggdrax reads versions "
            f"{FORMAT_VERSION} and {FORMAT_VERSION_TOGETHER}. Use the yggdrax that wrote it, or "
            f"a later one."
        )
    try:
        content = record["content"]
        if record["sha256"] != _content_digest(content):
            raise ValueError("digest")
        entries = [Entry.from_json(entry) for entry in content.pop("entries")]
        manifest = Manifest(entries=entries, **content)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{folder / MANIFEST} was altered after it was written") from error
    if step_folder(folder.parent, manifest.step).name != folder.name:
        raise CheckpointDamaged(f"{folder} holds step {manifest.step}")
    for name, size in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointDamaged(f"{folder / name} is missing") from error
        if found != size:
            raise CheckpointDamaged(f"{folder / name} has {found} bytes instead of {size}")
    return manifest


def read_step(folder: pathlib.Path, manifest: Manifest) -> list[np.ndarray | None]:
    """Reads the arrays of a step and checks the digest of each.

    Returns:
      One array for each entry; None for those that are not stored.

    Raises:
      CheckpointDamaged: an array cannot be read, or is not what was written.
    """
    names = array_names(manifest.entries)
    try:
        stored = orbax_arrays.read_arrays(folder) if names else {}
    except MemoryError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many types for a broken file
        raise CheckpointDamaged(f"{folder} cannot be read: {_first_line(error)}") from error
    arrays: list[np.ndarray | None] = [None] * len(manifest.entries)
    for name, index in names.items():
        entry = manifest.entries[index]
        array = stored.get(name)
        if array is None or digest(array) != entry.sha256:
            raise CheckpointDamaged(f"{folder}: {entry.name or 'the state'} is not what was saved")
        arrays[index] = array
    return arrays


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def write_step(
    root: pathlib.Path, manifest: Manifest, arrays: Sequence[np.ndarray | None]
) -> Manifest:
    """Writes one step beside the others and gives it its name when it is whole and on the disk.

    Args:
      root: the run's directory.
      manifest: all but ``files`` and the digests of the arrays.
      arrays: one for each entry.

    Returns:
      The completed manifest.

    Raises:
      OSError: or whatever Orbax raises; nothing but the scratch folder was touched.
    """
    names = array_names(manifest.entries)
    entries = list(manifest.entries)
    stored = {}
    for name, index in names.items():
        array = arrays[index]
        assert array is not None
        entries[index] = dataclasses.replace(entries[index], sha256=digest(array))
        stored[name] = array
    # A disk that is full or read-only shows here, before Orbax has started its threads.
    work = new_scratch(root, manifest.step) / "step"
    orbax_arrays.write_arrays(work, stored)
    return finish_step(root, work, dataclasses.replace(manifest, entries=entries))


def finish_step(root: pathlib.Path, work: pathlib.Path, manifest: Manifest) -> Manifest:
    """Adds the manifest to a step whose arrays are written, and gives the step its name."""
    manifest = dataclasses.replace(manifest, files=_files(work))
    (work / MANIFEST).write_text(manifest.dumps())
    _flush(work)
    os.rename(work, step_folder(root, manifest.step))
    _flush_one(root)
    shutil.rmtree(work.parent, ignore_errors=True)
    return manifest


def new_scratch(root: pathlib.Path, step: int) -> pathlib.Path:
    """Makes a folder for a step that is being written or deleted."""
    folder = root / SCRATCH / f"{step:08d}-{secrets.token_hex(6)}"
    if folder.parent.is_symlink():
        raise CheckpointWriteError(
            f"{folder.parent} is a symbolic link, and steps are written in a folder of that name. "
            f"Remove the link."
        )
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()
    return folder


def _files(folder: pathlib.Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def _flush(folder: pathlib.Path) -> None:
    """Makes sure that a folder survives a power failure before its name says that it is whole."""
    for path in (*folder.rglob("*"), folder):
        _flush_one(path)


def _flush_one(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_step(root: pathlib.Path, step: int) -> str | None:
    """Deletes a step that this program wrote.

    Returns:
      None if it was deleted, else the reason why it stays: it is not a whole step of ours, or
      holds files or folders that its manifest does not list.
    """
    folder = step_folder(root, step)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return f"{error}; it is kept."
    foreign = sorted(_everything(folder) - _listed(manifest))
    if foreign or folder.is_symlink():
        return f"{folder} is kept: {foreign[0] if foreign else 'the link'} is not part of it."
    # Renamed first, so that a kill in the middle leaves a leftover and no half step.
    scratch = new_scratch(root, step)
    os.rename(folder, scratch / "step")
    shutil.rmtree(scratch)
    return None


def _everything(folder: pathlib.Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _listed(manifest: Manifest) -> set[str]:
    """The files of a step and the folders that hold them."""
    files = [pathlib.PurePosixPath(name) for name in (MANIFEST, *manifest.files)]
    return {path.as_posix() for file in files for path in (file, *file.parents)}


def make_room(root: pathlib.Path, step: int) -> str | None:
    """Moves aside what stands where a step is to go; it must not be a whole step of ours.

    Returns:
      What was moved, or None if there was nothing.

    Raises:
      CheckpointWriteError: it cannot be moved.
    """
    path = step_folder(root, step)
    if not os.path.lexists(path):
        return None
    suffixes = ("aside", *(f"aside-{n}" for n in range(2, 10_000)))
    targets = (path.with_name(f"{path.name}.{suffix}") for suffix in suffixes)
    target = next(target for target in targets if not os.path.lexists(target))
    try:
        os.rename(path, target)
    except OSError as error:
        raise CheckpointWriteError(
            f"{path} is in the way of step {step} and cannot be moved: {error.strerror}. "
            f"Move it away by hand."
        ) from error
    return f"{path} was not a whole checkpoint; it is now {target.name}."


def clean_scratch(root: pathlib.Path) -> None:
    """Removes what a killed or failed write left behind, by its name and place."""
    with contextlib.suppress(OSError):  # what cannot be removed now can be removed later
        folder = root / SCRATCH
        for path in () if folder.is_symlink() else folder.iterdir():  # a link is not ours
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
