"""Which of the steps on the disk stay."""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Literal

from yggdrax.checkpoint import folder as folders
from yggdrax.checkpoint.errors import CheckpointError
from yggdrax.typing import is_whole

__all__ = ["KeepPolicy"]


@dataclasses.dataclass(frozen=True)
class KeepPolicy:
    """A step stays if any of the rules asks for it.

    Attributes:
      latest: how many of the newest; None for all.
      every: multiples of it; None for none.
      best: name of a metric; None for none.
      mode: whether small or large values are best.
      count: how many of the best.
    """

    latest: int | None
    every: int | None
    best: str | None
    mode: Literal["min", "max"]
    count: int

    def __post_init__(self) -> None:
        """Refuses options out of range."""
        for name, value in (
            ("keep_latest", self.latest),
            ("keep_every", self.every),
            ("keep_best", self.count),
        ):
            if value is not None and not is_whole(value, 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', not {self.mode!r}.")
        if self.best is not None and not isinstance(self.best, str):
            raise ValueError(f"best must be the name of a metric, not {self.best!r}.")

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raises ValueError if the metric that decides is missing."""
        if self.best is not None and self.best not in metrics:
            raise ValueError(
                f"The best steps are kept by {self.best!r}, which is not among the metrics "
                f"{sorted(metrics)}. Pass metrics={{{self.best!r}: ...}} to save."
            )

    def choose(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps that stay.

        Args:
          metrics: the metrics of every whole step.

        Example:
          >>> policy = KeepPolicy(latest=1, every=100, best="loss", mode="min", count=1)
          >>> losses = {100: 3.0, 120: 1.0, 140: 2.0, 160: float("nan")}
          >>> sorted(policy.choose({step: {"loss": loss} for step, loss in losses.items()}))
          [100, 120, 160]
        """
        steps = sorted(metrics)
        if self.latest is None:
            return set(steps)
        stay = set(steps[-self.latest :])
        if self.every is not None:
            stay.update(step for step in steps if step % self.every == 0)
        if self.best is not None:
            values = {step: metrics[step].get(self.best, math.nan) for step in steps}
            sign = 1.0 if self.mode == "min" else -1.0
            # Among equal values the newest one is the best.
            ranked = sorted(
                (step for step in steps if not math.isnan(values[step])),
                key=lambda step: (sign * values[step], -step),
            )
            stay.update(ranked[: self.count])
        return stay

    def apply(self, root: pathlib.Path, damaged: Collection[int], written: int) -> list[str]:
        """Deletes the whole steps in ``root`` that no rule asks for.

        Args:
          root: the run's directory.
          damaged: steps that look whole and are not. They hold no place and are not deleted.
          written: the step that was just saved, which stays whatever the rules say.

        Returns:
          For each that should go and stays, the reason.
        """
        if self.latest is None:
            return []
        metrics = {}
        try:
            steps = folders.numbered_folders(root)
        except OSError as error:
            return [f"Old steps in {root} could not be deleted: {error}"]
        for step in steps:
            if step in damaged:
                continue
            try:
                metrics[step] = folders.read_manifest(folders.step_folder(root, step)).metrics
            except CheckpointError:
                continue  # said when it is skipped, and never deleted
        notes = []
        for step in sorted(set(metrics) - self.choose(metrics) - {written}):
            try:
                note = folders.delete_step(root, step)
            except OSError as error:
                note = f"Step {step} could not be deleted from {root}: {error}"
            if note is not None:
                notes.append(note)
        return notes
