"""What a target is: a Flax module whose call on one particle returns log p up to a constant."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from yggdrax.typing import Array, Key, PyTree, is_whole

__all__ = ["LogDensity", "Target", "check_num_data", "check_scalar", "likelihood_scale"]


class Target(nnx.Module):
    """Base of all targets.

    A subclass defines ``__call__(particle, batch=None, *, key=None)``, the log density of *one*
    particle up to a constant, and ``init(key)``, which draws one particle to start from. It may set
    ``num_data``, the rows of the whole data set: the likelihood of a minibatch is scaled by
    ``num_data / rows``.

    Targets with mutable collections (the running statistics of BatchNorm) also define
    ``init_model_state`` and ``apply``; for all others the state is an empty dictionary.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Shows the arguments of ``__init__`` in ``help``, where Flax's metaclass hides them."""
        super().__init_subclass__(**options)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        cls.__signature__ = inspect.Signature(parameters)

    num_data: int | None = None
    needs_model_state: bool = False

    def __call__(self, particle: PyTree, batch: Any = None, *, key: Key | None = None) -> Array:
        """The log density of one particle up to a constant, a scalar."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no __call__(particle, batch=None, *, key=None)."
        )

    def init(self, key: Key) -> PyTree:
        """Draws one particle to start from."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no init(key), so particles cannot be drawn: define it, "
            "or make the particles yourself (each leaf with a leading axis N)."
        )

    def init_many(self, key: Key, num_particles: int) -> PyTree:
        """Draws a stack of particles, each by :meth:`init` with a key of its own.

        A subclass may draw them together instead, such as with a mean that is exact.
        """
        return jax.vmap(self.init)(jax.random.split(key, num_particles))

    def init_model_state(self, key: Key) -> PyTree:
        """The mutable collections of one particle before the first step; ``{}`` without any."""
        del key
        return {}

    def apply(
        self, particle: PyTree, model_state: PyTree, batch: Any = None, *, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        """The log density and the new mutable collections of one particle."""
        return self(particle, batch, key=key), model_state


class LogDensity(Target):
    """A plain function as a target, so that log densities come in from anywhere.

    Args:
      function: the log density of one particle up to a constant. It is called as
        ``function(particle)``, or as ``function(particle, batch)`` when a batch is given.
      init: draws one particle from a key, ``init(key) -> particle``; or an example particle, whose
        float leaves are replaced by standard normal draws around it.
      num_data: rows of the whole data set, for the function's own use in scaling minibatches.

    Raises:
      ValueError: for ``num_data`` that is no positive integer; when called, if the function returns
        anything but a scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> target = LogDensity(lambda u: u - jnp.exp(u), init=jnp.zeros(()))
      >>> float(jax.grad(target)(0.0))
      0.0
    """

    def __init__(
        self,
        function: Callable[..., Array],
        init: "Callable[[Key], PyTree] | PyTree",
        *,
        num_data: int | None = None,
    ):
        """Keeps the function and the way to draw a particle."""
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__}.")
        check_num_data(num_data)
        self.function = nnx.static(function)
        self.draw = nnx.static(init if callable(init) else _normal_around(init))
        self.num_data = num_data

    def __call__(self, particle: PyTree, batch: Any = None, *, key: Key | None = None) -> Array:
        """The function's value, checked to be a scalar."""
        del key
        value = self.function(particle) if batch is None else self.function(particle, batch)
        return check_scalar(value, "the log density")

    def init(self, key: Key) -> PyTree:
        """One particle from the given ``init``."""
        return self.draw(key)


def _normal_around(example: PyTree) -> Callable[[Key], PyTree]:
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, example))

    def draw(key):
        keys = jax.random.split(key, len(leaves))
        moved = [
            leaf + jax.random.normal(k, leaf.shape, leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    return draw


def check_scalar(value: Array, what: str) -> Array:
    """Returns ``value`` if it is a scalar.

    Raises:
      ValueError: naming the shape and the remedy otherwise.
    """
    shape = jnp.shape(value)
    if shape != ():
        raise ValueError(
            f"{what} of one particle must be a scalar, but has shape {shape}: sum it over the data "
            "and the coordinates (the leading axis N of the particles is mapped over, so the "
            "function sees one particle at a time)."
        )
    return value


def check_num_data(num_data: int | None) -> None:
    """Raises a ValueError unless ``num_data`` is None or a positive integer."""
    if num_data is not None and not is_whole(num_data, 1):
        raise ValueError(
            f"num_data must be a positive integer, the rows of the whole data set, not "
            f"{num_data!r}."
        )


def likelihood_scale(num_data: int | None, rows: int) -> float:
    """The factor ``num_data / rows`` of a minibatch's log likelihood; 1 without ``num_data``.

    Raises:
      ValueError: if the batch has no rows, or more than there are.
    """
    if rows == 0:
        raise ValueError("the batch has 0 rows: a minibatch needs at least one.")
    if num_data is not None and rows > num_data:
        raise ValueError(f"the batch has {rows} rows, but num_data says that there are {num_data}.")
    return 1.0 if num_data is None else num_data / rows
