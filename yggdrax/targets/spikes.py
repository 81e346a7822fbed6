"""Densities with a spike: a warning where weights and their scale are sampled together, centred."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.typing import PyTree

__all__ = ["SpikeWarning", "find_spikes", "warn_of_spikes"]

# How far a leaf is moved, in its own unconstrained units: as a log precision, e^15.
_REACH = 15.0
# A density of n numbers with fixed scales gains about n / 2 from typical values to its highest
# point, and some more with a Student's t. What gains more than this for each number is a spike.
_GAIN_PER_NUMBER, _GAIN = 1.5, 10.0
# A leaf of more numbers than this, or of most of them, holds weights and no scales.
_MOST_SCALES = 64


class SpikeWarning(UserWarning):
    """The density of weights and of the scale of their prior, sampled together, has a spike."""


def find_spikes(log_density: Callable[[PyTree], Any], particle: PyTree) -> dict[str, float]:
    """Small leaves that, with all the weights at zero, raise the density without reason.

    In a centred hierarchy the density of n weights at zero grows as ``precision ** (n / 2)``.
    So each leaf that may hold scales (one number, or up to 64, such as one a layer) is moved as a
    whole, all other leaves with more than one number being zero.

    Args:
      log_density: of one particle, a scalar.
      particle: typical values, such as a draw of the prior; a nested dictionary.

    Returns:
      For every leaf with a spike its name and the gain of the log density over ``particle``.

    Example:
      >>> def centred(p):  # weights of precision exp(t), which has the prior Gamma(1, 0.1)
      ...     prior = p["t"] - 0.1 * jnp.exp(p["t"])
      ...     return prior + 50 * p["t"] - 0.5 * jnp.exp(p["t"]) * jnp.sum(p["w"] ** 2)
      >>> list(find_spikes(centred, {"t": jnp.zeros(()), "w": jnp.ones(100)}))
      ['t']
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(particle)
    leaves = [jnp.asarray(leaf) for _, leaf in paths]
    numbers = sum(leaf.size for leaf in leaves)
    weights = [numbers - leaf.size for leaf in leaves]  # what each would be the scale of
    scales = [
        i
        for i, leaf in enumerate(leaves)
        if 1 <= leaf.size <= _MOST_SCALES and weights[i] > leaf.size
    ]
    if not scales:
        return {}
    at_rest = [leaf if leaf.size == 1 else jnp.zeros_like(leaf) for leaf in leaves]

    def moved(index_and_shift):
        index, shift = index_and_shift
        values = [
            jnp.where(index == i, leaf + shift, rest) if i in scales else rest
            for i, (leaf, rest) in enumerate(zip(leaves, at_rest, strict=True))
        ]
        return log_density(jax.tree.unflatten(structure, values))

    shifts = np.linspace(-_REACH, _REACH, 61, dtype=np.float32)
    grid = np.repeat(scales, len(shifts)), np.tile(shifts, len(scales))
    # One after the other: a batch of them would hold as many copies of a large network.
    values = np.asarray(
        jax.jit(lambda grid: jax.lax.map(moved, grid))(jax.tree.map(jnp.asarray, grid))
    )
    values = np.where(np.isfinite(values), values, -np.inf).reshape(len(scales), -1)
    gains = values.max(axis=1) - float(log_density(particle))
    return {
        "/".join(str(getattr(key, "key", key)) for key in paths[i][0]): float(gain)
        for i, gain in zip(scales, gains, strict=True)
        if gain > _GAIN_PER_NUMBER * weights[i] + _GAIN
    }


def warn_of_spikes(
    log_density: Callable[[PyTree], Any], particle: PyTree, *, stacklevel: int = 2
) -> None:
    """Warns of every leaf that :func:`find_spikes` finds in a target or prior of your own.

    Warns:
      SpikeWarning: naming the leaves and the remedies.
    """
    spikes = find_spikes(log_density, particle)
    if spikes:
        named = ", ".join(f"{name} (log density higher by {v:.0f})" for name, v in spikes.items())
        warnings.warn(
            f"the density has a spike at zero weights, reached by moving {named}: weights and the "
            "scale of their prior seem to be sampled together, centred, and on long runs few "
            "particles fall in. Fix or bound the scale, integrate it out, or sample weights of "
            "unit scale and multiply them by it.",
            SpikeWarning,
            stacklevel=stacklevel + 1,
        )
