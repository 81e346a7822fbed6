"""Logistic regression, the small real posterior on which samplers are compared."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from yggdrax.targets.base import Target, likelihood_scale
from yggdrax.targets.likelihoods import Bernoulli
from yggdrax.targets.network import check_batch
from yggdrax.typing import Array, Key, PyTree

__all__ = ["LogisticRegression"]


class LogisticRegression(Target):
    r"""Binary labels, a linear logit, a Gaussian prior of fixed precision.

    .. math:: P(y = 1 \mid x) = \sigma(w \cdot x + b), \qquad (w, b) \sim N(0, I / \lambda)

    A particle is (w, b), shape (features + 1,), the intercept last.

    Args:
      x: features (rows, features), best standardised.
      y: labels 0 or 1, (rows,).
      prior_precision: lambda.

    Raises:
      ValueError: for labels other than 0 and 1, values that are not finite, or shapes that differ.

    Example:
      >>> target = LogisticRegression([[1.0], [-1.0]], [1, 0])
      >>> round(float(target(jnp.zeros(2))), 4)  # -2 log 2 - log(2 pi)
      -3.2242
    """

    likelihood = Bernoulli()

    def __init__(self, x: ArrayLike, y: ArrayLike, *, prior_precision: float = 1.0):
        """Checks and keeps the data."""
        features, labels = check_batch((jnp.asarray(x, float), jnp.asarray(y)))
        if features.ndim != 2 or labels.ndim != 1:
            raise ValueError(
                f"x must have shape (rows, features) and y (rows,), not {features.shape} and "
                f"{labels.shape}."
            )
        if not bool(jnp.all(jnp.isfinite(features))):
            raise ValueError("x holds values that are not finite: drop or fill those rows.")
        self.likelihood.validate_labels(labels)
        if not prior_precision > 0:
            raise ValueError(f"prior_precision must be positive, not {prior_precision}.")
        self.x, self.y = features, labels.astype(features.dtype)
        self.prior_precision = float(prior_precision)
        self.num_data, self.dimension = features.shape[0], features.shape[1] + 1

    def init(self, key: Key) -> Array:
        """One draw from N(0, 0.1^2 I), (features + 1,)."""
        return 0.1 * jax.random.normal(key, (self.dimension,), self.x.dtype)

    def forward(
        self,
        particle: Array,
        x: Array,
        model_state: PyTree | None = None,
        *,
        train: bool = False,
        key: Key | None = None,
    ) -> tuple[Array, PyTree]:
        """Logits (B,) of one particle."""
        del train, key
        logits = jnp.matmul(x, particle[:-1], precision=jax.lax.Precision.HIGHEST) + particle[-1]
        return logits, model_state

    def __call__(self, particle: Array, batch: Any = None, *, key: Key | None = None) -> Array:
        """Log posterior of one particle (features + 1,); all the data without a batch."""
        del key
        x, y = (self.x, self.y) if batch is None else check_batch(batch)
        if batch is not None and not isinstance(y, Tracer):  # traced labels give NaN instead
            self.likelihood.validate_labels(y)
        logits, _ = self.forward(particle, x)
        log_likelihood = jnp.sum(self.likelihood.log_prob({}, logits, y))
        normaliser = 0.5 * self.dimension * math.log(2 * math.pi / self.prior_precision)
        log_prior = -0.5 * self.prior_precision * jnp.sum(particle**2) - normaliser
        return log_prior + likelihood_scale(self.num_data, x.shape[0]) * log_likelihood
