"""Engines by name."""

from yggdrax.stein.auto import Auto
from yggdrax.stein.engine import Engine
from yggdrax.stein.exact import Exact
from yggdrax.stein.fourier import Fourier
from yggdrax.stein.tree import Tree

__all__ = ["resolve_engine"]

_NAMES = {"auto": Auto, "exact": Exact, "fourier": Fourier, "tree": Tree}


def resolve_engine(engine: Engine | str) -> Engine:
    """Returns the engine for an object or a name.

    Raises:
      ValueError: for an unknown name.
      TypeError: for an object that is no engine.

    Example:
      >>> resolve_engine("auto")
      Auto(rtol=0.001, check_every=100)
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise TypeError(
            f"engine must be an engine or one of {list(_NAMES)}, not {type(engine).__name__}."
        )
    if engine not in _NAMES:
        raise ValueError(
            f"unknown engine {engine!r}: choose one of {list(_NAMES)}, or pass an engine object."
        )
    return _NAMES[engine]()
