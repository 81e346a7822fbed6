"""Stop a training loop of your own at any moment and start it again: nothing is lost.

    python examples/04_resume.py --directory=runs/resume

Press Ctrl-C, or kill it, and call it again: it goes on from the last checkpoint, and the numbers
it prints at the end are the same to the last bit as those of a run that was never stopped.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import yggdrax as yg

NUM_PARTICLES = 200


def log_density(x):
    """A banana in two dimensions, up to a constant; x has shape (2,)."""
    return -0.5 * (x[0] ** 2 / 4 + (x[1] - x[0] ** 2 / 4) ** 2)


def main() -> None:
    """Runs to the end, from wherever the directory says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="runs/resume")
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--stop-at", type=int, help="leave after this step, as if interrupted")
    args = parser.parse_args()

    schedule = optax.cosine_decay_schedule(0.1, args.num_steps)
    tx = optax.chain(yg.svgd("median"), optax.adam(schedule))
    grads = jax.vmap(jax.grad(lambda x: -log_density(x)))

    @jax.jit
    def advance(state):
        # The noise is a function of (key, step), so a step repeated after a kill repeats it.
        key = jax.random.fold_in(state["key"], state["step"])
        x = state["particles"]
        noisy = grads(x) + 0.1 * jax.random.normal(key, x.shape)
        updates, opt_state = tx.update(noisy, state["opt_state"], x)
        return {
            "key": state["key"],
            "opt_state": opt_state,
            "particles": optax.apply_updates(x, updates),
            "step": state["step"] + 1,
        }

    # Everything that the next step needs is in the state, and nothing of it elsewhere.
    particles = jax.random.normal(jax.random.key(0), (NUM_PARTICLES, 2))
    state = {
        "key": jax.random.key(1),
        "opt_state": tx.init(particles),
        "particles": particles,
        "step": jnp.int32(0),
    }
    config = {"num_steps": args.num_steps, "particles": NUM_PARTICLES}
    with yg.Checkpointer(
        args.directory, save_every=args.save_every, keep_latest=2, config=config
    ) as checkpointer:
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(state)
            print(f"continuing after step {state['step']}")
        for step in range(int(state["step"]) + 1, args.num_steps + 1):
            state = advance(state)
            checkpointer.save(step, state, force=step == args.num_steps)
            if step == args.stop_at:
                print(f"stopped after step {step}; the same command continues")
                return

    mean = jnp.mean(state["particles"], 0)
    print(f"complete: mean {mean}, sum of squares {float(jnp.sum(state['particles'] ** 2)).hex()}")


if __name__ == "__main__":
    main()
