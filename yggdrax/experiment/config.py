"""Typed configurations: mutable while a file builds them, validated and frozen once parsed.

A configuration file ends in ``get_config()``, which returns an :class:`ExperimentConfig`; the
command line sets its attributes (``--config.num_steps=500``), and :meth:`Config.freeze` then checks
every type and value. Annotations are real types, not strings: the command line reads them.
"""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any

__all__ = [
    "Config",
    "ConfigError",
    "ExperimentConfig",
    "OptimizerConfig",
    "ProblemConfig",
    "SvgdConfig",
]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line that names the field."""


class Config:
    """Base of the typed configurations: refuses unknown fields, checks types, can be frozen."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a known field of a configuration that is not frozen yet.

        Raises:
          ConfigError: for a field that does not exist.
          dataclasses.FrozenInstanceError: once the configuration is frozen.
        """
        if getattr(self, "_frozen", False):
            raise dataclasses.FrozenInstanceError(
                f"cannot set {name!r}: this configuration is frozen. Change a copy made by "
                "config.replace(...)."
            )
        names = [f.name for f in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        if name not in names:
            raise ConfigError(unknown_field(name, names, type(self).__name__))
        super().__setattr__(name, value)

    def validate(self) -> None:
        """Checks values that the types do not; a subclass raises :class:`ConfigError`."""

    def freeze(self, prefix: str = "") -> typing.Self:
        """Checks types and values, fields in fields included, then forbids changes.

        Args:
          prefix: path of this configuration in the whole one, for messages.

        Returns:
          The configuration itself. Integers given for floats have become floats.

        Raises:
          ConfigError: naming the first field that is wrong, its value and what is allowed.
        """
        if getattr(self, "_frozen", False):
            return self
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            path = prefix + field.name
            value = _checked(path, getattr(self, field.name), field.type)
            object.__setattr__(self, field.name, value)
            if isinstance(value, Config):
                value.freeze(path + ".")
        try:
            self.validate()
        except ConfigError as error:
            raise ConfigError(prefix + str(error)) from None
        object.__setattr__(self, "_frozen", True)
        return self

    def replace(self, **changes: Any) -> typing.Self:
        """Returns a copy that is not frozen, with some fields changed (nested ones copied)."""
        values = {}
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            values[field.name] = value.replace() if isinstance(value, Config) else value
        return type(self)(**(values | changes))

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts of JSON types; a problem also names its class as ``"kind"``."""
        result: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if isinstance(value, Config):
                value = value.to_dict()
            result[field.name] = list(value) if isinstance(value, tuple) else value
        return result


def unknown_field(name: str, known: list[str], where: str) -> str:
    """One line that says a field does not exist and names the closest that does."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(known)}."
    return f"{where} has no field {name!r}; {hint}"


def _checked(path: str, value: Any, annotation: Any) -> Any:
    """The value, an int made a float where one is asked for; ConfigError for a wrong type."""
    if annotation is object:
        allowed: tuple[Any, ...] = (float, str)
    elif isinstance(annotation, types.UnionType):
        allowed = typing.get_args(annotation)
    else:
        allowed = (typing.get_origin(annotation) or annotation,)
    is_bool = isinstance(value, bool)
    if isinstance(value, allowed) and not (is_bool and bool not in allowed):
        return value
    if float in allowed and isinstance(value, int) and not is_bool:
        return float(value)
    names = " or ".join("None" if t is types.NoneType else t.__name__ for t in allowed)
    raise ConfigError(f"{path} must be {names}, not {type(value).__name__} ({value!r})")


def require_positive(**values: float) -> None:
    """Raises a ConfigError for the first field that is not positive and finite."""
    for name, value in values.items():
        _require(0 < value < math.inf, name, value, "positive and finite")


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {allowed}, not {value!r}")


@dataclasses.dataclass
class SvgdConfig(Config):
    """Options of :func:`yggdrax.svgd`.

    Attributes:
      bandwidth: ``"median"`` or a number, in the units of the particles.
      kernel: ``"rbf"`` or ``"imq"``.
      engine: ``"auto"``, ``"exact"``, ``"tree"`` or ``"fourier"``.
      temperature: T; the target is p^(1/T).
      per: ``"particle"``, ``"leaf"`` or ``"coordinate"``: what one kernel sees.
    """

    bandwidth: object = "median"
    kernel: str = "rbf"
    engine: str = "auto"
    temperature: float = 1.0
    per: str = "particle"

    def validate(self) -> None:
        """Checks names and signs."""
        if isinstance(self.bandwidth, float):
            require_positive(bandwidth=self.bandwidth)
        else:
            allowed = "'median' or a number"
            _require(self.bandwidth == "median", "bandwidth", self.bandwidth, allowed)
        for name, names in (
            ("kernel", ("rbf", "imq")),
            ("engine", ("auto", "exact", "tree", "fourier")),
            ("per", ("particle", "leaf", "coordinate")),
        ):
            value = getattr(self, name)
            _require(value in names, name, value, f"one of {', '.join(names)}")
        require_positive(temperature=self.temperature)


@dataclasses.dataclass
class OptimizerConfig(Config):
    """The optimizer behind ``svgd`` in the chain.

    Weight decay and clipping are not offered: behind ``svgd`` the first is an undeclared prior,
    and the second mixes the particles.

    Attributes:
      name: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ``"momentum"`` or ``"sgd"``.
      learning_rate: step size at the start (of a schedule: its peak).
      schedule: ``"constant"``, or ``"cosine"``: falls to a hundredth over ``num_steps``.
    """

    name: str = "adam"
    learning_rate: float = 1e-2
    schedule: str = "constant"

    def validate(self) -> None:
        """Checks names and signs."""
        names = ("adam", "rmsprop", "adagrad", "momentum", "sgd")
        _require(self.name in names, "name", self.name, f"one of {', '.join(names)}")
        names = ("constant", "cosine")
        _require(self.schedule in names, "schedule", self.schedule, f"one of {', '.join(names)}")
        require_positive(learning_rate=self.learning_rate)


@dataclasses.dataclass
class ProblemConfig(Config):
    """What is sampled. A subclass adds its fields and builds the problem."""

    def build(self, seed: int) -> Any:
        """Returns the :class:`yggdrax.experiment.problems.Problem` for this configuration."""
        raise NotImplementedError(f"{type(self).__name__} must define build(seed).")

    def to_dict(self) -> dict[str, Any]:
        """Adds the class under ``"kind"``, so that two problems never look alike."""
        return {"kind": type(self).__name__} | super().to_dict()


@dataclasses.dataclass
class ExperimentConfig(Config):
    """One experiment.

    Attributes:
      problem: the target, its data and its report.
      num_particles: N.
      num_steps: updates of the whole run.
      batch_size: rows of a minibatch; 0 takes all rows (and suits a target without data).
      seed: everything random follows from it and from the step.
      svgd: options of the transformation.
      optimizer: what moves the particles along it.
      log_every: steps between two rows of ``metrics.jsonl``.
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: how many of the latest stay.
      mesh: ``"none"``: one device; ``"automatic"``: the particles are split over all devices of
        all processes, on an automatic mesh of JAX. (An explicit one would ask of every target that
        its operations know how to be split.)
      stop_at: the run stops itself once it gets to this step (exit status 75) and is continued by
        the same command; 0 never stops.
      plots: whether to draw pictures at the end.

    Example:
      >>> config = ExperimentConfig(problem=ProblemConfig(), num_particles=8)
      >>> config.num_steps = 20
      >>> config.freeze().num_steps
      20
    """

    problem: ProblemConfig
    num_particles: int = 100
    num_steps: int = 1000
    batch_size: int = 0
    seed: int = 0
    svgd: SvgdConfig = dataclasses.field(default_factory=SvgdConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    mesh: str = "none"
    stop_at: int = 0
    plots: bool = True

    def validate(self) -> None:
        """Checks ranges."""
        for name in (
            "num_particles",
            "num_steps",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            _require(value >= 1, name, value, "at least 1")
        for name in ("batch_size", "stop_at"):
            value = getattr(self, name)
            _require(value >= 0, name, value, "at least 0")
        meshes = ("none", "automatic")
        _require(self.mesh in meshes, "mesh", self.mesh, f"one of {', '.join(meshes)}")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        _require(self.num_steps < 2**31, "num_steps", self.num_steps, "below 2**31")
