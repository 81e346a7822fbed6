"""The files of a run, apart from its checkpoints: all writing happens here.

======================  ==========================================================================
``config.json``         the resolved configuration, written before the first step
``metrics.jsonl``       one row for each logged step, without gaps or doubles
``particles.npz``       the final particles, one array a leaf, named by its path in the tree
``*.png``               pictures
``summary.json``        the figures; written last, so its presence says that the run is complete
======================  ==========================================================================

Whole files appear under their names by a rename, so a kill leaves the old one or the new one. With
several processes only process 0 writes. What was damaged, or is not of this run, is kept under
another name (``*.damaged``, ``*.aside``) and a line on stderr says so.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import jax
import numpy as np

from yggdrax.checkpoint.values import fingerprint, first_difference

__all__ = ["Workdir", "WorkdirError"]


class WorkdirError(OSError):
    """A working directory that cannot be used; the message is one line."""


class Workdir:
    """A run's directory.

    Args:
      path: created if missing; ``~`` and relative paths are resolved once.

    Raises:
      WorkdirError: if it cannot be created or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Resolves, creates and tries the directory."""
        if not os.fspath(path):
            raise WorkdirError("the workdir is empty: give --workdir=FOLDER.")
        self.path = pathlib.Path(path).expanduser().resolve()
        self.writes = jax.process_index() == 0
        self._log: IO[str] | None = None
        if not self.writes:
            return
        trial = self.path / f".write-trial-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise WorkdirError(
                f"cannot write in the workdir {self.path}: {error.strerror or error}. "
                "Choose another --workdir or change its permissions."
            ) from error

    @property
    def checkpoints(self) -> pathlib.Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def compare(self, config: dict[str, Any], recorded: dict[str, Any] | None = None) -> None:
        """Compares the configuration with the one that is recorded, if there is one.

        Args:
          config: the resolved configuration.
          recorded: the one that the latest checkpoint carries; used if ``config.json`` is gone.

        Raises:
          WorkdirError: naming the first field that differs; or, where no configuration is
            recorded, a file that another program may have written.
        """
        old, problem = self._read_dict("config.json")
        if old is None:
            old = recorded
        if old is None and problem is not None:
            raise WorkdirError(
                f"cannot read a configuration in {self.path / 'config.json'}: {problem}. "
                "Repair it or use another --workdir."
            )
        if old is None and self.writes:
            self._check_free()
        if old is not None and (difference := first_difference(old, _through_json(config))):
            raise WorkdirError(
                f"{self.path} belongs to another configuration: {difference}. "
                "Use another --workdir, or the configuration it was started with."
            )

    def claim(self, config: dict[str, Any], recorded: dict[str, Any] | None = None) -> None:
        """Records the configuration, once it has proved to work, in a directory without one.

        Raises:
          WorkdirError: as :meth:`compare`.
        """
        self.compare(config, recorded)
        if not self.writes:
            return
        old, problem = self._read_dict("config.json")
        if problem is not None:
            self._set_aside("config.json", f"is damaged ({problem}) and is written again")
        if old is None:
            self.write_json("config.json", _through_json(config))
        summary, problem = self._read_dict("summary.json")
        if problem is not None or (summary is not None and not _is_of(summary, config)):
            self._set_aside("summary.json", "is not of this run")

    def _check_free(self) -> None:
        for name in ("metrics.jsonl", "summary.json", "particles.npz"):
            if os.path.lexists(self.path / name):
                raise WorkdirError(
                    f"{self.path / name} is there, and neither config.json nor a checkpoint says "
                    "that it is of this run. Use another --workdir or move it away."
                )

    def summary(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The summary of the complete run with this configuration, or None."""
        summary, _ = self._read_dict("summary.json")
        if summary is None or not _is_of(summary, config):
            return None
        return summary if zipfile.is_zipfile(self.path / "particles.npz") else None

    def write_json(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Writes a JSON file as a whole, NaN as null; returns it as it reads back."""
        value = _plain(value)
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        self._write(name, lambda file: file.write(text.encode()))
        return value

    def write_npz(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Writes an archive of arrays as a whole."""
        self._write(name, lambda file: np.savez(file, **arrays))  # pyright: ignore

    def write_figure(self, name: str, figure: Any) -> None:
        """Writes a Matplotlib figure as a PNG as a whole."""
        self._write(name, lambda file: figure.savefig(file, format="png", dpi=150))

    def _write(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        """Calls ``write(file)`` on a temporary file and renames it to ``name`` once it is safe."""
        if not self.writes:
            return
        temporary = self.path / f".{name}.tmp"
        with _naming(self.path / name):
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)

    def _set_aside(self, name: str, why: str) -> None:
        target = self._unused(f"{name}.aside")
        with _naming(self.path / name):
            os.rename(self.path / name, target)
        _say(f"{self.path / name} {why}; it is now {target.name}.")

    def _unused(self, name: str) -> pathlib.Path:
        """A path in the directory at which there is nothing."""
        paths = (self.path / (name if n == 1 else f"{name}-{n}") for n in range(1, 10_000))
        return next(path for path in paths if not os.path.lexists(path))

    def open_metrics(
        self,
        step: int,
        *,
        fields: Iterable[str] = (),
        expected: Iterable[int] = (),
        surely_saved: int = 0,
    ) -> list[dict[str, Any]]:
        """Opens ``metrics.jsonl`` to append, and returns its rows up to the given step.

        Rows of later steps, and a line that a kill left incomplete, go: the resumed run writes
        them again. Every other whole row stays. Lines that cannot be read and rows that are there
        twice are dropped, in which case the file as it was stays as ``metrics.jsonl.damaged``.

        Args:
          step: of the checkpoint that the run continues from; -1 without one, to start a new log.
          fields: what a row must hold besides ``step``, numbers or None.
          expected: the steps whose rows should be there; those that are not are said.
          surely_saved: a run whose log goes beyond this step had a checkpoint.

        Raises:
          WorkdirError: the file cannot be read.
        """
        path = self.path / "metrics.jsonl"
        try:
            data = path.read_bytes() if os.path.lexists(path) else b""
        except OSError as error:
            raise WorkdirError(
                f"cannot read {path}: {error.strerror or error}. Move it away or repair it."
            ) from error
        lines = data.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n") and _row(lines[-1], fields) is None:
            del lines[-1]  # as a kill leaves it
        rows = [_row(line, fields) for line in lines]
        kept: dict[int, tuple[dict[str, Any], bytes]] = {}
        doubles = 0
        for row, line in zip(rows, lines, strict=True):
            if row is not None and row["step"] <= step:
                doubles += row["step"] in kept
                kept.setdefault(row["step"], (row, line.rstrip(b"\r\n") + b"\n"))
        kept = dict(sorted(kept.items()))
        if self.writes:
            damaged = rows.count(None)
            lost = max([row["step"] for row in rows if row], default=-1) if step < 0 else -1
            if damaged or doubles or lost > surely_saved:
                shutil.copyfile(path, copy := self._unused("metrics.jsonl.damaged"))
                _say(f"{path} as it was is now {copy.name}.")
            if damaged or doubles:
                _say(f"{path}: {damaged} unreadable and {doubles} doubled lines were dropped.")
            if lost >= 0:
                _say(f"{path} ends at step {lost}; without a checkpoint the run starts again.")
            self._say_missing(path, sorted(set(expected) - set(kept)))
            text = b"".join(line for _, line in kept.values())
            if not data.startswith(text):
                self._write("metrics.jsonl", lambda file: file.write(text))
            with _naming(path):
                self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
                self._log.truncate(len(text))  # which needs no room on a full disk
        return [row for row, _ in kept.values()]

    def _say_missing(self, path: pathlib.Path, missing: list[int]) -> None:
        if missing:
            shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            _say(
                f"{path} lacks the rows of {len(missing)} steps before the checkpoint ({shown}); "
                "they are not computed again."
            )

    def append_metrics(self, row: dict[str, Any]) -> dict[str, Any]:
        """Appends one row and hands it to the operating system; returns the row as it reads back.

        Raises:
          RuntimeError: before :meth:`open_metrics`.
        """
        row = _plain(row)
        if self.writes:
            if self._log is None:
                raise RuntimeError("open_metrics comes before append_metrics.")
            with _naming(self.path / "metrics.jsonl"):
                self._log.write(json.dumps(row, allow_nan=False) + "\n")
                self._log.flush()
        return row

    def sync_metrics(self) -> None:
        """Forces the log to the disk: a checkpoint must not outlive the rows before it."""
        if self._log is not None:
            with _naming(self.path / "metrics.jsonl"):
                os.fsync(self._log.fileno())

    def close(self) -> None:
        """Closes the log."""
        log, self._log = self._log, None
        if log is not None:
            with _naming(self.path / "metrics.jsonl"):
                log.close()

    def _read_dict(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        """The dictionary in a JSON file, or None; and what is wrong with the file, or None."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError) as error:
            return None, getattr(error, "strerror", None) or str(error)
        if not isinstance(value, dict) or not value:
            return None, f"it holds {json.dumps(value)[:40]}"
        return value, None


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Makes an error of the disk one line that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {path}: {error.strerror or error}. Make room or change the "
            "permissions; the same command then continues from the last checkpoint."
        ) from error


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _is_of(summary: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a summary is that of the complete run with this configuration."""
    return summary.get("complete") is True and summary.get("fingerprint") == fingerprint(config)


def _row(line: bytes, fields: Iterable[str]) -> dict[str, Any] | None:
    """A whole row of the log, or None for what is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    good = all(name in row and isinstance(row[name], int | float | None) for name in fields)
    return row if good else None


def _plain(value: Any) -> Any:
    """Numbers as Python's own, arrays as lists, what is not finite as None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _plain(np.asarray(value).tolist())


def _through_json(config: dict[str, Any]) -> dict[str, Any]:
    """As it reads back: lists for tuples."""
    return json.loads(json.dumps(config))
