"""The near field of the tree: both ways of adding up, forward and with gradients, in both dtypes.

    python examples/benchmarks/near_field.py [--smoke] [--json FILE] [--sizes 10000 100000]

``scatter`` evaluates every pair of leaves once and adds to both, ``segment`` evaluates directed
pairs and each target leaf sums its own. ``plain reverse`` is what one gets without the adjoint: a
scan over gathered pairs of leaves, differentiated by ``jax.grad`` with recomputation. The last two
rows take that scan apart: gather and arithmetic, and the scattered additions alone. Times
are the fastest of several, taken in turns, on a normal cloud in three dimensions, inverse
multiquadric kernel, opening angle 0.7. Runs on whatever device JAX finds.
"""

import argparse
import functools
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.geometry.slots import fill_slots
from yggdrax.kernels import IMQ
from yggdrax.stein.near import near_field
from yggdrax.stein.tree import Tree

BANDWIDTH, CHUNK = 0.45, 64


def pairs_of_leaves(topology):
    """Target and source leaf of every directed near pair, on the host, filled up to whole chunks.

    The filling names a leaf that does not exist.
    """
    lists = topology.lists
    count = np.asarray(lists.near_count)
    target = np.repeat(np.arange(len(count)), count)
    source = np.asarray(lists.near)[: count.sum()]
    fill = np.full(-len(target) % CHUNK, topology.layout.leaves)
    return tuple(np.concatenate([v, fill]).reshape(-1, CHUNK) for v in (target, source))


def tile(x, s, weight, scale, pair):
    """What the targets of a chunk of pairs of leaves get, (d, CHUNK, leaf)."""
    target, source = (jnp.minimum(v, x.shape[1] - 1) for v in pair)
    difference = (x[:, target, :, None] - x[:, source, None]) * scale
    u = jnp.sum(difference**2, 0)
    push = IMQ().kappa(1, u) * weight[source][:, None] * scale
    return jnp.sum(IMQ().kappa(0, u) * s[:, source, None] + push * difference, -1)


@jax.jit
def plain(x, s, scale, pairs, weight):
    """The near sum by a scan that adds chunk after chunk."""

    @jax.checkpoint
    def add(total, pair):
        return total.at[:, pair[0]].add(tile(x, s, weight, scale, pair), mode="drop"), None

    return jax.lax.scan(add, jnp.zeros_like(x), pairs)[0]


@jax.jit
def arithmetic(x, s, scale, pairs, weight):
    """Gather and arithmetic of all directed pairs; nothing is placed."""

    def add(total, pair):
        return total + tile(x, s, weight, scale, pair), None

    return jax.lax.scan(add, jnp.zeros((len(x), CHUNK, x.shape[2]), x.dtype), pairs)[0]


@jax.jit
def additions(x, s, scale, pairs, weight):
    """The scattered additions of all directed pairs alone."""
    del s, scale, weight
    values = jnp.broadcast_to(x[:, :1], (len(x), CHUNK, x.shape[2]))

    def add(total, pair):
        return total.at[:, pair[0]].add(values, mode="drop"), None

    return jax.lax.scan(add, jnp.zeros_like(x), pairs)[0]


def fastest(functions, arguments, repeats):
    """Seconds of each function, in turns."""
    times = {name: [] for name in functions}
    for f in functions.values():
        jax.block_until_ready(f(*arguments))
    for _ in range(repeats):
        for name, f in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def functions_of(topology, pairs, weight):
    """Everything that is timed, as functions of positions and scores in slots and of 1 / h."""
    layout, lists = topology.layout, topology.lists

    def with_gradient(f):
        def both(x, s, scale):
            value, pull = jax.vjp(f, x, s, scale)
            return value, pull(s)

        return jax.jit(both)

    functions = {}
    for strategy in ("scatter", "segment"):
        f = functools.partial(near_field, IMQ(), strategy, layout, lists)
        functions[f"{strategy}, forward"] = jax.jit(f)
        functions[f"{strategy}, forward + gradient"] = with_gradient(f)
    functions["plain, forward"] = lambda *a: plain(*a, pairs, weight)
    functions["plain reverse, forward + gradient"] = with_gradient(functions["plain, forward"])
    functions["gather + arithmetic alone"] = lambda *a: arithmetic(*a, pairs, weight)
    functions["additions alone"] = lambda *a: additions(*a, pairs, weight)
    return functions


def measure(n, dtype, repeats):
    """Rows of the table for one size and dtype."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 3)), dtype)
    topology = jax.jit(lambda x: Tree(theta=0.7, exact_above=1.0).topology(x, BANDWIDTH, IMQ()))(x)
    layout = topology.layout
    weight = layout.filled().astype(dtype)
    slots = [fill_slots(v, topology.slots, layout) for v in (x, 1 - x)]
    slots[1] = slots[1] * weight
    pairs = pairs_of_leaves(topology)
    functions = functions_of(topology, pairs, weight)
    arguments = (*slots, jnp.asarray(1 / BANDWIDTH, dtype))
    expected = plain(*arguments, pairs, weight)
    for strategy in ("scatter", "segment"):
        error = jnp.max(jnp.abs(functions[f"{strategy}, forward"](*arguments) - expected))
        assert error < 1e-4 * jnp.max(jnp.abs(expected)), f"{strategy} differs by {error}"
    rows = []
    for name, seconds in fastest(functions, arguments, repeats).items():
        rows.append({"N": n, "dtype": np.dtype(dtype).name, "what": name, "seconds": seconds})
        print(f"N={n:7d} {np.dtype(dtype).name} {name:36s} {1e3 * seconds:10.2f} ms", flush=True)
    return rows


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small size, once")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.platform} {device.device_kind}, {platform.machine()}")
    rows = []
    for n in [400] if args.smoke else args.sizes:
        for bits in (32,) if args.smoke else (32, 64):
            with jax.enable_x64(bits == 64):
                rows += measure(n, f"float{bits}", 1 if args.smoke else 3)
    if args.json:
        table = {"jax": jax.__version__, "device": device.device_kind, "rows": rows}
        with open(args.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
