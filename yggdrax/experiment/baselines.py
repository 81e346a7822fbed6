"""What a report compares with: on the same rows, by the usual means."""

import jax
import numpy as np

from yggdrax.experiment.config import ExperimentConfig
from yggdrax.experiment.data import Split
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.experiment.steps import fit

__all__ = ["logistic", "ridge", "ridge_predictions", "single_network"]


def ridge(parts: Split) -> dict[str, float]:
    """Test scores of ridge regression with normal noise, in the units of the data."""
    mean, deviation = ridge_predictions(parts)
    residuals = parts.y_test - mean
    log_density = -0.5 * (residuals / deviation) ** 2 - np.log(deviation * np.sqrt(2 * np.pi))
    return {
        "test_rmse": float(np.sqrt(np.mean(residuals**2))),
        "test_log_likelihood": float(np.mean(log_density)),
    }


def ridge_predictions(parts: Split) -> tuple[np.ndarray, float]:
    """Predictions of ridge regression for the test rows, and the deviation of its noise.

    The penalty is chosen by leave-one-out on the rows to fit, whose leave-one-out error is the
    noise: an in-sample error would promise too much.
    """
    from sklearn.linear_model import RidgeCV

    model = RidgeCV(np.logspace(-2, 4, 49), store_cv_results=True)
    model.fit(parts.x_train.astype(float), parts.y_train.astype(float))
    left_out = np.sqrt(model.cv_results_.mean(0).min())
    standardised = model.predict(parts.x_test.astype(float))
    return parts.unit.undo(standardised), float(parts.unit.scale * left_out)


def single_network(config: ExperimentConfig, problem: Problem, initial: RunState) -> RunState:
    """One network, fitted by the same optimizer, steps and minibatches: the run's first particle.

    With N = 1 the kernel is 1 and its gradient 0, so this is ordinary training of the network's
    log posterior.
    """
    members = jax.tree.map(lambda leaf: leaf[:1], (initial.particles, initial.model_state))
    return fit(config, problem, initial._replace(particles=members[0], model_state=members[1]))


def logistic(parts: Split, prior_precision: float) -> dict[str, float]:
    """Test scores of scikit-learn's logistic regression with the same prior on the weights."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1 / prior_precision, max_iter=2000)
    model.fit(parts.x_train, parts.y_train)
    probabilities = model.predict_proba(parts.x_test)[:, 1]
    labels = parts.y_test > 0.5
    return {
        "test_accuracy": float(np.mean((probabilities > 0.5) == labels)),
        "test_log_likelihood": float(
            np.mean(np.log(np.where(labels, probabilities, 1 - probabilities)))
        ),
    }
