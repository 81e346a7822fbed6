"""The command line: one clear line and status 2 for what is wrong, 0 and 75 for what is right."""

import errno
import json
import re

import pytest

from yggdrax.checkpoint import arrays
from yggdrax.experiment.cli import EX_TEMPFAIL, main, parse
from yggdrax.experiment.workdir import Workdir, _naming

SMALL = (
    "from yggdrax.experiment import BananaProblem, ExperimentConfig\n"
    "def get_config():\n"
    "    config = ExperimentConfig(BananaProblem(), num_particles=4, num_steps=6)\n"
    "    config.log_every, config.checkpoint_every, config.plots = 2, 3, False\n"
    "    return config\n"
)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def call(*arguments):
    return main(["yggdrax", *map(str, arguments)])


def test_overrides_reach_every_level(config_file):
    config, workdir, progress = parse(
        [
            "yggdrax",
            f"--config={config_file}",
            "--workdir=here",
            "--noprogress",
            "--config.num_steps=500",
            "--config.svgd.bandwidth=0.5",
            "--config.svgd.kernel=imq",
            "--config.optimizer.learning_rate=1",
            "--config.problem.curvature=0.25",
            "--config.plots=true",
        ]
    )
    assert (workdir, progress) == ("here", False)
    assert (config.num_steps, config.svgd.bandwidth, config.svgd.kernel) == (500, 0.5, "imq")
    assert (config.optimizer.learning_rate, config.problem.curvature) == (1.0, 0.25)
    assert config.plots is True and config.num_particles == 4
    # Flags of one call are not seen by the next.
    assert parse(["yggdrax", f"--config={config_file}", "--workdir=x"])[0].num_steps == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config={file}"], "--workdir is missing"),
        (["--config={file}", "--workdir="], "--workdir is missing"),
        (["--workdir={dir}"], "--config is missing"),
        (["--config=nowhere.py", "--workdir={dir}"], "configuration file 'nowhere.py': no such"),
        (["--config={file}", "--workdir={dir}", "--steps=3"], "Unknown command line flag 'steps'"),
        (["--config={file}", "--workdir={dir}", "extra"], "unexpected argument 'extra'"),
        (
            ["--config={file}", "--workdir={dir}", "--config.num_stepz=3"],
            "--config.num_stepz: the configuration has no field 'num_stepz'",
        ),
        (
            ["--config={file}", "--workdir={dir}", "--config.svgd.bandwith=3"],
            "--config.svgd.bandwith: the configuration has no field 'bandwith'",
        ),
        (
            ["--config={file}", "--workdir={dir}", "--config.svg.kernel=rbf"],
            "--config.svg.kernel: the configuration has no field 'svg'",
        ),
        (
            ["--config={file}", "--workdir={dir}", "--config.num_steps=many"],
            "--config.num_steps=many",
        ),
        (["--config={file}", "--workdir={dir}", "--config.num_steps=2.5"], "num_steps=2.5"),
        (
            ["--config={file}", "--workdir={dir}", "--config.num_particles=0"],
            "num_particles must be at least 1, not 0",
        ),
        (
            ["--config={file}", "--workdir={dir}", "--config.svgd.bandwidth=-1"],
            "svgd.bandwidth must be positive and finite, not -1",
        ),
        (["--config={file}", "--workdir={file}/run"], "cannot write in the workdir"),
        (
            ["--config={file}", "--workdir={dir}", "--config.batch_size=5"],
            "batch_size must be at most the 0 rows",
        ),
    ],
)
def test_a_wrong_command_is_one_line(config_file, tmp_path, capsys, arguments, message):
    places = {"file": config_file, "dir": tmp_path / "run"}
    assert call(*(argument.format(**places) for argument in arguments)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return ExperimentConfig(BananaProblem(), num_stepz=3)", "num_stepz"),
        ("config = ExperimentConfig(BananaProblem()); config.num_stepz = 3", "num_stepz"),
        ("return ExperimentConfig(BananaProblem(), num_steps='3')", "num_steps must be int"),
        ("return ExperimentConfig(BananaProblem(), seed=0.5)", "seed must be int"),
        ("return 1 / 0", "line 3: ZeroDivisionError: division by zero"),
        ("return {'num_steps': 3}", "must return an ExperimentConfig, not dict"),
        ("pass", "must return an ExperimentConfig, not NoneType"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_wrong_configuration_file_is_one_line(tmp_path, capsys, body, message):
    path = tmp_path / "wrong.py"
    path.write_text(SMALL.splitlines()[0] + f"\ndef get_config():\n    {body}\n")
    assert call(f"--config={path}", f"--workdir={tmp_path / 'run'}") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_file_without_get_config_or_with_bad_syntax_is_one_line(tmp_path, capsys):
    cases = {"x = 1\n": "defines no get_config()", "\ndef (:\n": "wrong.py, line 2: invalid syntax"}
    for text, message in cases.items():
        path = tmp_path / "wrong.py"
        path.write_text(text)
        assert call(f"--config={path}", f"--workdir={tmp_path / 'run'}") == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", ".summary.json.tmp", "checkpoint"])
def test_a_full_disk_is_one_line_and_status_1(config_file, tmp_path, capsys, monkeypatch, name):
    """Of the log, of the report, and of a checkpoint; the same command then goes on."""
    command = [f"--config={config_file}", f"--workdir={tmp_path / 'run'}", "--noprogress"]

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if name == "metrics.jsonl":
            patch.setattr(Workdir, "sync_metrics", _naming(tmp_path / "run" / name)(full))
        elif name == "checkpoint":
            patch.setattr(arrays.v1, "save", full)
        else:
            patch.setattr(Workdir, "write_npz", _naming(tmp_path / "run" / name)(full))
        assert call(*command) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "No space left on device" in lines[0] and "ake room" in lines[0]
    assert call(*command) == 0


def test_an_interrupt_before_the_start_is_one_line(config_file, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("yggdrax.experiment.cli.run", interrupted)
    assert call(f"--config={config_file}", f"--workdir={tmp_path}") == 130
    assert capsys.readouterr().err == "interrupted before the first step\n"


def test_a_file_for_checkpoints_is_a_wrong_workdir(config_file, tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("mine")
    assert call(f"--config={config_file}", f"--workdir={tmp_path}", "--noprogress") == 2
    assert "checkpoints cannot be created" in capsys.readouterr().err
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_help_shows_the_usage(capsys):
    assert call("--help") == 0
    assert "--config.FIELD=VALUE" in capsys.readouterr().out


def test_a_run_stops_half_way_continues_and_says_that_it_is_complete(config_file, tmp_path, capsys):
    command = [f"--config={config_file}", f"--workdir={tmp_path / 'run'}", "--config.stop_at=4"]
    assert call(*command) == EX_TEMPFAIL
    first = capsys.readouterr()
    assert "stopped at step 4 of 6 (stop_at)" in first.out
    assert "the same command continues" in first.out
    assert re.search(r"\d/6 .*log p=.*, h=.*, spread=.*status=ok", first.err)  # the progress bar
    assert call(*command, "--noprogress") == 0
    assert "is complete (6 steps)" in capsys.readouterr().out
    before = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    assert call(*command) == 0
    again = capsys.readouterr()
    assert "is complete (6 steps)" in again.out and "/6" not in again.err
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "run" / "config.json").read_text())["stop_at"] == 4
    assert call(*command, "--config.num_particles=5") == 2
    assert "num_particles was 4 and is now 5" in capsys.readouterr().err
