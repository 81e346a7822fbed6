"""What one step costs on 1, 2, 4 and 8 devices: bytes exchanged and arithmetic, from the program.

    python examples/benchmarks/sharding.py --json=sharding.json

Every number of devices is a process of its own with that many fake CPU devices. The bytes of the
collectives and the exponentials of one device are read from the compiled program, with the loops'
trip counts, and stand beside the model:

    exact    particles and scores travel round the ring: 2 N d numbers a step and device;
             one exponential a pair, N^2 / P
    fourier  the modes alone: ceil((d + 1) / 2) M^d complex numbers, and M^d exponentials, whatever
             N (the transforms, proportional to N / P, are a library's and are not in the program)

Time is printed where there are cores for it; fake devices share them, so it says nothing about
real ones.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

DEVICES = (1, 2, 4, 8)


def measure(engine: str, n: int, d: int) -> dict:
    """One step of an engine in this process, on all its devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import yggdrax as yg
    from yggdrax.kernels import RBF

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.random.default_rng(0).uniform(-1, 1, (n, d)).astype(np.float32)
    x = yg.shard_particles(x, mesh)
    kind = yg.Exact() if engine == "exact" else transforms_alone()
    step = jax.jit(lambda x, h: kind.stein(x, 1 - x, h, RBF()))
    h = jnp.float32(0.5)
    compiled = step.lower(x, h).compile()
    text = compiled.as_text()
    status = int(step(x, h).status)
    start = time.perf_counter()
    jax.block_until_ready(step(x, h))
    seconds = time.perf_counter() - start
    rows = n // devices
    modes = -(-(d + 1) // 2) * MODES**d
    model = 2 * n * d * 4 if engine == "exact" else modes * 8
    memory = compiled.memory_analysis()
    return {
        "engine": engine,
        "n": n,
        "d": d,
        "devices": devices,
        "status": status,
        "bytes": added_up(text, exchanged),
        "model_bytes": 0 if devices == 1 else model,
        "exponentials": added_up(text, exponentials),
        "model_exponentials": rows * n if engine == "exact" else modes_of_the_symbol(),
        "flops": (compiled.cost_analysis() or {}).get("flops") if engine == "fourier" else None,
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        "seconds": seconds,
    }


MODES = 19


def modes_of_the_symbol() -> int:
    """The Gaussian's symbol takes one exponential a mode, on every device."""
    return MODES**2


def transforms_alone():
    """A Fourier engine whose program does not hold the exact sum that it may fall back to."""
    import jax.numpy as jnp

    import yggdrax as yg
    from yggdrax.stein.engine import Engine, SteinSum

    class Nothing(Engine):
        shards = True

        def on_shard(self, axes, x, s, h, kernel):
            return SteinSum(jnp.full_like(x, jnp.nan), jnp.int32(0))

    return yg.Fourier(max_modes=MODES, fallback=Nothing())


_SIZES = {"f32": 4, "c64": 8, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "c128": 16}


def _bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        size = _SIZES.get(dtype, 0)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size
    return total


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of every computation of a program, by its name."""
    found, name = {}, ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*->.*\{$", line):
            name = head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def added_up(text: str, cost) -> int:
    """The sum of ``cost(line)`` over a program, loops with their trip counts.

    Of a conditional the dearest branch counts.
    """
    parts = computations(text)

    def of(name: str) -> int:
        return sum(cost(line) + inside(line) for line in parts.get(name, ()))

    def inside(line: str) -> int:
        if loop := re.search(r"while\(.*body=%?([\w.-]+)", line):
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            return of(loop[1]) * (int(trips[1]) if trips else 1)
        if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            return max(of(branch.strip().lstrip("%")) for branch in branches[1].split(","))
        if two := re.search(r"true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", line):
            return max(of(two[1]), of(two[2]))
        called = re.search(r"(?:to_apply|calls)=%?([\w.-]+)", line)
        return of(called[1]) if called else 0

    entry = re.search(r"ENTRY %?([\w.-]+)", text)
    return of(entry[1]) if entry else 0


def exchanged(line: str) -> int:
    """Bytes that one device hands to a collective."""
    kinds = r"= (.*?) (?:all-reduce|collective-permute|all-gather|all-to-all)(?:-start)?\("
    found = re.search(kinds, line)
    return _bytes(found[1]) if found else 0


def exponentials(line: str) -> int:
    """Exponentials, of which the Gaussian kernel takes one a pair."""
    found = re.search(r"= (f32\[[\d,]*\])\S* exponential\(", line)
    return _bytes(found[1]) // 4 if found else 0


def rows_of(arguments) -> list[dict]:
    """All rows of the table, each number of devices in its own process."""
    rows = []
    for devices in DEVICES:
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, __file__, "--worker", *(["--smoke"] if arguments.smoke else [])]
        done = subprocess.run(
            command,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes, two numbers of devices")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (512,) if arguments.smoke else (4096, 16384)
    if arguments.worker:
        rows = [measure(engine, n, 2) for n in sizes for engine in ("exact", "fourier")]
        print(json.dumps(rows))
        return
    if arguments.smoke:
        globals()["DEVICES"] = (1, 2)
    rows = rows_of(arguments)
    columns = (
        "engine",
        "n",
        "devices",
        "bytes",
        "model_bytes",
        "exponentials",
        "model_exponentials",
    )
    print("  ".join(f"{name:>15}" for name in (*columns, "seconds")))
    for row in sorted(rows, key=lambda row: (row["engine"], row["n"], row["devices"])):
        print(
            "  ".join(
                f"{row[name] or 0:>15.10g}" if name != "engine" else f"{row[name]:>15}"
                for name in columns
            )
            + f"  {row['seconds']:>15.4f}"
        )
    if arguments.json:
        import jax

        record = {"versions": {"jax": jax.__version__}, "dtype": "float32", "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
