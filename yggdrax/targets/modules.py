"""Flax modules as pure functions of their parameters: NNX first, Linen by a thin adapter."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import InvalidRngError, ScopeCollectionNotFound, ScopeParamShapeError

from yggdrax.typing import Array, Key, PyTree

__all__ = ["LinenNetwork", "NNXNetwork", "Network", "as_network"]


class Network(Protocol):
    """A network as three pure functions of one member."""

    needs_state: bool
    """Whether the forward pass changes collections that must be carried (BatchNorm)."""
    template: PyTree
    """Shapes and dtypes of the parameters, a nested dictionary."""

    def init(self, key: Key) -> PyTree | None:
        """Parameters of one member, or None where only the prior can draw them."""
        ...

    def init_state(self, key: Key) -> PyTree:
        """Mutable collections of one member, a nested dictionary, ``{}`` without any."""
        ...

    def apply(
        self, params: PyTree, state: PyTree | None, x: Array, *, train: bool, key: Key | None
    ) -> tuple[Array, PyTree]:
        """Outputs (B, ...) and the new mutable collections."""
        ...

    def flax_state(self, params: PyTree, state: PyTree | None) -> Any:
        """All variables of one member, as Flax itself keeps them."""
        ...


class NNXNetwork:
    """An NNX module, split into parameters, carried collections and random keys.

    Args:
      module: a class or function that builds the module from ``nnx.Rngs`` (as ``rngs=`` or as its
        only argument), so that each member can be initialised by the module's own rules; or a built
        module, whose values serve as a template only.
      mutable: further Variable types that the forward pass may change, carried per member.

    Raises:
      ValueError: for a Variable type that is neither known nor named in ``mutable``.
    """

    def __init__(
        self, module: nnx.Module | Callable[..., nnx.Module], mutable: Sequence[type] = ()
    ):
        """Builds the module once to learn its structure."""
        self.build = None if isinstance(module, nnx.Module) else _builder(module)
        self.instance_state: PyTree = None
        if self.build is None:
            example: nnx.Module = nnx.clone(module)  # pyright: ignore[reportAssignmentType]
            self.instance_state = nnx.to_pure_dict(_split(example)[3])
        else:
            example = nnx.eval_shape(lambda: self._built(nnx.Rngs(0)))
        _check_collections(example, tuple(mutable))
        example.train()
        self.train_graph, params, keys, state = _split(example)
        example.eval()
        self.eval_graph = nnx.graphdef(example)
        self.structures = tuple(jax.tree.structure(part) for part in (params, keys, state))
        self.template = jax.eval_shape(lambda: nnx.to_pure_dict(params))
        self.counts = jax.eval_shape(lambda: nnx.to_pure_dict(state))
        self.num_keys = len(jax.tree.leaves(keys))
        self.needs_state = bool(jax.tree.leaves(nnx.state(example, nnx.BatchStat, *mutable)))

    def _built(self, rngs: nnx.Rngs) -> nnx.Module:
        assert self.build is not None
        module = self.build(rngs)
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"the module's factory returned {type(module).__name__}, not a flax.nnx.Module."
            )
        return module

    def init(self, key: Key) -> PyTree | None:
        """The module's own initial parameters, or None for a built module."""
        if self.build is None:
            return None
        return nnx.to_pure_dict(nnx.state(self._built(nnx.Rngs(_typed(key))), nnx.Param))

    def init_state(self, key: Key) -> PyTree:
        """The collections as the module is built."""
        if self.build is None:
            return self.instance_state
        return nnx.to_pure_dict(_split(self._built(nnx.Rngs(_typed(key))))[3])

    def apply(
        self, params: PyTree, state: PyTree | None, x: Array, *, train: bool, key: Key | None
    ) -> tuple[Array, PyTree]:
        """Runs the module with these values; the key seeds every random stream in it."""
        if self.num_keys and train and key is None:
            raise ValueError(_NO_KEY)
        parts = self._states(params, state, key)
        module = nnx.merge(self.train_graph if train else self.eval_graph, *parts)
        outputs = module(x)  # pyright: ignore[reportCallIssue]
        return outputs, nnx.to_pure_dict(_split(module)[3])

    def flax_state(self, params: PyTree, state: PyTree | None) -> nnx.State:
        """The ``nnx.State`` of the whole module, random streams included."""
        return nnx.merge_state(*self._states(params, state, None))

    def _states(self, params: PyTree, state: PyTree | None, key: Key | None) -> list[Any]:
        if state is None and self.needs_state:
            raise ValueError(_NO_STATE)
        if state is None:  # only counts of random draws, which start at 0
            state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.counts)
        key = jax.random.key(0) if key is None else _typed(key)
        keys = [jax.random.fold_in(key, i) for i in range(self.num_keys)]
        return [
            _fill(structure, value, name)
            for structure, value, name in zip(
                self.structures, (params, keys, state), _PARTS, strict=True
            )
        ]


class LinenNetwork:
    """A Linen module with the same interface as an NNX one.

    A ``train`` argument of its ``__call__``, or ``deterministic`` or ``use_running_average``, is
    set for training and for prediction.

    Args:
      module: a ``flax.linen.Module``.
      example_input: an input of the right shape, such as the first row of the data, (1, ...).
      mutable: collections besides ``batch_stats`` that the forward pass may change.

    Raises:
      ValueError: for a collection that is neither known nor named in ``mutable``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen
      >>> network = LinenNetwork(linen.Dense(1), jnp.zeros((1, 3)))
      >>> jax.tree.map(jnp.shape, network.init(jax.random.key(0)))
      {'bias': (1,), 'kernel': (3, 1)}
    """

    def __init__(self, module: Any, example_input: Array, mutable: Sequence[str] = ()):
        """Initialises the module once to learn its structure."""
        self.module = module
        self.example_input = jnp.asarray(example_input)
        arguments = inspect.signature(type(module).__call__).parameters
        self.mode = next((n for n in ("train", *_INVERSE_MODES) if n in arguments), None)
        shapes = jax.eval_shape(self._variables, jax.random.key(0))
        known = {"params", "batch_stats", *mutable}
        if unknown := sorted(set(shapes) - known):
            raise ValueError(_unknown_collection(unknown, f"mutable={tuple(unknown)!r}"))
        self.template = shapes["params"]
        self.needs_state = len(shapes) > 1

    def _variables(self, key: Key) -> dict[str, Any]:
        streams = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        return dict(self.module.init(streams, self.example_input, **self._mode(False)))

    def _mode(self, train: bool) -> dict[str, bool]:
        if self.mode is None:
            return {}
        return {self.mode: not train if self.mode in _INVERSE_MODES else train}

    def init(self, key: Key) -> PyTree:
        """The module's own initial parameters."""
        return self._variables(key)["params"]

    def init_state(self, key: Key) -> PyTree:
        """The module's other collections."""
        variables = self._variables(key)
        return {name: value for name, value in variables.items() if name != "params"}

    def apply(
        self, params: PyTree, state: PyTree | None, x: Array, *, train: bool, key: Key | None
    ) -> tuple[Array, PyTree]:
        """Runs the module with these values."""
        variables = self.flax_state(params, state)
        # A stream of another name than dropout falls back to that of "params".
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        try:
            return self.module.apply(
                variables, x, rngs=rngs, mutable=list(state or {}), **self._mode(train)
            )
        except InvalidRngError as error:
            raise ValueError(_NO_KEY) from error
        except ScopeCollectionNotFound as error:
            raise ValueError(_NO_STATE) from error
        except ScopeParamShapeError as error:
            raise ValueError(f"the parameters do not fit these inputs: {error}") from error

    def flax_state(self, params: PyTree, state: PyTree | None) -> dict[str, Any]:
        """The variables that the module's ``apply`` takes."""
        if state is None and self.needs_state:
            raise ValueError(_NO_STATE)
        return {"params": params, **(state or {})}


def as_network(module: Any, mutable: Sequence[type] = ()) -> Network:
    """An NNX module, a factory of one, or a :class:`Network` as a network.

    Raises:
      TypeError: for anything else, with the remedy for a Linen module.
    """
    if isinstance(module, (NNXNetwork, LinenNetwork)):
        return module
    if any(base.__module__.startswith("flax.linen") for base in type(module).__mro__):
        raise TypeError(
            f"{type(module).__name__} is a Linen module: wrap it as "
            "LinenNetwork(module, example_input)."
        )
    if isinstance(module, nnx.Module) or callable(module):
        return NNXNetwork(module, mutable)  # pyright: ignore[reportArgumentType]
    raise TypeError(f"module must be an NNX module or build one, not {type(module).__name__}.")


_NO_KEY = "the network draws random numbers (dropout): pass key=, a new one each step."
_NO_STATE = (
    "the network has mutable collections (such as BatchNorm statistics): pass the model_state that "
    "init_model_state or the last step returned, in a loop of particle_grads (sample and unrolled "
    "carry none)."
)
_PARTS = ("params", "random keys", "model_state")
_INVERSE_MODES = ("deterministic", "use_running_average")
_KNOWN = (nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount)


def _split(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """The graph, parameters, random keys, and everything else."""
    graph, params, keys, state = nnx.split(module, nnx.Param, nnx.RngKey, ...)
    return graph, params, keys, state


def _builder(module: Callable[..., nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
    inner = module.func if isinstance(module, functools.partial) else module
    # A class's own signature is hidden by the metaclass of nnx.Module.
    inner = inner.__init__ if inspect.isclass(inner) else inner
    if "rngs" in inspect.signature(inner).parameters:
        return lambda rngs: module(rngs=rngs)
    return lambda rngs: module(rngs)


def _fill(structure, value: PyTree, name: str):
    leaves = jax.tree.leaves(value)
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            f"the network has {structure.num_leaves} leaves of {name}, but {len(leaves)} were "
            "given: use those from init_particles and init_model_state for this target."
        )
    return jax.tree.unflatten(structure, leaves)


def _check_collections(module: nnx.Module, mutable: tuple[type, ...]) -> None:
    unknown = sorted(
        {
            type(variable).__name__
            for _, variable in nnx.to_flat_state(nnx.state(module))
            if not isinstance(variable, _KNOWN + mutable)
        }
    )
    if unknown:
        raise ValueError(_unknown_collection(unknown, f"mutable=({', '.join(unknown)},)"))


def _unknown_collection(names: list[str], remedy: str) -> str:
    return (
        f"the network holds the collection {', '.join(names)}, which is neither a parameter nor "
        f"BatchNorm statistics nor a random stream: pass {remedy} to carry it per member."
    )


def _typed(key: Key) -> Key:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if typed else jax.random.wrap_key_data(key)
