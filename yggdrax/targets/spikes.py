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


class SpikeWarning(UserWarning):
    """The density of weights and of the scale of their prior, sampled together, has a spike."""


def find_spikes(log_density: Callable[[PyTree], Any], particle: PyTree) -> dict[str, float]:
    """Scalar leaves that, with all other leaves at zero, raise the density without reason.

    In a centred hierarchy the density of n weights at zero grows as ``precision ** (n / 2)``.
    So each leaf with one number is moved on its own, all leaves with more numbers being zero.

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
    weights = sum(leaf.size for leaf in leaves if leaf.size != 1)
    scalars = [i for i, leaf in enumerate(leaves) if leaf.size == 1]
    if not weights or not scalars:
        return {}
    at_zero = [leaf if leaf.size == 1 else jnp.zeros_like(leaf) for leaf in leaves]

    def moved(index, shift):
        values = [
            leaf + shift * (index == i) if i in scalars else leaf for i, leaf in enumerate(at_zero)
        ]
        return log_density(jax.tree.unflatten(structure, values))

    shifts = jnp.linspace(-_REACH, _REACH, 61)
    grid = jax.vmap(jax.vmap(moved, (None, 0)), (0, None))
    values = np.asarray(jax.jit(grid)(jnp.asarray(scalars), shifts))
    values = np.where(np.isfinite(values), values, -np.inf)
    gains = values.max(axis=1) - float(log_density(particle))
    return {
        "/".join(str(getattr(key, "key", key)) for key in paths[i][0]): float(gain)
        for i, gain in zip(scalars, gains, strict=True)
        if gain > _GAIN_PER_NUMBER * weights + _GAIN
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
