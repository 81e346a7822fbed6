"""Checks on eight CPU devices, all in one process; prints one JSON object.

Run by test_eight.py, which gives this process its devices. A check returns what a test asserts.
"""

import contextlib
import functools
import json
import re
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import yggdrax as yg
from yggdrax.kernels import RBF

RNG = np.random.default_rng(0)
MESHES = {
    kind.name.lower(): jax.make_mesh((8,), ("p",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}
TREE = {
    "w": RNG.normal(size=(160, 2, 2)).astype(np.float32),
    "b": RNG.normal(size=160).astype(np.float32),
}
# More than 16 dimensions: distances of all pairs by matrix products, leaves apart.
WIDE = {
    "w": RNG.normal(size=(16, 20, 20)).astype(np.float32),
    "b": RNG.normal(size=(16, 1)).astype(np.float32),
}
# In a box of a few bandwidths, so that one rung of the Fourier ladder serves.
FLAT = RNG.uniform(-1, 1, size=(1200, 2)).astype(np.float32)
FOURIER = yg.Fourier(max_modes=19)


def difference(one, other):
    """|one - other| / |other|, over all leaves."""
    a, b = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (one, other)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def collectives(text):
    return sorted(
        set(re.findall(r"(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text))
    )


def wholes(text, n):
    """Arrays of the compiled program that have n rows, but (n, n) of the median's distances."""
    return sorted(set(re.findall(rf"f32\[{n}(?:,\d+)*\]", text)) - {f"f32[{n},{n}]"})


def updates(particles, steps=2, **options):
    """Some updates of svgd alone; the last update, the state, and the compiled function."""
    tx = yg.svgd(**options)
    update = jax.jit(lambda *arguments: tx.update(*arguments))
    grads = jax.tree.map(lambda leaf: leaf - 1, particles)
    state = tx.init(particles)
    for _ in range(steps):
        direction, state = update(grads, state, particles)
    return direction, state, update, grads


@functools.cache
def on_one_device(name, **options):
    """The same on one device; once for both kinds of meshes."""
    return updates(globals()[name], **options)[:2]


def same(name, kind, *, look=False, **options):
    """What the first promise says of one kind of particles on one kind of mesh."""
    particles = globals()[name]
    expected, expected_state = on_one_device(name, **options)
    mesh = MESHES[kind]
    sharded = yg.shard_particles(particles, mesh)
    direction, state, update, grads = updates(sharded, **options)
    # Looking into the compiled program compiles it once more.
    text = update.lower(grads, state, sharded).compile().as_text() if look else ""
    rows = NamedSharding(mesh, PartitionSpec("p"))
    return {
        "difference": difference(direction, expected),
        "bandwidth": np.array_equal(state.bandwidth, expected_state.bandwidth),
        "status": int(state.status) == int(expected_state.status),
        "error": [float(state.error), float(expected_state.error)],
        "split": all(
            leaf.sharding.is_equivalent_to(rows, leaf.ndim) for leaf in jax.tree.leaves(direction)
        ),
        "replicated": all(
            leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 8
            for leaf in jax.tree.leaves(state)
        ),
        "compiled": update._cache_size(),
        "collectives": collectives(text),
        "wholes": wholes(text, jax.tree.leaves(particles)[0].shape[0]),
    }


def in_a_training_loop():
    """A chain with Adam, and a two-axis mesh, in a context that keeps it at one compilation."""
    target = yg.Banana()
    start = np.asarray(yg.init_particles(jax.random.key(0), target, 64))
    tx = optax.chain(yg.svgd(), optax.adam(0.05))

    def loop(particles):
        @jax.jit
        def step(particles, opt_state):
            grads = yg.particle_grads(target, particles)
            direction, opt_state = tx.update(grads, opt_state, particles)
            return optax.apply_updates(particles, direction), opt_state

        opt_state = tx.init(particles)
        for _ in range(20):
            particles, opt_state = step(particles, opt_state)
        return particles, step._cache_size()

    expected, _ = loop(start)
    mesh = jax.make_mesh((4, 2), ("p", "other"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        moved, compiled = loop(yg.shard_particles(start, mesh, "p"))
    spec = str(moved.sharding.spec)
    return {"difference": difference(moved, expected), "compiled": compiled, "spec": spec}


def placed_by_jit():
    """NumPy particles that in_shardings splits, and particles that every device has whole."""
    tx = yg.svgd(1.0, engine="exact")
    state = tx.init(FLAT)
    expected = jax.jit(tx.update)(FLAT - 1, state, FLAT)[0]
    rows, whole = (NamedSharding(MESHES["auto"], PartitionSpec(*axes)) for axes in (("p",), ()))

    def step(grads, particles):
        return tx.update(grads, tx.init(particles), particles)[0]

    split = jax.jit(step, in_shardings=(rows, rows))
    text = split.lower(FLAT - 1, FLAT).compile().as_text()
    everywhere = jax.device_put(FLAT, whole)
    replicated = jax.jit(step)(everywhere - 1, everywhere)
    return {
        "difference": difference(split(FLAT - 1, FLAT), expected),
        "collectives": collectives(text),
        "replicated": [difference(replicated, expected), str(replicated.sharding.spec)],
    }


def gradients(kind, *names):
    """Derivatives of a function of the update in particles and gradients, the median included."""
    out = {}
    cases = {
        "exact": (TREE, {"engine": "exact"}),
        "wide": (WIDE, {}),
        "fourier": (FLAT, {"engine": FOURIER}),
    }
    for name in names:
        particles, options = cases[name]
        tx = yg.svgd(**options)

        def loss(particles, grads, tx=tx):
            direction = tx.update(grads, tx.init(particles), particles)[0]
            return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(direction))

        both = jax.jit(jax.grad(loss, (0, 1)))
        grads = jax.tree.map(lambda leaf: leaf - 1, particles)
        expected = both(particles, grads)
        mesh = MESHES[kind]
        sharded = [yg.shard_particles(tree, mesh) for tree in (particles, grads)]
        value = both(*sharded)
        rows = NamedSharding(mesh, PartitionSpec("p"))
        out[name] = {
            "difference": [difference(a, b) for a, b in zip(value, expected, strict=True)],
            "split": all(
                leaf.sharding.is_equivalent_to(rows, leaf.ndim) for leaf in jax.tree.leaves(value)
            ),
        }
    return out


def not_finite():
    """One NaN in one shard; and more modes than allowed, where the ring serves in the same call."""
    x = FLAT.copy()
    x[7, 0] = np.nan
    step = jax.jit(lambda x, h: FOURIER.stein(x, 1 - x, h, RBF()))
    sharded = yg.shard_particles(FLAT, MESHES["auto"])
    fine = step(sharded, jnp.float32(0.5))
    broken = step(yg.shard_particles(x, MESHES["auto"]), jnp.float32(0.5))
    narrow = step(sharded, jnp.float32(0.02))
    compiled = step._cache_size()
    expected = yg.exact_phi(FLAT, 1 - FLAT, 0.02)
    return {
        "fine": [bool(np.isfinite(fine.phi).all()), int(fine.status)],
        "broken": [bool(np.isnan(broken.phi).all()), int(broken.status)],
        "narrow": [difference(narrow.phi, expected), int(narrow.status)],
        "compiled": compiled,
    }


def fourier_traffic():
    """Bytes of the collectives of one Fourier sum, for two sizes."""

    def size(n):
        rows = NamedSharding(MESHES["auto"], PartitionSpec("p"))
        x = jax.ShapeDtypeStruct((n, 2), jnp.float32, sharding=rows)
        step = jax.jit(lambda x: FOURIER.stein(x, 1 - x, jnp.float32(0.5), RBF()).phi)
        text = step.lower(x).compile().as_text()
        return re.findall(r"= (\S+?)\{\S* all-reduce(?:-start)?\(", text)

    return {"small": size(800), "large": size(1600)}


def medians():
    """More particles than twice the sampled pairs: the differences are added over the shards."""
    x = RNG.normal(size=(65_600, 1)).astype(np.float32)
    rule = jax.jit(lambda x: yg.MedianRule().bandwidth((x,)))
    slope = jax.jit(jax.grad(lambda x: yg.MedianRule().bandwidth((x,))))
    sharded = yg.shard_particles(x, MESHES["auto"])
    text = rule.lower(sharded).compile().as_text()
    value = rule(sharded)
    return {
        "equal": float(value) == float(rule(x)),
        "devices": len({float(shard.data) for shard in value.addressable_shards}),
        "slope": difference(slope(sharded), slope(x)),
        "collectives": collectives(text),
        "wholes": wholes(text, len(x)),
    }


def refusals():
    """Messages of what is refused."""
    mesh = MESHES["auto"]
    messages = {}
    for name, action in {
        "uneven": lambda: yg.shard_particles(np.zeros((30, 2)), mesh),
        "few": lambda: yg.shard_particles(np.zeros((5, 2)), mesh),
        "axis": lambda: yg.shard_particles(np.zeros((8, 2)), mesh, "data"),
        "tree": lambda: updates(yg.shard_particles(FLAT, mesh), engine="tree"),
    }.items():
        messages[name] = ""
        try:
            action()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def networks(kind):
    """Members split over devices: gradients with keys of their own, and predictions."""
    from flax import nnx

    def build(rngs):
        return nnx.Linear(3, 1, rngs=rngs)

    target = yg.BayesianNetwork(build, num_data=20)
    x, y = RNG.normal(size=(20, 3)).astype(np.float32), RNG.normal(size=20).astype(np.float32)
    members = jax.tree.map(np.asarray, yg.init_particles(jax.random.key(0), target, 16))
    mesh = MESHES[kind]

    def everything(members):
        grads = yg.particle_grads(target, members, (x, y), key=jax.random.key(1))
        tx = yg.svgd()
        return tx.update(grads, tx.init(members), members)[0]

    expected = jax.jit(everything)(members)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        sharded = yg.shard_particles(members, mesh)
        value = jax.jit(everything)(sharded)
        predicting = jax.jit(lambda members: yg.predict(target, members, x).mean)
        text = predicting.lower(sharded).compile().as_text()
        mean = predicting(sharded)
    return {
        "difference": difference(value, expected),
        "prediction": difference(mean, jax.jit(lambda m: yg.predict(target, m, x).mean)(members)),
        "collectives": collectives(text),
        "parameters": wholes(text, 16),
    }


CHECKS = {
    "tree auto": lambda: same("TREE", "auto", look=True),
    "tree explicit": lambda: same("TREE", "explicit"),
    "wide auto": lambda: same("WIDE", "auto", look=True),
    "wide explicit": lambda: same("WIDE", "explicit"),
    "fourier auto": lambda: same("FLAT", "auto", look=True, engine=FOURIER),
    "fourier explicit": lambda: same("FLAT", "explicit", engine=FOURIER),
    "leaf explicit": lambda: same("TREE", "explicit", per="leaf", kernel="imq"),
    "coordinate auto": lambda: same("TREE", "auto", per="coordinate"),
    "scale explicit": lambda: same("TREE", "explicit", scale=yg.RunningScale(), distances="w"),
    "loop": in_a_training_loop,
    "placed": placed_by_jit,
    "gradients auto": lambda: gradients("auto", "exact", "fourier"),
    "gradients explicit": lambda: gradients("explicit", "wide"),
    "not finite": not_finite,
    "traffic": fourier_traffic,
    "medians": medians,
    "refusals": refusals,
    "networks auto": lambda: networks("auto"),
    "networks explicit": lambda: networks("explicit"),
}


def main():
    results = {}
    for name, check in CHECKS.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        start = time.process_time()
        try:
            results[name] = check()
        except Exception:
            results[name] = {"exception": traceback.format_exc()}
        print(f"{name}: {time.process_time() - start:.1f} s of CPU", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
