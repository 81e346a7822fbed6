r"""What ``svgd`` adds to a training step of an ensemble: ``chain(svgd, adam)`` against ``adam``.

    python examples/benchmarks/overhead.py [--json FILE] [--smoke]

20 networks of about 10^4 and 10^6 parameters, batches of 100 rows. Both steps take the gradient of
every member and update it by Adam; one of them sends the gradients through ``svgd`` (median rule,
exact sum) first. The two steps alternate, each is timed alone, the state is donated, and the ratio
is that of the medians: machines are shared, and single times mean little.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import optax
from flax import nnx

import yggdrax as yg

NUM_PARTICLES, BATCH = 20, 100
# Features and units of the hidden layers, with one output: 9,981 and 992,901 parameters.
SIZES = {"1e4": (50, 140, 20), "1e6": (100, 900, 1000)}
ROUNDS = {"1e4": 60, "1e6": 7}


class Net(nnx.Module):
    """A multilayer perceptron with one output."""

    def __init__(self, sizes: tuple[int, ...], *, rngs: nnx.Rngs):
        """Linear layers between the sizes."""
        pairs = zip(sizes, (*sizes[1:], 1), strict=True)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x):
        """(B, features) to (B, 1)."""
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


def measure(sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Median seconds of both steps, and their ratio."""
    target = yg.BayesianNetwork(lambda rngs: Net(sizes, rngs=rngs), num_data=10 * BATCH)
    key = jax.random.key(0)
    batch = (jax.random.normal(key, (BATCH, sizes[0])), jax.random.normal(key, (BATCH,)))
    steps = {}
    for name, transformation in (("plain", optax.identity()), ("svgd", yg.svgd("median"))):
        tx = optax.chain(transformation, optax.adam(1e-4))

        def step(particles, opt_state, tx=tx):
            grads = yg.particle_grads(target, particles, batch)
            updates, opt_state = tx.update(grads, opt_state, particles)
            return optax.apply_updates(particles, updates), opt_state

        # Each its own copy of the particles, since they are donated.
        particles = yg.init_particles(key, target, NUM_PARTICLES)
        steps[name] = (jax.jit(step, donate_argnums=(0, 1)), (particles, tx.init(particles)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):  # the first round compiles
        for name, (step, state) in steps.items():
            start = time.perf_counter()
            state = jax.block_until_ready(step(*state))
            seconds[name].append(time.perf_counter() - start)
            steps[name] = (step, state)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "parameters": sum(leaf[0].size for leaf in jax.tree.leaves(steps["svgd"][1][0])),
        "plain_seconds": medians["plain"],
        "svgd_seconds": medians["svgd"],
        "ratio": medians["svgd"] / medians["plain"],
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures both sizes, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--smoke", action="store_true", help="tiny networks, two rounds")
    options = parser.parse_args(arguments)
    print(
        f"{NUM_PARTICLES} particles, batch {BATCH}, float32; jax {jax.__version__}, "
        f"{jax.default_backend()}"
    )
    results = {}
    for name, sizes in SIZES.items():
        sizes, rounds = ((5, 4, 3), 2) if options.smoke else (sizes, ROUNDS[name])
        results[name] = measure(sizes, rounds)
        r = results[name]
        print(
            f"{r['parameters']:>9,d} parameters: adam {1e3 * r['plain_seconds']:9.3f} ms, "
            f"chain(svgd, adam) {1e3 * r['svgd_seconds']:9.3f} ms, ratio {r['ratio']:.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
