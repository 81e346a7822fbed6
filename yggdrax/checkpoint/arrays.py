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
from collections.abc import Mapping

import numpy as np
from orbax.checkpoint import v1

__all__ = ["read_arrays", "write_arrays"]


def write_arrays(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes non-empty ``arrays`` as an Orbax checkpoint to ``folder``, which must not exist."""
    if not arrays:  # Orbax would warn; a state of nothing but scalars is legitimate
        folder.mkdir()
        return
    context = v1.Context()
    # Particles are noise to a compressor: half the writing time for a tenth more disk.
    context.array.saving.use_compression = False
    with context:
        v1.save(str(folder), dict(arrays))


def read_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads back what :func:`write_arrays` wrote, in the same dtypes."""
    with v1.Context():
        return v1.load(str(folder))
