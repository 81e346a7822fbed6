"""What a gradient through the sum over pairs costs: the adjoint beside plain reverse mode.

    python examples/benchmarks/gradients.py [--smoke] [--sizes N ...] [--dtypes ...] [--json FILE]

``forward`` and ``both`` (forward and gradient in particles, scores and bandwidth) of each engine,
of the same sum: a normal cloud in three dimensions, S = 1 - x, the median bandwidth (the tree: an
inverse multiquadric at a quarter of it, its own ground). ``plain`` is plain reverse mode: of a
tiled contraction for the exact sum, of the library's transforms for Fourier sums; that of the
tree's near field is in ``near_field.py``. Every method has a process of its own, whose peak memory
above its start is given; what plain reverse mode cannot hold is left out, and said.
"""

import argparse
import json
import platform
import resource
import time

from yardstick import contraction, row_of_own_process, write_rows

METHODS = {
    "exact": ("exact", "adjoint"),
    "exact plain": ("exact", "plain"),
    "tree scatter": ("scatter", "adjoint"),
    "tree segment": ("segment", "adjoint"),
    "fourier": ("fourier", "adjoint"),
    "fourier plain": ("fourier", "plain"),
}
# Above this size plain reverse mode of the contraction would keep all N^2 tiles: 40 GB and more.
MOST_PLAIN = 10_000


def method(name):
    """``phi(x, s, h)`` of a method, and the share of the median bandwidth that it is tried at."""
    import yggdrax as yg
    from yggdrax.kernels import IMQ, RBF
    from yggdrax.stein import modes
    from yggdrax.stein.fourier import Fourier, _Rule

    kind, how = METHODS[name]
    if kind == "exact":
        if how == "adjoint":
            return lambda x, s, h: yg.Exact().stein(x, s, h, RBF()).phi, 1.0
        return contraction, 1.0
    if kind == "fourier":
        engine = Fourier(rtol=1e-3)
        if how == "adjoint":
            return lambda x, s, h: engine.stein(x, s, h, RBF()).phi, 1.0

        def transforms(x, s, h):
            # The rung that the engine runs for this cloud, without the choice.
            box = modes.bounding_box(x, h)
            rule = _Rule.of(engine.rtol, RBF())
            return modes.forward_sum(box, s, h, RBF(), 43, rule)

        return transforms, 1.0
    engine = yg.Tree(accumulate=kind, exact_above=1.0)
    return lambda x, s, h: engine.stein(x, s, h, IMQ()).phi, 0.25


def measure(name: str, n: int, dtype: str, repeats: int) -> dict:
    """One row of the table, in this process."""
    import jax
    import jax.numpy as jnp

    import yggdrax as yg

    jax.config.update("jax_enable_x64", dtype == "float64")
    phi, share = method(name)
    x = jax.random.normal(jax.random.key(0), (n, 3), dtype)
    s, h = 1 - x, share * yg.MedianRule().bandwidth((x,))
    weights = jnp.cos(jnp.arange(3.0 * n, dtype=dtype)).reshape(n, 3)
    forward = jax.jit(phi)
    both = jax.jit(jax.value_and_grad(lambda x, s, h: jnp.sum(weights * phi(x, s, h)), (0, 1, 2)))

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

    compiled = [f.lower(x, s, h).compile() for f in (forward, both)]
    row = {"method": name, "N": n, "d": 3, "dtype": dtype, "h": float(h)}
    base, times, values = peak(), ([], []), {}
    for _ in range(repeats):
        for kind, f, spent in zip(("forward", "both"), compiled, times, strict=True):
            start = time.perf_counter()
            values[kind] = jax.block_until_ready(f(x, s, h))
            spent.append(time.perf_counter() - start)
    forward_seconds, both_seconds = map(min, times)
    gradient = values["both"][1]
    norms = [float(jnp.linalg.norm(g)) for g in gradient]
    assert all(0 < norm < float("inf") for norm in norms), norms
    return row | {
        "forward_seconds": forward_seconds,
        "both_seconds": both_seconds,
        "ratio": both_seconds / forward_seconds,
        "peak_MB": peak() - base,
        "slope_in_h": float(gradient[2]),
    }


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size in float32, once")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file for the table")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.sizes, args.dtypes, args.repeats = [600], ["float32"], 1
    if args.row:
        name, n, dtype = args.row
        print(json.dumps(measure(name, int(n), dtype, args.repeats)))
        return
    import jax

    print(f"jax {jax.__version__}, {platform.processor() or platform.machine()}")
    print("method           N       dtype    forward s   both s   ratio   peak MB   slope in h")
    table = []
    for n in args.sizes:
        for dtype in args.dtypes:
            for name in args.methods:
                if name == "exact plain" and n > MOST_PLAIN:
                    print(f"{name:14s} {n:9d} {dtype:8s} left out: it keeps all tiles, N^2 numbers")
                    continue
                row, problem = row_of_own_process(
                    __file__, name, str(n), dtype, f"--repeats={args.repeats}"
                )
                if row is None:
                    print(f"{name:14s} {n:9d} {dtype:8s} did not finish: {problem[:100]}")
                    continue
                table.append(row)
                print(
                    f"{name:14s} {n:9d} {dtype:8s} {row['forward_seconds']:9.4f} "
                    f"{row['both_seconds']:9.4f} {row['ratio']:6.2f} {row['peak_MB']:9.1f} "
                    f"{row['slope_in_h']:12.5f}",
                    flush=True,
                )
    write_rows(args.json, table)


if __name__ == "__main__":
    main()
