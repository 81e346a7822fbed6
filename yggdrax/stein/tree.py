"""The tree engine: near pairs exactly, far nodes by their expansion, negligible ones not at all."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from yggdrax.geometry.layout import Layout
from yggdrax.geometry.slots import ORDERINGS
from yggdrax.kernels import Kernel
from yggdrax.status import Status
from yggdrax.stein.engine import (
    Engine,
    SteinSum,
    require_interval,
    require_matrices,
    require_number,
)
from yggdrax.stein.near import check_strategy
from yggdrax.stein.topology import Plan, Topology, build, evaluate
from yggdrax.typing import Array, is_whole

__all__ = ["Tree"]

# Measured on two cores: smaller leaves make longer lists, larger ones more near pairs.
LEAF_SIZE = 32
# Entries of the lists, 4 bytes each: 32 and 64 MiB at most.
NEAR_CAPACITY, FAR_CAPACITY = 2**23, 2**24


@dataclasses.dataclass(frozen=True)
class Tree(Engine):
    r"""The sum over all pairs by a tree over the particles, in any dimension, for any kernel.

    Particles are sorted into equal leaves. Two nodes of the tree that accept each other act by an
    expansion (moments of the one, translated to a Taylor polynomial about the centre of the
    other), pairs of nodes whose kernel is negligible are skipped, and what is left at the leaves
    is summed pair by pair. All of it is rebuilt in every call, inside ``jit``, with shapes from
    (N, d) and these options alone.

    Nodes accept each other if the error of the expansion is below ``rtol``, by bounds that know
    the kernel (:mod:`yggdrax.stein.acceptance`), or, if ``theta`` is given, if their radii
    together are less than ``theta`` times the distance of their centres. An angle knows nothing of
    the bandwidth; it is there for comparison.

    Where more than ``exact_above`` of all pairs of leaves are near, the exact tiles do the sum:
    they are faster there. If a list is longer than its capacity, they do as well, and
    ``Status.CAPACITY`` is set. Positions that are not finite give NaN and ``Status.NONFINITE``.

    Differentiable once in reverse mode, with order and lists held fixed, and exact for what is
    computed; no gather is transposed. Under ``jax.vmap`` the batch is a loop.

    Args:
      leaf_size: most particles of a leaf; None for 32.
      theta: opening angle, 0 for none far; None to accept by ``rtol``.
      rtol: what the error should stay below, in the norm of ``|phi' - phi|`` over
        ``sqrt(|attraction|^2 + |repulsion|^2)``, root sums of squares over all particles. It is
        measured, not guaranteed.
      order: total degree of the expansion, 0, 1 or 2; at most 1 above 8 dimensions, for its d^3
        numbers a node. Above 64 dimensions no node is far.
      accumulate: how near pairs add up, ``"scatter"``, ``"segment"`` or ``"auto"``
        (:func:`yggdrax.svgd_phi_from_topology`).
      ordering: ``"median"`` splits along the widest axis, or the ``"morton"`` curve (d <= 3).
      near_capacity: room for near pairs of leaves; None for all of them, up to 8,388,608.
      far_capacity: room for far pairs of nodes; None for what they can need, up to 16,777,216.
      exact_above: part of the pairs of leaves that may be near; 1 to never leave it to the tiles.
      check_every: measure the error at 64 particles every so many steps; 0 for never.

    Raises:
      ValueError: for an option out of range, naming it.

    Example:
      >>> from yggdrax.kernels import IMQ
      >>> x = jax.random.normal(jax.random.key(0), (3000, 3))
      >>> phi, status = Tree(rtol=1e-2).stein(x, -x, jnp.float32(0.5), IMQ())
      >>> phi.shape, int(status)
      ((3000, 3), 0)
    """

    leaf_size: int | None = None
    theta: float | None = None
    rtol: float = 1e-3
    order: int = 2
    accumulate: str = "scatter"
    ordering: str = "median"
    near_capacity: int | None = None
    far_capacity: int | None = None
    exact_above: float = 0.25
    check_every: int = 100

    def __post_init__(self):
        """Checks the options."""
        for name in ("leaf_size", "near_capacity", "far_capacity"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise ValueError(f"{name} must be a positive integer or None, not {value!r}.")
        if self.theta is not None:
            require_number("theta, unless None,", self.theta, 0, 2)
        require_number("rtol", self.rtol, 0, 1)
        require_number("exact_above", self.exact_above, 0, 1)
        require_interval(self.check_every)
        _check_choice("order", self.order, (0, 1, 2))
        check_strategy(self.accumulate)
        _check_choice("ordering", self.ordering, tuple(ORDERINGS))

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """phi for particles and scores (N, d) and a bandwidth ()."""
        require_matrices(x, s)
        topology = self.topology(x, h, kernel)
        phi = evaluate(topology, x, s, jnp.asarray(h, x.dtype))
        finite = jnp.all(jnp.isfinite(jax.lax.stop_gradient(s)))
        return SteinSum(phi, jnp.where(finite, topology.status, int(Status.NONFINITE)))

    def topology(self, x: Array, h: Array, kernel: Kernel, *, reuse: float = 0.0) -> Topology:
        """Order and interaction lists for positions (N, d) and a bandwidth ()."""
        problem = self.refuses((x.shape[0], x.shape[1]), x.dtype, kernel)
        if problem:
            raise ValueError(problem)
        layout = Layout.of(x.shape[0], self.leaf_size or LEAF_SIZE)
        tolerance = jnp.asarray(self.rtol if self.theta is None else self.theta, x.dtype)
        h = jnp.asarray(h, x.dtype)
        return build(self.plan(layout, kernel, reuse), layout, x, h, tolerance)

    def refuses(self, shape: tuple[int, int], dtype, kernel: Kernel) -> str | None:
        """See :class:`yggdrax.stein.engine.Engine`."""
        del dtype, kernel
        n, d = shape
        if n == 0:
            return "there are no particles: N = 0."
        if self.ordering == "morton" and d > 3:
            return (
                f"the Morton order serves up to three dimensions, not {d}: choose "
                "ordering='median'."
            )
        return None

    def plan(self, layout: Layout, kernel: Kernel, reuse: float = 0.0) -> Plan:
        """The static part of a topology."""
        every = layout.leaves**2
        # All pairs of all levels hold 4/3 of the pairs of leaves.
        most = math.ceil(4 * every / 3)
        return Plan(
            kernel=kernel,
            order=self.order,
            by_angle=self.theta is not None,
            ordering=self.ordering,
            near_capacity=min(self.near_capacity or NEAR_CAPACITY, every),
            far_capacity=min(self.far_capacity or FAR_CAPACITY, most),
            exact_above=self.exact_above,
            reuse=reuse,
            accumulate=self.accumulate,
        )


def _check_choice(name: str, value, choices: tuple) -> None:
    if value not in choices or type(value) not in {type(choice) for choice in choices}:
        raise ValueError(f"{name} must be one of {list(choices)}, not {value!r}.")
