"""What the bits of a run depend on besides its state: machine, versions, global options of JAX."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

__all__ = ["current_settings", "differences"]

_PACKAGES = ("yggdrax", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
_OPTIONS = ("enable_x64", "default_matmul_precision", "threefry_partitionable")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _threads() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


def current_settings() -> dict[str, Any]:
    """Returns what must be equal for a resumed run to be bit-equal, in JSON types.

    Example:
      >>> current_settings()["platform"]
      'cpu'
    """
    devices = jax.devices()
    settings: dict[str, Any] = {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "threads": _threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: getattr(jax.config, f"jax_{name}") for name in _OPTIONS},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    settings.update({f"version of {name}": _version(name) for name in _PACKAGES})
    return settings


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns one short text for each setting that differs.

    Example:
      >>> differences({"threads": 8, "x64": False}, {"threads": 2, "x64": False})
      ['threads 8, now 2']
    """
    return [
        f"{name} {saved.get(name)}, now {now.get(name)}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
