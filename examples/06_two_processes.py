"""Two processes, each with half of the particles: the same result as one process with all.

    python examples/06_two_processes.py

starts itself twice more on this machine. The processes meet at a port of the loopback interface and
exchange blocks of particles through JAX's CPU collectives. On a cluster nobody starts them like
this: a launcher does, jax.distributed.initialize() reads its environment, and `run` stays as it is.
"""

import argparse
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import yggdrax as yg

NUM_PARTICLES, NUM_STEPS = 200, 200


def run() -> jax.Array:
    """Moves particles onto a banana, wherever they are; returns them, split over all devices."""
    target = yg.Banana()
    mesh = jax.make_mesh((jax.device_count(),), ("particles",))
    particles = yg.init_particles(jax.random.key(0), target, NUM_PARTICLES)
    with jax.set_mesh(mesh):
        particles = yg.shard_particles(np.asarray(particles), mesh)
        tx = optax.chain(yg.svgd("median"), optax.adam(0.05))
        opt_state = tx.init(particles)

        @jax.jit
        def step(particles, opt_state):
            grads = yg.particle_grads(target, particles)
            updates, opt_state = tx.update(grads, opt_state, particles)
            return optax.apply_updates(particles, updates), opt_state

        for _ in range(NUM_STEPS):
            particles, opt_state = step(particles, opt_state)
    yg.check(opt_state)
    return jax.block_until_ready(particles)


def member(coordinator: str, index: int, folder: pathlib.Path) -> None:
    """One of the two processes: writes the rows that it holds."""
    jax.distributed.initialize(coordinator, 2, index, initialization_timeout=60)
    for shard in run().addressable_shards:
        np.savez(folder / f"{index}.npz", start=shard.index[0].start or 0, rows=shard.data)
    jax.distributed.shutdown()


def start_two(folder: pathlib.Path) -> np.ndarray:
    """Starts both processes and puts their rows together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, f"--coordinator=127.0.0.1:{port}", f"--folder={folder}"]
    processes = [
        # Sessions of their own: Ctrl-C reaches the parent alone, which ends both.
        subprocess.Popen([*command, f"--index={index}"], start_new_session=True)
        for index in range(2)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    except KeyboardInterrupt:
        raise SystemExit("interrupted: both processes are ended") from None
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")
    parts = [np.load(folder / f"{index}.npz") for index in range(2)]
    return np.concatenate([part["rows"] for part in sorted(parts, key=lambda p: int(p["start"]))])


def main() -> None:
    """Compares two processes with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="host:port of process 0; set by the parent")
    parser.add_argument("--index", type=int)
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    if args.coordinator:
        # One CPU device a process, whatever flags the parent was started with.
        jax.config.update("jax_num_cpu_devices", 1)
        member(args.coordinator, args.index, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        two = start_two(pathlib.Path(folder))
    one = np.asarray(run())
    print(f"one process: mean {jnp.mean(one, 0)}; two processes: mean {jnp.mean(two, 0)}")
    relative = np.linalg.norm(one - two) / np.linalg.norm(one)
    print(f"largest difference of a coordinate: {np.abs(one - two).max():.1e}")
    print(f"relative: {relative:.1e} (sums in another order, over {NUM_STEPS} steps of float32)")


if __name__ == "__main__":
    main()
