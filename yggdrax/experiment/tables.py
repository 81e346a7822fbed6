"""Problems with data: a Bayesian network for regression, logistic regression for two classes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from yggdrax import plots
from yggdrax.diagnostics import interval_coverage, rmse
from yggdrax.experiment import baselines
from yggdrax.experiment.config import ConfigError, ExperimentConfig, ProblemConfig, require_positive
from yggdrax.experiment.data import (
    Split,
    load_classification,
    load_regression,
    split,
    uci_split,
)
from yggdrax.experiment.nuts import compare_moments, load_blackjax, nuts
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.targets import (
    BayesianNetwork,
    GaussianNoise,
    GaussianPrior,
    LogisticRegression,
    Predictive,
    Whitened,
    predict,
)
from yggdrax.transform import svgd
from yggdrax.typing import Array, Key, PyTree
from yggdrax.unroll import sample

__all__ = ["ClassificationProblem", "RegressionProblem"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": nnx.relu, "tanh": nnx.tanh}


@dataclasses.dataclass
class RegressionProblem(ProblemConfig):
    """A Bayesian network with one hidden layer and normal noise of unknown precision.

    Features and target are standardised. Weights have the prior N(0, prior_scale^2 / fan-in),
    biases N(0, bias_scale^2), the noise precision Gamma(noise_concentration, noise_rate).

    Attributes:
      data: ``"diabetes"``, or the path of a CSV file with the target last.
      hidden: units of the layer.
      activation: ``"relu"`` or ``"tanh"``.
      prior_scale: of the weights.
      bias_scale: of the biases.
      noise_concentration: of the precision's Gamma prior.
      noise_rate: of the precision's Gamma prior.
      test_fraction: share of the rows that are only tested on.
      split_seed: which rows those are.
      split_rule: ``"fraction"``, or ``"uci"`` for the 90/10 split ``split_seed`` of published
        figures, which leaves ``test_fraction`` aside.
    """

    data: str = "diabetes"
    hidden: int = 50
    activation: str = "relu"
    prior_scale: float = 1.0
    bias_scale: float = 1.0
    noise_concentration: float = 1.0
    noise_rate: float = 0.1
    test_fraction: float = 0.1
    split_seed: int = 0
    split_rule: str = "fraction"

    def validate(self) -> None:
        """Checks ranges and names."""
        require_positive(
            prior_scale=self.prior_scale,
            bias_scale=self.bias_scale,
            noise_concentration=self.noise_concentration,
            noise_rate=self.noise_rate,
        )
        if self.hidden < 1:
            raise ConfigError(f"hidden must be at least 1, not {self.hidden!r}")
        if self.activation not in _ACTIVATIONS:
            names = ", ".join(_ACTIVATIONS)
            raise ConfigError(f"activation must be one of {names}, not {self.activation!r}")
        if self.split_rule not in ("fraction", "uci"):
            raise ConfigError(f"split_rule must be 'fraction' or 'uci', not {self.split_rule!r}")
        _check_split(self.test_fraction, self.split_seed)

    def build(self, seed: int) -> Problem:
        """Loads and splits the data; the split depends on ``split_seed`` alone."""
        del seed
        table, label = load_regression(self.data)
        if self.split_rule == "uci":
            parts = uci_split(table, self.split_seed)
        else:
            parts = split(table, test_fraction=self.test_fraction, seed=self.split_seed)
        network = functools.partial(
            _OneHiddenLayer, parts.x_train.shape[1], self.hidden, _ACTIVATIONS[self.activation]
        )
        target = BayesianNetwork(
            network,
            GaussianNoise(self.noise_concentration, self.noise_rate),
            prior=GaussianPrior(self.prior_scale, self.bias_scale),
            num_data=len(parts.y_train),
        )
        return _Regression(target, label, parts)


class _OneHiddenLayer(nnx.Module):
    """The network: (B, features) to (B, 1)."""

    def __init__(self, features: int, hidden: int, activation, *, rngs: nnx.Rngs) -> None:
        precision = jax.lax.Precision.HIGHEST
        self.hidden = nnx.Linear(features, hidden, precision=precision, rngs=rngs)
        self.output = nnx.Linear(hidden, 1, precision=precision, rngs=rngs)
        self.activation = nnx.static(activation)

    def __call__(self, x: Array) -> Array:
        return self.output(self.activation(self.hidden(x)))


class _Regression(Problem):
    """Test scores in the units of the data, beside ridge regression and a single network."""

    target: BayesianNetwork
    watch = ("test_rmse", "test_log_likelihood")

    def __init__(self, target: BayesianNetwork, label: str, parts: Split) -> None:
        super().__init__(
            target,
            train=(jnp.asarray(parts.x_train), jnp.asarray(parts.y_train)),
            test=(jnp.asarray(parts.x_test), jnp.asarray(parts.y_test)),
        )
        self.label, self.parts = label, parts

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """RMSE of the predictive mean and mean log density of the predictive."""
        x, y = test
        predictive = self._predictive(state, x)
        return {
            "test_rmse": rmse(predictive.mean[:, 0], y),
            "test_log_likelihood": jnp.mean(predictive.log_density(y)),
        }

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """The scores of the three models on the same rows."""
        scores = jax.jit(self.evaluate)
        single = baselines.single_network(config, self, initial)
        _, lower, upper = self._interval(state)
        coverage = interval_coverage(lower, upper, self.test[1])
        return {
            "train_rows": len(self.parts.y_train),
            "test_rows": len(self.parts.y_test),
            "posterior": scores(state, self.test) | {"coverage_90": coverage},
            "ridge": baselines.ridge(self.parts),
            "single_network": scores(single, self.test),
        }

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """The other two models' scores."""
        labels = {"ridge": "ridge regression", "single_network": "single network"}
        return {
            name: {label: summary[model][name] for model, label in labels.items()}
            for name in self.watch
        }

    def pictures(self, state: RunState, initial: RunState):
        """Predictions with their intervals against the truth."""
        mean, lower, upper = self._interval(state)
        figure = plots.predictions(
            self.test[1],
            mean,
            lower,
            upper,
            label=self.label,
            baseline=baselines.ridge_predictions(self.parts)[0],
        )
        return {"predictions": figure}

    def _predictive(self, state: RunState, x: Array) -> Predictive:
        standardised = predict(self.target, state.particles, x)
        return standardised.rescale(self.parts.unit.scale, self.parts.unit.mean)

    def _interval(self, state: RunState) -> tuple[Array, Array, Array]:
        """Mean, 5 % and 95 % quantile of the predictive for the test rows, (rows,) each."""

        @jax.jit
        def moments(state, x):
            predictive = self._predictive(state, x)
            ends = (predictive.quantile(0.05), predictive.quantile(0.95))
            return tuple(part[:, 0] for part in (predictive.mean, *ends))

        return moments(state, self.test[0])


@dataclasses.dataclass
class ClassificationProblem(ProblemConfig):
    """Logistic regression on the bundled breast cancer data, features standardised.

    Attributes:
      prior_precision: of the weights and the intercept.
      test_fraction: share of the rows that are only tested on.
      split_seed: which rows those are.
      whiten: sample in coordinates in which the posterior is about a standard normal (see
        :class:`yggdrax.Whitened`), found by the mode and a short first run.
      refine_steps: of that first run.
      nuts_draws: compare with NUTS, four chains of so many draws; 0 does not, and needs no
        BlackJAX.
    """

    prior_precision: float = 1.0
    test_fraction: float = 0.2
    split_seed: int = 0
    whiten: bool = False
    refine_steps: int = 150
    nuts_draws: int = 0

    def validate(self) -> None:
        """Checks ranges."""
        require_positive(prior_precision=self.prior_precision)
        if self.refine_steps < 1:
            raise ConfigError(f"refine_steps must be at least 1, not {self.refine_steps!r}")
        if self.nuts_draws < 0:
            raise ConfigError(f"nuts_draws must be at least 0, not {self.nuts_draws!r}")
        _check_split(self.test_fraction, self.split_seed)

    def build(self, seed: int) -> Problem:
        """Loads and splits the data; the split depends on ``split_seed`` alone.

        Raises:
          ConfigError: if NUTS is asked for and BlackJAX is missing: now, not after the run.
        """
        if self.nuts_draws:
            try:
                load_blackjax()
            except ImportError as error:
                raise ConfigError(f"problem.nuts_draws: {error}; or set it to 0") from error
        table = load_classification()
        parts = split(table, test_fraction=self.test_fraction, seed=self.split_seed, labels=True)
        target = LogisticRegression(
            parts.x_train, parts.y_train, prior_precision=self.prior_precision
        )
        white = None
        if self.whiten:
            white = whitened_by_a_run(target, jax.random.key(seed), self.refine_steps)
        return _Classification(target, table.names, parts, white, self.nuts_draws)


def whitened_by_a_run(target: LogisticRegression, key: Key, steps: int) -> Whitened:
    """Whitens by the mode and the curvature there, then by 200 particles of a short run."""
    white = Whitened.laplace(target, jnp.zeros(target.dimension, target.x.dtype))
    schedule = optax.cosine_decay_schedule(0.1, steps)
    optimizer = optax.chain(svgd(0.35, per="coordinate"), optax.adam(schedule))
    run = sample(white, key, 200, steps, optimizer=optimizer)
    return white.refined(run.particles)


class _Classification(Problem):
    """Test scores beside the usual point estimate, moments beside those of NUTS."""

    watch = ("test_accuracy", "test_log_likelihood")

    def __init__(
        self,
        regression: LogisticRegression,
        names: tuple[str, ...],
        parts: Split,
        white: Whitened | None = None,
        nuts_draws: int = 0,
    ) -> None:
        super().__init__(
            regression if white is None else white,
            train=(jnp.asarray(parts.x_train), jnp.asarray(parts.y_train)),
            test=(jnp.asarray(parts.x_test), jnp.asarray(parts.y_test)),
        )
        self.regression, self.white, self.nuts_draws = regression, white, nuts_draws
        self.names, self.parts = names, parts

    def coefficients(self, state: RunState) -> Array:
        """The particles as weights and intercept, (N, features + 1)."""
        particles = state.particles
        return particles if self.white is None else self.white.restore(particles)

    def exported(self, state: RunState) -> Array:
        """The coefficients, also of a run in whitened coordinates."""
        return self.coefficients(state)

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """Accuracy of the averaged probability, and mean log probability of the labels."""
        x, y = test
        predictive = predict(self.regression, self.coefficients(state), x)
        return {
            "test_accuracy": jnp.mean((predictive.probabilities > 0.5) == (y > 0.5)),
            "test_log_likelihood": jnp.mean(predictive.log_density(y)),
        }

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """The scores of both models on the same rows, and the comparison with NUTS."""
        found: dict[str, Any] = {
            "train_rows": len(self.parts.y_train),
            "test_rows": len(self.parts.y_test),
            "posterior": jax.jit(self.evaluate)(state, self.test),
            "point_estimate": baselines.logistic(self.parts, self.regression.prior_precision),
        }
        if self.nuts_draws:
            white = self.white or Whitened.laplace(self.regression, self.coefficients(state)[0])
            chains = nuts(white, jax.random.key(config.seed), self.nuts_draws)
            found["nuts"] = {
                "effective_size": chains.effective_size,
                **compare_moments(self.coefficients(state), chains),
            }
        return found

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """The point estimate's scores."""
        return {name: {"point estimate": summary["point_estimate"][name]} for name in self.watch}

    def pictures(self, state: RunState, initial: RunState):
        """The coefficients with their intervals."""
        names = (*self.names, "intercept")
        return {"coefficients": plots.coefficients(self.coefficients(state), names)}


def _check_split(test_fraction: float, split_seed: int) -> None:
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction must be inside (0, 1), not {test_fraction!r}")
    if split_seed < 0:
        raise ConfigError(f"split_seed must be at least 0, not {split_seed!r}")
