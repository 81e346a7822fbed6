"""A classifier of small images: a convolutional network on scikit-learn's bundled digits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from yggdrax import plots
from yggdrax.diagnostics import brier_score, calibration_curve, expected_calibration_error
from yggdrax.experiment import baselines
from yggdrax.experiment.config import ConfigError, ExperimentConfig, ProblemConfig, require_positive
from yggdrax.experiment.data import Images, load_digits
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.targets import BayesianNetwork, Categorical, GaussianPrior, Predictive, predict
from yggdrax.typing import Array, PyTree

__all__ = ["DigitsProblem"]


@dataclasses.dataclass
class DigitsProblem(ProblemConfig):
    """A small convolutional network on 1797 handwritten digits of 8 x 8 pixels.

    Weights have the prior N(0, prior_scale^2 / fan-in), biases N(0, bias_scale^2).

    Attributes:
      channels: of the first convolution; the second has twice as many.
      prior_scale: of the weights.
      bias_scale: of the biases.
      test_fraction: share of the images that are only tested on.
      split_seed: which images those are.
    """

    channels: int = 8
    prior_scale: float = 1.0
    bias_scale: float = 1.0
    test_fraction: float = 0.3
    split_seed: int = 0

    def validate(self) -> None:
        """Checks ranges."""
        require_positive(prior_scale=self.prior_scale, bias_scale=self.bias_scale)
        if self.channels < 1:
            raise ConfigError(f"channels must be at least 1, not {self.channels!r}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction must be inside (0, 1), not {self.test_fraction!r}")
        if self.split_seed < 0:
            raise ConfigError(f"split_seed must be at least 0, not {self.split_seed!r}")

    def build(self, seed: int) -> Problem:
        """Loads and splits the images; the split depends on ``split_seed`` alone."""
        del seed
        images = load_digits(test_fraction=self.test_fraction, seed=self.split_seed)
        target = BayesianNetwork(
            functools.partial(_ConvolutionalNetwork, self.channels),
            Categorical(10),
            prior=GaussianPrior(self.prior_scale, self.bias_scale),
            num_data=len(images.y_train),
        )
        return _Digits(target, images)


class _Convolution(nnx.Module):
    """A 3 x 3 convolution as one matrix product of the patches.

    Mapped over members, ``nnx.Conv`` becomes a grouped convolution, which takes many times as long
    on a CPU.
    """

    def __init__(self, channels: int, features: int, *, rngs: nnx.Rngs) -> None:
        precision = jax.lax.Precision.HIGHEST
        self.linear = nnx.Linear(9 * channels, features, precision=precision, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        height, width = x.shape[1:3]
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifts = [(i, j) for i in range(3) for j in range(3)]
        patches = [padded[:, i : i + height, j : j + width] for i, j in shifts]
        return self.linear(jnp.concatenate(patches, axis=-1))


class _ConvolutionalNetwork(nnx.Module):
    """Two convolutions, each halving the picture, and a linear layer: (B, 8, 8) to (B, 10)."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.first = _Convolution(1, channels, rngs=rngs)
        self.second = _Convolution(channels, 2 * channels, rngs=rngs)
        self.output = nnx.Linear(8 * channels, 10, precision=jax.lax.Precision.HIGHEST, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = _halved(nnx.relu(self.first(x[..., None])))
        x = _halved(nnx.relu(self.second(x)))
        return self.output(x.reshape(x.shape[0], -1))


def _halved(x: Array) -> Array:
    """The largest of every 2 x 2 pixels."""
    rows, height, width, channels = x.shape
    return x.reshape(rows, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class _Digits(Problem):
    """Test scores beside those of a single network."""

    target: BayesianNetwork
    watch = ("test_accuracy", "test_log_likelihood")

    def __init__(self, target: BayesianNetwork, images: Images) -> None:
        super().__init__(
            target,
            train=(jnp.asarray(images.x_train), jnp.asarray(images.y_train)),
            test=(jnp.asarray(images.x_test), jnp.asarray(images.y_test)),
        )

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """Accuracy, mean log probability of the labels, calibration error and Brier score."""
        x, y = test
        predictive = self._predictive(state, x)
        probabilities = predictive.probabilities
        return {
            "test_accuracy": jnp.mean(jnp.argmax(probabilities, axis=1) == y),
            "test_log_likelihood": jnp.mean(predictive.log_density(y)),
            "test_calibration_error": expected_calibration_error(probabilities, y),
            "test_brier": brier_score(probabilities, y),
        }

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """The scores of the ensemble and of a single network on the same images."""
        scores = jax.jit(self.evaluate)
        self._single = baselines.single_network(config, self, initial)
        return {
            "train_rows": len(self.train[1]),
            "test_rows": len(self.test[1]),
            "posterior": scores(state, self.test),
            "single_network": scores(self._single, self.test),
        }

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """The single network's scores."""
        return {
            name: {"single network": value} for name, value in summary["single_network"].items()
        }

    def pictures(self, state: RunState, initial: RunState):
        """How often the classifiers are right, against how sure they are."""
        curves = {}
        for label, run in (("posterior", state), ("single network", self._single)):
            probabilities = jax.jit(self._probabilities)(run, self.test[0])
            curves[label] = calibration_curve(np.asarray(probabilities), self.test[1])
        figure = plots.calibration(curves, x_label="confidence", y_label="accuracy")
        return {"calibration": figure}

    def _probabilities(self, state: RunState, x: Array) -> Array:
        return self._predictive(state, x).probabilities

    def _predictive(self, state: RunState, x: Array) -> Predictive:
        return predict(self.target, state.particles, x)
