"""States spread over several processes: all write and read their own shards through Orbax.

A step is one Orbax checkpoint, to which every process adds the shards that it holds. What was
saved does not say how many processes there were: each reads the parts of the arrays that it needs.
A digest of the whole array cannot be had where nobody holds it; instead every array has a checksum
that is a sum over its elements, each with its place, so each process adds up its own.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from yggdrax.checkpoint import arrays as orbax_arrays
from yggdrax.checkpoint import folder as folders
from yggdrax.checkpoint.errors import CheckpointDamaged
from yggdrax.checkpoint.manifest import Entry, array_names, check_storable, describe, is_key
from yggdrax.processes import Group

__all__ = [
    "checksum",
    "first_difference_together",
    "is_spread",
    "load_together",
    "save_together",
    "spread_snapshot",
]

# Elements whose places are computed at a time.
_CHUNK = 1 << 20


def checksum(array: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The share of one box in the checksum of an array; the shares of its boxes add up.

    Args:
      array: the box.
      start: where it starts.
      shape: of the whole array.

    Returns:
      A sum modulo 2 ** 64.

    Example:
      >>> whole = np.arange(12.0).reshape(4, 3)
      >>> parts = [checksum(whole[:1], (0, 0), (4, 3)), checksum(whole[1:], (1, 0), (4, 3))]
      >>> sum(parts) % 2**64 == checksum(whole, (0, 0), (4, 3))
      True
    """
    array = np.ascontiguousarray(array)
    size = array.dtype.itemsize
    if size > 8:  # complex128: two numbers an element
        array, start, shape = (
            array.reshape(*array.shape, 1).view(np.uint64),
            (*start, 0),
            (*shape, 2),
        )
    else:
        array = array.reshape(array.shape or (1,)).view(f"u{size}")
        start, shape = start or (0,), shape or (1,)
    total = 0
    rows = max(1, _CHUNK // max(1, int(np.prod(array.shape[1:]))))
    for first in range(0, len(array), rows):
        part = array[first : first + rows]
        place = _places((start[0] + first, *start[1:]), part.shape, shape)
        total += int(np.sum(_mixed(place, part.astype(np.uint64)), dtype=np.uint64))
    return total % 2**64


def _places(start, box: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The number of every element of a box in the flat array."""
    places = np.zeros((1,) * len(box), np.uint64)
    stride = 1
    for axis in reversed(range(len(box))):
        line = (np.arange(box[axis], dtype=np.uint64) + np.uint64(start[axis])) * np.uint64(stride)
        places = places + line.reshape((-1,) + (1,) * (len(box) - 1 - axis))
        stride *= shape[axis]
    return places


def _mixed(place: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """A number from a place and a value that changes all over if a bit of either does."""
    z = place * np.uint64(0x9E3779B97F4A7C15) + (bits ^ np.uint64(0xD6E8FEB86659FD93))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def spread_snapshot(tree: Any) -> tuple[list[Entry], list[Any]]:
    """The entries of a tree and, for each, the array behind it: global ones as they are.

    Raises:
      TypeError: a leaf that a checkpoint cannot hold.
      ValueError: a leaf that was donated.
    """
    entries, arrays, leaves = [], [], iter(jax.tree.leaves(tree))
    for entry in describe(tree):
        leaf: Any = None if entry.kind == "node" else next(leaves)
        check_storable(entry)
        if entry.kind == "key":
            entry = dataclasses.replace(entry, detail=str(jax.random.key_impl(leaf)))
            leaf = jax.random.key_data(leaf)
        if entry.kind in ("node", "python"):
            leaf = None
        elif not is_spread(leaf):
            leaf = np.array(leaf, copy=True, order="C")
        entries.append(entry)
        arrays.append(leaf)
    return entries, arrays


def is_spread(leaf: Any) -> bool:
    """Whether an array is spread over several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _boxes(array: Any, leads: bool) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """What this process adds to the checksum of an array: every element once over all processes."""
    if not is_spread(array):
        if leads:
            yield np.asarray(array), (0,) * np.ndim(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            bounds = zip(shard.index, array.shape, strict=True)
            yield np.asarray(shard.data), tuple(s.indices(size)[0] for s, size in bounds)


def _checksums(group: Group, arrays: dict[str, Any]) -> dict[str, int]:
    """The checksum of every array, added up over the processes."""
    mine = {
        name: sum(checksum(b, start, np.shape(array)) for b, start in _boxes(array, group.leads))
        for name, array in arrays.items()
    }
    everybody = group.gather(mine)
    return {name: sum(one[name] for one in everybody) % 2**64 for name in arrays}


def save_together(
    group: Group, root: pathlib.Path, manifest: folders.Manifest, arrays: list[Any]
) -> None:
    """Writes one step with the shards of all processes; returns when it is whole."""
    names = array_names(manifest.entries)
    stored = {name: arrays[index] for name, index in names.items()}
    work = pathlib.Path(group.lead(lambda: str(folders.new_scratch(root, manifest.step) / "step")))
    checksums = _checksums(group, stored)
    orbax_arrays.write_arrays(work, stored)
    shapes = {name: list(np.shape(array)) for name, array in stored.items()}
    record = {name: {"checksum": checksums[name], "shape": shapes[name]} for name in stored}
    group.lead(lambda: folders.finish_step(root, work, manifest.of_processes(record)) and None)


def first_difference_together(
    group: Group, manifest: folders.Manifest, arrays: list[Any]
) -> str | None:
    """The name of the first array that differs from what processes saved, or None."""
    names = array_names(manifest.entries)
    checksums = _checksums(group, {name: arrays[index] for name, index in names.items()})
    for name, index in names.items():
        if checksums[name] != (manifest.arrays or {})[name]["checksum"]:
            return manifest.entries[index].name or "the state"
    return None


def load_together(
    group: Group, path: pathlib.Path, manifest: folders.Manifest, like: list[Any]
) -> list[Any]:
    """Reads a step that several processes wrote, each array where ``like`` has it.

    Args:
      group: the processes that read, one of which is this.
      path: of the step.
      manifest: of the step.
      like: for each entry the program's own leaf, or None.

    Returns:
      For each entry an array (of typed keys their data), or None.

    Raises:
      CheckpointDamaged: an array cannot be read, or is not what was written.
    """
    record = manifest.arrays or {}
    names = array_names(manifest.entries)
    wanted = {}
    for name, index in names.items():
        leaf = jax.random.key_data(like[index]) if is_key(like[index]) else like[index]
        dtype = jax.numpy.dtype("uint32" if is_key(like[index]) else manifest.entries[index].dtype)
        if is_spread(leaf):
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        else:
            wanted[name] = np.broadcast_to(np.zeros((), dtype), record[name]["shape"])
    stored, problem = {}, None
    try:
        stored = orbax_arrays.read_arrays(path, wanted) if wanted else {}
    except MemoryError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many types for a broken file
        problem = f"{path} cannot be read: {(str(error).splitlines() or [''])[0][:300]}"
    problems = [other for other in group.gather(problem) if other]
    if problems:
        raise CheckpointDamaged(problems[0])
    arrays: list[Any] = [None] * len(like)
    for name, value in _checksums(group, stored).items():
        entry = manifest.entries[names[name]]
        if value != record[name]["checksum"]:
            raise CheckpointDamaged(f"{path}: {entry.name or 'the state'} is not what was saved")
        arrays[names[name]] = stored[name]
    return arrays
