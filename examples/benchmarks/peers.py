"""One step of SVGD in this project and elsewhere: same inputs, errors beside times, peak memory.

    pip install -e '.[benchmarks]'
    python examples/benchmarks/peers.py [--smoke] [--sizes N ...] [--json FILE] [--plot FILE]

``auto``, ``exact``, ``fourier`` and ``tree`` are whole jitted steps of ``svgd``: median rule, sum,
state. ``tiles`` and ``rows`` are the plain contractions of ``exact.py``, the sum alone at a given
bandwidth, as are BlackJAX's ``svgd`` (``optax.sgd(1)`` behind it), KeOps on the CPU and the bare
transforms of finufft at the accuracy and the modes of the Fourier engine. NumPyro's SteinVI chooses
its bandwidth by a rule of its own, so its step has a time and no error. Every row has a process of
its own; memory is that process's peak above what it held with inputs in place. Errors are those at
200 particles against a loop in float64: ``norm`` relative to attraction and repulsion, ``phi``
relative to phi itself, which nearly cancels for S = -x. What is not installed, and what would take
more than ``--most-pairs`` pairs, is left out, and said.
"""

import argparse
import importlib.util
import json
import platform
import resource
import time

import numpy as np
from yardstick import contraction, errors, row_of_own_process, write_rows

OURS = ("auto", "exact", "fourier", "tree")
LIBRARIES = {"blackjax": "blackjax", "numpyro": "numpyro", "keops": "pykeops", "finufft": "finufft"}
METHODS = (*OURS, "tiles", "rows", *LIBRARIES)
LINEAR = ("auto", "fourier", "finufft", "tree")
# Pairs that a method may take: they hold N x N arrays of d numbers, or are slow.
MOST_PAIRS = {"blackjax": 1e8, "numpyro": 1e6, "rows": 1e9, "keops": 1e9}
FEW_DIMENSIONS = ("fourier", "finufft")


def cloud(kind: str, n: int, d: int, dtype: str) -> np.ndarray:
    """Particles: a normal cloud, or 20 blobs of standard deviation 0.1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, d))
    if kind == "clustered":
        x = rng.standard_normal((20, d))[rng.integers(0, 20, n)] + 0.1 * x
    return x.astype(dtype)


def step_of(name: str, x, s, h: float, at_median: bool):
    """A function without arguments that does one step and returns phi, or None if it has none."""
    import jax
    import jax.numpy as jnp

    x, s = jnp.asarray(x), jnp.asarray(s)
    if name in OURS:
        import yggdrax as yg

        tx = yg.svgd("median" if at_median else h, engine=name)
        update, states, g = jax.jit(tx.update), [tx.init(x)], -s

        def one_step():
            # The state moves on: only the first of a hundred steps measures the error.
            updates, states[0] = jax.block_until_ready(update(g, states[0], x))
            return updates

        return lambda: -one_step()
    if name in ("tiles", "rows"):
        columns = 1024 if name == "tiles" else len(x)
        return lambda: jax.block_until_ready(contraction(x, s, h, 512, columns))
    return {"blackjax": _blackjax, "numpyro": _numpyro, "keops": _keops, "finufft": _finufft}[name](
        x, s, h
    )


def _blackjax(x, s, h):
    import blackjax
    import jax
    import optax

    shift = s[0] + x[0]  # S = shift - x
    algorithm = blackjax.svgd(lambda particle: shift - particle, optax.sgd(1.0))
    state = algorithm.init(x, {"length_scale": 2 * h * h})
    kernel = blackjax.vi.svgd.build_kernel(optax.sgd(1.0))
    rbf = blackjax.vi.svgd.rbf_kernel  # exp(-|x - y|^2 / length_scale)

    @jax.jit
    def step(state):
        return kernel(state, lambda particle: shift - particle, rbf).particles

    return lambda: jax.block_until_ready(step(state)) - x


def _numpyro(x, s, h):
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.contrib.einstein import RBFKernel, SteinVI
    from numpyro.infer.autoguide import AutoDelta

    def model():
        numpyro.sample("x", dist.Normal(s[0] + x[0], 1).to_event(1))

    stein = SteinVI(
        model, AutoDelta(model), numpyro.optim.SGD(1.0), RBFKernel(), num_stein_particles=len(x)
    )
    state = stein.init(jax.random.key(0))
    update = jax.jit(stein.update)
    return lambda: (jax.block_until_ready(update(state)[1]), None)[1]


def _keops(x, s, h):
    from pykeops.numpy import LazyTensor

    x, s = np.asarray(x), np.asarray(s)
    n = len(x)

    def step():
        xi, xj = LazyTensor(x[:, None, :]), LazyTensor(x[None, :, :])
        kernel = (-((xi - xj) ** 2).sum(-1) * (0.5 / h**2)).exp()
        pull = LazyTensor(s[None, :, :]) + (xi - xj) * (1 / h**2)
        return (kernel * pull).sum(1) / n

    return step


def _finufft(x, s, h):
    import finufft

    import yggdrax as yg

    # The modes and the accuracy that the engine takes for this cloud, and nothing but transforms.
    seen = yg.explain(x, h, engine="fourier")
    x, n, d = np.asarray(x), len(x), x.shape[1]
    extent = np.ptp(x, axis=0).max() / h
    period = h * 0.5 * (np.sqrt(extent**2 + 4 * np.pi * seen.modes) + extent)
    complex_type = np.complex64 if x.dtype == np.float32 else np.complex128
    circle = (x - (x.max(0) + x.min(0)) / 2) * 2 * np.pi / period
    theta = [np.ascontiguousarray(column) for column in circle.T]
    weights = np.zeros((d + 1 + (d + 1) % 2, n))  # two real rows to a complex one
    weights[:d], weights[d] = np.asarray(s).T, 1
    packed = np.ascontiguousarray((weights[0::2] + 1j * weights[1::2]).astype(complex_type))
    modes = (seen.modes,) * d
    options = {"eps": 0.89e-3, "upsampfac": 1.25}
    out = {2: (finufft.nufft2d1, finufft.nufft2d2), 3: (finufft.nufft3d1, finufft.nufft3d2)}
    first, second = out[d]

    def step():
        spectra = first(*theta, packed, modes, isign=-1, **options)
        fields = np.ascontiguousarray(spectra[: (d + 1) // 2])
        second(*theta, fields, isign=1, **options)

    return step


def measure(task: dict) -> dict:
    """One row of the table, in this process."""
    import jax

    jax.config.update("jax_enable_x64", task["dtype"] == "float64")
    import yggdrax as yg

    x = cloud(task["cloud"], task["N"], task["d"], task["dtype"])
    s = (task["shift"] - x).astype(x.dtype)
    h = float(yg.MedianRule().bandwidth((jax.numpy.asarray(x),))) * task["share"]
    step = step_of(task["method"], x, s, h, task["share"] == 1)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    phi = step()
    first, times = time.perf_counter() - start, []
    while len(times) < task["repeats"] and sum(times) < 20:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1e3
    row = task | {"h": h, "seconds": min(times), "first_seconds": first, "peak_MB": peak}
    if phi is not None:
        row["error_norm"], row["error_phi"] = errors(phi, x, s, h)
    return row


def tasks(args):
    """What is to be measured, and what is left out and why."""
    for dtype in args.dtypes:
        for kind in args.clouds:
            for share in args.shares:
                for shift in args.shifts:
                    for d in args.dimensions:
                        for n in args.sizes:
                            for name in args.methods:
                                task = {"method": name, "N": n, "d": d, "dtype": dtype}
                                task |= {"cloud": kind, "share": share, "shift": shift}
                                yield task | {"repeats": args.repeats}, left_out(name, n, d, args)


def left_out(name: str, n: int, d: int, args) -> str:
    """Why a method is not measured at a size, or nothing."""
    if name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None:
        return f"{LIBRARIES[name]} is not installed"
    if name in FEW_DIMENSIONS and d > 3:
        return "it serves up to three dimensions"
    linear = name in ("fourier", "finufft") or (name in LINEAR and d <= 3)
    if not linear and n * n > min(args.most_pairs, MOST_PAIRS.get(name, 1e99)):
        return "too many pairs"
    return ""


def plot(rows: list[dict], file: str) -> None:
    """Time against N, log-log, one panel a dimension."""
    from matplotlib.figure import Figure

    rows = [r for r in rows if (r["cloud"], r["share"], r["dtype"]) == ("normal", 1, "float32")]
    dimensions = sorted({row["d"] for row in rows})
    figure = Figure(figsize=(4 * len(dimensions), 3.6), layout="constrained")
    axes = figure.subplots(1, len(dimensions), sharey=True, squeeze=False)[0]
    for axis, d in zip(axes, dimensions, strict=True):
        for name in METHODS:
            points = sorted(
                (r["N"], r["seconds"]) for r in rows if (r["d"], r["method"]) == (d, name)
            )
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", ms=3, label=name)
        axis.set(title=f"d = {d}", xlabel="particles")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds a step")
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size of each method, once")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 10**6])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 3, 10, 100])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--clouds", nargs="+", default=["normal"], choices=["normal", "clustered"])
    parser.add_argument("--shares", type=float, nargs="+", default=[1], help="of the median rule")
    parser.add_argument("--shifts", type=float, nargs="+", default=[0], help="S = shift - x")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--most-pairs", type=float, default=1.1e10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file for the table")
    parser.add_argument("--plot", help="file for the picture")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.sizes, args.dimensions, args.repeats = [200], [2], 1
    if args.row:
        print(json.dumps(measure(json.loads(args.row))))
        return
    import jax

    print(f"jax {jax.__version__}, {platform.processor() or platform.machine()}")
    rows, said = [], set()
    for task, reason in tasks(args):
        name = task["method"]
        if reason:
            if (name, reason, task["d"]) not in said:
                print(f"{name:9s} d={task['d']} N={task['N']}: left out, {reason}")
            said.add((name, reason, task["d"]))
            continue
        row, problem = row_of_own_process(__file__, json.dumps(task))
        if row is None:
            print(
                f"{name:9s} d={task['d']} N={task['N']}: did not finish: {problem[:90]}", flush=True
            )
            continue
        rows.append(row)
        error = "error        -" if "error_norm" not in row else f"error {row['error_norm']:.1e}"
        relative = "" if "error_phi" not in row else f" ({row['error_phi']:.1e} of phi)"
        print(
            f"{name:9s} d={row['d']:3d} N={row['N']:7d} {row['dtype']} {row['cloud']} "
            f"{row['share']:g} h S={row['shift']:g}-x {row['seconds']:9.5f} s "
            f"{row['peak_MB']:8.1f} MB {error}{relative}",
            flush=True,
        )
    write_rows(args.json, rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
