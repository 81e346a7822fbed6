"""Toy problems: densities with exact samples and moments, to watch the method on.

A problem of your own is a subclass of :class:`yggdrax.experiment.ProblemConfig` in your
configuration file, whose ``build(seed)`` returns a :class:`yggdrax.experiment.Problem`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax import plots
from yggdrax.diagnostics import ksd_squared, mmd_squared
from yggdrax.experiment.config import ConfigError, ExperimentConfig, ProblemConfig, require_positive
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.particles import particle_grads
from yggdrax.targets import Banana, Funnel, Gaussian, Mixture, ToyTarget
from yggdrax.typing import Array, Key, PyTree

__all__ = ["BananaProblem", "FunnelProblem", "GaussianProblem", "MixtureProblem"]


@dataclasses.dataclass
class _ToyConfig(ProblemConfig):
    """Fields of every toy problem.

    Attributes:
      start_mean: every coordinate of the initial particles' mean.
      start_scale: their standard deviation.
    """

    start_mean: float = 0.0
    start_scale: float = 1.0

    def validate(self) -> None:
        """Checks signs."""
        require_positive(start_scale=self.start_scale)

    def target(self) -> ToyTarget:
        """The target itself."""
        raise NotImplementedError(f"{type(self).__name__} defines no target().")

    def build(self, seed: int) -> Problem:
        """The target; nothing in it is random."""
        del seed
        return _ToyProblem(Started(self.target(), self.start_mean, self.start_scale))


@dataclasses.dataclass
class GaussianProblem(_ToyConfig):
    """A Gaussian with unit variances.

    Attributes:
      dimension: d.
      correlation: of any two neighbouring coordinates; falls off as its powers.
    """

    dimension: int = 2
    correlation: float = 0.5

    def validate(self) -> None:
        """Checks ranges."""
        super().validate()
        if self.dimension < 1:
            raise ConfigError(f"dimension must be at least 1, not {self.dimension!r}")
        if not -1 < self.correlation < 1:
            raise ConfigError(f"correlation must be inside (-1, 1), not {self.correlation!r}")

    def target(self) -> ToyTarget:
        """The Gaussian."""
        i = np.arange(self.dimension)
        covariance = self.correlation ** np.abs(i[:, None] - i).astype(float)
        return Gaussian(np.zeros(self.dimension, np.float32), covariance.astype(np.float32))


@dataclasses.dataclass
class MixtureProblem(_ToyConfig):
    """Gaussians of unit variance at equal distances on a circle, with rising weights 1, 2, 3, ...

    Attributes:
      modes: how many.
      radius: of the circle; with two modes they lie at -radius and radius on the first axis.
    """

    modes: int = 3
    radius: float = 3.0

    def validate(self) -> None:
        """Checks ranges."""
        super().validate()
        require_positive(radius=self.radius)
        if self.modes < 1:
            raise ConfigError(f"modes must be at least 1, not {self.modes!r}")

    def target(self) -> ToyTarget:
        """The mixture in the plane."""
        angles = 2 * np.pi * np.arange(self.modes) / self.modes + np.pi
        centres = self.radius * np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        return Mixture(np.arange(1.0, self.modes + 1), [Gaussian(c, 1.0) for c in centres])


@dataclasses.dataclass
class BananaProblem(_ToyConfig):
    """A bent Gaussian in the plane.

    Attributes:
      scale: standard deviation along the banana.
      curvature: how much it bends.
    """

    scale: float = 2.0
    curvature: float = 0.5

    def validate(self) -> None:
        """Checks signs."""
        super().validate()
        require_positive(scale=self.scale)

    def target(self) -> ToyTarget:
        """The banana."""
        return Banana(self.scale, self.curvature)


@dataclasses.dataclass
class FunnelProblem(_ToyConfig):
    """A funnel: the first coordinate sets the width of the others.

    Attributes:
      dimension: d, at least 2.
      scale: standard deviation of the first coordinate, the log variance of the others.
    """

    dimension: int = 2
    scale: float = 1.5

    def validate(self) -> None:
        """Checks ranges."""
        super().validate()
        require_positive(scale=self.scale)
        if self.dimension < 2:
            raise ConfigError(f"dimension must be at least 2, not {self.dimension!r}")

    def target(self) -> ToyTarget:
        """The funnel."""
        return Funnel(self.dimension, self.scale)


class Started(ToyTarget):
    """A toy target whose particles start elsewhere; all else is the target's own."""

    def __init__(self, inner: ToyTarget, start_mean: float, start_scale: float) -> None:
        self.inner, self.dimension = inner, inner.dimension
        self.start_mean, self.start_scale = start_mean, start_scale

    def __call__(self, particle: Array, batch: Any = None, *, key: Key | None = None) -> Array:
        return self.inner(particle, batch, key=key)

    def init(self, key: Key) -> Array:
        return self.start_mean + self.start_scale * jax.random.normal(key, (self.dimension,))


class _ToyProblem(Problem):
    """Watches the moments, and compares with exact samples at the end."""

    target: Started
    watch = ("mean_error", "variance_ratio")

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """Errors of mean and total variance, both relative to the target's scale."""
        total = jnp.trace(self.target.inner.covariance())
        distance = jnp.linalg.norm(state.particles.mean(0) - self.target.inner.mean())
        return {
            "mean_error": distance / jnp.sqrt(total),
            "variance_ratio": jnp.sum(state.particles.var(0)) / total,
        }

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """Moments beside the exact ones, and the distance from exact samples."""
        exact = self.target.inner

        @jax.jit  # one compilation instead of one an operation
        def figures(state: RunState) -> dict[str, Array]:
            particles, samples = state.particles, self._exact_samples(state)
            scores = -particle_grads(exact, particles)
            return {
                "mean": particles.mean(0),
                "exact_mean": exact.mean(),
                "variance": particles.var(0),
                "exact_variance": jnp.diag(exact.covariance()),
                "mmd_squared": mmd_squared(particles, samples),
                "ksd_squared": ksd_squared(particles, scores),
            }

        return figures(state)

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Where a perfect sampler would be."""
        return {"mean_error": {"exact": 0.0}, "variance_ratio": {"exact": 1.0}}

    def pictures(self, state: RunState, initial: RunState):
        """Particles over the density, at the start and at the end."""
        figure = plots.density(
            state.particles,
            self.target.inner,
            initial=initial.particles,
            samples=jax.jit(self._exact_samples)(state),
            title=f"after {int(state.step)} steps",
        )
        return {"density": figure}

    def _exact_samples(self, state: RunState) -> Array:
        return self.target.inner.sample(jax.random.fold_in(state.key, 3), 2000)
