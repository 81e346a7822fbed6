"""The files of a run: cut back, claimed, written as a whole."""

import json
import math

import numpy as np
import pytest

from yggdrax.experiment.workdir import Workdir, WorkdirError


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("restored", "kept"),
    [(-1, []), (0, [0]), (25, [0, 10, 20]), (30, [0, 10, 20, 30]), (99, [0, 10, 20, 30])],
)
def test_metrics_are_cut_back_to_the_restored_step(tmp_path, restored, kept):
    lines = [json.dumps({"step": step}) + "\n" for step in (0, 10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 40, "log_den')
    files = Workdir(tmp_path)
    assert [row["step"] for row in files.open_metrics(restored)] == kept
    files.append_metrics({"step": 1000})
    files.close()
    assert [row["step"] for row in rows_of(tmp_path)] == [*kept, 1000]


def test_rows_read_back_as_they_were_returned(tmp_path):
    files = Workdir(tmp_path)
    assert files.open_metrics(-1) == []
    given = {"step": 0, "a": math.nan, "b": np.float32(0.1), "c": np.int32(3), "d": -math.inf}
    row = files.append_metrics(given)
    files.sync_metrics()
    files.close()
    assert row == {"step": 0, "a": None, "b": float(np.float32(0.1)), "c": 3, "d": None}
    assert rows_of(tmp_path) == [row]


def test_metrics_must_be_opened_first(tmp_path):
    with pytest.raises(RuntimeError, match="open_metrics"):
        Workdir(tmp_path).append_metrics({"step": 0})


def test_another_configuration_is_refused_by_field(tmp_path):
    files = Workdir(tmp_path)
    files.claim({"seed": 0, "svgd": {"kernel": "rbf", "shape": (1, 2)}})
    files.claim({"seed": 0, "svgd": {"kernel": "rbf", "shape": (1, 2)}})
    with pytest.raises(WorkdirError, match=r"svgd.kernel was 'rbf' and is now 'imq'"):
        files.claim({"seed": 0, "svgd": {"kernel": "imq", "shape": (1, 2)}})
    (tmp_path / "config.json").unlink()
    with pytest.raises(WorkdirError, match=r"seed was 1 and is now 0"):
        files.claim({"seed": 0}, recorded={"seed": 1})
    files.claim({"seed": 1}, recorded={"seed": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WorkdirError, match=r"cannot read .*config.json"):
        Workdir(tmp_path).claim({})


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"cannot write in the workdir .*file/run"):
        Workdir(tmp_path / "file" / "run")


def test_files_appear_as_a_whole(tmp_path):
    files = Workdir(tmp_path)
    assert files.write_json("summary.json", {"a": math.inf}) == {"a": None}

    class Broken:
        def savefig(self, file, **_):
            file.write(b"half")
            raise OSError("disk full")

    files.write_json("picture.png", {"old": 1})
    with pytest.raises(OSError, match="disk full"):
        files.write_figure("picture.png", Broken())
    assert json.loads((tmp_path / "picture.png").read_text()) == {"old": 1}
    files.write_npz("particles.npz", {"a/b": np.arange(3)})
    assert np.load(tmp_path / "particles.npz")["a/b"].tolist() == [0, 1, 2]


def test_relative_paths_are_resolved_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = Workdir("runs/a")
    monkeypatch.chdir("/")
    files.write_json("summary.json", {"a": 1})
    assert Workdir(tmp_path / "runs" / "a").summary() == {"a": 1}
