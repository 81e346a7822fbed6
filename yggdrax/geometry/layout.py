"""The shape of a tree, from the number of particles and the leaf size alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.typing import Array

__all__ = ["Layout"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["num"],
    meta_fields=["rows", "depth", "leaf"],
)
@dataclasses.dataclass(frozen=True)
class Layout:
    """A complete binary tree of ``2 ** depth`` equal leaves.

    A *slot* is a place for one particle; leaf ``b`` owns the slots ``[b * leaf, (b + 1) * leaf)``,
    so leaves tile all slots disjointly. Every split gives the left child ``ceil(n / 2)`` of the
    ``n`` particles, so the counts of all nodes are known before any position is, and two leaves
    differ by one particle at most. The slots left over are empty and come last in their leaf.

    Nodes are numbered as in a heap: node ``b`` of level ``l`` is ``2 ** l + b``, its children are
    ``2 * id`` and ``2 * id + 1``, and number 0 is unused.

    Example:
      >>> layout = Layout.of(5, leaf_size=2)
      >>> layout.leaves, layout.leaf, layout.counts(2).tolist()
      (4, 2, [2, 1, 1, 1])
    """

    num: int | Array
    """Particles. A traced number up to ``rows`` serves too; rows behind it are then ignored."""
    rows: int
    """Rows of the arrays of particles."""
    depth: int
    leaf: int
    """Slots of a leaf."""

    @classmethod
    def of(cls, num: int, leaf_size: int) -> "Layout":
        """The smallest tree whose leaves hold at most ``leaf_size`` particles.

        Raises:
          ValueError: if there are no particles or the leaf size is not positive.
        """
        if num < 1:
            raise ValueError(f"a tree needs at least one particle, not {num}.")
        if leaf_size < 1:
            raise ValueError(f"leaf_size must be a positive integer, not {leaf_size}.")
        depth = 0
        while -(-num // 2**depth) > leaf_size:
            depth += 1
        return cls(num, num, depth, -(-num // 2**depth))

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return 2**self.depth

    @property
    def slots(self) -> int:
        """Number of places, at least ``rows``."""
        return self.leaves * self.leaf

    @property
    def nodes(self) -> int:
        """Length of an array over all heap numbers, including the unused number 0."""
        return 2 * self.leaves

    def counts(self, level: int) -> Array:
        """Particles in each node of a level, ``(2 ** level,)`` int32."""
        # n particles dealt out one by one to 2^level nodes in the order of their reversed bits.
        return (jnp.asarray(self.num, jnp.int32) + (2**level - 1 - _reversed_bits(level))) >> level

    def heap_counts(self) -> Array:
        """Particles in every node by heap number, ``(nodes,)`` int32; 0 for the unused one."""
        levels = [self.counts(level) for level in range(self.depth + 1)]
        return jnp.concatenate([jnp.zeros(1, jnp.int32), *levels])

    def filled(self) -> Array:
        """Which slots hold a particle, ``(leaves, leaf)`` bool."""
        return jnp.arange(self.leaf) < self.counts(self.depth)[:, None]


@functools.lru_cache(maxsize=64)
def _reversed_bits(level: int) -> np.ndarray:
    """The numbers below ``2 ** level`` with their bits in reverse, int32."""
    reversed_bits = np.zeros(1, np.int32)
    for _ in range(level):
        reversed_bits = np.concatenate([2 * reversed_bits, 2 * reversed_bits + 1])
    reversed_bits.setflags(write=False)
    return reversed_bits
