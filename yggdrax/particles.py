"""Stacks of particles: draw them, and take the gradient of each particle's own loss.

The trap of the first day: the loss of an ensemble must be *summed* over its members. The gradient
of the *mean* of the losses is 1/N of the right one and silently targets p^(1/N), a posterior that
is far too wide. :func:`particle_grads` returns the gradients that ``svgd`` expects.
"""

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from yggdrax.sharding import rows_like
from yggdrax.targets.base import Target, check_scalar
from yggdrax.typing import Key, ParticleTree, PyTree, is_whole

__all__ = [
    "EqualParticlesWarning",
    "init_model_state",
    "init_particles",
    "particle_grads",
    "warn_if_equal",
]


class EqualParticlesWarning(UserWarning):
    """Some particles start equal, and equal particles can never separate."""


def init_particles(key: Key, target: Target, num_particles: int) -> ParticleTree:
    """Draws particles to start from, each with a key of its own.

    Args:
      key: a random key.
      target: any target with ``init(key)``, or with an ``init_many(key, N)`` of its own.
      num_particles: N, at least 1.

    Returns:
      A tree like one particle, with a leading axis N on every leaf.

    Raises:
      ValueError: if ``num_particles`` is not a positive integer.
      TypeError: for a target that is none, or a key that is none.

    Warns:
      EqualParticlesWarning: if the target draws equal particles, since equal particles get equal
        updates for ever. (Not checked inside ``jax.jit``.)

    Example:
      >>> from yggdrax.targets import Banana
      >>> init_particles(jax.random.key(0), Banana(), 100).shape
      (100, 2)
    """
    if not hasattr(target, "init_many"):
        raise TypeError(
            f"{target!r} has no init_many, so no particles can be drawn: wrap a plain function in "
            "yggdrax.LogDensity(function, init), or pass particles of your own."
        )
    check_key(key)
    # Compiled as one program: op by op, a network's initialisers take several times as long.
    particles = jax.jit(target.init_many, static_argnums=1)(key, _check_count(num_particles))
    warn_if_equal(particles, stacklevel=3)
    return particles


def warn_if_equal(particles: ParticleTree, *, stacklevel: int = 2) -> None:
    """Warns if two particles are equal in every number; silent on traced values.

    Of networks, whose particles have ``params`` beside leaves of the likelihood, the networks alone
    are looked at: members that differ in their noise only hardly separate.

    Warns:
      EqualParticlesWarning: with the number of different particles and the remedy.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings(record=True) as caught:
      ...     warnings.simplefilter("always")
      ...     warn_if_equal(jnp.array([[1.0], [2.0], [1.0]]))
      >>> str(caught[0].message).split(":")[0]
      'only 2 of 3 particles differ'
    """
    if isinstance(particles, Mapping) and "params" in particles:
        particles = particles["params"]
    leaves = jax.tree.leaves(particles)
    if any(isinstance(v, Tracer) or not getattr(v, "is_fully_addressable", True) for v in leaves):
        return
    num_particles = leaves[0].shape[0]
    rows = [np.ascontiguousarray(leaf).reshape(num_particles, -1) for leaf in leaves]
    # Equal particles have equal sums, so only those with a sum that is not their own are compared.
    sums = sum((row.sum(axis=1, dtype=np.float64) for row in rows), start=np.zeros(num_particles))
    _, first, counts = np.unique(sums, return_inverse=True, return_counts=True)
    alike = np.flatnonzero(counts[first] > 1)
    members = {b"".join(row[i].tobytes() for row in rows) for i in alike}
    different = num_particles - len(alike) + len(members)
    if different < num_particles:
        warnings.warn(
            f"only {different} of {num_particles} particles differ: equal particles get equal "
            "updates and can never separate. Draw each with a key of its own, as init_particles "
            "does for a target whose init uses its key, or add noise to them.",
            EqualParticlesWarning,
            stacklevel=stacklevel,
        )


def init_model_state(key: Key, target: Target, num_particles: int) -> PyTree:
    """The mutable collections (BatchNorm statistics, dropout counts) of N members.

    They are no particles: they enter no distance and get no update, but change in the forward pass.

    Returns:
      A tree with a leading axis N on every leaf; ``{}`` for a target without such collections.

    Raises:
      ValueError: if ``num_particles`` is not a positive integer.

    Example:
      >>> from yggdrax.targets import Banana
      >>> init_model_state(jax.random.key(0), Banana(), 100)
      {}
    """
    draw = jax.jit(jax.vmap(target.init_model_state))
    return draw(jax.random.split(key, _check_count(num_particles)))


@overload
def particle_grads(
    target: Target,
    particles: ParticleTree,
    batch: Any = None,
    *,
    key: Key | None = None,
    model_state: None = None,
    batch_axis: Literal[0] | None = None,
) -> ParticleTree: ...


@overload
def particle_grads(
    target: Target,
    particles: ParticleTree,
    batch: Any = None,
    *,
    key: Key | None = None,
    model_state: PyTree,
    batch_axis: Literal[0] | None = None,
) -> tuple[ParticleTree, PyTree]: ...


def particle_grads(
    target,
    particles,
    batch=None,
    *,
    key=None,
    model_state=None,
    batch_axis=None,
):
    """The gradient of each particle's own loss -log p: what ``svgd`` takes as updates.

    The losses are summed over the particles, never averaged: averaging targets p^(1/N).

    Args:
      target: a :class:`~yggdrax.targets.Target`, or any function ``(particle, batch, *, key)``.
      particles: a tree whose leaves have the leading axis N.
      batch: handed to the target; ``None`` for targets without data, or to use all of it.
      key: a random key, split so that each particle has its own (dropout, sampled minibatches).
      model_state: the members' mutable collections from :func:`init_model_state`; given one, the
        new one is returned as well.
      batch_axis: 0 if the batch has the leading axis N too, one batch for each particle.

    Returns:
      The gradients, shaped like ``particles``; with ``model_state`` the pair of gradients and the
      new model state.

    Raises:
      TypeError: for an integer leaf, by name, or a function that cannot be called like that.
      ValueError: if the target returns no scalar, if leading axes differ, or if the target has
        mutable collections and no ``model_state`` is given.

    Example:
      >>> from yggdrax.targets import Gaussian
      >>> particle_grads(Gaussian([0.0], 1.0), jnp.array([[1.0], [3.0]])).tolist()
      [[1.0], [3.0]]
    """
    num_particles = _check_particles(particles)
    _check_callable(target, batch, key)
    keys = None
    if key is not None:
        keys = rows_like(jax.random.split(key, num_particles), particles)
    if model_state is None and getattr(target, "needs_model_state", False):
        raise ValueError(
            f"{type(target).__name__} has mutable collections (such as BatchNorm statistics): pass "
            "model_state=init_model_state(key, target, num_particles) and keep the one returned."
        )

    def loss(particle, state, data, member_key):
        if state is None:
            value, new_state = target(particle, data, key=member_key), None
        else:
            value, new_state = target.apply(particle, state, data, key=member_key)
        return -check_scalar(value, "the log density"), new_state

    axes = (0, None if model_state is None else 0, batch_axis, None if key is None else 0)
    gradients, new_state = jax.vmap(jax.grad(loss, has_aux=True), in_axes=axes)(
        particles, model_state, batch, keys
    )
    return gradients if model_state is None else (gradients, new_state)


def _check_callable(target: Any, batch: Any, key: Any) -> None:
    """A plain function must take what a target takes."""
    if isinstance(target, Target) or not callable(target):
        return
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(target).bind(None, batch, key=key)
        except TypeError as error:
            raise TypeError(
                f"the target is called as target(particle, batch, key=key), which {target!r} does "
                f"not take ({error}): wrap a function of the particle in "
                "yggdrax.LogDensity(function, init)."
            ) from None


def check_key(key: Any) -> None:
    """Raises a TypeError for what cannot be a random key, such as a seed."""
    if isinstance(key, (int, float, str, type(None))):
        raise TypeError(f"key must be a random key, such as jax.random.key(0), not {key!r}.")


def _check_count(num_particles: int) -> int:
    if not is_whole(num_particles, 1):
        raise ValueError(
            f"num_particles must be a positive integer, not {num_particles!r}: choose at least 1."
        )
    return int(num_particles)


def _check_particles(particles: ParticleTree) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(particles)
    if not leaves:
        raise ValueError("particles is an empty tree: it needs at least one leaf of shape (N, ...)")
    sizes = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "the particles"
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"leaf {name} has dtype {jnp.result_type(leaf)}: particles must be floating; keep "
                "integers in the target instead."
            )
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"leaf {name} is a scalar: every leaf needs the leading axis N.")
        sizes[name] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        raise ValueError(f"the leading axes differ, and each must be N: {sizes}.")
    num_particles = next(iter(sizes.values()))
    if num_particles == 0:
        raise ValueError("there are 0 particles: the leading axis N must be at least 1.")
    return num_particles
