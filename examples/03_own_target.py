"""Targets of one's own: a function, and a Flax module with data."""

import jax
import jax.numpy as jnp
import optax

import yggdrax as yg


def log_density(x):
    """A ring of radius 2, up to a constant."""
    return -((jnp.linalg.norm(x) - 2.0) ** 2) / (2 * 0.2**2)


class Decay(yg.Target):
    """Radioactive decay: unknown rate and amplitude, counts with Poisson noise, in minibatches.

    A particle is a dictionary of unconstrained numbers; the prior is on their logarithms.
    """

    def __init__(self, times, counts):
        """Keeps the data only for their number."""
        self.num_data = len(times)
        self.mean_count = float(jnp.mean(counts))

    def init(self, key):
        """One particle to start from."""
        a, b = jax.random.split(key)
        return {
            "log_rate": jax.random.normal(a),
            "log_amplitude": jnp.log(self.mean_count) + jax.random.normal(b),
        }

    def __call__(self, particle, batch=None, *, key=None):
        """Log prior and, scaled from the batch to all data, log likelihood."""
        times, counts = batch
        expected = jnp.exp(particle["log_amplitude"] - jnp.exp(particle["log_rate"]) * times)
        prior = -sum(jnp.square(v - m) / 8 for v, m in zip(particle.values(), (5, 0), strict=True))
        likelihood = jnp.sum(counts * jnp.log(expected) - expected)
        return prior + self.num_data / len(times) * likelihood


def main() -> None:
    """Samples both."""
    ring = yg.LogDensity(log_density, init=lambda key: jax.random.normal(key, (2,)))
    run = yg.sample(ring, jax.random.key(0), num_particles=100, num_steps=500)
    radius = jnp.linalg.norm(run.particles, axis=1)
    print(f"ring: radius {radius.mean():.2f} +- {radius.std():.2f}")

    times = jnp.linspace(0, 5, 200)
    counts = jax.random.poisson(jax.random.key(1), 100 * jnp.exp(-0.7 * times)).astype(jnp.float32)
    target = Decay(times, counts)
    particles = yg.init_particles(jax.random.key(2), target, 50)
    tx = optax.chain(yg.svgd("median"), optax.adam(optax.cosine_decay_schedule(0.1, 2000)))
    opt_state = tx.init(particles)

    @jax.jit
    def step(particles, opt_state, key):
        rows = jax.random.choice(key, target.num_data, (50,), replace=False)
        grads = yg.particle_grads(target, particles, (times[rows], counts[rows]))
        updates, opt_state = tx.update(grads, opt_state, particles)
        return optax.apply_updates(particles, updates), opt_state

    for key in jax.random.split(jax.random.key(3), 2000):
        particles, opt_state = step(particles, opt_state, key)
    yg.check(opt_state)
    rate = jnp.exp(particles["log_rate"])
    amplitude = jnp.exp(particles["log_amplitude"])
    print(f"decay: rate {rate.mean():.3f} +- {rate.std():.3f} (true 0.7)")
    print(f"       amplitude {amplitude.mean():.1f} +- {amplitude.std():.1f} (true 100)")


if __name__ == "__main__":
    main()
