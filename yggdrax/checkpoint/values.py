"""Values that go into the manifest as JSON: metrics, metadata, configurations."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from yggdrax.checkpoint.errors import CheckpointMismatch

__all__ = ["check_config", "check_json", "fingerprint", "first_difference", "json_copy", "numbers"]


def check_json(value: Any, name: str) -> None:
    """Raises TypeError, by name, for what JSON would refuse or silently turn into something else.

    Tuples are accepted and come back as lists; keys that are not strings are not.

    Example:
      >>> check_json({"layers": {1: "tanh"}}, "config")
      Traceback (most recent call last):
      ...
      TypeError: config['layers'] has the key 1; JSON keeps only strings as keys.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; JSON keeps only strings as keys.")
            check_json(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_json(item, f"{name}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{name} is of type {type(value).__qualname__}; give numbers, strings, lists and "
            f"dictionaries."
        )


def json_copy(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy as it would be read back from JSON, or raises as :func:`check_json` does.

    Example:
      >>> json_copy({"widths": (50, 20)}, "config")
      {'widths': [50, 20]}
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary, not {value!r}.")
    check_json(value, name)
    return json.loads(json.dumps(value, default=dict))  # other mappings become dictionaries


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as Python numbers.

    Raises:
      TypeError: a name that is no string or a value that is no number.
      ValueError: a number beyond the range of a float.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dictionary of numbers by name, not {metrics!r}.")
    result = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"The name of a metric is a string, not {name!r}.")
        try:
            result[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"The metric {name!r} must be one number, not {value!r}.") from error
        except OverflowError as error:
            raise ValueError(f"The metric {name!r} is beyond the range of a float.") from error
    return result


def fingerprint(config: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits that differ for configurations that differ.

    Example:
      >>> fingerprint({"seed": 1, "rate": 0.1}) == fingerprint({"rate": 0.1, "seed": 1})
      True
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(saved: Any, given: Any, name: str = "") -> str | None:
    """Returns the first field in which two JSON values differ, with both sides, or None.

    Example:
      >>> first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
      'b.c was 2 and is now 3'
    """
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted({*saved, *given}):
            inner = f"{name}.{key}" if name else key
            if key not in given:
                return f"{inner} was {saved[key]!r} and is now missing"
            if key not in saved:
                return f"{inner} was missing and is now {given[key]!r}"
            difference = first_difference(saved[key], given[key], inner)
            if difference is not None:
                return difference
        return None
    same = json.dumps(saved) == json.dumps(given)
    return None if same else f"{name} was {saved!r} and is now {given!r}"


def check_config(saved: Any, given: Any, path: pathlib.Path) -> None:
    """Raises CheckpointMismatch, by field, if a step belongs to another configuration.

    Args:
      saved: that of the step; None for one without.
      given: that of the run; None for one without.
      path: of the step.
    """
    if saved is None or given is None:
        return
    difference = first_difference(saved, given)
    if difference is not None:
        raise CheckpointMismatch(
            f"{path} belongs to another configuration: {difference}. Use the configuration "
            f"it was saved with, or another directory."
        )
