"""A small engine for tests: the whole (N, N, d) array, differentiated plainly, quick to compile."""

import dataclasses

import jax.numpy as jnp

from yggdrax.stein.engine import Engine, SteinSum


@dataclasses.dataclass(frozen=True)
class Dense(Engine):
    """The sum as its definition reads."""

    def stein(self, x, s, h, kernel):
        """phi from all differences at once."""
        difference = (x[:, None] - x) / h
        u = jnp.sum(difference**2, -1)
        attraction = jnp.einsum("ij,jd->id", kernel.kappa(0, u), s, precision="highest")
        repulsion = jnp.einsum("ij,ijd->id", kernel.kappa(1, u), difference, precision="highest")
        return SteinSum((attraction + repulsion / h) / len(x), jnp.zeros((), jnp.int32))
