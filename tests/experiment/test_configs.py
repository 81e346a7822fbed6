"""Every configuration in ``configs/`` runs, for a few steps, and leaves what it should."""

import json
import pathlib

import pytest

from yggdrax.experiment.cli import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PICTURES = {
    "banana": {"density.png"},
    "logistic_regression": {"coefficients.png"},
    "digits": {"calibration.png"},
    "test": {"predictions.png"},
}
REPORTED = {
    "bnn_diabetes": {"posterior", "ridge", "single_network"},
    "uci": {"posterior", "ridge", "single_network"},
    "regression_csv": {"posterior", "ridge", "single_network"},
    "digits": {"posterior", "single_network"},
    "test": {"posterior", "ridge", "single_network"},
    "logistic_regression": {"posterior", "point_estimate"},
    "logistic_nuts": {"posterior", "point_estimate"},
    "learn_bandwidth": set(),
}
TOY = {"mean", "exact_mean", "variance", "exact_variance", "mmd_squared", "ksd_squared"}


def test_the_list_of_configurations_is_complete():
    names = {path.stem for path in CONFIGS.glob("*.py")}
    assert names == {
        *("default", "test", "gaussian_mixture", "banana", "funnel"),
        *("logistic_regression", "logistic_nuts", "bnn_diabetes", "resume"),
        *("uci", "regression_csv", "digits", "learn_bandwidth"),
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_few_steps_of_each(tmp_path, path):
    name = path.stem
    options = {"num_steps": 4, "num_particles": 3, "checkpoint_every": 2, "log_every": 2}
    options |= {"stop_at": 2} if name == "resume" else {}
    if name in ("bnn_diabetes", "regression_csv"):  # then they compile what "test" compiles
        options |= {"problem.hidden": 8, "batch_size": 50}
    if name == "digits":
        options |= {"problem.channels": 1}
    if name == "learn_bandwidth":
        options |= {"problem.inner_steps": 2, "problem.held_out": 10}
    if name == "logistic_nuts":  # which needs a package of another extra
        options |= {"problem.nuts_draws": 0, "problem.refine_steps": 4}
    options |= {"plots": str(name in PICTURES).lower()}
    command = ["yggdrax", f"--config={path}", f"--workdir={tmp_path}", "--noprogress"]
    command += [f"--config.{field}={value}" for field, value in options.items()]
    if name == "resume":
        assert main(command) == 75
    assert main(command) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert REPORTED.get(name, TOY) <= set(summary)
    for model in REPORTED.get(name, ()):
        assert all(isinstance(value, float) for value in summary[model].values())
    pictures = {file.name for file in tmp_path.glob("*.png")}
    shared = {"learning_curves.png", "spread.png"}
    assert pictures == (PICTURES[name] | shared if name in PICTURES else set())


def test_configurations_are_valid_as_they_stand():
    from yggdrax.experiment.cli import parse

    for path in CONFIGS.glob("*.py"):
        config = parse(["yggdrax", f"--config={path}", "--workdir=unused"])[0]
        assert config.num_steps >= 60 and config.checkpoint_every <= config.num_steps
