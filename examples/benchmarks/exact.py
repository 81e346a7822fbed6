"""The exact sum beside two plain contractions: time, error and memory, in one run.

    python examples/benchmarks/exact.py [--smoke] [--json FILE]

``rows`` is whole rows of the kernel matrix against all columns, ``tiles`` a scan over tiles of 512
targets by 1024 sources; both are what one would write in a few lines. Times are the fastest of
several, taken in turns. Errors are those at 200 particles against a float64 loop: ``norm`` relative
to attraction and repulsion, ``phi`` relative to phi itself, which nearly cancels for S = -x.
"""

import argparse
import functools
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

import yggdrax as yg

SIZES = ((3, 1000), (3, 10_000), (3, 32_768), (10, 10_000), (3, 100_000), (10, 100_000))


@functools.partial(jax.jit, static_argnames=("rows", "columns"))
def contraction(x, s, h, rows, columns):
    """Phi (N, d) by tiles of rows x columns, distances from dot products."""
    n, d = x.shape
    counts = -(-n // rows), -(-n // columns)
    weights = jnp.concatenate([s - x / h**2, jnp.ones((n, 1), x.dtype)], axis=1)

    def tiles(v, size, count):
        return jnp.pad(v, ((0, size * count - n), (0, 0))).reshape(count, size, v.shape[1])

    sources = tiles(x, columns, counts[1]), tiles(weights, columns, counts[1])

    def one_row(t):
        def add(total, source):
            y, w = source
            u = jnp.sum(t * t, 1)[:, None] + jnp.sum(y * y, 1)[None] - 2 * t @ y.T
            return total + jnp.exp(-jnp.maximum(u, 0) / (2 * h * h)) @ w, None

        total, _ = jax.lax.scan(add, jnp.zeros((rows, d + 1), x.dtype), sources)
        return total[:, :d] + t * total[:, d:] / h**2

    return jax.lax.map(one_row, tiles(x, rows, counts[0])).reshape(-1, d)[:n] / n


def errors(phi, x, s, h):
    """Both relative errors at 200 particles, against a loop in float64."""
    rows = np.random.default_rng(0).choice(len(x), min(200, len(x)), replace=False)
    x, s = np.asarray(x, np.float64), np.asarray(s, np.float64)
    parts = []
    for i in rows:
        difference = x[i] - x
        k = np.exp(-(difference**2).sum(1) / (2 * h * h))
        parts.append((k @ s / len(x), k @ difference / h**2 / len(x)))
    attraction, repulsion = (np.array(v) for v in zip(*parts, strict=True))
    wrong = np.linalg.norm(np.asarray(phi, np.float64)[rows] - attraction - repulsion)
    gross = np.sqrt((attraction**2).sum() + (repulsion**2).sum())
    return wrong / gross, wrong / np.linalg.norm(attraction + repulsion)


def measure(d, n, repeats):
    """One row of the table for each method."""
    x = jax.random.normal(jax.random.key(0), (n, d))
    s, h = -x, float(yg.MedianRule().bandwidth((x,)))
    methods = {
        "exact": jax.jit(yg.exact_phi),
        "tiles": lambda x, s, h: contraction(x, s, h, 512, 1024),
        "rows": lambda x, s, h: contraction(x, s, h, 512, n),
    }
    times = {name: [] for name in methods}
    table = []
    results = {name: jax.block_until_ready(f(x, s, h)) for name, f in methods.items()}
    for _ in range(repeats):
        for name, f in methods.items():
            start = time.perf_counter()
            jax.block_until_ready(f(x, s, h))
            times[name].append(time.perf_counter() - start)
    for name, f in methods.items():
        norm, relative = errors(results[name], x, s, h)
        memory = jax.jit(f).lower(x, s, h).compile().memory_analysis().temp_size_in_bytes
        row = {
            "method": name,
            "d": d,
            "N": n,
            "h": h,
            "dtype": str(x.dtype),
            "seconds": min(times[name]),
            "times_tiles": min(times["tiles"]) / min(times[name]),
            "error_norm": norm,
            "error_phi": relative,
            "temporary_MB": memory / 1e6,
        }
        table.append(row)
        print(
            f"d={d:3d} N={n:7d} {name:6s} {row['seconds']:9.4f} s  {row['times_tiles']:5.2f} times "
            f"tiles  error {norm:.1e} ({relative:.1e} of phi)  {row['temporary_MB']:8.1f} MB",
            flush=True,
        )
    return table


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size, once")
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {platform.machine()}")
    table = []
    for d, n in ((3, 500),) if args.smoke else SIZES:
        table += measure(d, n, 1 if args.smoke else 3 if n > 50_000 else 9)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"jax": jax.__version__, "rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
