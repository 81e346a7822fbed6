"""Learning a bandwidth as an experiment: it learns, stops, resumes, and refuses."""

import json

import jax
import numpy as np
import pytest

from yggdrax.experiment import ConfigError, ExperimentConfig, LearnBandwidthProblem, run
from yggdrax.status import StatusError


def config(**options):
    problem = LearnBandwidthProblem(inner_steps=5, held_out=200, **options)
    built = ExperimentConfig(problem, num_particles=40, num_steps=12, plots=False)
    built.optimizer.learning_rate = 0.3
    built.log_every, built.checkpoint_every = 1, 3
    return built


def test_it_learns_and_a_stopped_run_ends_in_the_same_bits(tmp_path):
    whole = run(config(), tmp_path / "whole")
    assert whole.complete and whole.summary["learned"]["loss"] < whole.summary["start"]["loss"]
    assert len(whole.summary["scales"]) == 2
    assert whole.summary["bandwidth"] == whole.summary["svgd"]["bandwidth"]
    stopped = config()
    stopped.stop_at = 6
    halves = [run(stopped.replace(), tmp_path / "halves") for _ in range(2)]
    assert [half.complete for half in halves] == [False, True]
    for name in ("learned", "bandwidth", "scales"):
        assert halves[1].summary[name] == whole.summary[name], name
    rows = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "halves")]
    assert rows[0] == rows[1]
    arrays = [np.load(tmp_path / name / "particles.npz") for name in ("whole", "halves")]
    for name in arrays[0]:
        np.testing.assert_array_equal(arrays[0][name], arrays[1][name])


def test_ksd_needs_no_samples_and_learns_in_five_dimensions(tmp_path):
    five = config(loss="ksd", variances=(1.0, 1.0, 1.0, 1.0, 9.0), per_dimension=False)
    outcome = run(five, tmp_path)
    assert outcome.summary["learned"]["loss"] < outcome.summary["start"]["loss"]
    assert "scales" not in outcome.summary


def test_a_step_without_a_finite_gradient_is_refused_and_explained(tmp_path):
    broken = config()
    problem = broken.freeze().problem.build(0)
    problem.loss = lambda particles: jax.numpy.sum(particles) * np.nan
    with pytest.raises(StatusError, match="gradient of the inner run"):
        run(broken, tmp_path, problem=problem)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["step"] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("variances", (1.0, -1.0), "variances"),
        ("loss", "mse", "loss must be"),
        ("inner_steps", 0, "inner_steps"),
        ("loss_bandwidth", 0.0, "loss_bandwidth"),
    ],
)
def test_options_out_of_range_are_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        config(**{field: value}) if field != "inner_steps" else ExperimentConfig(
            LearnBandwidthProblem(inner_steps=0)
        ).freeze()
        config(**{field: value}).freeze()
