"""The example does what it says: stopped between two saves and called again, it ends the same."""

import json
import pathlib
import runpy
import sys

from tests.checkpoint.common import assert_same
from yggdrax.checkpoint import Checkpointer

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "04_resume.py"


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_the_example_resumes(tmp_path, monkeypatch, capsys):
    options = ["--num-steps=60", "--save-every=20"]
    unbroken = run(monkeypatch, capsys, f"--directory={tmp_path / 'unbroken'}", *options)
    resumed = [f"--directory={tmp_path / 'resumed'}", *options]
    stopped = run(monkeypatch, capsys, *resumed, "--stop-at=47")
    assert stopped == ["stopped after step 47; the same command continues"]
    continued = run(monkeypatch, capsys, *resumed)
    assert continued == ["continuing after step 40", *unbroken]
    assert unbroken[-1].startswith("complete: mean [")


def test_the_loop_in_the_documentation_resumes(tmp_path, monkeypatch):
    text = (EXAMPLE.parents[1] / "docs" / "resume.md").read_text()
    loop = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(loop.replace("num_steps = 300", "num_steps = 200"), {})
    directory = tmp_path / "runs" / "mine" / "checkpoints"
    with Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.steps() == [100, 200]
    names = {}
    exec(loop, names)
    with Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.steps() == [100, 200, 300]
        assert_same(checkpointer.restore(names["state"]), names["state"])


def test_the_benchmark_of_saving_runs(tmp_path, monkeypatch, capsys):
    path = EXAMPLE.parent / "benchmarks" / "checkpointing.py"
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", f"--json={figures}"])
    runpy.run_path(str(path), run_name="__main__")
    cases = json.loads(figures.read_text())["cases"]
    assert len(cases) == 2
    for case in cases.values():
        assert case["restored equal"]
        assert case["bytes"] > 4 * 3 * case["N"] * case["d"]  # particles and both moments of Adam
        assert case["step"] > 0 and case["until on the disk"] > 0 and case["restore"] > 0
    assert "one save every 100 steps" in capsys.readouterr().out
