"""The benchmark's small mode, and its figures beside the model."""

import json
import pathlib
import runpy
import sys

BENCHMARK = pathlib.Path(__file__).parents[2] / "examples" / "benchmarks" / "sharding.py"


def test_the_traffic_read_from_the_programs_is_that_of_the_model(monkeypatch, tmp_path, capsys):
    file = tmp_path / "table.json"
    monkeypatch.setattr(sys, "argv", ["sharding.py", "--smoke", f"--json={file}"])
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARK.parents[2]))
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    assert "model_bytes" in capsys.readouterr().out
    rows = {(row["engine"], row["devices"]): row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {(e, p) for e in ("exact", "fourier") for p in (1, 2)}
    exact, fourier = rows["exact", 2], rows["fourier", 2]
    # Besides particles and scores of two coordinates a mask travels: five numbers instead of four.
    assert exact["bytes"] == exact["model_bytes"] * 5 / 4
    # Besides the modes the corners of the box and two flags.
    assert 0 <= fourier["bytes"] - fourier["model_bytes"] < 64
    assert rows["exact", 1]["bytes"] == rows["fourier", 1]["bytes"] == 0
    # Every pair once, half of them on each of two devices.
    assert exact["exponentials"] == exact["model_exponentials"] == 512 * 512 // 2
    assert rows["exact", 1]["exponentials"] == 512 * 512
    assert exact["temporary_bytes"] < rows["exact", 1]["temporary_bytes"]
    assert exact["status"] == fourier["status"] == 0
