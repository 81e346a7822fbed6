"""Describes a tree entry by entry, compares two descriptions, and rebuilds leaves from arrays.

An entry is a container or a leaf. Orbax stores the plain arrays; everything else that makes a
restored state indistinguishable from the saved one (names, container types, weak types, key
implementations, Python and NumPy scalars, empty arrays) is in the entries.
"""

import dataclasses
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src.lax.lax import _convert_element_type  # no public call makes an array weakly typed
from jax.core import Tracer
from jax.tree_util import default_registry, keystr, tree_flatten_with_path

from yggdrax.checkpoint.errors import CheckpointMismatch

__all__ = [
    "Entry",
    "array_names",
    "check_storable",
    "compare",
    "describe",
    "digest",
    "is_key",
    "rebuild",
    "rebuild_spread",
    "snapshot",
]

_PYTHON_TYPES = {"bool": bool, "int": int, "float": float, "complex": complex, "str": str}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One container or leaf of a tree.

    Attributes:
      name: path from the root, as ``jax.tree_util.keystr`` writes it: ``[1]`` is not ``['1']``.
      kind: ``node``, ``jax``, ``numpy``, ``scalar`` (of NumPy), ``key`` (typed) or ``python``.
      dtype: dtype of an array or key, name of a Python type, class name of a container.
      shape: shape of an array or a batch of keys.
      weak: whether a JAX array is weakly typed.
      detail: the value of a Python scalar, the implementation of a key.
      sha256: of the bytes of an array.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    weak: bool = False
    detail: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        """Returns what an error message shows, without the name."""
        if self.kind == "node":
            return f"a container {self.dtype}"
        if self.kind == "python":
            return f"a Python {self.dtype}"
        shape = ",".join(str(size) for size in self.shape)
        return f"{self.dtype}[{shape}]"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        record = dataclasses.asdict(self) | {"shape": list(self.shape)}
        return {
            field.name: record[field.name]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Entry":
        """Inverse of :meth:`to_json`."""
        return cls(**{**record, "shape": tuple(record.get("shape", ()))})


def _walk(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, str | None]]:
    """Yields name, value and container type (None for a leaf), in the order of jax.tree.leaves."""
    if default_registry.flatten_one_level(tree) is None:
        yield keystr(path), tree, None
        return
    yield keystr(path), tree, type(tree).__qualname__
    # Not flatten_one_level_with_keys: jax 0.10.1 gives all fields of a named tuple one name there.
    children, _ = tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    for key, child in children:
        yield from _walk(child, (*path, *key))


def is_key(leaf: Any) -> bool:
    """Whether a leaf holds typed random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _describe_leaf(name: str, leaf: Any) -> Entry:
    shown = name or "the state"
    if isinstance(leaf, Tracer):
        raise TypeError(f"{shown} is a traced value: save and restore outside jit, vmap and grad.")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{shown} was donated or deleted: save the state that the step returned.")
    if is_key(leaf):
        return Entry(name, "key", str(leaf.dtype), tuple(leaf.shape))
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        weak = bool(getattr(leaf, "weak_type", False))
        return Entry(name, "jax", np.dtype(leaf.dtype).name, tuple(leaf.shape), weak)
    if type(leaf) is np.ndarray or isinstance(leaf, np.generic):
        _check_dtype(shown, leaf.dtype)
        kind = "numpy" if type(leaf) is np.ndarray else "scalar"
        return Entry(name, kind, leaf.dtype.name, tuple(leaf.shape))
    if type(leaf) in _PYTHON_TYPES.values():
        return Entry(name, "python", type(leaf).__name__, detail=_write_python(leaf))
    raise TypeError(
        f"{shown} is of type {type(leaf).__qualname__}, which a checkpoint cannot hold. A state "
        f"consists of arrays, random keys, numbers and strings; keep functions and objects out."
    )


# Orbax 0.12 has no name for these.
_UNSTORABLE = {"uint1", "uint2", "uint4", "int1", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}


def check_storable(entry: Entry) -> None:
    """Raises TypeError, by name, for a dtype that Orbax cannot write."""
    if entry.dtype in _UNSTORABLE and entry.kind != "node" and 0 not in entry.shape:
        raise TypeError(
            f"{entry.name or 'the state'} is {entry}, and a checkpoint cannot hold {entry.dtype}. "
            f"Save it as a wider type, such as uint8 or bfloat16, and convert it back."
        )


def _check_dtype(shown: str, dtype: np.dtype) -> None:
    known = dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)
    if not known or dtype.name in ("float128", "complex256") or not dtype.isnative:
        raise TypeError(
            f"{shown} has the NumPy dtype {dtype.str}, which a checkpoint cannot hold. Convert it "
            f"to numbers in the byte order of this machine, of at most 64 bits."
        )


def describe(tree: Any) -> list[Entry]:
    """Returns the entries of a tree in the order of a walk from the root.

    Args:
      tree: any pytree of arrays, ``ShapeDtypeStruct``, keys, numbers and strings.

    Raises:
      TypeError: a leaf that a checkpoint cannot hold, by name.

    Example:
      >>> [entry.name for entry in describe({"w": np.zeros((2, 3)), "step": 0})]
      ['', "['step']", "['w']"]
    """
    return [
        _describe_leaf(name, value) if node is None else Entry(name, "node", node)
        for name, value, node in _walk(tree)
    ]


def snapshot(tree: Any) -> tuple[list[Entry], list[np.ndarray | None]]:
    """Returns the entries of a tree and, for each, a copy of its data in host memory.

    The copies share nothing with the tree, so the caller may donate or overwrite it at once.

    Args:
      tree: any pytree of arrays, keys, numbers and strings.

    Raises:
      TypeError: a leaf that a checkpoint cannot hold.
      ValueError: a leaf that was donated, or that is spread over several processes.
    """
    entries, arrays = [], []
    values = [(name, value, node) for name, value, node in _walk(tree)]
    for _, value, _ in values:
        if isinstance(value, jax.Array) and not (isinstance(value, Tracer) or value.is_deleted()):
            if not value.is_fully_addressable:
                raise ValueError("A state spread over several processes cannot be saved.")
            if not is_key(value):
                value.copy_to_host_async()
    for name, value, node in values:
        if node is not None:
            entries.append(Entry(name, "node", node))
            arrays.append(None)
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(f"{name or 'the state'} is a shape without values; nothing to save.")
        entry = _describe_leaf(name, value)
        check_storable(entry)
        if entry.kind == "key":
            entry = dataclasses.replace(entry, detail=str(jax.random.key_impl(value)))
            value = jax.random.key_data(value)
        entries.append(entry)
        # order="C" because only then do equal values have equal bytes.
        array = None if entry.kind == "python" else np.array(value, copy=True, order="C")
        arrays.append(array)
    return entries, arrays


def digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of the bytes of a contiguous array."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def array_names(entries: Sequence[Entry]) -> dict[str, int]:
    """Returns the names under which Orbax stores arrays, each with the index of its entry.

    Empty arrays and Python scalars are not stored: their entries say all there is to say.
    """
    names = {}
    for index, entry in enumerate(entries):
        if entry.kind in ("node", "python") or 0 in entry.shape:
            continue
        readable = re.sub(r"[^A-Za-z0-9]+", "-", entry.name).strip("-")
        names[f"{index:05d}-{readable}"[:100]] = index
    return names


def _agree(saved: Entry, expected: Entry) -> bool:
    if "node" in (saved.kind, expected.kind):
        return (saved.kind, saved.dtype) == (expected.kind, expected.dtype)
    if saved.kind == expected.kind == "python":
        return saved.dtype == expected.dtype
    return saved.shape == expected.shape and _abstract_dtype(saved) == _abstract_dtype(expected)


def _abstract_dtype(entry: Entry) -> str:
    """Returns the dtype under which JAX would trace a leaf: a Python 0 is an int32[] to it."""
    if entry.kind != "python" or entry.dtype == "str":
        return entry.dtype
    return jax.dtypes.canonicalize_dtype(_PYTHON_TYPES[entry.dtype]).name


def compare(saved: Sequence[Entry], expected: Sequence[Entry], where: str) -> None:
    """Raises for the first entry in which what is saved is not what the program expects.

    Names, container types, shapes and dtypes must be equal; nothing is cast. A number that is a
    Python or NumPy scalar on one side and an array of the same abstract type on the other agrees,
    because a jitted step turns the first into the second.

    Args:
      saved: entries of the checkpoint.
      expected: entries of the program's own state.
      where: how the message calls the checkpoint.

    Raises:
      CheckpointMismatch: names the entry and shows both sides.
    """
    for entry, other in zip(saved, expected, strict=False):
        if entry.name != other.name:
            _raise_name(entry, other, saved, expected, where)
        if not _agree(entry, other):
            raise CheckpointMismatch(
                f"{entry.name or 'the state'} differs: {where} holds {entry}, the program expects "
                f"{other}. Nothing was restored, and nothing is cast: build the state with the "
                f"settings of the run that saved it."
            )
    if len(saved) > len(expected):
        _raise_name(saved[len(expected)], None, saved, expected, where)
    if len(expected) > len(saved):
        _raise_name(None, expected[len(saved)], saved, expected, where)
    for entry in saved:
        if entry.kind == "jax" and jax.dtypes.canonicalize_dtype(entry.dtype).name != entry.dtype:
            raise CheckpointMismatch(
                f"{entry.name} is {entry} in {where}, and 64-bit types are switched off here. "
                f'Restore under jax.config.update("jax_enable_x64", True).'
            )


def _raise_name(
    entry: Entry | None,
    other: Entry | None,
    saved: Sequence[Entry],
    expected: Sequence[Entry],
    where: str,
) -> NoReturn:
    surplus = entry if entry and entry.name not in {e.name for e in expected} else None
    lacking = other if other and other.name not in {e.name for e in saved} else None
    if surplus and lacking:
        text = (
            f"{where} holds {surplus.name} ({surplus}) where the program expects "
            f"{lacking.name} ({lacking})"
        )
    elif surplus:
        text = f"{where} holds {surplus.name} ({surplus}), which the program does not expect"
    elif lacking:
        text = f"the program expects {lacking.name} ({lacking}), which {where} does not hold"
    else:
        text = f"{where} holds the same entries in another order"
    raise CheckpointMismatch(
        f"The trees differ: {text}. Nothing was restored: build the state with the settings of "
        f"the run that saved it."
    )


def rebuild(entry: Entry, array: np.ndarray | None, like: Any) -> Any:
    """Makes the leaf that was saved, placed where ``like`` is.

    Args:
      entry: what was saved, already compared with ``like``.
      array: its data; None for Python scalars and empty arrays.
      like: the program's own leaf. NumPy arrays give NumPy arrays; JAX arrays give JAX arrays with
        the same sharding; everything else comes back as it was saved.

    Returns:
      The leaf, equal to the saved one in value, dtype and weak type.
    """
    if entry.kind == "python":
        return _read_python(entry)
    if array is None:
        array = np.zeros(entry.shape, jax.numpy.dtype(entry.dtype) if entry.kind != "key" else None)
    if entry.kind == "scalar" and not isinstance(like, (jax.Array, np.ndarray)):
        return array[()]
    to_numpy = type(like) is np.ndarray or (
        entry.kind in ("numpy", "scalar") and not isinstance(like, jax.Array)
    )
    if to_numpy:
        return array
    sharding = getattr(like, "sharding", None)
    if entry.kind == "key":
        if isinstance(like, jax.Array) and not like.is_fully_addressable:
            data = jax.random.key_data(like)
            spread = jax.make_array_from_callback(data.shape, data.sharding, lambda i: array[i])
            return rebuild_spread(entry, spread, like)
        leaf = _wrap_key(entry, array)
    elif sharding is not None and len(sharding.device_set) > 1:
        # Every device gets its own part from the host, never one of them the whole.
        leaf = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    else:
        leaf = jax.numpy.asarray(array)
    if entry.weak:
        leaf = _convert_element_type(leaf, leaf.dtype, weak_type=True)
    # An uncommitted array stays free to follow the arrays it meets, as a fresh one is.
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        return leaf
    return jax.device_put(leaf, sharding)


def rebuild_spread(entry: Entry, array: Any, like: Any) -> Any:
    """Makes a leaf that is spread over several processes from the array that was read for it."""
    if entry.kind == "key":
        keys = jax.random.wrap_key_data(array, impl=entry.detail)
        return keys if keys.sharding == like.sharding else jax.device_put(keys, like.sharding)
    return _convert_element_type(array, array.dtype, weak_type=True) if entry.weak else array


def _wrap_key(entry: Entry, array: np.ndarray) -> jax.Array:
    if 0 in entry.shape:
        one = jax.random.key_data(jax.random.key(0, impl=entry.detail))
        array = np.zeros((*entry.shape, *one.shape), one.dtype)
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=entry.detail)


def _write_python(value: bool | int | float | complex | str) -> str:
    if isinstance(value, float):
        return struct.pack("<d", value).hex()
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag).hex()
    return str(value)


def _read_python(entry: Entry) -> bool | int | float | complex | str:
    if entry.dtype == "float":
        return struct.unpack("<d", bytes.fromhex(entry.detail))[0]
    if entry.dtype == "complex":
        return complex(*struct.unpack("<dd", bytes.fromhex(entry.detail)))
    if entry.dtype == "bool":
        return entry.detail == "True"
    return _PYTHON_TYPES[entry.dtype](entry.detail)
