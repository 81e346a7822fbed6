"""The tree beside the exact sum: whole jitted steps of svgd, accuracy curves, cost of building.

    python examples/benchmarks/whole_steps.py [--smoke] [--json FILE] [--plot FILE] [--only PART]

``steps`` times ``jit(tx.update)``, the tree rebuilt inside, beside the same step by the exact
engine; at N = 1,000,000 the exact time is that at 100,000 times 100. ``curves`` gives the error
over angle, tolerance, order and bandwidth, ``build`` the cost of sorting in argsorts of N keys.
Errors are those at 200 particles against a float64 loop, in the norm of docs/engines.md and
relative to phi. Times are the fastest of several.
"""

import argparse
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
from yardstick import errors

import yggdrax as yg
from yggdrax.geometry.layout import Layout
from yggdrax.geometry.slots import order_slots

KERNELS = {"rbf": yg.RBF(), "imq": yg.IMQ()}


def normal(n, d):
    """A standard normal cloud."""
    return jax.random.normal(jax.random.key(0), (n, d))


def clustered(n, d):
    """20 blobs of standard deviation 0.1 with centres from N(0, I)."""
    centres = jax.random.normal(jax.random.key(1), (20, d))
    return centres[jnp.arange(n) % 20] + 0.1 * normal(n, d)


def quarter_median(x):
    """A quarter of the median rule's bandwidth."""
    return 0.25 * float(yg.MedianRule().bandwidth((x,)))


# name: cloud, d, kernel, bandwidth of the particles, options of the tree.
CASES = {
    "imq, normal": (normal, 3, "imq", lambda x: 0.45, {"theta": 0.65}),
    "rbf, clusters, h/4": (clustered, 3, "rbf", quarter_median, {"rtol": 4e-3}),
    "rbf, clusters, h/4, d = 5": (clustered, 5, "rbf", quarter_median, {"rtol": 1e-2}),
    "rbf, normal, median": (normal, 3, "rbf", lambda x: 4 * quarter_median(x), {"rtol": 1e-3}),
}


def fastest(f, arguments, repeats):
    """Seconds and the last result."""
    result = jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(f(*arguments))
        times.append(time.perf_counter() - start)
    return min(times), result


def step_of(engine, kernel, h, x, repeats):
    """Seconds and phi of one jitted update with S = 1 - x."""
    tx = yg.svgd(h, kernel=KERNELS[kernel], engine=engine)
    update = jax.jit(tx.update)
    seconds, (updates, state) = fastest(update, (x - 1, tx.init(x), x), repeats)
    assert update._cache_size() == 1, "the step compiled more than once"
    return seconds, -np.asarray(updates), int(state.status)


def measure_steps(sizes, repeats):
    """Whole steps of every case; exact times beyond 100,000 particles are extrapolated."""
    rows, exact_at = [], {}
    for n in sizes:
        for name, (cloud, d, kernel, bandwidth, options) in CASES.items():
            if n > 100_000 and name != "imq, normal":
                continue
            x = cloud(n, d)
            h = bandwidth(x)
            # The measurement of the error at 64 particles is not part of an ordinary step.
            tree = yg.Tree(check_every=0, **options)
            seconds, phi, status = step_of(tree, kernel, h, x, repeats)
            if n <= 100_000:
                exact_at[name] = step_of("exact", kernel, h, x, repeats)[0], n
            exact = exact_at[name][0] * (n / exact_at[name][1]) ** 2
            norm, relative = errors(phi, x, 1 - x, h, kernel)
            row = {"case": name, "N": n, "d": d, "h": h, "options": options, "seconds": seconds}
            row |= {"exact_seconds": exact, "exact_extrapolated": n > exact_at[name][1]}
            row |= {"times": exact / seconds, "error_norm": norm, "error_phi": relative}
            rows.append(row | {"status": status})
            print(
                f"{name:26s} N={n:7d} {options!s:15s} {seconds:8.3f} s, exact {exact:9.3f} s: "
                f"{exact / seconds:6.2f} times, error {norm:.1e} ({relative:.1e} of phi)",
                flush=True,
            )
    return rows


def measure_curves(n):
    """Errors over angle, tolerance, order and bandwidth."""
    x = normal(n, 3)
    rows = []
    for order in (0, 1, 2):
        settings = [{"theta": theta} for theta in (0.3, 0.5, 0.7, 0.9)]
        settings += [{"rtol": rtol} for rtol in (1e-4, 1e-3, 1e-2, 1e-1)]
        for options in settings:
            engine = yg.Tree(order=order, exact_above=1.0, leaf_size=16, **options)
            phi = jax.jit(lambda x, h, engine=engine: engine.stein(x, 1 - x, h, yg.IMQ()).phi)
            for h in (0.1, 0.45, 2.0):
                norm, _ = errors(phi(x, jnp.float32(h)), x, 1 - x, h, "imq", 100)
                rows.append({"order": order, "h": h, "error_norm": norm, **options})
    return rows


def measure_build(sizes, repeats):
    """Both orderings, in units of one argsort of N keys."""
    rows = []
    for n in sizes:
        x = normal(n, 3)
        layout = Layout.of(n, 32)
        unit = fastest(jax.jit(jnp.argsort), (x[:, 0],), repeats)[0]
        for ordering in ("morton", "median"):
            f = jax.jit(lambda x, o=ordering, layout=layout: order_slots(x, layout, o))
            seconds = fastest(f, (x,), repeats)[0]
            rows.append({"N": n, "ordering": ordering, "argsorts": seconds / unit, "argsort": unit})
            print(f"{ordering} order of N={n:7d}: {seconds / unit:.2f} argsorts", flush=True)
    return rows


def plot(rows, file):
    """The accuracy curves: one panel for angles, one for tolerances."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("theta", "rtol"), strict=True):
        for order in (0, 1, 2):
            for h, line in ((0.1, ":"), (0.45, "-"), (2.0, "--")):
                chosen = [r for r in rows if name in r and (r["order"], r["h"]) == (order, h)]
                xs, ys = [r[name] for r in chosen], [r["error_norm"] for r in chosen]
                axis.loglog(xs, ys, line, color=f"C{order}", marker=".", label=f"{order}, h = {h}")
        axis.set_xlabel(name)
    axes[1].loglog([1e-4, 1e-1], [1e-4, 1e-1], color="0.7", zorder=0)
    axes[0].set_ylabel("error in the norm")
    axes[0].legend(title="order", fontsize=7)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size, once")
    parser.add_argument("--only", nargs="+", default=["steps", "curves", "build"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", help="file for the tables")
    parser.add_argument("--plot", help="file for the accuracy curves")
    args = parser.parse_args()
    sizes, repeats = ([300], 1) if args.smoke else (args.sizes, 3)
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}, {platform.machine()}")
    tables = {"jax": jax.__version__, "device": device}
    if "steps" in args.only:
        tables["steps"] = measure_steps(sizes, repeats)
    if "build" in args.only:
        tables["build"] = measure_build([n for n in sizes if n != 10_000], repeats)
    if "curves" in args.only:
        tables["curves"] = measure_curves(300 if args.smoke else 4000)
        if args.plot:
            plot(tables["curves"], args.plot)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(tables, file, indent=1)


if __name__ == "__main__":
    main()
