"""Whether ``engine="auto"`` is ever slower than the exact engine: whole steps, in turns.

    python examples/benchmarks/auto.py [--smoke] [--json FILE] [--sizes N ...]

The jitted steps of both engines (sum and state, a step that measures no error) are timed in turns,
and the ratio is that of the fastest of each. Clouds: normal; 20 clusters; a
normal cloud with one far outlier. Bandwidths: the median rule's, a quarter, and a hundredth of it.
The worst ratio is printed last; the promise is 1.1.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from yardstick import write_rows

import yggdrax as yg


def clouds(n, d):
    """Particles by name, (n, d) float32."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((n, d))
    clusters = rng.standard_normal((20, d))[rng.integers(0, 20, n)] + 0.1 * normal
    outlier = normal.copy()
    outlier[0] = 1e4
    named = {"normal": normal, "clusters": clusters, "outlier": outlier}
    return {name: jnp.asarray(x, jnp.float32) for name, x in named.items()}


def steps():
    """Both engines' jitted steps, which take the bandwidth as an argument: one compilation each."""

    def make(engine):
        def step(x, state, h):
            return yg.svgd(h, engine=engine).update(x, state, x)

        return jax.jit(step)

    return {engine: make(engine) for engine in ("exact", "auto")}


def compiled(functions, x) -> tuple[dict, dict]:
    """The steps compiled for particles like ``x``, and the seconds that took."""
    done, seconds = {}, {}
    for engine, f in functions.items():
        state = yg.svgd("median", engine=engine).init(x)
        start = time.perf_counter()
        done[engine] = f.lower(x, state, jnp.float32(1)).compile()
        seconds[engine] = time.perf_counter() - start
    return done, seconds


def measure(n: int, d: int, seconds: float) -> list[dict]:
    """The rows of one size."""
    particles, rows = clouds(n, d), []
    functions, compiling = compiled(steps(), particles["normal"])
    spent = ", ".join(f"{engine} {value:.1f} s" for engine, value in compiling.items())
    print(f"N={n:7d} d={d:2d} compiling: {spent}", flush=True)
    for name, x in particles.items():
        median = float(yg.MedianRule().bandwidth((x,)))
        for share in (1, 0.25, 0.01):
            h, times = jnp.float32(share * median), {"exact": [], "auto": []}
            states = {}
            for engine, f in functions.items():
                # The second step: the first one measures the error as well.
                state = yg.svgd(h, engine=engine).init(x)
                states[engine] = jax.block_until_ready(f(x, state, h))[1]
            begin = time.perf_counter()
            while min(map(len, times.values())) < 3 or time.perf_counter() - begin < seconds:
                for engine, f in functions.items():
                    start = time.perf_counter()
                    jax.block_until_ready(f(x, states[engine], h))
                    times[engine].append(time.perf_counter() - start)
                if time.perf_counter() - begin > 20 * seconds:
                    break
            row = {"N": n, "d": d, "cloud": name, "share": share}
            row |= {engine: min(spent) for engine, spent in times.items()}
            row |= {"ratio": row["auto"] / row["exact"]}
            row |= {f"compiling_{engine}": value for engine, value in compiling.items()}
            row |= {"serves": yg.explain(x, float(h)).engine, "error": float(states["auto"].error)}
            rows.append(row)
            print(
                f"N={n:7d} d={d:2d} {name:9s} {share:5g} h: auto {row['auto']:.5f} s, exact "
                f"{row['exact']:.5f} s, ratio {row['ratio']:.3f} ({row['serves']})",
                flush=True,
            )
    return rows


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size, briefly")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1, 2, 3, 5, 10])
    parser.add_argument("--seconds", type=float, default=0.5, help="at least, for each row")
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    if args.smoke:
        args.sizes, args.dimensions, args.seconds = [500], [2], 0.01
    rows = [row for n in args.sizes for d in args.dimensions for row in measure(n, d, args.seconds)]
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"worst ratio {worst['ratio']:.3f}: {worst}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
