"""The files of a run: cut back, claimed, written as a whole."""

import json
import math

import numpy as np
import pytest

from yggdrax.checkpoint.values import fingerprint
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


LINES = [json.dumps({"step": step, "a": float(step)}) + "\n" for step in (0, 10, 20, 30, 40)]


def opened(folder, step, **options):
    files = Workdir(folder)
    rows = files.open_metrics(step, fields=("a",), **options)
    files.close()
    text = (folder / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == rows
    return [row["step"] for row in rows]


@pytest.mark.parametrize(
    "damage",
    [
        *("{broken\n", '{"step": "x", "a": 1.0}\n', '{"step": 20}\n', "[1]\n", "5\n"),
        *('{"a": 1.0}\n', '{"step": 20, "a": "x"}\n', '{"step": 20.5, "a": 1.0}\n', "\0\0\n"),
    ],
)
def test_one_damaged_line_takes_no_other_with_it(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    before = "".join([*LINES[:2], damage, *LINES[3:]])
    path.write_text(before)
    assert opened(tmp_path, 30, expected=range(0, 30, 10)) == [0, 10, 30]
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == before
    said = capsys.readouterr().err
    assert "1 unreadable and 0 doubled lines were dropped" in said
    assert "now metrics.jsonl.damaged" in said
    assert "lacks the rows of 1 steps before the checkpoint (20)" in said
    path.write_text(before)
    assert opened(tmp_path, 30) == [0, 10, 30]
    assert (tmp_path / "metrics.jsonl.damaged-2").read_text() == before


def test_doubled_rows_stay_once_and_rows_out_of_order_are_sorted(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join([LINES[0], LINES[2], LINES[1], LINES[1], LINES[0], LINES[3]]))
    assert opened(tmp_path, 20, expected=range(0, 20, 10)) == [0, 10, 20]
    said = capsys.readouterr().err
    assert "0 unreadable and 2 doubled lines" in said and "lacks" not in said


@pytest.mark.parametrize("tail", ["", '{"step": 40, "lo', "\0\0"])
def test_what_a_kill_leaves_is_cut_without_a_word(tmp_path, capsys, tail):
    (tmp_path / "metrics.jsonl").write_text("".join(LINES[:4]) + tail)
    assert opened(tmp_path, 20, expected=range(0, 20, 10)) == [0, 10, 20]
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_row_whose_line_end_is_lost_stays(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(LINES[:3]).rstrip("\n"))
    assert opened(tmp_path, 20) == [0, 10, 20]


def test_a_log_that_is_emptied_or_gone_is_said(tmp_path, capsys):
    for text in ("", None):
        if text is not None:
            (tmp_path / "metrics.jsonl").write_text(text)
        else:
            (tmp_path / "metrics.jsonl").unlink()
        assert opened(tmp_path, 80, expected=range(0, 80, 10)) == []
        assert "lacks the rows of 8 steps" in capsys.readouterr().err


def test_a_log_without_its_checkpoints_is_kept_and_said(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(LINES))
    assert opened(tmp_path, -1, surely_saved=40) == []  # perhaps killed before the first one
    said = capsys.readouterr().err
    assert "ends at step 40; without a checkpoint the run starts again" in said
    assert not (tmp_path / "metrics.jsonl.damaged").exists()
    (tmp_path / "metrics.jsonl").write_text("".join(LINES))
    assert opened(tmp_path, -1, surely_saved=39) == []
    assert "the run starts again" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == "".join(LINES)


def test_a_log_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(WorkdirError, match=r"cannot read .*metrics.jsonl: Is a directory. Move it"):
        Workdir(tmp_path).open_metrics(-1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "particles.npz"])
def test_a_run_does_not_start_over_the_files_of_others(tmp_path, name):
    (tmp_path / name).write_text("mine")
    files = Workdir(tmp_path)
    for call in (files.compare, files.claim):
        with pytest.raises(WorkdirError, match=rf"{name} is there, .*another --workdir or move"):
            call({"seed": 0})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    files.claim({"seed": 0}, recorded={"seed": 0})  # a checkpoint says whose they are
    if name != "summary.json":
        assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "5", "{", "\xff"])
def test_a_config_that_is_none_is_refused_or_written_again(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text, encoding="latin1")
    files = Workdir(tmp_path)
    for call in (files.compare, files.claim):
        with pytest.raises(WorkdirError, match=r"cannot read a configuration in .*config\.json"):
            call({"seed": 0})
    with pytest.raises(WorkdirError, match="seed was 1 and is now 0"):
        files.claim({"seed": 0}, recorded={"seed": 1})
    assert (tmp_path / "config.json").read_text(encoding="latin1") == text
    files.claim({"seed": 1}, recorded={"seed": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}
    assert (tmp_path / "config.json.aside").read_text(encoding="latin1") == text
    assert "is written again; it is now config.json.aside" in capsys.readouterr().err


def test_only_a_summary_of_this_run_says_that_it_is_complete(tmp_path, capsys):
    config = {"seed": 1}
    files = Workdir(tmp_path)
    files.claim(config)
    ours = {"complete": True, "fingerprint": fingerprint(config)}
    files.write_json("summary.json", ours)
    assert files.summary(config) is None  # the particles are missing
    files.write_npz("particles.npz", {"x": np.zeros(2)})
    files.claim(config)
    assert files.summary(config) == ours
    assert files.summary({"seed": 2}) is None
    (tmp_path / "particles.npz").write_text("")
    assert files.summary(config) is None
    assert capsys.readouterr().err == ""
    files.write_npz("particles.npz", {"x": np.zeros(2)})
    for text in ("null", "[1]", "5", "{", '{"mine": 1}', json.dumps(ours | {"complete": False})):
        (tmp_path / "summary.json").write_text(text)
        assert files.summary(config) is None
        files.claim(config)
        assert "summary.json is not of this run" in capsys.readouterr().err
        assert not (tmp_path / "summary.json").exists()
    assert (tmp_path / "summary.json.aside").read_text() == "null"
    assert (tmp_path / "summary.json.aside-2").read_text() == "[1]"


def test_an_empty_workdir_is_refused():
    with pytest.raises(WorkdirError, match="--workdir=FOLDER"):
        Workdir("")


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
    assert json.loads((tmp_path / "runs" / "a" / "summary.json").read_text()) == {"a": 1}
