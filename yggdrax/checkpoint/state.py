"""From a step on the disk to a state, and whether a state is what a step holds."""

import pathlib
from typing import Any

import jax

from yggdrax.checkpoint import folder as folders
from yggdrax.checkpoint.folder import Manifest
from yggdrax.checkpoint.manifest import array_names, compare, digest, rebuild, rebuild_spread
from yggdrax.checkpoint.together import first_difference_together, is_spread, load_together
from yggdrax.processes import Group

__all__ = ["difference", "read_state"]


def read_state(group: Group, path: pathlib.Path, manifest: Manifest, like: Any) -> Any:
    """Reads the state of a step into the containers of ``like``, already compared with it.

    Raises:
      CheckpointDamaged: an array cannot be read, or is not what was saved.
    """
    leaves, structure = jax.tree.flatten(like)
    rest = iter(leaves)
    likes = [None if entry.kind == "node" else next(rest) for entry in manifest.entries]
    if manifest.arrays is None:
        arrays = folders.read_step(path, manifest)
    else:
        arrays = load_together(group, path, manifest, likes)
    restored = [
        rebuild_spread(entry, array, leaf) if is_spread(array) else rebuild(entry, array, leaf)
        for entry, array, leaf in zip(manifest.entries, arrays, likes, strict=True)
        if entry.kind != "node"
    ]
    return jax.tree.unflatten(structure, restored)


def difference(
    group: Group, path: pathlib.Path, entries: list[Any], arrays: list[Any]
) -> str | None:
    """The name of the first entry of a state that differs from what a step holds, or None.

    Raises:
      CheckpointMismatch: the state is another tree.
    """
    manifest = folders.read_manifest(path)
    saved = manifest.entries
    compare(saved, entries, str(path))
    if manifest.arrays is not None:
        return first_difference_together(group, manifest, arrays)
    names = array_names(entries)
    for index, (old, new) in enumerate(zip(saved, entries, strict=True)):
        # With several processes nobody holds the whole of an array that one process wrote.
        stored = index in names.values() and group.count == 1
        if old.detail != new.detail or (stored and digest(arrays[index]) != old.sha256):
            return new.name or "the state"
    return None
