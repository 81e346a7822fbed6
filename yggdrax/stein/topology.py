r"""The tree sum: a topology (order and lists) built from positions, and phi evaluated on it.

:func:`build` is discrete, and nothing is differentiated through it. :func:`evaluate` is
differentiable in positions, scores and bandwidth with the topology held fixed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.lists import Lists, descend, first_level
from yggdrax.geometry.nodes import Nodes, measure
from yggdrax.geometry.slots import fill_slots, order_slots, places
from yggdrax.kernels import Kernel, as_bandwidth
from yggdrax.status import Status
from yggdrax.stein.acceptance import by_angle, by_bound
from yggdrax.stein.exact import Exact
from yggdrax.stein.far import far_field
from yggdrax.stein.leaves import layout_of
from yggdrax.stein.near import near_field
from yggdrax.typing import Array, Number, ParticleTree

__all__ = ["Plan", "Topology", "build", "evaluate"]


# Expansions of second order take d^3 numbers for each node, those of lower order d^2.
SECOND_ORDER_DIMENSIONS, FAR_DIMENSIONS = 8, 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a tree sum; hashable."""

    kernel: Kernel
    order: int
    by_angle: bool
    """Whether nodes accept each other by an opening angle, not by a bound of the error."""
    ordering: str
    near_capacity: int
    far_capacity: int
    exact_above: float
    """Part of all pairs of leaves that may be near before the exact tiles serve instead."""
    reuse: float
    """How far particles may move before a topology is too old, in mean radii of the leaves."""
    accumulate: str


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layout", "slots", "places", "lists", "finite", "x", "h", "margin", "tolerance"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class Topology:
    """Order of the particles and interaction lists; a pytree that passes through jit and scan."""

    layout: Layout
    slots: Array
    """The particle in each slot, N in the empty ones, ``(slots,)`` int32."""
    places: Array
    """The slot of each particle, ``(N,)`` int32."""
    lists: Lists
    finite: Array
    """Whether all positions and the bandwidth were finite, ``()`` bool."""
    x: Array
    """The positions it was built for, ``(N, d)``."""
    h: Array
    """The bandwidth it was built for, ``()``; with an opening angle it serves every bandwidth."""
    margin: Array
    """How far a particle may have moved since, ``()``."""
    tolerance: Array
    """theta or rtol, ``()``."""
    plan: Plan

    @property
    def status(self) -> Array:
        """Status bits, ``()`` int32."""
        capacity = jnp.where(self.lists.overflow, int(Status.CAPACITY), 0)
        return jnp.where(self.finite, capacity, int(Status.NONFINITE)).astype(jnp.int32)

    @property
    def exact_serves(self) -> Array:
        """Whether the exact tiles do the sum: lists too short, or so long that tiles are faster."""
        pairs = jnp.sum(self.lists.near_count.astype(jnp.float32))
        most = self.plan.exact_above * float(self.layout.leaves) ** 2
        return self.lists.overflow | self.lists.crowded | (pairs > most)

    def serves(self, x: Array, h: Array) -> Array:
        """Whether the lists are right for these positions and this bandwidth, ``()`` bool."""
        squares = jnp.sum((x - self.x) ** 2, 1)
        still = jnp.all(squares <= self.margin**2)
        # An unserved NaN would be built for again and again; it poisons the sum by itself.
        same = self.plan.by_angle | (h == self.h)
        return (still & same) | ~(jnp.all(jnp.isfinite(x)) & jnp.isfinite(h))

    def refreshed(self, x: Array, h: Array) -> "Topology":
        """Itself where it serves ``x`` (N, d) and ``h``, else a new one for them."""
        fresh = sequential_vmap(_refresh_once)
        return fresh(self, *jax.lax.stop_gradient((x, h)))

    def refresh(self, particles: ParticleTree, bandwidth: Number | None = None) -> "Topology":
        """The same for a tree of particles, for the next steps of a loop. Traceable.

        Args:
          particles: like those that it was built for.
          bandwidth: None for the bandwidth that it was built for.

        Raises:
          ValueError: for particles of other shapes or dtypes, or a bandwidth that is not positive.
        """
        x = self.require(layout_of(particles).matrix(particles))
        h = self.h if bandwidth is None else as_bandwidth(bandwidth, self.h.dtype)
        return _refresh(self, x, h)

    def require(self, x: Array) -> Array:
        """Returns positions ``x`` (N, d), or raises a ValueError if they do not fit."""
        if x.shape != self.x.shape or x.dtype != self.x.dtype:
            raise ValueError(
                f"the topology was built for particles {self.x.shape} {self.x.dtype}, but "
                f"these are {x.shape} {x.dtype}: build one for them."
            )
        return x


@jax.jit
def _refresh(topology: Topology, x: Array, h: Array) -> Topology:
    """Compiled, since the condition would otherwise be compiled again by each call outside jit."""
    return topology.refreshed(x, h)


def build(plan: Plan, layout: Layout, x: Array, h: Array, tolerance: Array) -> Topology:
    """Builds the topology for positions ``x`` (N, d); ``tolerance`` is theta or rtol."""
    discrete = sequential_vmap(functools.partial(_build_once, plan))
    return discrete(layout, *jax.lax.stop_gradient((x, h, tolerance)))


def _build_once(plan: Plan, layout: Layout, x: Array, h: Array, tolerance: Array) -> Topology:
    finite = jnp.all(jnp.isfinite(x)) & jnp.isfinite(h)
    # Whatever is not finite must not steer the loops of the construction.
    x, h = jnp.where(jnp.isfinite(x), x, 0), jnp.where(jnp.isfinite(h), h, 1)
    slots = order_slots(x, layout, plan.ordering)
    nodes = measure(fill_slots(x, slots, layout), layout, first_level(layout))
    margin = plan.reuse * jnp.mean(nodes.radius[layout.leaves :])
    lists = descend(
        nodes,
        layout,
        _acceptance(plan, nodes, layout, h, tolerance),
        margin,
        near_capacity=plan.near_capacity,
        far_capacity=plan.far_capacity,
        most_near=plan.exact_above,
    )
    return Topology(
        layout=layout,
        slots=slots,
        places=places(slots, layout),
        lists=lists,
        finite=finite,
        x=x,
        h=h,
        margin=margin,
        tolerance=tolerance,
        plan=plan,
    )


def _refresh_once(topology: Topology, x: Array, h: Array) -> Topology:
    def anew(topology, x, h):
        return _build_once(topology.plan, topology.layout, x, h, topology.tolerance)

    keep = topology.serves(x, h)
    return jax.lax.cond(keep, lambda topology, x, h: topology, anew, topology, x, h)


def _acceptance(plan: Plan, nodes: Nodes, layout: Layout, h: Array, tolerance: Array):
    if len(nodes.center) > FAR_DIMENSIONS:
        return by_angle(jnp.zeros_like(tolerance))
    if plan.by_angle:
        return by_angle(tolerance)
    return by_bound(plan.kernel, nodes, layout, h, tolerance, _order(plan, len(nodes.center)))


def _order(plan: Plan, d: int) -> int:
    return plan.order if d <= SECOND_ORDER_DIMENSIONS else min(plan.order, 1)


def _in_slots(topology: Topology, values: Array) -> Array:
    filled = topology.layout.filled().astype(values.dtype)
    return fill_slots(values, topology.slots, topology.layout) * filled


def _to_particles(topology: Topology, values: Array) -> Array:
    return values.reshape(len(values), -1).T[topology.places]


def _slot_sum(topology: Topology, x: Array, s: Array, h: Array) -> Array:
    plan, layout, lists, scale = topology.plan, topology.layout, topology.lists, 1 / h
    near: Array = near_field(plan.kernel, plan.accumulate, layout, lists, x, s, scale)  # type: ignore[assignment]
    if len(x) > FAR_DIMENSIONS:
        return near / layout.num
    order = _order(plan, len(x))
    attraction, repulsion = far_field(plan.kernel, order, layout, lists, x, s, scale)
    return (near + attraction + scale * repulsion) / layout.num


def _tree_sum(topology: Topology, x: Array, s: Array, h: Array) -> Array:
    positions = fill_slots(x, topology.slots, topology.layout)
    return _to_particles(topology, _slot_sum(topology, positions, _in_slots(topology, s), h))


def _exact_sum(topology: Topology, x: Array, s: Array, h: Array) -> Array:
    return Exact().stein(x, s, h, topology.plan.kernel).phi


def _always_tree(topology: Topology) -> bool:
    """Whether the shapes alone rule the exact tiles out, so that they need not be compiled."""
    plan, pairs = topology.plan, topology.layout.leaves**2
    return (
        plan.exact_above >= 1 and plan.near_capacity >= pairs and 3 * plan.far_capacity >= 4 * pairs
    )


def _forward_once(topology: Topology, x: Array, s: Array, h: Array) -> Array:
    if _always_tree(topology):
        return _tree_sum(topology, x, s, h)
    return jax.lax.cond(topology.exact_serves, _exact_sum, _tree_sum, topology, x, s, h)


def _backward_once(topology: Topology, x, s, h, cotangent):
    def exact(x, s, h, cotangent):
        return jax.vjp(lambda x, s, h: _exact_sum(topology, x, s, h), x, s, h)[1](cotangent)

    def tree(x, s, h, cotangent):
        positions = fill_slots(x, topology.slots, topology.layout)
        scores, cotangent = _in_slots(topology, s), _in_slots(topology, cotangent)
        pull = jax.vjp(lambda *a: _slot_sum(topology, *a), positions, scores, h)[1]
        dx, ds, dh = pull(cotangent)
        return _to_particles(topology, dx), _to_particles(topology, ds), dh

    if _always_tree(topology):
        return tree(x, s, h, cotangent)
    return jax.lax.cond(topology.exact_serves, exact, tree, x, s, h, cotangent)


def _poisoned(values, finite):
    return jax.tree.map(lambda v: jnp.where(finite, v, jnp.nan), values)


def _sane(topology: Topology, x, s, h):
    finite = topology.finite & jnp.all(jnp.isfinite(x)) & jnp.all(jnp.isfinite(s))
    finite = finite & jnp.isfinite(h)
    x, s = (jnp.where(jnp.isfinite(v), v, 0) for v in (x, s))
    return finite, x, s, jnp.where(jnp.isfinite(h), h, 1)


# A batch is a loop: a batched condition would run the exact sum for every member as well.
@jax.custom_vjp
def evaluate(topology: Topology, x: Array, s: Array, h: Array) -> Array:
    """phi (N, d) on a topology that serves; NaN throughout if anything is not finite."""
    finite, *rest = _sane(topology, x, s, h)
    return _poisoned(sequential_vmap(_forward_once)(topology, *rest), finite)


def _evaluate_forward(topology, x, s, h):
    return evaluate(topology, x, s, h), (topology, x, s, h)


def _evaluate_backward(kept, cotangent):
    topology, x, s, h = kept
    finite, *rest = _sane(topology, x, s, h)
    gradients = sequential_vmap(_backward_once)(topology, *rest, cotangent)
    return None, *_poisoned(gradients, finite)


evaluate.defvjp(_evaluate_forward, _evaluate_backward)
