"""Arguments of the Checkpointer, checked and brought into one form."""

import operator
import os
import pathlib
from collections.abc import Callable
from typing import SupportsIndex

from yggdrax.typing import is_whole

__all__ = ["resolve_directory", "save_policy", "step_number"]


def resolve_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a directory; a URL is refused."""
    text = os.fspath(directory)
    if not isinstance(text, str):
        raise TypeError(f"directory must be a string or a path, not {text!r}.")
    if not text:
        raise ValueError("directory is empty; '.' is the current one.")
    if "://" in text:
        raise ValueError(f"{text!r} is a URL; give a directory of a mounted file system.")
    return pathlib.Path(os.path.abspath(os.path.expanduser(text)))


def step_number(step: SupportsIndex, least: int = 0) -> int:
    """Returns a step of at least ``least`` as a Python integer, or raises for what is none.

    Example:
      >>> step_number(3)
      3
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"step must be an integer, not {step!r}.") from error
    if number < least or isinstance(step, bool):
        raise ValueError(f"step is the number of steps completed, at least {least}, not {step!r}.")
    return number


def save_policy(save_every: int | Callable[[int], bool]) -> Callable[[int], bool]:
    """Returns a function of the step that says whether to save.

    Example:
      >>> due = save_policy(10)
      >>> [step for step in range(25) if due(step)]
      [0, 10, 20]
    """
    if callable(save_every):
        return save_every
    if not is_whole(save_every, 1):
        raise ValueError(
            f"save_every must be a positive integer or a function of the step, not {save_every!r}."
        )
    return lambda step: step % save_every == 0
