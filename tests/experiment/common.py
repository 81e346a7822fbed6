"""What several tests of experiments share."""

import json

import jax
import numpy as np

from yggdrax.checkpoint import Checkpointer
from yggdrax.experiment.steps import Stepper


def rows_of(folder):
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def left_by(folder, config):
    """All that must not depend on interruptions: metrics, particles, the whole final state."""
    config = config.freeze()
    state = Stepper(config, config.problem.build(config.seed)).initial_state()
    with Checkpointer(folder / "checkpoints", read_only=True) as checkpointer:
        state = checkpointer.restore(state)
    with np.load(folder / "particles.npz") as archive:
        particles = dict(archive)
    state = state._replace(key=jax.random.key_data(state.key))
    return rows_of(folder), particles, jax.tree.map(np.asarray, state)


def assert_same(first, second):
    """Equal in every bit."""
    assert first[0] == second[0]
    jax.tree.map(np.testing.assert_array_equal, first[1:], second[1:])
