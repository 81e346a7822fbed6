r"""Logistic regression on the breast cancer data (31 coefficients): SVGD's moments against NUTS.

    python -m pip install 'yggdrax[benchmarks]'
    python examples/benchmarks/logistic.py [--json FILE] [--particles 200] [--only NAME...]
        [--smoke]

All 569 rows, features standardised, prior N(0, 1) on the coefficients. NUTS (BlackJAX, four chains)
gives the moments to compare with; printed are the largest error of a mean in posterior standard
deviations, and the smallest and largest ratio of standard deviations, over the 31 coefficients.
The arrangements:

* ``median``: one kernel over all coordinates, the median rule.
* ``coordinate``: a kernel for each coordinate, in the coordinates of the data.
* ``white median``: one kernel, in whitened coordinates (mode, inverse curvature there).
* ``white coordinate``: a kernel for each whitened coordinate.
* ``refined``: the same, whitened again by the averaged curvature at the particles of that run.
"""

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import yggdrax as yg
from yggdrax.experiment.data import load_classification
from yggdrax.experiment.nuts import compare_moments, nuts

NAMES = ["median", "coordinate", "white median", "white coordinate", "refined"]
BANDWIDTH = 0.35  # of whitened coordinates, whose standard deviation is about 1


def run(target, key, num_particles: int, steps: int, transformation):
    """Particles after Adam with a cosine schedule."""
    schedule = optax.cosine_decay_schedule(0.1, steps)
    optimizer = optax.chain(transformation, optax.adam(schedule))
    found = yg.sample(target, key, num_particles, steps, optimizer=optimizer)
    yg.check(found.opt_state)
    return found.particles


def main(arguments: list[str] | None = None) -> None:
    """Measures all arrangements, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--particles", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--draws", type=int, default=2500, help="of each of NUTS's four chains")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--smoke", action="store_true", help="few particles, steps and draws")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.particles, options.steps, options.draws = 40, 5, 10
    table = load_classification()
    x = (table.x - table.x.mean(axis=0)) / table.x.std(axis=0)
    target = yg.LogisticRegression(x, table.y)
    white = yg.Whitened.laplace(target, jnp.zeros(target.dimension))
    key, n, steps = jax.random.key(options.seed), options.particles, options.steps

    start = time.perf_counter()
    chains = nuts(white, jax.random.key(options.seed + 1), options.draws)
    results: dict[str, dict[str, float]] = {
        "nuts": {
            "effective_size": chains.effective_size,
            "seconds": time.perf_counter() - start,
        }
    }
    print(
        f"{n} particles, {steps} steps, float32; jax {jax.__version__}, {jax.default_backend()}; "
        f"NUTS: 4 x {options.draws} draws worth {chains.effective_size:.0f}, "
        f"{results['nuts']['seconds']:.1f} s"
    )

    def report(name: str, particles, seconds: float) -> None:
        found = compare_moments(np.asarray(particles), chains) | {"seconds": seconds}
        results[name] = found
        print(
            f"{name:17s} mean within {found['mean_error']:.3f} sd, sd ratio "
            f"{found['deviation_ratio_low']:.3f} to {found['deviation_ratio_high']:.3f}, "
            f"{seconds:.1f} s",
            flush=True,
        )

    coordinate = yg.svgd(BANDWIDTH, per="coordinate")
    median_steps = 4 * steps  # it starts at a random place, far from the mode
    arrangements = {
        "median": (target, yg.svgd("median"), median_steps),
        "coordinate": (target, yg.svgd("median", per="coordinate"), steps),
        "white median": (white, yg.svgd("median"), steps),
        "white coordinate": (white, coordinate, steps),
    }
    particles = None
    wanted = set(options.only) | ({"white coordinate"} if "refined" in options.only else set())
    for name, (posterior, transformation, number) in arrangements.items():
        if name not in wanted:
            continue
        start = time.perf_counter()
        particles = jax.block_until_ready(run(posterior, key, n, number, transformation))
        seconds = time.perf_counter() - start
        report(name, white.restore(particles) if posterior is white else particles, seconds)
    if "refined" in wanted:  # from the particles of the arrangement before it
        start = time.perf_counter()
        refined = white.refined(particles)
        particles = jax.block_until_ready(run(refined, key, n, steps, coordinate))
        report("refined", refined.restore(particles), time.perf_counter() - start)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
