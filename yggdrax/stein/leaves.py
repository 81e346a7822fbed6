"""Particle trees as the matrices that engines work on, and back."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from yggdrax.stein.pairs import Leaves
from yggdrax.typing import Array, ParticleTree

__all__ = ["ParticleLayout", "layout_of"]

# Up to this dimension the leaves of a particle are put side by side in one (N, d) array, which
# every engine can serve; beyond, the exact engine takes them leaf by leaf.
JOIN_DIMENSIONS = 256


@dataclasses.dataclass(frozen=True)
class ParticleLayout:
    """How a tree of particles maps to matrices. Static: shapes and dtypes only."""

    structure: Any
    """The tree, a ``PyTreeDef``."""
    shapes: tuple[tuple[int, ...], ...]
    num_particles: int
    dtype: jnp.dtype
    """The dtype of distances and sums: float32 at least."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers per particle in each leaf."""
        return tuple(math.prod(shape[1:]) for shape in self.shapes)

    @property
    def dimension(self) -> int:
        """d, all leaves together."""
        return sum(self.sizes)

    def matrices(self, tree: ParticleTree) -> list[Array]:
        """Every leaf as a matrix ``(N, d_l)`` in the dtype of the sums."""
        return [
            jnp.asarray(leaf).astype(self.dtype).reshape(self.num_particles, size)
            for leaf, size in zip(jax.tree.leaves(tree), self.sizes, strict=True)
        ]

    def join(self, matrices: Sequence[Array], *, always: bool = False) -> Leaves:
        """What engines take: one ``(N, d)`` matrix if d is small (or ``always``), else the leaves.

        Empty leaves are left out.
        """
        if always or self.dimension <= JOIN_DIMENSIONS:
            return (jnp.concatenate(list(matrices), axis=1),)
        return tuple(matrix for matrix in matrices if matrix.shape[1])

    def matrix(self, tree: ParticleTree) -> Array:
        """All leaves side by side, ``(N, d)``, whatever d."""
        return self.join(self.matrices(tree), always=True)[0]

    def split(self, joined: Leaves) -> list[Array]:
        """The inverse of :meth:`join`."""
        if len(joined) == 1:
            ends = list(itertools.accumulate(self.sizes))[:-1]
            return jnp.split(joined[0], ends, axis=1)
        rest = iter(joined)
        empty = jnp.zeros((self.num_particles, 0), self.dtype)
        return [next(rest) if size else empty for size in self.sizes]

    def tree(self, matrices: Sequence[Array], like: ParticleTree) -> ParticleTree:
        """The inverse of :meth:`matrices`, in the structure and dtypes of ``like``."""
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(
            structure,
            [
                matrix.reshape(shape).astype(jnp.asarray(leaf).dtype)
                for matrix, shape, leaf in zip(matrices, self.shapes, leaves, strict=True)
            ],
        )


def _named(key: str) -> str:
    return f"leaf {key}" if key else "the array"


def layout_of(particles: ParticleTree) -> ParticleLayout:
    """Validates a tree of particles and returns its layout.

    Raises:
      ValueError: without a leaf, for N = 0, without or with differing leading axes.
      TypeError: for a leaf that is not floating; the message names it.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(particles)
    if not named:
        raise ValueError("particles have no leaves: pass arrays with a leading axis N.")
    arrays: list[tuple[str, Array]] = [
        (jax.tree_util.keystr(path), jnp.asarray(leaf)) for path, leaf in named
    ]
    for key, leaf in arrays:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"particles must be floating, but {_named(key)} has dtype {leaf.dtype}: keep it "
                "out of the particles, or convert it."
            )
        if leaf.ndim == 0:
            raise ValueError(f"{_named(key)} has no leading axis N: its shape is ().")
    first, n = arrays[0][0], arrays[0][1].shape[0]
    for key, leaf in arrays:
        if leaf.shape[0] != n:
            raise ValueError(
                f"leaves disagree in the number of particles: {first} has {n}, {key} has "
                f"{leaf.shape[0]} (the leading axis of every leaf is N)."
            )
    if n == 0:
        raise ValueError("there are no particles: the leading axis has length 0.")
    layout = ParticleLayout(
        structure=structure,
        shapes=tuple(leaf.shape for _, leaf in arrays),
        num_particles=n,
        dtype=jnp.result_type(jnp.float32, *(leaf.dtype for _, leaf in arrays)),
    )
    if layout.dimension == 0:
        raise ValueError("particles have dimension 0: every leaf is empty.")
    return layout


def check_like(layout: ParticleLayout, particles: ParticleTree, other: ParticleTree, what: str):
    """Raises ValueError, naming both sides, unless ``other`` has the particles' tree and shapes.

    Raises TypeError for leaves that are not floating.
    """
    structure = jax.tree.structure(other)
    if structure != layout.structure:
        raise ValueError(
            f"{what} and particles are different trees.\n  {what}: {structure}\n"
            f"  particles: {layout.structure}"
        )
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(particles)[0]]
    for path, shape, leaf in zip(paths, layout.shapes, jax.tree.leaves(other), strict=True):
        if jnp.shape(leaf) != shape:
            where = _named(jax.tree_util.keystr(path))
            raise ValueError(
                f"{what} and particles differ in shape at {where}: {jnp.shape(leaf)} "
                f"against {shape}. Each particle has a gradient of its own (leading axis N)."
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            where = _named(jax.tree_util.keystr(path))
            raise TypeError(f"{what} must be floating, but are {jnp.result_type(leaf)} at {where}.")
