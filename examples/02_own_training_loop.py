"""SVGD in training loops that people have already: plain Optax, TrainState, nnx.Optimizer.

The three loops take the same steps and end in the same particles.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import yggdrax as yg

STEPS = 200


def optimizer() -> optax.GradientTransformation:
    """One link of the chain turns gradients into the SVGD direction; any optimizer may follow."""
    return optax.chain(yg.svgd("median"), optax.adam(0.05))


def plain(target, particles):
    """A loop over ``update`` and ``apply_updates``."""
    tx = optimizer()
    opt_state = tx.init(particles)

    @jax.jit
    def step(particles, opt_state):
        # One gradient for each particle: summed losses, not averaged ones.
        grads = yg.particle_grads(target, particles)
        updates, opt_state = tx.update(grads, opt_state, particles)
        return optax.apply_updates(particles, updates), opt_state

    for _ in range(STEPS):
        particles, opt_state = step(particles, opt_state)
    yg.check(opt_state)
    return particles


def with_train_state(target, particles):
    """Flax's ``TrainState``."""
    # TrainState wants a dictionary.
    state = TrainState.create(apply_fn=None, params={"x": particles}, tx=optimizer())

    @jax.jit
    def step(state):
        return state.apply_gradients(grads={"x": yg.particle_grads(target, state.params["x"])})

    for _ in range(STEPS):
        state = step(state)
    return state.params["x"]


class Members(nnx.Module):
    """The stack of particles as a module, for ``nnx.Optimizer``."""

    def __init__(self, particles):
        """Keeps the particles as parameters."""
        self.x = nnx.Param(particles)


def with_nnx_optimizer(target, particles):
    """``nnx.Optimizer`` over a module whose parameters have the leading axis N."""
    members = Members(particles)
    tx = nnx.Optimizer(members, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(members, tx):
        # A state of the same structure; jax.tree.map makes new variables of it.
        params = nnx.state(members, nnx.Param)
        grads = jax.tree.map(lambda x: yg.particle_grads(target, x), params)
        tx.update(members, grads)

    for _ in range(STEPS):
        step(members, tx)
    return members.x[...]


def main() -> None:
    """Runs the three loops from one start."""
    target = yg.Gaussian([1.0, -1.0], [[1.0, 0.6], [0.6, 2.0]])
    start = yg.init_particles(jax.random.key(0), target, 50)
    results = [loop(target, start) for loop in (plain, with_train_state, with_nnx_optimizer)]
    for particles in results:
        difference = jnp.abs(particles - results[0]).max()
        print("mean", particles.mean(0), "largest difference", difference)


if __name__ == "__main__":
    main()
