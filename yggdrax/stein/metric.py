r"""In which coordinates the kernel measures: scales, chosen leaves, a kernel for each part.

With z = w x for a weight w per coordinate, the kernel k(z, z') has in x the gradient w times that
in z. So phi of the scores S is f times the plain sum in z with scores S / f, where f = w, and f = 1
where w = 0: such a coordinate is left out of the distances, and is moved by the attraction alone.
Every engine serves unchanged.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from yggdrax.stein.leaves import ParticleLayout
from yggdrax.typing import Array, ParticleTree, PyTree

__all__ = ["RunningScale", "chosen_leaves", "scale_weights"]


@dataclasses.dataclass(frozen=True)
class RunningScale:
    """Whitening by the particles' own spread: z = x / sigma, one sigma for each coordinate.

    The variance over the particles is averaged over steps with weight ``decay`` (0: the current
    step alone) and corrected for its start, as in Adam.

    Args:
      decay: in [0, 1).
      floor: smallest sigma, in the units of the particles.

    Raises:
      ValueError: for a decay or floor out of range.
    """

    decay: float = 0.9
    floor: float = 1e-6

    def __post_init__(self):
        """Validates both numbers."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), not {self.decay!r}.")
        if not self.floor > 0:
            raise ValueError(f"floor must be positive, not {self.floor!r}.")

    def init(self, particles: ParticleTree, dtype) -> PyTree:
        """The running variances, zero: like one particle, in the dtype of the sums."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], dtype), particles)

    def update(self, variances: PyTree, particles: ParticleTree, step: Array):
        """Returns ``(new variances, sigma)``, each like one particle; ``step`` counts from 0."""

        def average(old, leaf):
            leaf = leaf.astype(old.dtype)
            return self.decay * old + (1 - self.decay) * jnp.var(leaf, axis=0)

        variances = jax.tree.map(average, variances, particles)
        weight = 1 - self.decay ** (step.astype(jnp.float32) + 1)

        def sigma(variance):
            # The floor goes inside the root, whose derivative at 0 is infinite.
            corrected = variance / weight.astype(variance.dtype)
            return jnp.sqrt(jnp.maximum(corrected, self.floor**2))

        return variances, jax.tree.map(sigma, variances)


def scale_weights(layout: ParticleLayout, scale: PyTree) -> list[Array]:
    """``1 / scale`` for every leaf, each of shape ``(d_l,)``.

    ``scale`` is a number, an array for a particle that is a single array, or a tree like one
    particle (its leaves may broadcast).

    Raises:
      ValueError: if it fits none of these.
      TypeError: for text.
    """
    leaves = jax.tree.leaves(scale)
    if any(isinstance(leaf, (str, bytes)) for leaf in leaves):
        raise TypeError(f"scale must be one number or a tree of numbers, not {scale!r}.")
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(scale)) and jnp.ndim(scale) == 0:
        leaves = leaves * len(layout.shapes)
    elif jax.tree.structure(scale) != layout.structure:
        raise ValueError(
            "scale must be one number or a tree like one particle.\n"
            f"  scale: {jax.tree.structure(scale)}\n  particles: {layout.structure}"
        )
    weights = []
    for leaf, shape in zip(leaves, layout.shapes, strict=True):
        try:
            full = jnp.broadcast_to(jnp.asarray(leaf, layout.dtype), shape[1:])
        except ValueError:
            raise ValueError(
                f"a scale of shape {jnp.shape(leaf)} does not fit particles of shape {shape[1:]}."
            ) from None
        weights.append(1 / full.reshape(-1))
    return weights


def chosen_leaves(
    layout: ParticleLayout, particles: ParticleTree, names: Sequence[str]
) -> list[bool]:
    """Which leaves enter the distances: those whose path has one of ``names`` as a whole step.

    Raises:
      ValueError: for a name that matches no leaf; the paths there are get listed.
    """
    paths = [
        [_step(key) for key in path]
        for path, _ in jax.tree_util.tree_flatten_with_path(particles)[0]
    ]
    for name in names:
        if not any(_matches(path, name) for path in paths):
            listed = ", ".join("/".join(path) for path in paths)
            raise ValueError(f"no leaf of the particles is named {name!r}: there are {listed}.")
    return [any(_matches(path, name) for name in names) for path in paths]


def _step(key) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _matches(path: list[str], name: str) -> bool:
    wanted = name.split("/")
    length = len(wanted)
    return any(path[i : i + length] == wanted for i in range(len(path) - length + 1))
