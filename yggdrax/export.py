"""Particles leave the framework: NumPy archives and ArviZ.

For serving a network, ``BayesianNetwork.flax_state`` gives the plain Flax state of its members.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from yggdrax.typing import PyTree

__all__ = ["leaf_names", "load_npz", "save_npz", "to_arrays", "to_arviz"]


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


def load_npz(path: str | os.PathLike, like: PyTree = None) -> Any:
    """Reads what :func:`save_npz` or a run wrote.

    Args:
      path: the archive.
      like: particles of the same structure, such as ``init_particles(key, target, 1)``; N may
        differ.

    Returns:
      A dictionary of arrays by name; with ``like`` the particles, in its structure and dtypes.

    Raises:
      ValueError: if names or shapes of one particle differ from those of ``like``.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_npz(f"{folder}/p.npz", {"a": np.ones((5, 2))})
      ...     load_npz(f"{folder}/p.npz", like={"a": jax.numpy.zeros((1, 2))})["a"].shape
      (5, 2)
    """
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if like is None:
        return arrays
    names = leaf_names(like)
    if set(names) != set(arrays):
        raise ValueError(f"{path} holds the leaves {sorted(arrays)}, not {sorted(names)}.")
    leaves = []
    for name, leaf in zip(names, jax.tree.leaves(like), strict=True):
        if arrays[name].shape[1:] != np.shape(leaf)[1:]:
            raise ValueError(
                f"{path}: one particle's {name} has shape {arrays[name].shape[1:]}, not "
                f"{np.shape(leaf)[1:]}."
            )
        leaves.append(jax.numpy.asarray(arrays[name], jax.numpy.result_type(leaf)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def to_arviz(
    particles: PyTree,
    *,
    posterior_predictive: Mapping[str, Any] | None = None,
    log_likelihood: Mapping[str, Any] | None = None,
    observed_data: Mapping[str, Any] | None = None,
) -> Any:
    """Particles as ``arviz.InferenceData``: one chain, one draw for each particle.

    Variables are named by their path, joined by dots, such as ``params.hidden.kernel``. Particles
    are no Markov chain: effective sample sizes and R-hat computed from them mean nothing.

    Args:
      particles: a tree whose leaves have the leading axis N.
      posterior_predictive: arrays (N, ...) by name, such as the ``members`` of a prediction.
      log_likelihood: arrays (N, rows) by name, the log density of each row under each particle.
      observed_data: arrays by name.

    Raises:
      ImportError: without ArviZ, naming the extra.
      ValueError: if two leaves would get one name, or leading axes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> to_arviz({"w": jnp.zeros((5, 2))}).posterior["w"].shape
      (1, 5, 2)
    """
    try:
        with warnings.catch_warnings():
            # Announces its next major version, which the extra excludes, when first imported.
            warnings.simplefilter("ignore", FutureWarning)
            import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ: python -m pip install 'yggdrax[arviz]'") from error
    posterior = {name.replace("/", "."): leaf for name, leaf in to_arrays(particles).items()}
    given = {
        "posterior": posterior,
        "posterior_predictive": posterior_predictive,
        "log_likelihood": log_likelihood,
    }
    groups: dict[str, Any] = {
        group: _one_chain(group, arrays) for group, arrays in given.items() if arrays
    }
    sizes = {array.shape[1] for arrays in groups.values() for array in arrays.values()}
    if len(sizes) > 1:
        raise ValueError(f"leading axes differ, and each must be N: found {sorted(sizes)}.")
    if observed_data:
        groups["observed_data"] = {name: np.asarray(v) for name, v in observed_data.items()}
    return arviz.from_dict(**groups)


def _one_chain(group: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    scalars = [name for name, array in arrays.items() if np.ndim(array) == 0]
    if scalars:
        raise ValueError(f"{group} holds scalars, which have no leading axis N: {scalars}.")
    return {name: np.asarray(array)[None] for name, array in arrays.items()}
