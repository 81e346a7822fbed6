"""The exact sum beside two plain contractions: time, error and memory, in one run.

    python examples/benchmarks/exact.py [--smoke] [--json FILE]

``rows`` is whole rows of the kernel matrix against all columns, ``tiles`` a scan over tiles of 512
targets by 1024 sources; both are what one would write in a few lines. Times are the fastest of
several, taken in turns; the ratio is that of the fastest and that of the medians, since on a shared
machine one turn of nine may take half as long as the others. Errors are those at 200 particles
against a float64 loop: ``norm`` relative to attraction and repulsion, ``phi`` relative to phi
itself, which nearly cancels for S = -x.
"""

import argparse
import platform
import statistics
import time

import jax
from yardstick import contraction, errors, write_rows

import yggdrax as yg

SIZES = ((3, 1000), (3, 10_000), (3, 32_768), (10, 10_000), (3, 100_000), (10, 100_000))


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
    medians = {name: statistics.median(spent) for name, spent in times.items()}
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
            "median_times_tiles": medians["tiles"] / medians[name],
            "error_norm": norm,
            "error_phi": relative,
            "temporary_MB": memory / 1e6,
        }
        table.append(row)
        print(
            f"d={d:3d} N={n:7d} {name:6s} {row['seconds']:9.4f} s  {row['times_tiles']:5.2f} "
            f"(medians {row['median_times_tiles']:.2f}) times tiles  error {norm:.1e} "
            f"({relative:.1e} of phi)  {row['temporary_MB']:8.1f} MB",
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
        turns = 3 if n > 50_000 else 9 if n > 5_000 else 100
        table += measure(d, n, 1 if args.smoke else turns)
    write_rows(args.json, table)


if __name__ == "__main__":
    main()
