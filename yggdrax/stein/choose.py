"""Engines by name."""

import importlib.util

from yggdrax.stein.engine import Engine
from yggdrax.stein.exact import Exact

__all__ = ["resolve_engine"]

_NAMES = ("auto", "exact", "fourier", "tree")


def resolve_engine(engine: Engine | str) -> Engine:
    """Returns the engine for an object or a name.

    Raises:
      ValueError: for an unknown name.
      TypeError: for an object that is no engine.
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise TypeError(
            f"engine must be an engine or one of {list(_NAMES)}, not {type(engine).__name__}."
        )
    if engine == "exact":
        return Exact()
    if engine == "auto" and importlib.util.find_spec("yggdrax.stein.auto") is None:
        return Exact()
    if engine == "auto":
        from yggdrax.stein.auto import Auto

        return Auto()
    if engine == "fourier":
        from yggdrax.stein.fourier import Fourier

        return Fourier()
    if engine == "tree":
        from yggdrax.stein.tree import Tree

        return Tree()
    raise ValueError(f"unknown engine {engine!r}: choose one of {list(_NAMES)}, or pass an object.")
