"""Learn SVGD's bandwidth, and a scale for each dimension, by gradients through whole runs.

    python examples/05_learn_bandwidth.py [--loss=ksd] [--dimension=5]

An ordinary Optax loop: the loss is a function of the particles after 30 steps of
``chain(svgd, adam)``, and ``jax.grad`` goes through all of them: 60 outer steps for each of three
sets of numbers, some minutes on two cores (``--num-particles=200 --outer-steps=20`` for a first
look). The target is a Gaussian with variances from 1 to 9, the particles start narrower than its
narrowest axis.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import yggdrax as yg

INNER_STEPS = 30


def main() -> None:
    """Prints widths and losses: median rule, learned bandwidth, learned scales."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=("mmd", "ksd"), default="mmd")
    parser.add_argument("--dimension", type=int, default=2)
    parser.add_argument("--num-particles", type=int, default=1000)
    parser.add_argument("--outer-steps", type=int, default=60)
    args = parser.parse_args()

    widths = jnp.linspace(1.0, 3.0, args.dimension)
    target = yg.Gaussian(jnp.zeros(args.dimension), jnp.diag(widths**2))
    start = 0.5 * jax.random.normal(jax.random.key(0), (args.num_particles, args.dimension))
    held_out = target.sample(jax.random.key(1), 2000)

    def run(bandwidth="median", scale=None):
        tx = optax.chain(yg.svgd(bandwidth, scale=scale), optax.adam(0.3))
        return yg.unrolled(target, tx, start, INNER_STEPS).particles

    def discrepancy(particles):
        # The loss has a kernel of its own, of fixed width: as wide as the target.
        if args.loss == "ksd":
            return yg.ksd_squared(particles, -yg.particle_grads(target, particles), 2.0)
        return yg.mmd_squared(particles, held_out, 2.0)

    def loss(learned):
        learned = jax.tree.map(jnp.exp, learned)  # positive, whatever the optimizer does
        return discrepancy(run(**learned))

    def show(name, particles):
        text = " ".join(f"{width:.2f}" for width in particles.std(0))
        print(f"{name:32s} {args.loss}^2 {discrepancy(particles):.2e}  widths {text}", flush=True)

    followed = jax.jit(run)()
    show("median rule of the start", jax.jit(run)(yg.MedianRule().bandwidth((start,))))
    show("median rule at each step", followed)

    scale = {"scale": jnp.zeros(args.dimension)}
    # Learning begins at the scale of the particles that the median rule ends in. Far below it the
    # loss is flat and rough, and then a cliff: who begins there may go the wrong way.
    bandwidth = {"bandwidth": jnp.log(yg.MedianRule().bandwidth((followed,)))}
    # The last one learns the scales in which the median rule is applied, at each step.
    for learned in (bandwidth, bandwidth | scale, scale):
        optimizer = optax.adam(0.05)
        state = optimizer.init(learned)
        slope = jax.jit(jax.grad(loss))
        for _ in range(args.outer_steps):
            updates, state = optimizer.update(slope(learned), state)
            learned = optax.apply_updates(learned, updates)
        values = {name: jnp.round(jnp.exp(v), 2).tolist() for name, v in learned.items()}
        show("learned " + " and ".join(learned), jax.jit(run)(**jax.tree.map(jnp.exp, learned)))
        print(f"{'':32s} {values}")
    print("exact widths", " ".join(f"{width:.2f}" for width in widths))


if __name__ == "__main__":
    main()
