"""Priors over the parameters of a network.

Sampling weights *and* the precision of their Gaussian prior together, centred, gives a joint
density with a spike: at zero weights the density of n weights grows as ``precision ** (n / 2)``. A
few particles fall into it on long runs, and the network ends as a constant. The default,
:class:`GaussianPrior`, has a fixed scale and no spike.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from yggdrax.targets.likelihoods import log_gamma_prior
from yggdrax.targets.spikes import SpikeWarning
from yggdrax.typing import Array, Key, PyTree

__all__ = [
    "CentredGaussianPrior",
    "GaussianPrior",
    "LeafPriors",
    "Prior",
    "SpikeWarning",
    "StudentTPrior",
]


class Prior:
    """Base of the priors; ``extra`` holds the prior's own unconstrained leaves, mostly none."""

    def init(self, key: Key) -> dict[str, Array]:
        """Draws the prior's own leaves for one particle."""
        del key
        return {}

    def log_prob(self, params: PyTree, extra: dict[str, Array]) -> Array:
        """Log density of parameters and own leaves, log-Jacobian included; a scalar."""
        raise NotImplementedError

    def sample(self, key: Key, params: PyTree) -> PyTree:
        """Draws parameters shaped like ``params``, to start from."""
        return GaussianPrior().sample(key, params)


@dataclasses.dataclass(frozen=True)
class GaussianPrior(Prior):
    r"""Independent normals of fixed scale, wide enough that every layer keeps its signal.

    A kernel with fan-in f (all axes but the last) has standard deviation ``scale / sqrt(f)``; any
    other leaf, such as a bias, has ``bias_scale``.

    Args:
      scale: of kernels.
      bias_scale: of leaves with fewer than two axes.
      fan_in: False gives kernels the standard deviation ``scale`` itself.

    Raises:
      ValueError: for scales that are not positive.

    Example:
      >>> GaussianPrior().standard_deviation(jnp.zeros((4, 50)))
      0.5
    """

    scale: float = 1.0
    bias_scale: float = 1.0
    fan_in: bool = True

    def __post_init__(self):
        for name in ("scale", "bias_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}.")

    def standard_deviation(self, leaf: Array) -> float:
        """The prior's standard deviation of a leaf's entries."""
        if jnp.ndim(leaf) < 2:
            return self.bias_scale
        return self.scale / math.sqrt(_fan_in(leaf)) if self.fan_in else self.scale

    def log_prob(self, params: PyTree, extra: dict[str, Array] | None = None) -> Array:
        """Normalised log density of the parameters."""
        del extra
        total = jnp.zeros(())
        for leaf in jax.tree.leaves(params):
            deviation = self.standard_deviation(leaf)
            normaliser = jnp.size(leaf) * math.log(deviation * math.sqrt(2 * math.pi))
            total += -0.5 * jnp.sum((leaf / deviation) ** 2) - normaliser
        return total

    def sample(self, key: Key, params: PyTree) -> PyTree:
        """Draws parameters shaped like ``params``."""
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(
            structure,
            [
                self.standard_deviation(leaf) * jax.random.normal(k, leaf.shape, leaf.dtype)
                for k, leaf in zip(keys, leaves, strict=True)
            ],
        )


@dataclasses.dataclass(frozen=True)
class StudentTPrior(Prior):
    r"""A Gaussian prior whose Gamma-distributed precision is integrated out: no spike.

    For n weights w with precision Gamma(a, b), up to a constant

    .. math:: \log p(w) = -(a + n/2) \log(b + |w|^2 / 2)

    which is finite at w = 0. It still prefers small weights more strongly the smaller they are, so
    with many weights and few data its highest point can be at zero; a fixed scale
    (:class:`GaussianPrior`) is the safer choice there.

    Args:
      concentration: a.
      rate: b.
      per_leaf: True (the default) for one precision a leaf, False for one in all.

    Example:
      >>> prior = StudentTPrior(concentration=0.5, rate=0.5)
      >>> round(float(prior.log_prob(jnp.zeros(1), {})), 4)  # Cauchy: -log(pi)
      -1.1447
    """

    concentration: float = 1.0
    rate: float = 0.1
    per_leaf: bool = True

    def __post_init__(self):
        _check_gamma(self.concentration, self.rate)

    def log_prob(self, params: PyTree, extra: dict[str, Array] | None = None) -> Array:
        """Normalised log density of the parameters."""
        del extra
        leaves = jax.tree.leaves(params)
        sizes = [jnp.size(leaf) for leaf in leaves]
        squares = [jnp.sum(leaf**2) for leaf in leaves]
        if not self.per_leaf:
            sizes, squares = [sum(sizes)], [sum(squares)]
        total = jnp.zeros(())
        for n, square in zip(sizes, squares, strict=True):
            a = self.concentration + n / 2
            total += self.concentration * math.log(self.rate) - n / 2 * math.log(2 * math.pi)
            total += gammaln(a) - gammaln(self.concentration)
            total -= a * jnp.log(self.rate + 0.5 * square)
        return total


@dataclasses.dataclass(frozen=True)
class CentredGaussianPrior(Prior):
    r"""Weights and the log of their common precision, sampled together (centred).

    The leaf ``log_prior_precision`` holds :math:`\log\lambda`, :math:`\lambda \sim` Gamma(a, b).
    Without ``bounds`` the joint density has a spike and a :class:`SpikeWarning` is given.

    Args:
      concentration: a.
      rate: b.
      bounds: lower and upper bound of the precision. The leaf is then mapped to an interval of log
        precisions by a logistic function, its log-Jacobian included.

    Example:
      >>> prior = CentredGaussianPrior(bounds=(0.1, 10.0))
      >>> float(prior.precision(jnp.array(0.0)))
      1.0
    """

    concentration: float = 1.0
    rate: float = 0.1
    bounds: tuple[float, float] | None = None

    def __post_init__(self):
        _check_gamma(self.concentration, self.rate)
        if self.bounds is None:
            warnings.warn(_SPIKE, SpikeWarning, stacklevel=3)
        elif not 0 < self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be two rising positive numbers, not {self.bounds}.")

    def precision(self, leaf: Array) -> Array:
        """The precision that the unconstrained leaf stands for."""
        return jnp.exp(self._log_precision(leaf)[0])

    def _log_precision(self, leaf: Array) -> tuple[Array, Array]:
        if self.bounds is None:
            return leaf, jnp.zeros(())
        low, high = math.log(self.bounds[0]), math.log(self.bounds[1])
        log_precision = low + (high - low) * jax.nn.sigmoid(leaf)
        log_jacobian = math.log(high - low) + jax.nn.log_sigmoid(leaf) + jax.nn.log_sigmoid(-leaf)
        return log_precision, log_jacobian

    def init(self, key: Key) -> dict[str, Array]:
        """A leaf near 0."""
        return {"log_prior_precision": 0.1 * jax.random.normal(key)}

    def log_prob(self, params: PyTree, extra: dict[str, Array]) -> Array:
        """Log density of the weights and of the leaf."""
        log_precision, log_jacobian = self._log_precision(extra["log_prior_precision"])
        leaves = jax.tree.leaves(params)
        n = sum(jnp.size(leaf) for leaf in leaves)
        square = sum(jnp.sum(leaf**2) for leaf in leaves)
        weights = 0.5 * n * (log_precision - math.log(2 * math.pi))
        weights -= 0.5 * jnp.exp(log_precision) * square
        hyper = log_gamma_prior(log_precision, self.concentration, self.rate)
        return weights + hyper + log_jacobian


class Distribution(Protocol):
    """What NumPyro's, Distrax's and TFP's distributions have in common."""

    def log_prob(self, value: Any) -> Any:
        """Elementwise log density."""
        ...


@dataclasses.dataclass(frozen=True)
class LeafPriors(Prior):
    """A prior composed by the user: a distribution for each leaf, or for all below a name.

    Args:
      rules: distributions by name. A leaf's name is its path, such as ``hidden/kernel``; the
        longest rule that equals the name or is one of its leading folders counts. A distribution is
        any object with ``log_prob(value)`` (NumPyro, Distrax, TFP), or a
        :class:`Prior` without leaves of its own.
      default: for all other leaves.

    Raises:
      ValueError: when used, for a rule that no leaf answers to.

    Example:
      >>> prior = LeafPriors({"hidden": GaussianPrior(scale=2.0)}, default=GaussianPrior())
      >>> kernel = jnp.zeros((4, 1))
      >>> params = {"hidden": {"kernel": kernel}, "output": {"kernel": kernel}}
      >>> round(float(prior.log_prob(params, {})), 4)
      -4.5789
    """

    rules: Mapping[str, Any]
    default: Any = GaussianPrior()

    def log_prob(self, params: PyTree, extra: dict[str, Array] | None = None) -> Array:
        """The sum over the leaves."""
        del extra
        total, used = jnp.zeros(()), set()
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = "/".join(str(getattr(entry, "key", entry)) for entry in path)
            matches = [rule for rule in self.rules if f"{name}/".startswith(f"{rule}/")]
            used.update(matches)
            chosen = self.rules[max(matches, key=len)] if matches else self.default
            own = (leaf, {}) if isinstance(chosen, Prior) else (leaf,)
            total += jnp.sum(chosen.log_prob(*own))
        if unused := sorted(set(self.rules) - used):
            raise ValueError(f"no leaf is called or lies below {unused}: check the rules' names.")
        return total


def _fan_in(leaf: Array) -> int:
    return max(1, math.prod(jnp.shape(leaf)[:-1]))


def _check_gamma(concentration: float, rate: float) -> None:
    if not (concentration > 0 and rate > 0):
        raise ValueError(
            f"concentration and rate must be positive, not {concentration} and {rate}."
        )


_SPIKE = (
    "weights and the precision of their prior are sampled together without bounds: their joint "
    "density has a spike at zero weights and high precision, and on long runs few particles fall "
    "in. Use GaussianPrior (fixed), StudentTPrior (integrated out) or bounds=."
)
