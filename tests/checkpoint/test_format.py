"""Checkpoints written by earlier versions, whole and damaged, are read or refused by name.

``data/version_1`` was written by the first version of the format with :func:`write`. A version
that changes the format adds a folder of its own and keeps the older ones.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.checkpoint.common import Moments, assert_same
from yggdrax.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
    NoCheckpoint,
)
from yggdrax.checkpoint.folder import FORMAT_VERSION

DATA = pathlib.Path(__file__).parent / "data"


def state(scale):
    """The state that was saved with ``scale`` 1 at step 10 and 2 at step 20."""
    x = jnp.arange(600.0).reshape(200, 3) * scale
    return {
        "empty": jnp.zeros((0, 2)),
        "key": jax.random.key(3 * scale),
        "legacy": jax.random.PRNGKey(5 * scale),
        "moments": Moments(jnp.full(3, 0.5) * scale, jnp.ones(2, jnp.bfloat16) * scale),
        "numpy": np.linspace(0.0, scale, 4),
        "opt_state": optax.ScaleByAdamState(jnp.int32(scale), {"x": x / 2}, {"x": x / 4}),
        "particles": {"x": x},
        "python": [scale, 0.1 * scale, "text", True],
        "scalar": np.float32(scale),
        "weak": jnp.asarray(1.0) * scale,
    }


def write(directory):
    """Writes the data of the current version; called once, when the version was new."""
    with Checkpointer(directory, config={"seed": 1}) as checkpointer:
        for step in (10, 20):
            metrics, metadata = {"loss": 1 / step}, {"note": f"step {step}"}
            checkpointer.save(step, state(step // 10), metrics=metrics, metadata=metadata)


def open_copy(tmp_path, name):
    shutil.copytree(DATA / name, tmp_path / name)
    return Checkpointer(tmp_path / name)


# Another machine, or later packages, are to be said, and change nothing of the state.
OTHER_SETTINGS = "ignore:.*was saved under other settings:yggdrax.checkpoint.CheckpointWarning"


@pytest.mark.filterwarnings(OTHER_SETTINGS)
def test_version_1_is_read(tmp_path):
    with open_copy(tmp_path, "version_1") as checkpointer:
        assert checkpointer.steps() == [10, 20]
        assert_same(checkpointer.restore(state(7)), state(2))
        assert_same(checkpointer.restore(state(7), step=10), state(1))
        assert checkpointer.info(10)["metrics"] == {"loss": 0.1}
        assert checkpointer.info(10)["config"] == {"seed": 1}
        assert checkpointer.info(10)["format_version"] == 1 <= FORMAT_VERSION
        assert checkpointer.metadata() == {"note": "step 20"}
        assert checkpointer.save(30, state(3))
        assert_same(checkpointer.restore(state(7)), state(3))


DAMAGED = {
    "no_manifest": "has no readable yggdrax.json",
    "manifest_cut": "is not a whole manifest",
    "manifest_altered": "was altered after it was written",
    "manifest_of_another_program": "was not written by yggdrax",
    "array_file_missing": "is missing",
    "array_file_cut": "bytes instead of",
    "byte_flipped": "00000020",
    "metadata_of_orbax_garbled": "cannot be read",
    "step_renamed": "holds step 10",
}


@pytest.mark.filterwarnings(OTHER_SETTINGS)
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_of_version_1_are_refused_with_the_reason(tmp_path, name):
    # Each holds one step 20 that is damaged; step 10 is taken from the whole one.
    shutil.copytree(DATA / "version_1_damaged" / name, tmp_path / "run" / "00000020")
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(CheckpointDamaged, match=DAMAGED[name]):
            checkpointer.restore(state(7), step=20)
        with (
            pytest.warns(CheckpointWarning, match=r"00000020.*skipped"),
            pytest.raises(NoCheckpoint),
        ):
            checkpointer.restore(state(7))
    shutil.copytree(DATA / "version_1" / "00000010", tmp_path / "run" / "00000010")
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.warns(CheckpointWarning, match=r"00000020.*skipped"):
            assert_same(checkpointer.restore(state(7)), state(1))
        assert checkpointer.restored_step == 10


def test_a_version_that_is_not_known_is_refused_by_number(tmp_path):
    with open_copy(tmp_path, "version_1") as checkpointer:
        path = checkpointer.directory / "00000020" / "yggdrax.json"
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"version": FORMAT_VERSION + 2}))
        with pytest.raises(CheckpointError, match=f"format version {FORMAT_VERSION + 2}"):
            checkpointer.restore(state(7))
