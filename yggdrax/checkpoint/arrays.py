"""The only calls of Orbax: a flat dictionary of NumPy arrays to a folder and back.

The v1 interface is where Orbax's authors are going, and it still moves, so it is pinned in
pyproject.toml and used in this file alone. Of all it offers only the plain saving and loading of
one folder is used. The sequence of steps (names, what to keep, half-written and stray folders,
weak types, scalars, empty arrays, checks of shapes) is this package's own: version 0.12.8 refuses
NumPy scalars and empty arrays, leaves temporary folders behind, forgets weak types, casts to the
dtype of a template silently, returns False for a step below the newest and takes an empty folder
for the latest step.
"""

import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
from orbax.checkpoint import v1

__all__ = ["read_arrays", "write_arrays"]

# Two operations of Orbax at a time in one process disturb each other: it keeps their state in
# globals, and now and then one of them fails.
_one_operation = threading.Lock()


def write_arrays(folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Writes non-empty ``arrays`` as an Orbax checkpoint to ``folder``, which must not exist.

    With several processes all call it together, and arrays that are spread over them are written
    by all.
    """
    if not arrays:  # Orbax would warn; a state of nothing but scalars is legitimate
        folder.mkdir(exist_ok=jax.process_count() > 1)
        return
    context = v1.Context()
    # Particles are noise to a compressor: half the writing time for a tenth more disk.
    context.array.saving.use_compression = False
    with _one_operation, context:
        v1.save(str(folder), dict(arrays))


def read_arrays(folder: pathlib.Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads back what :func:`write_arrays` wrote, in the same dtypes.

    Args:
      folder: the checkpoint.
      like: for each array an array or ``jax.ShapeDtypeStruct`` that says where it goes; NumPy
        arrays for all if None. With several processes all call it together.
    """
    with _one_operation, v1.Context():
        return v1.load(str(folder), None if like is None else dict(like))
