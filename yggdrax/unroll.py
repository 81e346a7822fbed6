"""Whole runs as functions: to draw samples, and to differentiate through."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from yggdrax.particles import check_key, init_particles, particle_grads, warn_if_equal
from yggdrax.transform import SvgdState, get_state, svgd
from yggdrax.typing import Array, Key, ParticleTree, PyTree, is_whole

__all__ = ["Samples", "Unrolled", "sample", "unrolled"]


class Samples(NamedTuple):
    """What :func:`sample` returns."""

    particles: ParticleTree
    """The particles after the last step, leading axis N."""
    state: SvgdState
    """The state of ``svgd``: bandwidth, status bits, measured error."""
    opt_state: PyTree
    """The whole optimizer state, to go on from."""


def sample(
    target: Any,
    key: Key,
    num_particles: int,
    num_steps: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    batch: PyTree = None,
    particles: ParticleTree = None,
) -> Samples:
    """Draws particles and moves them onto a target: a whole run in one call, one compiled loop.

    Args:
      target: a target module; with ``particles`` also whatever :func:`yggdrax.particle_grads`
        takes. A plain function becomes a target by ``LogDensity(function, init)``.
      key: a random key; one key of its own for each particle is derived from it.
      num_particles: N.
      num_steps: number of updates.
      optimizer: an Optax chain that contains ``svgd``; by default
        ``optax.chain(svgd("median"), optax.adam(0.1))``.
      batch: data for targets that take them, the same at every step.
      particles: where to start; by default ``init_particles(key, target, num_particles)``.

    Returns:
      :class:`Samples`; call :func:`yggdrax.check` on its ``opt_state`` for advice on status bits.

    Raises:
      ValueError: if N or the number of steps is out of range, or the optimizer holds no ``svgd``.
      TypeError: for a key that is none, or a function that is no target.

    Example:
      >>> import jax, yggdrax as yg
      >>> run = sample(yg.Gaussian([1.0], [[4.0]]), jax.random.key(0), 50, 200)
      >>> f"{float(run.particles.mean()):.1f}"
      '1.0'
    """
    _check_steps(num_steps)
    check_key(key)
    if optimizer is None:
        optimizer = optax.chain(svgd("median"), optax.adam(0.1))
    if particles is None:
        particles = init_particles(key, target, num_particles)
    else:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(particles)}
        if rows != {(num_particles,)}:
            raise ValueError(
                f"num_particles is {num_particles}, but the leading axes of particles are {rows}."
            )
        warn_if_equal(particles, stacklevel=3)
    opt_state = optimizer.init(particles)
    get_state(opt_state)

    @jax.jit
    def run(particles, opt_state):
        return unrolled(
            target,
            optimizer,
            particles,
            num_steps,
            opt_state=opt_state,
            batch=batch,
            key=jax.random.fold_in(key, 1),
            checkpoint=False,
        )

    particles, opt_state = run(particles, opt_state)
    return Samples(particles, get_state(opt_state), opt_state)


class Unrolled(NamedTuple):
    """What :func:`unrolled` returns."""

    particles: ParticleTree
    """The particles after the last step, leading axis N."""
    opt_state: PyTree
    """The whole optimizer state; give it to :func:`yggdrax.check` outside jit."""


def unrolled(
    target: Any,
    optimizer: optax.GradientTransformation,
    particles: ParticleTree,
    num_steps: int,
    *,
    opt_state: PyTree = None,
    batch: PyTree | Callable[[Array], PyTree] = None,
    key: Key | None = None,
    checkpoint: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Unrolled:
    r"""A run of ``num_steps`` updates as a function to differentiate through.

    ``jax.grad`` of any loss of the final particles reaches every number that went in: bandwidth,
    scales and temperature given to ``svgd``, learning rates, the initial particles, and the
    target's own parameters. What is discrete (the order of particles, tiles, near and far lists,
    mode counts, the pair that is the median) is held fixed at each step: the gradient is that of
    what was computed. ``docs/differentiable.md`` says what happens where it changes.

    Reverse mode only, once: the sum has an adjoint of its own (``jax.custom_vjp``), and JAX refuses
    ``jax.jvp`` and ``jax.jacfwd`` of it with a ``TypeError``.

    With ``checkpoint`` the backward pass keeps the particles and the optimizer state of each step
    and computes the rest of the step again (``jax.checkpoint``): memory grows with the steps times
    the particles, never with the pairs. ``policy`` keeps more (``jax.checkpoint_policies``), such
    as ``dots_saveable`` for a network whose forward pass is dear.

    Args:
      target: a target module, or whatever :func:`yggdrax.particle_grads` takes. Its parameters may
        be traced.
      optimizer: an Optax chain that contains ``svgd``, built inside the function that is
        differentiated if its numbers are to be learned.
      particles: where to start, leaves (N, ...).
      num_steps: number of updates, static.
      opt_state: to go on from; by default ``optimizer.init(particles)``.
      batch: data for targets that take them, or a traceable function of the step, counted from 0.
      key: noise for targets that take a key; split into one for each step.
      checkpoint: recompute each step in the backward pass.
      policy: what is kept besides, for ``jax.checkpoint``.

    Returns:
      :class:`Unrolled`. A status bit that was set inside stays in ``opt_state``: call
      :func:`yggdrax.check` on it outside jit, since a gradient through a step that was not finite
      is not finite either.

    Raises:
      ValueError: for a negative number of steps, or an optimizer without ``svgd``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, yggdrax as yg
      >>> target, start = yg.Gaussian([0.0], 1.0), jnp.linspace(-1.0, 1.0, 8)[:, None]
      >>> def width(h):
      ...     tx = optax.chain(yg.svgd(h), optax.sgd(0.5))
      ...     return yg.unrolled(target, tx, start, 20).particles.std()
      >>> f"{jax.grad(width)(0.5):.2f}"
      '0.24'
    """
    _check_steps(num_steps)
    if opt_state is None:
        opt_state = optimizer.init(particles)
    get_state(opt_state)
    keys = None if key is None else jax.random.split(key, num_steps)

    def step(carry, each):
        particles, opt_state = carry
        index, noise_key = each
        data = batch(index) if callable(batch) else batch
        grads = particle_grads(target, particles, data, key=noise_key)
        updates, opt_state = optimizer.update(grads, opt_state, particles)
        return (optax.apply_updates(particles, updates), opt_state), None

    if checkpoint:
        # Inside a scan nothing can be merged across steps, so nothing needs to be prevented.
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    (particles, opt_state), _ = jax.lax.scan(step, (particles, opt_state), (steps, keys))
    return Unrolled(particles, opt_state)


def _check_steps(num_steps: Any) -> None:
    if isinstance(num_steps, Tracer):
        raise TypeError("num_steps must be static, but is traced: unrolled has a fixed length.")
    if not is_whole(num_steps, 0):
        raise ValueError(f"num_steps must be an integer, not negative, but is {num_steps!r}.")
