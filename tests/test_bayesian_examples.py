"""Benchmarks of networks run as scripts, in small; other libraries' densities as targets."""

import importlib.util
import json
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SCORES = {"rmse_mean", "rmse_se", "log_likelihood_mean", "log_likelihood_se", "seconds"}


def load(name):
    """A benchmark as a module."""
    path = EXAMPLES / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def uci():
    return load("uci")


def table(tmp_path, rows=60, features=5):
    random = np.random.RandomState(0)
    x = random.randn(rows, features)
    y = 3 + 2 * x[:, :1] + 0.1 * random.randn(rows, 1)
    np.savetxt(tmp_path / "line.csv", np.hstack([x, y]), delimiter=",")
    return x, y[:, 0]


def test_tables_are_measured_and_written(uci, tmp_path, capsys):
    table(tmp_path)
    out = tmp_path / "uci.json"
    uci.main([f"--data-dir={tmp_path}", "--names", "line", f"--out={out}", "--smoke"])
    results = json.loads(out.read_text())
    assert set(results) == {"line"}
    assert set(results["line"]) == {"svgd", "deep_ensemble", "single_network", "ridge"}
    for scores in results["line"].values():
        assert set(scores) == SCORES and all(np.isfinite(list(scores.values())))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 4
    # Forty steps do not learn much, but a straight line is learned by ridge regression.
    assert results["line"]["ridge"]["rmse_mean"] < 0.3


def test_a_mistyped_table_is_named_before_anything_runs(uci, tmp_path, capsys):
    table(tmp_path)
    out = tmp_path / "uci.json"
    with pytest.raises(SystemExit, match="2"):
        uci.main([f"--data-dir={tmp_path}", "--names", "line", "curve", f"--out={out}", "--smoke"])
    said = capsys.readouterr()
    assert "curve.csv" in said.err and not said.out and not out.exists()


def test_splits_are_those_of_the_protocol(uci, tmp_path):
    _, y = table(tmp_path)
    data = uci.read_csv(tmp_path / "line.csv")
    split = uci.make_split(data, 7)
    order = np.random.RandomState(7).permutation(60)
    np.testing.assert_allclose(split.y_test, y[order[54:]], rtol=1e-6)
    np.testing.assert_allclose(
        split.y * split.scale + split.shift, y[order[:54]], rtol=1e-4, atol=1e-5
    )
    # To validate, the last tenth of the training rows is held out, and no test row is seen.
    held_out = uci.make_split(data, 7, validate=True)
    np.testing.assert_allclose(held_out.y_test, y[order[48:54]], rtol=1e-6)
    assert len(held_out.y) == 48


def test_ten_times_the_steps_go_little_further(uci):
    for steps in (uci.STEPS, uci.PILOT_STEPS):
        usual, long = (np.sum(uci.step_size(np.arange(n))) for n in (steps, 10 * steps))
        assert 1.05 < long / usual < 1.4


def test_bad_arguments_are_refused(uci, tmp_path):
    table(tmp_path)
    common = [f"--data-dir={tmp_path}", "--names", "line", f"--out={tmp_path / 'a.json'}"]
    for bad in (["--splits=0"], ["--step-factor=0"], ["--first-split=-1"]):
        with pytest.raises(SystemExit):
            uci.main(common + bad)


def test_overhead_runs(tmp_path):
    out = tmp_path / "overhead.json"
    load("overhead").main(["--smoke", f"--json={out}"])
    results = json.loads(out.read_text())
    assert set(results) == {"1e4", "1e6"}
    for row in results.values():
        assert row["parameters"] == 44
        assert row["ratio"] == pytest.approx(row["svgd_seconds"] / row["plain_seconds"])


def test_overhead_has_networks_of_the_sizes_it_says():
    for name, (features, first, second) in load("overhead").SIZES.items():
        parameters = features * first + first + first * second + second + second + 1
        assert parameters == pytest.approx(float(name), rel=0.01)


@pytest.mark.filterwarnings("default")  # of the other libraries, which are not ours to mend
def test_logistic_regression_beside_nuts_runs(tmp_path):
    pytest.importorskip("blackjax")
    out = tmp_path / "logistic.json"
    load("logistic").main(["--smoke", f"--json={out}"])
    results = json.loads(out.read_text())
    names = {"nuts", "median", "coordinate", "white median", "white coordinate", "refined"}
    assert set(results) == names
    assert all(np.isfinite(list(row.values())).all() for row in results.values())


@pytest.mark.filterwarnings("default")
def test_a_numpyro_model_is_sampled(capsys):
    pytest.importorskip("numpyro")
    runpy.run_path(str(EXAMPLES / "07_numpyro_model.py"), run_name="__main__")
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    found = {k: [float(n) for n in re.findall(r"-?\d+\.\d+", v)] for k, v in lines.items()}
    # The true line; the posterior's deviations are near 0.05, 0.09 and 0.035.
    for name, true in (("offset", 2.0), ("slope", -3.0), ("scale", 0.5)):
        mean, deviation = found[name]
        assert abs(mean - true) < 4 * deviation and 0.02 < deviation < 0.15


def test_without_numpyro_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    with pytest.raises(ImportError, match=r"pip install 'yggdrax\[benchmarks\]'"):
        runpy.run_path(str(EXAMPLES / "07_numpyro_model.py"))
