"""Bayesian neural networks: the particle is the parameter tree of a user's own module."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from yggdrax.targets.base import Target, check_num_data, likelihood_scale
from yggdrax.targets.likelihoods import GaussianNoise, Likelihood
from yggdrax.targets.modules import as_network
from yggdrax.targets.priors import CentredGaussianPrior, GaussianPrior, Prior
from yggdrax.targets.spikes import warn_of_spikes
from yggdrax.typing import Array, Key, PyTree

__all__ = ["BayesianNetwork"]


class BayesianNetwork(Target):
    r"""The posterior of a network's parameters given data.

    .. math:: \log p(\theta) = \log \mathrm{prior}(\theta)
              + \frac{\text{num\_data}}{B} \sum_{b=1}^{B} \log p(y_b \mid f_\theta(x_b))

    A particle is a dictionary: ``params`` holds the module's parameters, and beside it stand the
    unconstrained leaves of likelihood and prior, such as ``log_noise_precision``. A batch is a pair
    (x, y) with B rows each.

    The default prior is a Gaussian of fixed scale (:class:`~yggdrax.targets.GaussianPrior`): a
    posterior in which the prior's precision is sampled along with the weights has a spike at zero
    weights, and one in which it is integrated out can still have its highest point
    there, so that few particles end in it when they run for long.

    Args:
      module: a class or function that builds your NNX module from ``rngs`` (members then start from
        the module's own initialisers), a built NNX module (members then start from the prior), or
        :class:`~yggdrax.targets.LinenNetwork`.
      likelihood: ``GaussianNoise()`` of unknown precision by default.
      prior: ``GaussianPrior()`` by default.
      num_data: rows of the whole data set. Without it a batch is taken for all the data.
      data: the pair (x, y), kept in the target and used when no batch is given.
      mutable: further NNX Variable types that the forward pass may change.

    Raises:
      ValueError: for data that do not fit the likelihood, or a collection the framework does not
        know.

    Warns:
      SpikeWarning: if a prior of your own samples weights and their scale together, centred.

    Example:
      >>> from functools import partial
      >>> target = BayesianNetwork(partial(nnx.Linear, 3, 1), num_data=100)
      >>> particle = target.init(jax.random.key(0))
      >>> sorted(particle)
      ['log_noise_precision', 'params']
      >>> target(particle, (jnp.zeros((10, 3)), jnp.zeros(10))).shape
      ()
    """

    def __init__(
        self,
        module: Any,
        likelihood: Likelihood | None = None,
        *,
        prior: Prior | None = None,
        num_data: int | None = None,
        data: tuple[Any, Any] | None = None,
        mutable: Sequence[type] = (),
    ):
        """Learns the module's structure; checks the data on the host."""
        self.network = nnx.static(as_network(module, mutable))
        self.likelihood = nnx.static(GaussianNoise() if likelihood is None else likelihood)
        self.prior = nnx.static(GaussianPrior() if prior is None else prior)
        if not isinstance(self.prior, CentredGaussianPrior):  # which has warned already
            self._check_hierarchy()
        self.needs_model_state = self.network.needs_state
        check_num_data(num_data)
        self.num_data = num_data
        self.data = nnx.data(None)
        if data is not None:
            x, y = check_batch(data)
            self.likelihood.validate_labels(y)
            if jnp.issubdtype(jnp.result_type(x), jnp.floating) and not np.all(np.isfinite(x)):
                raise ValueError("x holds values that are not finite: drop or fill those rows.")
            if num_data is not None and num_data != len(x):
                raise ValueError(f"num_data is {num_data}, but data has {len(x)} rows.")
            self.num_data = len(x)
            self.data = nnx.data((jnp.asarray(x), jnp.asarray(y)))

    def _check_hierarchy(self) -> None:
        """Warns of a user's prior with leaves of its own whose density has a spike."""
        prior = self.prior
        with jax.ensure_compile_time_eval():  # a target may be made inside jit
            own = prior.init(jax.random.key(0))
            if own:
                params = prior.sample(jax.random.key(1), self.network.template)
                particle = {"params": params, **own}
                warn_of_spikes(lambda p: prior.log_prob(p["params"], p), particle, stacklevel=3)

    def init(self, key: Key) -> PyTree:
        """Draws one particle: the module's own initial values, or the prior's."""
        network_key, likelihood_key, prior_key, sample_key = jax.random.split(key, 4)
        params = self.network.init(network_key)
        if params is None:
            params = self.prior.sample(sample_key, self.network.template)
        return {
            "params": params,
            **self.likelihood.init(likelihood_key),
            **self.prior.init(prior_key),
        }

    def init_model_state(self, key: Key) -> PyTree:
        """BatchNorm statistics, dropout counts and the like of one member."""
        return self.network.init_state(key)

    def forward(
        self,
        particle: PyTree,
        x: Array,
        model_state: PyTree | None = None,
        *,
        train: bool = False,
        key: Key | None = None,
    ) -> tuple[Array, PyTree]:
        """The network's outputs (B, ...) for one particle, and the new mutable collections."""
        try:
            outputs, state = self.network.apply(
                particle["params"], model_state, x, train=train, key=key
            )
        except (TypeError, ValueError) as error:
            error.add_note(f"The network was called with inputs x of shape {jnp.shape(x)}.")
            raise
        if not isinstance(outputs, jax.Array):
            raise TypeError(
                f"the network must return one array, (B, ...), not {type(outputs).__name__}: "
                "concatenate what belongs to one output along the last axis."
            )
        return outputs, state

    def flax_state(self, particles: PyTree, model_state: PyTree | None = None) -> Any:
        """The members as plain Flax, for serving without this package.

        Args:
          particles: leaves (N, ...).
          model_state: the members' mutable collections, for networks that have some.

        Returns:
          With a leading axis N: for an NNX module the ``nnx.State`` of your module, for
          ``nnx.merge`` or ``nnx.update``; for a Linen module the variables for ``module.apply``.

        Example:
          >>> from functools import partial
          >>> build = partial(nnx.Linear, 3, 1)
          >>> target = BayesianNetwork(build)
          >>> particles = jax.vmap(target.init)(jax.random.split(jax.random.key(0), 5))
          >>> graph = nnx.graphdef(build(rngs=nnx.Rngs(0)))
          >>> state = target.flax_state(particles)
          >>> jax.vmap(lambda s: nnx.merge(graph, s)(jnp.ones((2, 3))))(state).shape
          (5, 2, 1)
        """
        return jax.vmap(self.network.flax_state)(particles["params"], model_state)

    def __call__(self, particle: PyTree, batch: Any = None, *, key: Key | None = None) -> Array:
        """Log posterior of one particle up to a constant."""
        return self.apply(particle, None, batch, key=key)[0]

    def apply(
        self,
        particle: PyTree,
        model_state: PyTree | None,
        batch: Any = None,
        *,
        key: Key | None = None,
    ) -> tuple[Array, PyTree]:
        """Log posterior of one particle, and the new mutable collections.

        Raises:
          ValueError: for a missing or empty batch, shapes that do not fit the likelihood, or labels
            outside their range. Inside ``jit`` such labels make the density NaN, and ``svgd`` says
            so in its status.
        """
        if batch is None and self.data is None:
            raise ValueError(
                "no batch was given and the target keeps no data: pass batch=(x, y), or data=(x, y)"
                " when the target is made."
            )
        x, y = check_batch(self.data if batch is None else batch)
        if batch is not None and not isinstance(y, Tracer):  # traced labels give NaN instead
            self.likelihood.validate_labels(y)
        outputs, new_state = self.forward(particle, x, model_state, train=True, key=key)
        self.likelihood.check(jnp.shape(outputs), jnp.shape(y))
        scale = likelihood_scale(self.num_data, len(x))
        log_likelihood = jnp.sum(self.likelihood.log_prob(particle, outputs, y))
        log_prior = self.prior.log_prob(particle["params"], particle)
        log_prior += self.likelihood.log_prior(particle)
        return log_prior + scale * log_likelihood, new_state


def check_batch(batch: Any) -> tuple[Any, Any]:
    """Returns the pair (x, y).

    Raises:
      ValueError: if it is no pair, or x and y differ in rows.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"a batch must be the pair (x, y), not {type(batch).__name__}.")
    x, y = batch
    shapes = jnp.shape(x), jnp.shape(y)
    if not shapes[0] or not shapes[1] or shapes[0][0] != shapes[1][0]:
        raise ValueError(f"x and y must have the same rows, but have shapes {shapes}.")
    return x, y
