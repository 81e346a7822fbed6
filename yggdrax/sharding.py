"""Particles over several devices: where they are, and how one function is run on every shard.

Meshes, shardings and collectives are JAX's own. A function of particles is written once, for one
shard, with the names of the mesh axes over which the leading axis of its rows is split (none of
them on one device); :func:`over_shards` runs it where the particles are:

* On an *explicit* mesh the types say how an array is split: ``jax.shard_map`` over those axes.
* On an *automatic* mesh the compiler decides how an array is split: ``custom_partitioning`` asks
  it at compile time and compiles the function for that. Particles that are not split are computed
  as on one device, and a program for one device is the function as it is.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from yggdrax.typing import Array, ParticleTree, PyTree

__all__ = [
    "Axes",
    "every",
    "fetch",
    "largest",
    "may_be_sharded",
    "offset",
    "on_mesh_of",
    "on_one_device",
    "over_shards",
    "pass_round",
    "replicated_like",
    "rows_like",
    "shard_count",
    "shard_particles",
    "smallest",
    "total",
]

Axes = tuple[str, ...]
"""Names of the mesh axes over which rows are split; () for one device."""

Rows = tuple[Array, ...]
# body(static, axes, rows, rest) -> (rows out, rest out)
Body = Callable[[Any, Axes, Rows, tuple[Array, ...]], tuple[Rows, tuple[Array, ...]]]


# --- inside a shard --------------------------------------------------------------------------


def shard_count(axes: Axes) -> int:
    """The number of shards."""
    return jax.lax.axis_size(axes) if axes else 1


def offset(axes: Axes, rows: int) -> Array | int:
    """The number of the first of this shard's ``rows`` rows among all."""
    return jax.lax.axis_index(axes) * rows if axes else 0


def total(value: Any, axes: Axes) -> Any:
    """The sum over all shards."""
    return jax.lax.psum(value, axes) if axes else value


def largest(value: Any, axes: Axes) -> Any:
    """The maximum over all shards."""
    return jax.lax.pmax(value, axes) if axes else value


def smallest(value: Any, axes: Axes) -> Any:
    """The minimum over all shards."""
    return jax.lax.pmin(value, axes) if axes else value


def every(predicate: Array, axes: Axes) -> Array:
    """Whether a predicate holds on all shards."""
    return smallest(predicate.astype(jnp.int32), axes) > 0 if axes else predicate


def pass_round(tree: PyTree, axes: Axes) -> PyTree:
    """What the previous shard of the ring holds; each shard hands its own on to the next."""
    if not axes:
        return tree
    count = shard_count(axes)
    ring = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axes, ring), tree)


def fetch(rows: Array, index: Array, axes: Axes) -> Array:
    """``rows[index]`` for the numbers of rows among all, the same on every shard.

    Costs a sum over the shards of as many rows as are asked for.
    """
    if not axes:
        return rows[index]
    here = index - offset(axes, rows.shape[0])
    mine = (here >= 0) & (here < rows.shape[0])
    mine = mine.reshape(mine.shape + (1,) * (rows.ndim - 1))
    return total(jnp.where(mine, rows[jnp.where(mine.reshape(here.shape), here, 0)], 0), axes)


# --- where particles are ---------------------------------------------------------------------


def _mesh_of(array: Array):
    """The mesh in the type of an array, or of the context, or None."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _in_shard(mesh) -> bool:
    """Whether this is already the inside of a ``shard_map``."""
    return any(kind == AxisType.Manual for kind in mesh.axis_types)


def _several(mesh) -> bool:
    """Whether a mesh matters: the types of an explicit one do even with a single device."""
    return mesh.size > 1 or not _automatic(mesh)


def _automatic(mesh) -> bool:
    return any(kind == AxisType.Auto for kind in mesh.axis_types)


def _explicit_axes(array: Array) -> Axes:
    """The axes over which the type says that the leading axis is split."""
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty or not sharding.spec or sharding.spec[0] is None:
        return ()
    names = sharding.spec[0]
    return names if isinstance(names, tuple) else (names,)


def may_be_sharded(tree: PyTree) -> bool:
    """Whether arrays live on a mesh of several devices, as far as their types tell.

    Example:
      >>> may_be_sharded(jnp.zeros((8, 2)))
      False
    """
    return any(
        mesh is not None and _several(mesh) and not _in_shard(mesh)
        for mesh in (_mesh_of(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree))
    )


def on_one_device(array: Array) -> bool:
    """Whether an array is certain to be whole where the program runs.

    Example:
      >>> on_one_device(jnp.zeros((8, 2)))
      True
    """
    mesh = _mesh_of(array)
    if mesh is not None:
        return not _several(mesh) or _in_shard(mesh)
    # A traced array may be put on several devices later, by in_shardings or a constraint.
    return jax.device_count() == 1 or not isinstance(array, Tracer)


def replicated_like(tree: PyTree, like: PyTree) -> PyTree:
    """Puts arrays on every device of the mesh of ``like``, where it has one.

    A state that starts where the steps leave it does not make the second step compile again.
    """
    for leaf in jax.tree.leaves(like):
        if isinstance(leaf, Tracer):
            return on_mesh_of(tree, leaf)
        sharding: Any = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and _several(sharding.mesh):
            return jax.tree.map(functools.partial(_put_everywhere, sharding.mesh), tree)
    return tree


def _put_everywhere(mesh: Any, array: Array) -> Array:
    # An explicit type lists every axis of an array.
    spec = PartitionSpec() if _automatic(mesh) else PartitionSpec(*(None,) * array.ndim)
    return jax.device_put(array, NamedSharding(mesh, spec))


def on_mesh_of(tree: PyTree, like: Array) -> PyTree:
    """Gives traced arrays the explicit mesh in the type of ``like``, replicated."""
    mesh = _mesh_of(like)
    if mesh is None or not all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return tree
    return jax.sharding.reshard(tree, NamedSharding(mesh, PartitionSpec()))


def rows_like(rows: PyTree, like: PyTree) -> PyTree:
    """Splits arrays with a leading axis N as the types say that ``like`` is split.

    On an automatic mesh and without one there is nothing to do.
    """
    leaf = jax.tree.leaves(like)[0]
    axes = _explicit_axes(leaf)
    if not axes:
        return rows
    mesh = jax.typeof(leaf).sharding.mesh
    return jax.sharding.reshard(rows, NamedSharding(mesh, PartitionSpec(axes)))


def shard_particles(particles: ParticleTree, mesh: Mesh, axis: str | None = None) -> ParticleTree:
    """Splits the leading axis of every leaf over an axis of a mesh.

    The same as ``jax.device_put`` with a ``NamedSharding``, but an N that does not divide is
    refused with what to do about it. Works with several processes, each of which passes the same
    particles.

    Args:
      particles: a tree whose leaves have the leading axis N.
      mesh: any JAX mesh, automatic or explicit.
      axis: the name of the axis; may be left out for a mesh with a single one.

    Returns:
      The particles, on the devices of the mesh.

    Raises:
      ValueError: for an axis that the mesh does not have, or an N that is not a multiple of it.

    Example:
      >>> mesh = jax.make_mesh((1,), ("particles",))
      >>> shard_particles(jnp.zeros((8, 2)), mesh).sharding.spec
      P('particles',)
    """
    names = mesh.axis_names
    if axis is None and len(names) != 1:
        raise ValueError(f"the mesh has the axes {names}: say which one splits the particles.")
    name = names[0] if axis is None else axis
    if name not in names:
        raise ValueError(f"the mesh has no axis {name!r}: its axes are {names}.")
    devices = mesh.shape[name]
    for leaf in jax.tree.leaves(particles):
        n = leaf.shape[0]
        if n % devices:
            lower, upper = n // devices * devices, -(-n // devices) * devices
            fitting = max(count for count in range(1, devices + 1) if n % count == 0)
            raise ValueError(
                f"{n} particles cannot be split evenly over the {devices} devices of {name!r}: "
                f"take {f'{lower} or ' if lower else ''}{upper} particles, or a mesh of "
                f"{fitting} device{'s' if fitting > 1 else ''}."
            )
    return jax.device_put(particles, NamedSharding(mesh, PartitionSpec(name)))


# --- running a function on every shard -------------------------------------------------------


def over_shards(
    body: Body,
    static: Hashable,
    rows: Sequence[Array],
    rest: Sequence[Array],
    row_results: int,
) -> tuple[Rows, tuple[Array, ...]]:
    """Runs ``body(static, axes, rows, rest)`` on every shard of the rows.

    Nothing is differentiated through it: give the caller a ``custom_vjp``.

    Args:
      body: a function of a module (results are cached by it). It gets this shard's part of the
        rows and the whole of the rest, and returns two tuples: arrays that are split like the
        rows, and arrays that are the same on every shard.
      static: hashable options, handed on.
      rows: arrays with a common leading axis, split over the same axes.
      rest: arrays that every shard gets as they are.
      row_results: how many arrays are in the first tuple.

    Returns:
      The two tuples, as arrays over all shards.
    """
    rows, rest = tuple(rows), tuple(rest)
    if on_one_device(rows[0]):
        return body(static, (), rows, rest)
    mesh = _mesh_of(rows[0])
    sizes = (len(rows), len(rest), row_results)
    axes = next((a for a in map(_explicit_axes, rows) if a), ())
    if axes or (mesh is not None and not _automatic(mesh)):
        return _by_shard_map(body, static, axes, mesh, sizes)(*rows, *rest)
    return _by_partitioning(body, static, sizes)(*rows, *rest)


@functools.lru_cache(maxsize=256)
def _by_shard_map(body: Body, static: Hashable, axes: Axes, mesh, sizes: tuple[int, int, int]):
    num_rows, num_rest, _ = sizes
    split, same = PartitionSpec(axes or None), PartitionSpec()

    def local(*arrays):
        return body(static, axes, arrays[:num_rows], arrays[num_rows:])

    specs = (split,) * num_rows + (same,) * num_rest
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(split, same), check_vma=False
    )

    @jax.jit
    def run(*arrays):
        placed = [
            jax.sharding.reshard(array, NamedSharding(mesh, _full(spec, array.ndim)))
            for array, spec in zip(arrays, specs, strict=True)
        ]
        return mapped(*placed)

    return run


def _full(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))


@functools.lru_cache(maxsize=256)
def _by_partitioning(body: Body, static: Hashable, sizes: tuple[int, int, int]):
    num_rows, num_rest, row_results = sizes

    def whole(*arrays):
        return body(static, (), arrays[:num_rows], arrays[num_rows:])

    def shardings(mesh, arguments, results):
        axes = _axes_of_rows(mesh, arguments[:num_rows])
        split, same = (NamedSharding(mesh, PartitionSpec(a)) for a in (axes or None, None))
        placed = (split,) * num_rows + (same,) * num_rest
        return axes, placed, ((split,) * row_results, (same,) * len(results[1]))

    def partition(mesh, arguments, results):
        axes, placed, out = shardings(mesh, arguments, results)

        def local(*arrays):
            return body(static, axes, arrays[:num_rows], arrays[num_rows:])

        return mesh, local, out, placed

    def rule(mesh, arguments, results):
        del mesh
        names = (f"f{i}" for i in itertools.count())
        left, factors = _factors(arguments, num_rows, names)
        right, more = _factors(results, row_results, names)
        text = f"{', '.join(left)} -> {', '.join(right)}"
        return text, {"need_replication_factors": (*factors, *more)}

    # Inside a jit of its own, whose program holds the constants: they may not be loose here.
    partitioned = custom_partitioning(jax.jit(whole))
    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=lambda *of: shardings(*of)[2],
        sharding_rule=rule,
    )
    mappable = custom_vmap(partitioned)

    @mappable.def_vmap
    def batched(axis_size, in_batched, *arrays):
        # Whole ensembles side by side: the compiler splits the plain sum as it sees fit.
        del axis_size
        out = jax.vmap(whole, [0 if b else None for b in in_batched])(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return jax.jit(mappable)


def _axes_of_rows(mesh: Mesh, rows: Sequence[jax.ShapeDtypeStruct]) -> Axes:
    """Over which axes the compiler has split the rows; () if it cannot be done evenly."""
    for row in rows:
        sharding = row.sharding
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        if spec and spec[0] is not None:
            axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
            devices = math.prod(mesh.shape[axis] for axis in axes)
            return axes if row.shape[0] % devices == 0 else ()
    return ()


def _factors(types, num_rows: int, names: Iterator[str]) -> tuple[list[str], list[str]]:
    """The axes of each array for the compiler: "rows" or a name that must not be split."""
    words, used = [], []
    for number, one in enumerate(types):
        ndim = len(one.shape)
        axes = [next(names) for _ in range(ndim - (number < num_rows))]
        used += axes
        words.append(" ".join(["rows", *axes] if number < num_rows else axes))
    return words, used
