"""The run loop: what a run leaves, and that interruptions of every kind change none of it."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.experiment.common import assert_same, left_by, rows_of
from yggdrax.checkpoint import (
    CheckpointDamaged,
    Checkpointer,
    CheckpointLocked,
    CheckpointWarning,
    NoCheckpoint,
    folder,
)
from yggdrax.experiment import (
    BananaProblem,
    ExperimentConfig,
    OptimizerConfig,
    Problem,
    ProblemConfig,
    WorkdirError,
    run,
)
from yggdrax.experiment.steps import Stepper
from yggdrax.experiment.workdir import Workdir
from yggdrax.status import StatusError
from yggdrax.targets import LogDensity


@dataclasses.dataclass
class BrokenProblem(ProblemConfig):
    """A density whose score is NaN once a particle is beyond a point."""

    def build(self, seed):
        del seed

        def log_density(x):
            return jnp.sum(x + 0 * jnp.sqrt(2 - x))

        return Problem(LogDensity(log_density, init=jnp.zeros(1)))


def config(**changes):
    fields = {
        "num_particles": 4,
        "num_steps": 20,
        "log_every": 5,
        "checkpoint_every": 4,
        "optimizer": OptimizerConfig("adam", 0.05, "cosine"),
        "plots": False,
    }
    return ExperimentConfig(BananaProblem(), **(fields | changes)).freeze()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    outcome = run(config(), folder)
    assert outcome.complete and outcome.step == 20
    return folder


def test_a_run_leaves_its_files(unbroken):
    names = {path.name for path in unbroken.iterdir()}
    assert names == {
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "particles.npz",
        "summary.json",
    }
    assert [row["step"] for row in rows_of(unbroken)] == [0, 5, 10, 15, 20]
    assert {"log_density", "bandwidth", "spread", "status", "error", "error_step"} <= set(
        rows_of(unbroken)[-1]
    )
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["complete"] is True and summary["num_steps"] == 20
    assert json.loads((unbroken / "config.json").read_text()) == config().to_dict()
    with np.load(unbroken / "particles.npz") as archive:
        assert archive["particles"].shape == (4, 2)
        np.testing.assert_allclose(archive["particles"].mean(0), summary["mean"], atol=1e-6)
    with Checkpointer(unbroken / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.steps() == [12, 16, 20]
        assert checkpointer.info()["config"] == config().to_dict()


@pytest.mark.parametrize("stop_at", [3, 10])
def test_stopping_half_way_changes_no_bit(unbroken, tmp_path, stop_at):
    """3 is between a metrics row and a checkpoint, 10 is a row but no multiple of four."""
    cfg = config(stop_at=stop_at)
    first = run(cfg, tmp_path)
    assert not first.complete and first.step == stop_at and first.summary is None
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(0, stop_at + 1, 5))
    assert run(cfg, tmp_path).complete
    assert_same(left_by(unbroken, config()), left_by(tmp_path, cfg))


def test_losing_the_latest_checkpoint_changes_no_bit(unbroken, tmp_path):
    """As after a kill: rows of later steps are there, and the last step folder is half written."""
    cfg = config(stop_at=18)
    run(cfg, tmp_path)
    folder = sorted((tmp_path / "checkpoints").glob("*18"))[0]
    manifest = next(path for path in sorted(folder.iterdir()) if path.is_file())
    manifest.unlink()
    with pytest.warns(CheckpointWarning) as warned:
        assert run(cfg, tmp_path).step == 18  # lost, so the run comes to stop_at again
    assert "This step is skipped" in str(warned[0].message)
    assert run(cfg, tmp_path).complete
    assert_same(left_by(unbroken, config()), left_by(tmp_path, cfg))


def test_a_kill_before_the_first_checkpoint_starts_again(unbroken, tmp_path):
    Workdir(tmp_path).claim(config().to_dict())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "log_density": 1.0}\n{"step": 5, "lo')
    assert run(config(), tmp_path).complete
    assert_same(left_by(unbroken, config()), left_by(tmp_path, config()))


def test_a_missing_report_is_written_again(unbroken, tmp_path):
    run(config(), tmp_path)
    before = json.loads((tmp_path / "summary.json").read_text())
    for name in ("summary.json", "particles.npz"):
        (tmp_path / name).unlink()
    again = run(config(), tmp_path)
    assert again.complete and again.summary["mean"] == before["mean"]
    assert_same(left_by(unbroken, config()), left_by(tmp_path, config()))


@pytest.mark.parametrize("name", ["summary.json", "particles.npz"])
def test_a_report_that_is_not_whole_is_written_again(unbroken, tmp_path, name, capsys):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"mine": {"test_x": 1}}')
    assert run(config(), tmp_path).complete
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is True
    assert_same(left_by(unbroken, config()), left_by(tmp_path, config()))


def test_rows_that_are_lost_are_said_and_the_last_one_is_written_again(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    for name in ("metrics.jsonl", "summary.json", "particles.npz"):
        (tmp_path / name).unlink()
    assert run(config(), tmp_path).complete
    assert "lacks the rows of 4 steps" in capsys.readouterr().err
    assert rows_of(tmp_path) == rows_of(unbroken)[-1:]
    assert json.loads((tmp_path / "summary.json").read_text())["svgd"]["status"] == "OK"


def test_a_damaged_line_of_the_log_takes_no_row_with_it(unbroken, tmp_path, capsys):
    cfg = config(stop_at=16)
    run(cfg, tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    assert run(cfg, tmp_path).complete
    assert "1 unreadable" in capsys.readouterr().err
    whole = rows_of(unbroken)
    assert rows_of(tmp_path) == [whole[0], *whole[2:]]


def test_without_its_checkpoints_a_log_is_kept_and_the_run_starts_again(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "summary.json").unlink()
    assert run(config(), tmp_path).complete
    assert "ends at step 20; without a checkpoint" in capsys.readouterr().err
    kept = (tmp_path / "metrics.jsonl.damaged").read_text()
    assert kept == (unbroken / "metrics.jsonl").read_text()
    assert_same(left_by(unbroken, config()), left_by(tmp_path, config()))


@pytest.mark.parametrize("how", ["manifest", "values"])
def test_where_all_checkpoints_are_damaged_the_run_does_not_start_again(
    unbroken, tmp_path, how, monkeypatch
):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    (tmp_path / "summary.json").unlink()

    def read_step(folder, manifest):
        raise CheckpointDamaged(f"{folder}: ['x'] is not what was saved")

    if how == "values":
        monkeypatch.setattr(folder, "read_step", read_step)
    else:
        for path in (tmp_path / "checkpoints").glob("0*/yggdrax.json"):
            path.write_text("{")
    log = (tmp_path / "metrics.jsonl").read_bytes()
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(NoCheckpoint, match=r"are damaged \(12, 16, 20\).*another directory"),
    ):
        run(config(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


def test_a_directory_of_others_is_refused_and_stays_as_it_was(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mine": 2}\n')
    with pytest.raises(WorkdirError, match=r"metrics\.jsonl is there, .*another --workdir"):
        run(config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "mine": 2}\n'


def test_another_configuration_is_refused_and_nothing_changes(unbroken):
    before = (unbroken / "metrics.jsonl").read_bytes()
    with pytest.raises(WorkdirError, match=r"optimizer.learning_rate was 0.05 and is now 0.1"):
        run(config(optimizer=OptimizerConfig("adam", 0.1, "cosine")), unbroken)
    (unbroken / "config.json").rename(unbroken / "aside.json")
    try:
        with pytest.raises(WorkdirError, match=r"seed was 0 and is now 1"):
            run(config(seed=1), unbroken)
    finally:
        (unbroken / "aside.json").rename(unbroken / "config.json")
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_a_second_run_in_the_same_directory_is_refused(unbroken):
    with (
        Checkpointer(unbroken / "checkpoints"),
        pytest.raises(CheckpointLocked, match="being written by"),
    ):
        run(config(), unbroken)


def test_a_run_that_becomes_nan_ends_with_advice_and_keeps_its_checkpoints(tmp_path):
    cfg = ExperimentConfig(
        BrokenProblem(),
        num_particles=3,
        num_steps=500,
        checkpoint_every=5,
        optimizer=OptimizerConfig("sgd", 0.1),
        plots=False,
    )
    with pytest.raises(StatusError) as caught:
        run(cfg, tmp_path)
    # Where and when: the first step with a particle beyond the point, which was not taken.
    stepper = Stepper(cfg.freeze(), cfg.problem.build(0))
    state = stepper.initial_state()
    while np.all(state.particles < 2):
        state = stepper.advance(state, 1)
    beyond = np.flatnonzero(np.asarray(state.particles)[:, 0] >= 2)
    message = str(caught.value)
    assert f"step {int(state.step) + 1} was refused" in message
    assert f"gradient of particles of members {', '.join(map(str, beyond))}\n" in message
    assert "NONFINITE: a particle or a score was NaN" in message
    assert f"the latest of step {int(state.step) // 5 * 5}" in message
    refused = stepper.advance(jax.tree.map(jnp.copy, state), 7)
    assert int(refused.step) == int(state.step)
    np.testing.assert_array_equal(refused.particles, state.particles)
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpointer:
        state = Stepper(cfg, cfg.problem.build(0)).initial_state()
        assert np.isfinite(checkpointer.restore(state).particles).all()
    assert not (tmp_path / "summary.json").exists()


PROGRAM = """
import sys
from yggdrax.experiment.cli import main
sys.exit(main(sys.argv))
"""
ENDLESS = """
from yggdrax.experiment import BananaProblem, ExperimentConfig

def get_config():
    return ExperimentConfig(BananaProblem(), num_particles=200, num_steps=10**9,
                            checkpoint_every=10**9, log_every=100, plots=False)
"""


def start(folder, cache):
    (folder / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", PROGRAM, f"--config={folder / 'endless.py'}"]
    root = pathlib.Path(__file__).parents[2]
    return subprocess.Popen(
        [*command, f"--workdir={folder / 'run'}", "--noprogress"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache},
    )


def wait_for_rows(process, folder, number):
    deadline = time.monotonic() + 120
    path = folder / "run" / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_signals_save_and_leave_and_the_next_call_continues(tmp_path, compilation_cache):
    """SIGTERM first; continued; then SIGINT. A run without end, so that only signals end it."""
    steps = []
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
        process = start(tmp_path, compilation_cache)
        rows = len(rows_of(tmp_path / "run")) if steps else 0
        wait_for_rows(process, tmp_path, rows + 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        assert f"{name}: saving after this step" in err
        assert f"({name}) and saved in" in out and "the same command continues" in out
        with Checkpointer(tmp_path / "run" / "checkpoints", read_only=True) as checkpointer:
            steps.append(checkpointer.latest_step())
        logged = [row["step"] for row in rows_of(tmp_path / "run")]
        assert logged == list(range(0, steps[-1] + 1, 100))
    assert 0 < steps[0] < steps[1]
