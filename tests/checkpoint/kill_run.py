"""A run that the kill trial kills: a user's own loop with minibatches, noise, a schedule and a log.

``python -m tests.checkpoint.kill_run`` reads directories from stdin, one a line, and for each forks
a process that starts the run there or continues it to its end; it prints the process id, and the
exit status once the process has ended. The forks share the imports, which take longer than a run;
JAX starts its threads at the first computation, after the fork.
"""

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

NUM_STEPS = 60
SAVE_EVERY = 5
ROWS = 40
BATCH = 4


def main(directory: pathlib.Path) -> None:
    """Runs to the end; everything is a function of the restored state."""
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


def serve() -> None:
    """Forks a run for each line of stdin."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                main(pathlib.Path(line.strip()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
