"""Particles leave the framework: NumPy archives, ArviZ, plain trees for serving."""

import os
from collections.abc import Mapping

import jax
import numpy as np

from yggdrax.typing import PyTree

__all__ = ["leaf_names", "load_npz", "save_npz", "to_arrays"]


def leaf_names(tree: PyTree) -> list[str]:
    """One name a leaf, from its path in the tree, in the order of ``jax.tree.leaves``.

    Example:
      >>> leaf_names({"params": {"hidden": {"kernel": 0.0}}, "log_noise_precision": 0.0})
      ['log_noise_precision', 'params/hidden/kernel']
      >>> leaf_names(1.0)
      ['particles']
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return ["/".join(_name(entry) for entry in path) or "particles" for path in paths]


def _name(entry) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def to_arrays(particles: PyTree) -> dict[str, np.ndarray]:
    """The leaves as NumPy arrays by name; bfloat16 becomes float32, which NumPy can store.

    Raises:
      ValueError: if two leaves would get one name.
    """
    names = leaf_names(particles)
    if len(set(names)) != len(names):
        raise ValueError(f"two leaves share a name among {names}: rename one of them.")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(particles)]
    return {
        name: leaf.astype(np.float32) if leaf.dtype.name == "bfloat16" else leaf
        for name, leaf in zip(names, leaves, strict=True)
    }


def save_npz(path: str | os.PathLike, particles: PyTree) -> None:
    """Writes one array a leaf, (N, ...), under names such as ``params/hidden/kernel``.

    The file is written beside its place first and then moved there, so a reader never sees half.
    """
    path = os.fspath(path)
    temporary = f"{path}.partial"
    with open(temporary, "wb") as file:
        np.savez(file, **to_arrays(particles))  # pyright: ignore[reportArgumentType]
    os.replace(temporary, path)


def load_npz(path: str | os.PathLike) -> Mapping[str, np.ndarray]:
    """Reads an archive back as a dictionary of arrays by name."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}
