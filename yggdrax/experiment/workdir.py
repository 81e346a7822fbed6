"""The files of a run, apart from its checkpoints: all writing happens here.

======================  ==========================================================================
``config.json``         the resolved configuration, written first
``metrics.jsonl``       one row for each logged step, without gaps or doubles
``particles.npz``       the final particles, one array a leaf, named by its path in the tree
``*.png``               pictures
``summary.json``        the figures; written last, so its presence says that the run is complete
======================  ==========================================================================

Whole files appear under their names by a rename, so a kill leaves the old one or the new one. With
several processes only process 0 writes.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import IO, Any

import jax
import numpy as np

from yggdrax.checkpoint.values import first_difference

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

    def claim(self, config: dict[str, Any], recorded: dict[str, Any] | None = None) -> None:
        """Records the configuration, or compares it with the one that is recorded.

        Args:
          config: the resolved configuration.
          recorded: the one that the latest checkpoint carries; used if ``config.json`` is gone.

        Raises:
          WorkdirError: naming the first field that differs.
        """
        old = self._read_json("config.json") or recorded
        new = json.loads(json.dumps(config))
        if old is not None and (difference := first_difference(old, new)):
            raise WorkdirError(
                f"{self.path} belongs to another configuration: {difference}. "
                "Use another --workdir, or the configuration it was started with."
            )
        if self.writes and not (self.path / "config.json").exists():
            self.write_json("config.json", new)

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete run, or None."""
        return self._read_json("summary.json")

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
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)

    def open_metrics(self, step: int) -> list[dict[str, Any]]:
        """Cuts ``metrics.jsonl`` back to the given step, opens it to append, and returns its rows.

        Rows of later steps, and a line that a kill left incomplete, go: the resumed run writes
        them again. A step of -1 empties the log.
        """
        rows: list[dict[str, Any]] = []
        path = self.path / "metrics.jsonl"
        kept = 0
        if path.exists():
            with open(path, "rb") as file:
                for line in file:
                    row = _row(line)
                    if row is None or row["step"] > step:
                        break
                    rows.append(row)
                    kept += len(line)
        if self.writes:
            self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
            self._log.truncate(kept)
        return rows

    def append_metrics(self, row: dict[str, Any]) -> dict[str, Any]:
        """Appends one row and hands it to the operating system; returns the row as it reads back.

        Raises:
          RuntimeError: before :meth:`open_metrics`.
        """
        row = _plain(row)
        if self.writes:
            if self._log is None:
                raise RuntimeError("open_metrics comes before append_metrics.")
            self._log.write(json.dumps(row, allow_nan=False) + "\n")
            self._log.flush()
        return row

    def sync_metrics(self) -> None:
        """Forces the log to the disk: a checkpoint must not outlive the rows before it."""
        if self._log is not None:
            os.fsync(self._log.fileno())

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise WorkdirError(f"cannot read {path}: {error}. Remove it or repair it.") from error


def _row(line: bytes) -> dict[str, Any] | None:
    """A complete row of the log, or None for one that a kill cut short."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and "step" in row else None


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
