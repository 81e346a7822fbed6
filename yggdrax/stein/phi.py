"""The tree sum as functions: a topology from particles, and phi from a topology."""

import dataclasses
import functools
import sys

import jax

from yggdrax.kernels import RBF, Kernel, as_bandwidth, resolve_kernel
from yggdrax.stein.engine import require_number
from yggdrax.stein.leaves import check_like, layout_of
from yggdrax.stein.near import check_strategy
from yggdrax.stein.topology import Topology, evaluate
from yggdrax.stein.tree import Tree
from yggdrax.typing import Array, Number, ParticleTree

__all__ = ["build_svgd_topology", "svgd_phi", "svgd_phi_from_topology"]


def build_svgd_topology(
    particles: ParticleTree,
    bandwidth: Number | None = None,
    *,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
    leaf_size: int | None = None,
    theta: float | None = None,
    rtol: float = 1e-3,
    order: int = 2,
    ordering: str = "median",
    reuse: float = 0.0,
    near_capacity: int | None = None,
    far_capacity: int | None = None,
    exact_above: float = 0.25,
) -> Topology:
    """Sorts particles into a tree and lists which nodes meet which. Traceable.

    Args:
      particles: pytree of floating arrays with a leading axis N.
      bandwidth: h > 0; not needed if ``theta`` is given, whose lists serve every bandwidth.
      kernel: a radial kernel, or its name.
      leaf_size: see :class:`yggdrax.Tree`, as for ``theta``, ``rtol``, ``order``, ``ordering``,
        ``near_capacity``, ``far_capacity`` and ``exact_above``.
      theta: opening angle.
      rtol: what the error should stay below.
      order: total degree of the expansions.
      ordering: ``"median"`` or ``"morton"``.
      reuse: how far particles may move before the topology no longer serves, in mean radii of the
        leaves. The acceptance is made for all positions within that distance: larger nodes are
        refused, lists are longer. :func:`svgd_phi_from_topology` checks every particle.
      near_capacity: room for near pairs of leaves.
      far_capacity: room for far pairs of nodes.
      exact_above: part of the pairs of leaves that may be near before the exact tiles serve.

    Returns:
      A :class:`~yggdrax.stein.topology.Topology`: a pytree that passes through ``jit`` and
      ``scan``. Its ``status`` holds ``Status.CAPACITY`` if a list was too short (the exact sum
      then serves) and ``Status.NONFINITE``; ``refresh(particles, bandwidth)`` builds it anew where
      it no longer serves.

    Raises:
      ValueError: for an option out of range, N = 0, or a missing bandwidth.
      TypeError: for integer leaves.

    Example:
      >>> import jax
      >>> x = jax.random.normal(jax.random.key(0), (200, 3))
      >>> build_svgd_topology(x, theta=0.5, leaf_size=8).layout.leaves
      32
    """
    if bandwidth is None and theta is None:
        raise ValueError("acceptance by rtol depends on the bandwidth: pass bandwidth, or theta.")
    require_number("reuse", reuse, 0, sys.float_info.max)
    layout = layout_of(particles)
    engine = Tree(
        leaf_size=leaf_size,
        theta=theta,
        rtol=rtol,
        order=order,
        ordering=ordering,
        near_capacity=near_capacity,
        far_capacity=far_capacity,
        exact_above=exact_above,
    )
    h = as_bandwidth(1.0 if bandwidth is None else bandwidth, layout.dtype)
    return _build(engine, resolve_kernel(kernel), float(reuse), layout.matrix(particles), h)


# Compiled, so that calls outside of any jit do not trace and compile their conditions each time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _build(engine: Tree, kernel: Kernel, reuse: float, x: Array, h: Array) -> Topology:
    return engine.topology(x, h, kernel, reuse=reuse)


@functools.partial(jax.jit, static_argnums=0)
def _phi(accumulate: str, topology: Topology, x: Array, s: Array, h: Array) -> Array:
    current = topology.refreshed(x, h)
    plan = dataclasses.replace(topology.plan, accumulate=accumulate)
    return evaluate(dataclasses.replace(current, plan=plan), x, s, h)


def svgd_phi_from_topology(
    particles: ParticleTree,
    scores: ParticleTree,
    bandwidth: Number,
    topology: Topology,
    *,
    accumulate: str = "scatter",
) -> ParticleTree:
    r"""The Stein variational gradient of every particle, summed by a tree. Traceable.

    .. math::
        \phi_i = \frac1N \sum_j \big[ k(x_j, x_i)\, S_j + \nabla_{x_j} k(x_j, x_i) \big]

    Differentiable once in particles, scores and bandwidth in reverse mode, with order and lists
    held fixed. The adjoint is a sum over the same pairs: with ``"segment"``, and elsewhere than on
    CPUs, every target owns its row; on CPUs ``"scatter"`` adds every tile to both leaves.

    Particles may have moved since the topology was built. If one went further than the topology
    allows (``reuse``), or if the bandwidth is another one than it was built for (with ``rtol``), a
    new topology is built in this call; it is never used where it does not hold.

    Measured (milliseconds, near field alone, d = 3, angle 0.7, JAX 0.10.1 on two cores of an AMD
    EPYC; ``plain`` is a scan over gathered pairs under plain reverse mode; one run of
    examples/benchmarks/near_field.py, which also runs where there is a GPU):

    ===== ================== ======= ======= ===== ======= ======= =====
    .     .                  float32 .       .     float64 .       .
    N     .                  scatter segment plain scatter segment plain
    ===== ================== ======= ======= ===== ======= ======= =====
    1e4   forward                 53      65    52      78     118    87
    .     forward + gradient     178     209   309     225     339   445
    1e5   forward                417     467   361     689    1088   811
    .     forward + gradient    1263    2321  2482    2263    3365  3563
    ===== ================== ======= ======= ===== ======= ======= =====

    Since then the tiles of ``scatter`` and ``segment`` fit the cache, which takes some 30 % off
    their forward sums. Of ``plain``, forward, the additions alone take 2 and 24 ms in float32, 4
    and 41 in float64.

    Args:
      particles: pytree of floating arrays with a leading axis N.
      scores: gradients of log p at the particles, like ``particles``.
      bandwidth: h > 0, in the units of the particles.
      topology: from :func:`build_svgd_topology`, for the same shapes.
      accumulate: how near pairs are added up. ``"scatter"``: every pair of leaves is evaluated
        once and added to both; ``"segment"``: every target leaf sums its own directed pairs, and
        the sums are placed by a permutation; ``"auto"``: by dtype and platform.

    Returns:
      phi, like ``particles`` in structure, shapes and dtypes.

    Raises:
      ValueError: for trees, shapes or dtypes that differ, an unknown strategy, or a bandwidth that
        is not positive.
      TypeError: for integer leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0], [1.0], [3.0]])
      >>> topology = build_svgd_topology(x, 1.0, leaf_size=1)
      >>> [f"{v:.5f}" for v in svgd_phi_from_topology(x, -x, 1.0, topology)[:, 0]]
      ['-0.42657', '-0.35672', '-0.94378']
    """
    layout = layout_of(particles)
    check_like(layout, particles, scores, "scores")
    check_strategy(accumulate)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must come from build_svgd_topology, not {topology!r}.")
    h = as_bandwidth(bandwidth, layout.dtype)
    x, s = topology.require(layout.matrix(particles)), layout.matrix(scores)
    phi = _phi(accumulate, topology, x, s, h)
    return layout.tree(layout.split((phi,)), particles)


def svgd_phi(
    particles: ParticleTree,
    scores: ParticleTree,
    bandwidth: Number,
    *,
    accumulate: str = "auto",
    **options,
) -> ParticleTree:
    """phi by a tree built for this call alone: for callers who do not differentiate.

    Args:
      particles: pytree of floating arrays with a leading axis N.
      scores: gradients of log p at the particles, like ``particles``.
      bandwidth: h > 0, in the units of the particles.
      accumulate: see :func:`svgd_phi_from_topology`.
      **options: of :func:`build_svgd_topology`.

    Returns:
      phi, like ``particles``.

    Raises:
      ValueError, TypeError: as the two functions that it is made of.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0], [1.0], [3.0]])
      >>> [f"{v:.5f}" for v in svgd_phi(x, 0 * x, 1.0)[:, 0]]
      ['-0.21329', '0.11195', '0.10133']
    """
    topology = build_svgd_topology(particles, bandwidth, **options)
    return svgd_phi_from_topology(particles, scores, bandwidth, topology, accumulate=accumulate)
