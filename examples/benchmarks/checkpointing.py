"""What saving costs: time added to a step, time until a step is on the disk, time to restore.

    python examples/benchmarks/checkpointing.py [--smoke] [--json=FILE]

Blocks of steps with one save at their beginning and blocks without one alternate, so that both see
the same machine; the difference of their medians is the time that one save adds, whether it blocks
or competes for the cores, and it is shown as a share of ``--interval`` steps. The gradient is the
cheapest there is (a standard normal target), so the share is at its largest.
"""

import argparse
import importlib.metadata
import json
import pathlib
import platform
import resource
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

import yggdrax as yg

CASES = {
    # name: shape of the particles, shape in the smoke test, the engine that is fastest there
    "100,000 particles, d = 3": ((100_000, 3), (300, 3), "fourier"),
    "20 particles, d = 1,000,000": ((20, 1_000_000), (20, 100), "exact"),
}


def make_step(engine: str):
    """Returns init and a jitted step of chain(svgd, adam) on N(0, I)."""
    tx = optax.chain(yg.svgd("median", engine=engine), optax.adam(1e-3))

    def init(shape):
        x = jax.random.normal(jax.random.key(0), shape)
        return {
            "key": jax.random.key(1),
            "opt_state": tx.init(x),
            "particles": x,
            "step": jnp.int32(0),
        }

    @jax.jit
    def step(state):
        x = state["particles"]
        updates, opt_state = tx.update(x, state["opt_state"], x)
        x = optax.apply_updates(x, updates)
        return state | {"opt_state": opt_state, "particles": x, "step": state["step"] + 1}

    return init, step


def run_block(state, step, count: int, save=None) -> tuple[dict, float]:
    """Returns the state after ``count`` steps and the seconds that they took."""
    start = time.perf_counter()
    if save is not None:
        save(state)
    for _ in range(count):
        state = step(state)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start


def measure(shape, engine: str, interval: int, repeats: int, seconds: float) -> dict:
    """Measures one case; times are medians in seconds."""
    init, step = make_step(engine)
    state = jax.block_until_ready(init(shape))
    for _ in range(2):  # the first compiles
        state, once = run_block(state, step, 1)
    # A block lasts longer than the write, so that it bears the whole of it.
    count = max(2, min(interval, round(seconds / once)))
    number, plain, saving, blocked, whole = 0, [], [], [], []
    with (
        tempfile.TemporaryDirectory() as directory,
        yg.Checkpointer(directory, keep_latest=2) as checkpointer,
    ):

        def save(state):
            start = time.perf_counter()
            checkpointer.save(number, state)
            blocked.append(time.perf_counter() - start)

        for _ in range(repeats):
            number += 1
            state, spent = run_block(state, step, count)
            plain.append(spent / count)
            state, spent = run_block(state, step, count, save)
            late = time.perf_counter()
            checkpointer.wait()
            saving.append(spent + time.perf_counter() - late)
        for _ in range(repeats):
            number += 1
            start = time.perf_counter()
            checkpointer.save(number, state)
            checkpointer.wait()
            whole.append(time.perf_counter() - start)
        restores = []
        for _ in range(repeats):
            start = time.perf_counter()
            restored = jax.block_until_ready(checkpointer.restore(state))
            restores.append(time.perf_counter() - start)
        equal = bool(jnp.array_equal(restored["particles"], state["particles"]))
        size = checkpointer.info()["bytes"]
    one_step = statistics.median(plain)
    added = statistics.median(
        with_save - count * without for with_save, without in zip(saving, plain, strict=True)
    )
    return {
        "N": shape[0],
        "d": shape[1],
        "dtype": "float32",
        "engine": engine,
        "bytes": size,
        "step": one_step,
        "steps a block": count,
        "added by a save": added,
        "share": added / (interval * one_step),
        "save() blocks": statistics.median(blocked),
        "until on the disk": statistics.median(whole),
        "restore": statistics.median(restores),
        "restored equal": equal,
    }


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few seconds")
    parser.add_argument("--interval", type=int, default=100, help="steps between two saves")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    repeats, seconds = (1, 0.01) if args.smoke else (args.repeats, 4.0)
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint", "numpy")
    }
    result = {
        "interval": args.interval,
        "repeats": repeats,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "versions": versions,
        "cases": {},
    }
    print(f"one save every {args.interval} steps, medians of {repeats}; {versions}")
    for name, (full, small, engine) in CASES.items():
        shape = small if args.smoke else full
        case = measure(shape, engine, args.interval, repeats, seconds)
        case["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        result["cases"][name] = case
        print(f"\n{name}")
        for key, value in case.items():
            unit = " s" if isinstance(value, float) and key != "share" else ""
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"  {key:20} {f'{value:.2%}' if key == 'share' else shown}{unit}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
