"""When to save, what to keep, and what is recorded beside the state."""

import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.checkpoint import Checkpointer
from yggdrax.checkpoint.keep import KeepPolicy

STATE = {"x": jnp.zeros(2)}


@pytest.mark.parametrize(
    "save_every, forced, expected",
    [
        (1, (), [0, 1, 2, 3, 4, 5, 6]),
        (3, (), [0, 3, 6]),
        (3, (5,), [0, 3, 5, 6]),
        (lambda step: step in (1, 4), (), [1, 4]),
    ],
)
def test_save_every(tmp_path, save_every, forced, expected):
    with Checkpointer(tmp_path, save_every=save_every, keep_latest=None) as checkpointer:
        saved = [s for s in range(7) if checkpointer.save(s, STATE, force=s in forced)]
        assert saved == expected == checkpointer.steps()


def choose(losses, **options):
    options = {"latest": 1, "every": None, "best": "loss", "mode": "min", "count": 1} | options
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    return sorted(KeepPolicy(**options).choose(metrics))


def test_what_is_kept():
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 5.0}
    assert choose(losses, best=None) == [50]
    assert choose(losses, best=None, latest=3) == [30, 40, 50]
    assert choose(losses, best=None, latest=None) == [10, 20, 30, 40, 50]
    assert choose(losses, best=None, every=20) == [20, 40, 50]
    # The best is kept besides the latest, never instead of it; of equals the newest.
    assert choose(losses) == [40, 50]
    assert choose(losses, count=3) == [20, 30, 40, 50]
    assert choose(losses, mode="max") == [50]
    assert choose(losses, mode="max", count=2) == [10, 50]
    nan = float("nan")
    assert choose({1: nan, 2: 4.0, 3: nan}) == [2, 3]
    assert choose({1: nan, 2: nan}) == [2]
    assert choose({1: float("inf"), 2: nan}) == [1, 2]


def test_the_directory_follows_the_policy_across_a_restart(tmp_path):
    losses = {1: 4.0, 2: 0.5, 3: 2.0, 4: 3.0, 5: 1.0, 6: 6.0}
    for steps in ((1, 2, 3), (4, 5, 6)):
        with Checkpointer(tmp_path, keep_latest=2, keep_every=4, best="loss") as checkpointer:
            for step in steps:
                checkpointer.save(step, STATE, metrics={"loss": jnp.float32(losses[step])})
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.steps() == [2, 4, 5, 6]
        assert checkpointer.info(2)["metrics"] == {"loss": 0.5}
    assert not any((tmp_path / ".yggdrax-tmp").iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"save_every": 0}, "save_every must be a positive integer or a function.*, not 0"),
        ({"save_every": 1.5}, "save_every"),
        ({"keep_latest": 0}, "keep_latest must be a positive integer, not 0"),
        ({"keep_every": -1}, "keep_every"),
        ({"keep_best": 0}, "keep_best"),
        ({"best": "loss", "best_mode": "least"}, "best_mode must be 'min' or 'max', not 'least'"),
        ({"best": lambda metrics: 0}, "best must be the name of a metric"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_metrics_and_metadata(tmp_path):
    before = time.time()
    config = {"seed": 3, "widths": (50, 20)}
    metadata = {"epoch": 2, "files": ["a", "b"], "note": None}
    with Checkpointer(tmp_path, config=config, best="loss") as checkpointer:
        with pytest.raises(ValueError, match="'loss', which is not among the metrics"):
            checkpointer.save(1, STATE, metrics={"rmse": 1.0})
        with pytest.raises(TypeError, match="The metric 'loss' must be one number"):
            checkpointer.save(1, STATE, metrics={"loss": np.zeros(3)})
        with pytest.raises(TypeError, match="The name of a metric is a string, not 3"):
            checkpointer.save(1, STATE, metrics={3: 1.0, "loss": 1.0})
        with pytest.raises(TypeError, match=r"metadata\['x'\] is of type ndarray"):
            checkpointer.save(1, STATE, metrics={"loss": 1}, metadata={"x": np.zeros(3)})
        with pytest.raises(TypeError, match=r"metadata has the key 1"):
            checkpointer.save(1, STATE, metrics={"loss": 1}, metadata={1: 2})
        assert checkpointer.latest_step() is None
        checkpointer.save(1, STATE, metrics={"loss": np.float64(0.5)}, metadata=metadata)
        checkpointer.save(2, STATE, metrics={"loss": float("nan")})
        assert checkpointer.metadata(1) == metadata
        assert checkpointer.metadata() == {}
        info = checkpointer.info(1)
    assert before <= info["time"] <= time.time()
    assert info["config"] == {"seed": 3, "widths": [50, 20]}
    assert info["leaves"] == {"['x']": "float32[2]"}
    assert info["format_version"] == 1
    assert info["settings"]["platform"] == "cpu" and info["settings"]["threads"] >= 1
    assert info["settings"]["version of orbax-checkpoint"].startswith("0.12.")
    assert len(info["fingerprint"]) == 16 and info["bytes"] > 0


def test_changes_of_the_callers_metadata_after_the_call_are_not_saved(tmp_path):
    metadata = types.MappingProxyType({"rows": [1]})
    config = {"seed": 1}
    with Checkpointer(tmp_path, config=config) as checkpointer:
        checkpointer.save(1, {"x": jnp.zeros(3_000_000)}, metadata=metadata)
        metadata["rows"].append(2)
        config["seed"] = 2
        assert checkpointer.metadata() == {"rows": [1]}
        assert checkpointer.info()["config"] == {"seed": 1}
