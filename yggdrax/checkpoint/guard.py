"""One call at a time, warnings that point at the caller, and what is known to be damaged."""

import functools
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from yggdrax import processes
from yggdrax.checkpoint import folder as folders
from yggdrax.checkpoint.errors import CheckpointWarning

__all__ = ["KnownDamage", "nothing_here", "one_at_a_time", "warn_caller"]

_Self = TypeVar("_Self", bound=Any)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def one_at_a_time(
    method: Callable[Concatenate[_Self, _Given], _Result],
) -> Callable[Concatenate[_Self, _Given], _Result]:
    """Makes a method wait while another thread is in one of the same object (its ``_calls``)."""

    @functools.wraps(method)
    def alone(self: _Self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self._calls:
            return method(self, *args, **kwargs)

    return alone


def warn_caller(text: str) -> None:
    """Warns at the line that called into this package."""
    here = (str(pathlib.Path(__file__).parent), processes.__file__)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, CheckpointWarning, stacklevel=level)


class KnownDamage:
    """The steps whose contents proved damaged, as long as nobody writes them again."""

    def __init__(self, root: pathlib.Path):
        """Nothing is known yet.

        Args:
          root: the run's directory.
        """
        self._root = root
        self._seen: dict[int, tuple[int, int] | None] = {}
        self._why: dict[int, str] = {}

    def add(self, step: int, why: str) -> None:
        """Remembers a step, and what is wrong with it."""
        self._seen[step], self._why[step] = self._identity(step), why

    def why(self, step: int) -> str:
        """What is wrong with a step that is known."""
        return self._why[step]

    def forget(self, step: int) -> None:
        """Its folder was moved away."""
        self._seen.pop(step, None)

    def __contains__(self, step: int) -> bool:
        """Whether the folder that is there now is the one that proved damaged."""
        return step in self._seen and self._seen[step] == self._identity(step)

    def steps(self) -> frozenset[int]:
        """All of them."""
        return frozenset(step for step in self._seen if step in self)

    def _identity(self, step: int) -> tuple[int, int] | None:
        try:
            found = (folders.step_folder(self._root, step) / folders.MANIFEST).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def nothing_here(root: pathlib.Path) -> str:
    """Why there is nothing to restore in a directory, and what to do."""
    if root.exists() and not root.is_dir():
        return f"There is no checkpoint in {root}: it is a file, not a directory."
    if not root.is_dir():
        return f"There is no checkpoint in {root}: the directory does not exist."
    numbered = folders.numbered_folders(root)
    if numbered:
        listed = ", ".join(map(str, numbered))
        return (
            f"All steps in {root} are damaged ({listed}). Restore the directory from a copy; or, "
            f"to start again, use another directory or move this one away."
        )
    below = [p.name for p in sorted(root.iterdir()) if folders.looks_like_a_run(p)]
    hint = f" Did you mean {root / below[0]}?" if below else ""
    return f"There is no checkpoint in {root}.{hint}"
