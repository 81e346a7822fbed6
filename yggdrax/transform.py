r"""``svgd``: Stein variational gradient descent as an Optax gradient transformation.

.. code-block:: python

    tx = optax.chain(yg.svgd(bandwidth="median"), optax.adam(1e-2))

The gradients given to ``update`` are those of each particle's *own* loss -log p, one for each
particle (leading axis N). The gradient of the mean of the losses is smaller by N and silently
targets p^(1/N); :func:`yggdrax.particle_grads` does it right.

``svgd`` goes before the optimizer. Weight decay behind it is a prior that nobody declared, and
clipping by a global norm before it mixes the particles.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from yggdrax.kernels import (
    RBF,
    BandwidthRule,
    Kernel,
    MedianRule,
    ceiling_of,
    check_positive,
    floor_of,
    nan_unless_positive,
    resolve_kernel,
)
from yggdrax.sharding import may_be_sharded, replicated_like
from yggdrax.status import Status, StatusError, explain
from yggdrax.stein.check import measured_error
from yggdrax.stein.choose import resolve_engine
from yggdrax.stein.engine import Engine
from yggdrax.stein.exact import Exact
from yggdrax.stein.leaves import ParticleLayout, check_like, layout_of
from yggdrax.stein.metric import RunningScale, chosen_leaves, scale_weights
from yggdrax.stein.pairs import Leaves, agree_over_batch
from yggdrax.typing import Array, Number, ParticleTree, PyTree

__all__ = ["SvgdState", "check", "get_state", "svgd"]

Schedule = Callable[[Any], Any]
Bandwidth = Number | str | MedianRule | BandwidthRule | Schedule


class SvgdState(NamedTuple):
    """What ``svgd`` keeps from step to step; arrays only."""

    count: Array
    """Steps done, () int32."""
    bandwidth: Array
    """The bandwidth last used: (), or one for each group of ``per`` (number of groups,)."""
    status: Array
    """Bits of :class:`yggdrax.Status`, accumulated, () int32."""
    error: Array
    """The error last measured, in the norm of the documentation, () float32; NaN before."""
    error_step: Array
    """The step at which it was measured, () int32; -1 before."""
    carry: PyTree
    """What scales and engines remember: () for most."""


def svgd(
    bandwidth: Bandwidth = "median",
    *,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
    engine: Engine | str = "auto",
    temperature: Number | Schedule = 1.0,
    scale: PyTree | RunningScale | None = None,
    distances: Sequence[str] | None = None,
    per: str = "particle",
) -> optax.GradientTransformationExtraArgs:
    r"""Turns the gradients of a stack of particles into their SVGD direction.

    For gradients G = -S of the particles' losses -log p the update is -phi,

    .. math::
        \phi_i = \frac1N \sum_j \big[ k(x_j, x_i)\, S_j / T + \nabla_{x_j} k(x_j, x_i) \big],

    so that any optimizer behind it moves the particles by +phi (Liu and Wang, 2016). Particles are
    any pytree of floating arrays with a leading axis N. With one particle phi is its score.

    Args:
      bandwidth: h of the kernel, in the units of the particles. A positive number, ``"median"``,
        ``MedianRule()``, ``BandwidthRule(fn)`` for a function of the particles, or a callable,
        an Optax schedule of the step. Values below 1e-15 (float32; 1e-120 in float64) are raised
        to that.
      kernel: ``RBF()``, ``IMQ()``, ``Radial(profile)``, or a name.
      engine: how the sum over pairs is done: ``"exact"``, ``"fourier"`` (one to three dimensions,
        many particles), ``"tree"``, ``"auto"`` (the cheaper of the first two;
        :func:`yggdrax.explain` says which and why), or an engine object. The error of an engine
        with ``check_every`` is measured at those steps, and above its ``rtol`` the exact sum serves
        from the next step on.
      temperature: T > 0, a number or a schedule; the target is p^(1/T). It divides the score only.
      scale: the kernel measures x / scale: a number, a tree like one particle, or
        ``RunningScale()``. The bandwidth is then in units of the scale.
      distances: names of leaves (``"params"``, ``"params/out"``); only these enter the kernel,
        while all leaves move. (``optax.masked`` is something else: leaves masked out keep their
        raw gradient and are no longer SVGD.)
      per: ``"particle"``: one kernel over all coordinates; ``"leaf"`` or ``"coordinate"``: one for
        each leaf or coordinate, with a bandwidth of its own. Each is a sum of smaller dimension,
        which keeps its variance in high dimension, and is no longer a kernel of the whole particle.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its ``update`` needs ``params`` (the particles).

    Raises:
      ValueError: for a number out of range or an unknown name; from ``init`` and ``update`` for
        particles and gradients that do not fit.
      TypeError: for arguments of a wrong kind and for particles that are not floating.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> particles = jnp.array([[1.0], [-1.0]])
      >>> tx = optax.chain(svgd("median"), optax.sgd(0.1))
      >>> updates, state = tx.update(particles, tx.init(particles), particles)  # N(0, 1): G = x
      >>> [f"{v:.5f}" for v in optax.apply_updates(particles, updates)[:, 0]]
      ['0.98498', '-0.98498']
      >>> f"{float(get_state(state).bandwidth):.5f}"
      '1.34925'
    """
    rule = _resolve_bandwidth(bandwidth)
    if not callable(temperature):
        check_positive(temperature, "temperature")
    if per not in ("particle", "leaf", "coordinate"):
        raise ValueError(f"per must be 'particle', 'leaf' or 'coordinate', not {per!r}.")
    if isinstance(distances, str):
        distances = (distances,)
    if distances is not None and not all(isinstance(name, str) for name in distances):
        raise TypeError(f"distances must be names of leaves, not {distances!r}.")
    options = _Options(
        rule, resolve_kernel(kernel), resolve_engine(engine), temperature, scale, distances, per
    )

    def init(params: ParticleTree) -> SvgdState:
        if not jax.tree.leaves(params):
            return _initial_state(jnp.float32, (), ())
        layout = layout_of(params)
        options.validate(layout, params)
        carry = scale.init(params, layout.dtype) if isinstance(scale, RunningScale) else ()
        state = _initial_state(layout.dtype, options.groups(layout), carry)
        return replicated_like(state, params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        del extra_args
        if params is None:
            raise ValueError(
                "You are using a transformation that requires the current value of parameters, "
                "but you are not passing `params` when calling `update`: svgd needs the current "
                "params, the particles."
            )
        if not jax.tree.leaves(params):
            return updates, state._replace(count=optax.safe_increment(state.count))
        layout = layout_of(params)
        check_like(layout, params, updates, "gradients")
        return options.step(layout, updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _initial_state(dtype, groups: tuple[int, ...], carry: PyTree) -> SvgdState:
    return SvgdState(
        count=jnp.zeros((), jnp.int32),
        bandwidth=jnp.zeros(groups, dtype),
        status=jnp.zeros((), jnp.int32),
        error=jnp.full((), jnp.nan, jnp.float32),
        error_step=jnp.full((), -1, jnp.int32),
        carry=carry,
    )


def _resolve_bandwidth(bandwidth: Bandwidth):
    if isinstance(bandwidth, str):
        if bandwidth == "median":
            return MedianRule()
        raise ValueError(
            f"unknown bandwidth {bandwidth!r}: pass 'median', a positive number, a schedule, or "
            "BandwidthRule(fn)."
        )
    if isinstance(bandwidth, (MedianRule, BandwidthRule)) or callable(bandwidth):
        return bandwidth
    check_positive(bandwidth, "bandwidth")
    return bandwidth


class _Options(NamedTuple):
    """The arguments of ``svgd``, resolved."""

    bandwidth: Any
    kernel: Kernel
    engine: Engine
    temperature: Any
    scale: Any
    distances: Sequence[str] | None
    per: str

    def validate(self, layout: ParticleLayout, particles: ParticleTree) -> None:
        """Raises early what a first update would raise."""
        if self.engine.needs_one_matrix:
            widths = {"particle": (layout.dimension,), "leaf": layout.sizes, "coordinate": (1,)}
            for d in widths[self.per]:
                engine = self.engine.choose(layout.num_particles, d, layout.dtype, self.kernel)
                problem = engine.refuses((layout.num_particles, d), layout.dtype, self.kernel)
                if problem:
                    raise ValueError(problem)
        if self.distances is not None:
            chosen_leaves(layout, particles, self.distances)
        if self.scale is not None and not isinstance(self.scale, RunningScale):
            for weight in scale_weights(layout, self.scale):
                traced = isinstance(weight, Tracer)
                if not traced and not bool(jnp.all((weight > 0) & jnp.isfinite(weight))):
                    raise ValueError(
                        f"scale must be positive and finite everywhere, not {self.scale!r}."
                    )

    def groups(self, layout: ParticleLayout) -> tuple[int, ...]:
        """Shape of the bandwidth in the state."""
        if self.per == "particle":
            return ()
        return (len(layout.shapes) if self.per == "leaf" else layout.dimension,)

    def step(self, layout: ParticleLayout, updates, state: SvgdState, params):
        """One update."""
        value = self.temperature(state.count) if callable(self.temperature) else self.temperature
        temperature = jnp.asarray(value, layout.dtype)
        flags = _range_flag(temperature)
        temperature = nan_unless_positive(temperature)
        carry, scale = state.carry, self.scale
        if isinstance(scale, RunningScale):
            carry, scale = scale.update(carry, params, state.count)
        x = layout.matrices(params)
        s = [-g / temperature for g in layout.matrices(updates)]
        weights = None if scale is None else scale_weights(layout, scale)
        if weights is not None and not isinstance(self.scale, RunningScale):
            flags = flags | _range_flag(jnp.concatenate(weights))
            # A negative scale would do as its amount; traced, it can only become NaN.
            weights = [nan_unless_positive(w) for w in weights]
        if self.distances is not None:
            weights = self._chosen(layout, params, weights)
        if weights is not None:
            # z = w x, and phi = f times the sum in z with scores S / f (see the metric's module).
            factors = [jnp.where(w == 0, 1, w) for w in weights]
            x = [leaf * w for leaf, w in zip(x, weights, strict=True)]
            s = [leaf / f for leaf, f in zip(s, factors, strict=True)]
            phi, h, status, error = self._sum(layout, x, s, state, params)
            phi = [leaf * f for leaf, f in zip(phi, factors, strict=True)]
        else:
            phi, h, status, error = self._sum(layout, x, s, state, params)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in phi]))
        status = state.status | status | flags | jnp.where(finite, 0, Status.NONFINITE.value)
        return layout.tree([-leaf for leaf in phi], updates), state._replace(
            count=optax.safe_increment(state.count),
            bandwidth=h.astype(state.bandwidth.dtype),
            status=status.astype(jnp.int32),
            error=jnp.where(jnp.isnan(error), state.error, error),
            error_step=jnp.where(jnp.isnan(error), state.error_step, state.count),
            carry=carry,
        )

    def _chosen(self, layout: ParticleLayout, params, weights) -> list[Array]:
        """The weight of every coordinate, ``(d_l,)`` a leaf, zero in leaves left out."""
        if weights is None:
            weights = scale_weights(layout, 1.0)
        assert self.distances is not None
        chosen = chosen_leaves(layout, params, self.distances)
        return [w if keep else jnp.zeros_like(w) for w, keep in zip(weights, chosen, strict=True)]

    def _sum(self, layout: ParticleLayout, x, s, state: SvgdState, params):
        """Returns phi leaf by leaf, the bandwidth of each group, status bits and measured error."""
        if self.per == "particle":
            always = self.engine.needs_one_matrix
            xs, ss = layout.join(x, always=always), layout.join(s, always=always)
            h, flags = self._bandwidth(xs, params, state.count)
            phi, status, error = self._engine(_held(xs, flags), ss, h, state)
            return layout.split(phi), h, status | flags, error
        if self.per == "leaf":
            phi, widths, status, errors = [], [], jnp.zeros((), jnp.int32), []
            for matrix, scores, leaf in zip(x, s, jax.tree.leaves(params), strict=True):
                h, flags = self._bandwidth((matrix,), leaf, state.count)
                (part,), bits, error = self._engine(_held((matrix,), flags), (scores,), h, state)
                phi, widths, errors = [*phi, part], [*widths, h], [*errors, error]
                status = status | bits | flags
            return phi, jnp.stack(widths), status, jnp.max(jnp.stack(errors))
        return self._sum_by_coordinate(layout, x, s, state)

    def _sum_by_coordinate(self, layout: ParticleLayout, x, s, state: SvgdState):
        (xs,), (ss,) = layout.join(x, always=True), layout.join(s, always=True)

        def one(column):
            matrix, scores = column[0][:, None], column[1][:, None]
            h, flags = self._bandwidth((matrix,), matrix, state.count)
            (phi,), status, error = self._engine(_held((matrix,), flags), (scores,), h, state)
            return phi[:, 0], h, status | flags, error

        # Coordinates side by side as long as their kernel matrices stay small together. Particles
        # on several devices stay there if the coordinates take turns.
        n = layout.num_particles
        batch = max(1, min(layout.dimension, 4_194_304 // n**2))
        batch = None if may_be_sharded(xs) else batch
        phi, h, status, errors = jax.lax.map(one, (xs.T, ss.T), batch_size=batch)
        status = jax.lax.reduce(status, jnp.zeros((), status.dtype), jax.lax.bitwise_or, (0,))
        return layout.split((phi.T,)), h, status, jnp.max(errors)

    def _bandwidth(self, leaves: Leaves, particles, count: Array) -> tuple[Array, Array]:
        rule, dtype = self.bandwidth, leaves[0].dtype
        if isinstance(rule, MedianRule):
            h = rule.bandwidth(leaves)
        elif isinstance(rule, BandwidthRule):
            h = rule.fn(particles)
        else:
            h = rule(count) if callable(rule) else rule
        h = jnp.asarray(h, dtype)
        if h.ndim:
            raise ValueError(f"a bandwidth must be one number, but its shape is {h.shape}.")
        floor, ceiling = floor_of(dtype), ceiling_of(dtype)
        at_floor = h < floor
        flags = jnp.where(at_floor, Status.BANDWIDTH_FLOOR.value, 0) | jnp.where(
            _all_equal(at_floor, leaves), Status.COLLAPSED.value, 0
        )
        # The median rule is 0 for equal particles and NaN for those that are not finite.
        fine = ~jnp.isinf(h) if isinstance(rule, MedianRule) else (h > 0) & jnp.isfinite(h)
        flags = flags | jnp.where(fine, 0, Status.OUT_OF_RANGE.value)
        return jnp.where(at_floor, floor, jnp.where(h > ceiling, ceiling, h)), flags

    def _engine(self, x: Leaves, s: Leaves, h: Array, state: SvgdState):
        """Returns phi, status bits, and the measured error: NaN where none was due."""
        unmeasured = jnp.full((), jnp.nan, jnp.float32)
        if len(x) != 1 or len(s) != 1:
            # Many dimensions in several leaves: only the exact sum takes them without a copy.
            exact = self.engine if isinstance(self.engine, Exact) else Exact()
            return exact.stein_leaves(x, s, h, self.kernel), jnp.zeros((), jnp.int32), unmeasured
        x0, s0 = x[0], s[0]
        engine = self.engine.choose(x0.shape[0], x0.shape[1], x0.dtype, self.kernel)
        engine.require_place(x0)
        if not engine.check_every:
            phi, status = engine.stein(x0, s0, h, self.kernel)
            return (phi,), status, unmeasured
        phi, status, error = _checked(engine, self.kernel, x0, s0, h, state.status, state.count)
        return (phi,), status, error


# The functions below are compiled, so that calls outside of any jit do not compile their conditions
# each time.


@jax.jit
def _all_equal(asked: Array, leaves: Leaves) -> Array:
    """Whether all particles are one, where asked."""
    return jax.lax.cond(
        asked,
        lambda: jnp.all(jnp.stack([jnp.all(jnp.max(v, 0) == jnp.min(v, 0)) for v in leaves])),
        lambda: jnp.asarray(False),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _checked(engine: Engine, kernel: Kernel, x, s, h, status_before, count):
    """The sum by an engine whose error is measured: phi, status bits, and the error or NaN."""
    # An error found too large stays so: the exact sum serves until the bit is cleared.
    trusted = agree_over_batch((status_before & Status.INACCURATE.value) == 0)
    phi, status = jax.lax.cond(
        trusted,
        lambda: engine.stein(x, s, h, kernel),
        lambda: Exact().stein(x, s, h, kernel),
    )
    due = count % engine.check_every == 0
    unmeasured = jnp.full((), jnp.nan, jnp.float32)
    # Of a batch whose members count differently some may be due: all are measured then.
    error = jax.lax.cond(
        agree_over_batch(~due),
        lambda: unmeasured,
        lambda: measured_error(x, s, h, kernel, phi, count),
    )
    error = jnp.where(due, error, unmeasured)
    return phi, status | jnp.where(error > engine.rtol, Status.INACCURATE.value, 0), error


def _held(x: Leaves, flags: Array) -> Leaves:
    """The particles, without a derivative of their distances where the bandwidth is at its floor.

    Those that differ are out of each other's reach there, and between equal ones the derivative
    grows as 1 / h^2, beyond every dtype.
    """
    at_floor = (flags & Status.BANDWIDTH_FLOOR.value) != 0
    return tuple(jnp.where(at_floor, jax.lax.stop_gradient(leaf), leaf) for leaf in x)


def _range_flag(values: Array) -> Array:
    """The status bit of numbers that must be positive and finite; nothing inside jit can raise."""
    fine = jnp.all((values > 0) & jnp.isfinite(values))
    return jnp.where(fine, 0, Status.OUT_OF_RANGE.value)


def get_state(opt_state: PyTree) -> SvgdState:
    """Finds the state of ``svgd`` inside any nest of chains and wrappers.

    Raises:
      ValueError: if there is none, or more than one.
    """
    states = _states(opt_state)
    if len(states) != 1:
        raise ValueError(
            f"expected one SvgdState in the optimizer state, found {len(states)}: pass the part "
            "that belongs to one svgd."
        )
    return states[0]


def check(opt_state: PyTree) -> None:
    """Raises the advice for the status bits of every ``svgd`` in the optimizer state, if any.

    Call it on the host, between steps; it waits for the step to end.

    Raises:
      StatusError: with one line for each bit that is set.
      ValueError: if there is no ``svgd`` in the state.
    """
    bits = 0
    for state in _states(opt_state):
        bits |= int(np.bitwise_or.reduce(np.asarray(state.status).reshape(-1)))
    if bits:
        raise StatusError(bits, explain(bits))


def _states(opt_state: PyTree) -> list[SvgdState]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, SvgdState))
    states = [leaf for leaf in leaves if isinstance(leaf, SvgdState)]
    if not states:
        raise ValueError("there is no SvgdState in the optimizer state: is svgd in its chain?")
    return states
