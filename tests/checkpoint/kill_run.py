"""The runs that the kill trial kills.

One is a user's own loop with minibatches, noise, a schedule and a log; the other is an experiment
from the command line. ``python -m tests.checkpoint.kill_run`` reads lines "name directory" from
stdin, and for each forks a process that starts that run there or continues it to its end; it prints
the process id, and the exit status once the process has ended. The forks share the imports, which
take longer than a run; JAX starts its threads at the first computation, after the fork.
"""

import functools
import json
import os
import pathlib
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import optax

from yggdrax.checkpoint import Checkpointer
from yggdrax.experiment import cli

ROOT = pathlib.Path(__file__).parents[2]

NUM_STEPS = 40
SAVE_EVERY = 5
ROWS = 40
BATCH = 4


def run_loop(directory: pathlib.Path) -> None:
    """Runs the loop to its end; everything is a function of the restored state."""
    tx = optax.adam(optax.cosine_decay_schedule(0.1, NUM_STEPS))
    data = jnp.linspace(-1.0, 1.0, ROWS)

    @jax.jit
    def advance(state):
        rows_key, noise_key = jax.random.split(jax.random.fold_in(state["key"], state["step"]))
        rows = jax.random.choice(rows_key, ROWS, (BATCH,), replace=False)
        x = state["particles"]
        grads = x - data[rows].mean() + 0.1 * jax.random.normal(noise_key, x.shape)
        updates, opt_state = tx.update(grads, state["opt_state"])
        state = state | {"particles": optax.apply_updates(x, updates), "opt_state": opt_state}
        return state | {"step": state["step"] + 1}, rows

    particles = jax.random.normal(jax.random.key(0), (200, 3))
    state = {
        "key": jax.random.key(1),
        "opt_state": tx.init(particles),
        "particles": particles,
        "step": jnp.int32(0),
    }
    with Checkpointer(directory / "checkpoints", save_every=SAVE_EVERY) as checkpointer:
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(state)
        log_path = directory / "log.jsonl"
        # Cut back in place: a log written anew would be lost by a kill just then.
        log_path.touch()
        lines = log_path.read_bytes().splitlines(keepends=True)
        with log_path.open("r+b") as log:
            log.seek(sum(map(len, lines[: int(state["step"])])))
            log.truncate()
            while int(state["step"]) < NUM_STEPS:
                state, rows = advance(state)
                norm = float(jnp.sum(state["particles"] ** 2))
                row = [int(state["step"]), rows.tolist(), norm.hex()]
                log.write(json.dumps(row).encode() + b"\n")
                log.flush()
                checkpointer.save(state["step"], state)
                time.sleep(0.002)


def run_experiment(config: str, directory: pathlib.Path) -> None:
    """Runs ``python -m yggdrax`` with a configuration of this project to its end."""
    arguments = [
        "yggdrax",
        f"--config={ROOT / 'configs' / config}",
        f"--workdir={directory}",
        "--noprogress",
        f"--config.num_steps={NUM_STEPS}",
        f"--config.checkpoint_every={SAVE_EVERY}",
        "--config.log_every=1",
        "--config.plots=False",
    ]
    status = cli.main(arguments)
    if status != 0:
        raise SystemExit(status)


RUNS = {
    "loop": run_loop,
    "banana": functools.partial(run_experiment, "banana.py"),
    "regression": functools.partial(run_experiment, "test.py"),  # with minibatches
}


def serve() -> None:
    """Forks a run for each line of stdin."""
    for line in sys.stdin:
        name, directory = line.split(maxsplit=1)
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # stdout carries the answers of the server
            code = 1
            try:
                RUNS[name](pathlib.Path(directory.strip()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
