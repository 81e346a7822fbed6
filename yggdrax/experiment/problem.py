"""What an experiment samples: a target, its data, and what is worth watching and reporting."""

from typing import TYPE_CHECKING, Any, NamedTuple

import optax

from yggdrax.experiment.config import ExperimentConfig
from yggdrax.targets.base import Target
from yggdrax.typing import Array, Key, ParticleTree, PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from yggdrax.experiment.steps import Stepper

__all__ = ["Problem", "RunState"]


class RunState(NamedTuple):
    """All that the next step of a run needs, and all that a checkpoint holds."""

    step: Array  # () int32, updates done
    particles: ParticleTree  # leaves (N, ...)
    model_state: PyTree  # BatchNorm statistics and the like, leaves (N, ...); {} mostly
    opt_state: optax.OptState
    key: Key  # () typed key of the run; it never changes


class Problem:
    """A target with its data. A subclass adds what it watches, reports and draws.

    Attributes:
      target: log p up to a constant.
      train: a tree of arrays with one leading axis (rows), or None; minibatches are taken from it
        and handed to the target.
      test: handed to :meth:`evaluate`.
      watch: names of the numbers from :meth:`evaluate` that the progress bar shows.
      stepper_type: what takes the steps, where a step is more than an update of the particles.
    """

    target: Target
    train: PyTree
    test: PyTree
    watch: tuple[str, ...] = ()
    stepper_type: "type[Stepper] | None" = None

    def __init__(self, target: Target, train: PyTree = None, test: PyTree = None) -> None:
        """Keeps the target and the data."""
        self.target, self.train, self.test = target, train, test

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """Numbers for each row of the metrics, scalars; traced inside ``jax.jit``."""
        del state, test
        return {}

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """Figures for ``summary.json``: numbers, text, and dictionaries of them."""
        del config, state, initial
        return {}

    def exported(self, state: RunState) -> PyTree:
        """What ``particles.npz`` holds: the particles, leaves (N, ...)."""
        return state.particles

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Lines to draw beside the learning curves, by the curve's name and the line's label."""
        del summary
        return {}

    def pictures(self, state: RunState, initial: RunState) -> "dict[str, Figure]":
        """Pictures besides the learning curves and the spread, by file name without ``.png``."""
        del state, initial
        return {}
