"""Whole runs as functions."""

from typing import Any, NamedTuple

import jax
import optax

from yggdrax.particles import init_particles, particle_grads
from yggdrax.transform import SvgdState, get_state, svgd
from yggdrax.typing import Key, ParticleTree, PyTree

__all__ = ["Samples", "sample"]


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
      target: a target module (or whatever :func:`yggdrax.particle_grads` takes).
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

    Example:
      >>> import jax, yggdrax as yg
      >>> run = sample(yg.Gaussian([1.0], [[4.0]]), jax.random.key(0), 50, 200)
      >>> f"{float(run.particles.mean()):.1f}"
      '1.0'
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative, but is {num_steps}.")
    if optimizer is None:
        optimizer = optax.chain(svgd("median"), optax.adam(0.1))
    if particles is None:
        particles = init_particles(key, target, num_particles)
    opt_state = optimizer.init(particles)
    get_state(opt_state)

    @jax.jit
    def run(particles, opt_state):
        def step(carry, noise_key):
            particles, opt_state = carry
            grads = particle_grads(target, particles, batch, key=noise_key)
            updates, opt_state = optimizer.update(grads, opt_state, particles)
            return (optax.apply_updates(particles, updates), opt_state), None

        keys = jax.random.split(jax.random.fold_in(key, 1), num_steps)
        return jax.lax.scan(step, (particles, opt_state), keys)[0]

    particles, opt_state = run(particles, opt_state)
    return Samples(particles, get_state(opt_state), opt_state)
