"""The benchmarks of the tree run, and write what they say."""

import json
import pathlib
import runpy

BENCHMARKS = pathlib.Path(__file__).parents[2] / "examples" / "benchmarks"


def _rows(monkeypatch, file, name, *arguments):
    monkeypatch.setattr("sys.argv", [name, "--smoke", f"--json={file}", *arguments])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return json.loads(file.read_text())


def test_the_benchmark_of_the_near_field_runs(monkeypatch, tmp_path):
    rows = _rows(monkeypatch, tmp_path / "table.json", "near_field.py")["rows"]
    assert len(rows) == 8
    assert all(row["seconds"] > 0 for row in rows)


def test_the_benchmark_of_building_runs(monkeypatch, tmp_path):
    rows = _rows(monkeypatch, tmp_path / "table.json", "whole_steps.py", "--only", "build")["build"]
    assert [row["ordering"] for row in rows] == ["morton", "median"]
    assert all(row["argsorts"] > 0 for row in rows)
