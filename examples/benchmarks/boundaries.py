"""How often the discrete parts of a sum change along a run, and how far the loss jumps there.

    python examples/benchmarks/boundaries.py [--smoke] [--json FILE]

Order, lists, mode counts and the pair that is the median are constants to a gradient. Here a loss
(a weighted sum of phi) is followed along a run of ``chain(svgd, adam)``: between two steps
the positions are interpolated in 8 parts, and in each part the change of the engine's loss is
compared with that of the exact sum's. Where the discrete parts stay, both changes agree to the
engine's smooth error; a jump is what is left over. All are relative to the gross size of the loss,
in the norm that ``rtol`` bounds. ``changed`` is the share of steps in which the discrete parts
differ at both ends.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from yardstick import write_rows

import yggdrax as yg
from yggdrax.kernels import IMQ, RBF
from yggdrax.stein import modes

PARTS = 8


def engines():
    """Name, engine, kernel, and what is discrete about it for particles x and a bandwidth h."""
    fourier = yg.Fourier(rtol=1e-3, check_every=0)
    tree = yg.Tree(rtol=1e-3, exact_above=1.0, check_every=0)

    def rung(x, h):
        extent = modes.bounding_box(x, h).extent
        return jnp.sum(extent > jnp.asarray(fourier.reaches(x.shape[1], x.dtype, RBF())))[None]

    def lists(x, h):
        topology = tree.topology(x, h, IMQ())
        sizes = jax.tree.leaves(topology.lists)
        return jnp.stack([jnp.sum(leaf.astype(jnp.float32) % 8191) for leaf in sizes])

    return (("fourier", fourier, RBF(), rung), ("tree", tree, IMQ(), lists))


def measure(name, engine, kernel, discrete, n, steps):
    """One row of the table."""
    target = yg.Banana()
    tx = optax.chain(yg.svgd(0.6, kernel=kernel, engine="exact"), optax.adam(0.1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((n, 2)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((n, 2)), jnp.float32)
    h = jnp.float32(0.6)

    @jax.jit
    def step(x, state):
        updates, state = tx.update(yg.particle_grads(target, x), state, x)
        return optax.apply_updates(x, updates), state

    @jax.jit
    def losses(x):
        s = -yg.particle_grads(target, x)
        sums = [e.stein(x, s, h, kernel).phi for e in (engine, yg.Exact())]
        gross = yg.Exact().stein(x, 0 * s, h, kernel).phi
        attraction = sums[1] - gross
        size = jnp.sqrt(jnp.sum(gross**2) + jnp.sum(attraction**2)) * jnp.linalg.norm(weights)
        return jnp.stack([jnp.sum(weights * phi) / size for phi in sums])

    mark = jax.jit(lambda x: discrete(x, h))
    state, changed, leftovers = tx.init(x), [], []
    for _ in range(steps):
        new, state = step(x, state)
        path = [losses(x + t * (new - x)) for t in np.linspace(0, 1, PARTS + 1, dtype=np.float32)]
        smooth = np.diff(np.array(path, np.float64), axis=0)
        leftovers.append(np.abs(smooth[:, 0] - smooth[:, 1]).max())
        changed.append(not np.array_equal(mark(x), mark(new)))
        x = new
    row = {"engine": name, "N": n, "steps": steps, "rtol": engine.rtol}
    row |= {"changed": float(np.mean(changed)), "largest_jump": float(np.max(leftovers))}
    row |= {"median_jump": float(np.median(leftovers))}
    print(
        f"{name:8s} N={n} {steps} steps: changed in {row['changed']:.0%} of the steps, "
        f"largest jump {row['largest_jump']:.1e} (median {row['median_jump']:.1e}) "
        f"at rtol {engine.rtol:g}"
    )
    return row


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps of few particles")
    parser.add_argument("--json", help="file for the table")
    args = parser.parse_args()
    n, steps = (300, 2) if args.smoke else (2000, 50)
    rows = [measure(*engine, n, steps) for engine in engines()]
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
