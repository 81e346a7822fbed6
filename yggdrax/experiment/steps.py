"""The steps of a run as pure functions of the configuration and the state: no files, no clock.

Everything random is a function of (seed, step): the initial particles, the noise inside a target,
and the minibatches. A run may therefore be cut into calls of any length, in any number of
processes, and computes the same numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from yggdrax.data import epoch_order
from yggdrax.experiment.config import ConfigError, ExperimentConfig
from yggdrax.experiment.places import Places
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.export import leaf_names
from yggdrax.particles import init_model_state, init_particles, particle_grads, warn_if_equal
from yggdrax.status import Status
from yggdrax.stein.explain import explain
from yggdrax.transform import SvgdState, get_state, svgd
from yggdrax.typing import Array, Key, ParticleTree, PyTree

__all__ = [
    "Stepper",
    "batch_rows",
    "fit",
    "make_optimizer",
    "make_plain_optimizer",
    "make_stepper",
    "spread",
]

# What the run's key is folded with, so that no two uses share random numbers.
_INIT, _NOISE, _BATCHES, _MODEL_STATE = 0, 1, 2, 3

# The log density is watched on at most this many training rows.
_MEASURED_ROWS = 2048


def make_plain_optimizer(config: ExperimentConfig) -> optax.GradientTransformation:
    """Returns the optimizer without ``svgd``."""
    options = config.optimizer
    rate: optax.ScalarOrSchedule = options.learning_rate
    if options.schedule == "cosine":
        rate = optax.cosine_decay_schedule(options.learning_rate, config.num_steps, alpha=0.01)
    return {
        "adam": optax.adam,
        "rmsprop": optax.rmsprop,
        "adagrad": optax.adagrad,
        "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
        "sgd": optax.sgd,
    }[options.name](rate)


def make_optimizer(config: ExperimentConfig) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.chain(svgd(...), optimizer)``."""
    svgd_options = config.svgd
    transformation = svgd(
        svgd_options.bandwidth,  # pyright: ignore[reportArgumentType]  (checked when frozen)
        kernel=svgd_options.kernel,
        engine=svgd_options.engine,
        temperature=svgd_options.temperature,
        per=svgd_options.per,
    )
    return optax.chain(transformation, make_plain_optimizer(config))


def make_stepper(config: ExperimentConfig, problem: Problem) -> "Stepper":
    """The stepper of the problem's own kind, or the usual one."""
    return (problem.stepper_type or Stepper)(config, problem)


class Stepper:
    """The compiled functions of one run. Three executables, whatever the lengths of the calls.

    Args:
      config: the frozen configuration.
      problem: what ``config.problem.build(config.seed)`` returned.

    Raises:
      ConfigError: for a minibatch of more rows than there are.
    """

    def __init__(self, config: ExperimentConfig, problem: Problem) -> None:
        """Builds the functions; nothing is compiled before the first call."""
        self.config = config
        self.problem = problem
        self.optimizer = make_optimizer(config)
        self._rows = num_rows(problem.train)
        if config.batch_size > self._rows:
            raise ConfigError(
                f"batch_size must be at most the {self._rows} rows of the training data, "
                f"not {config.batch_size!r}"
            )
        self.use(None)
        self._initial = jax.jit(self._state_zero)
        self._advance = jax.jit(self._many_steps, donate_argnums=0)
        self._measure = jax.jit(self._measurements)

    def use(self, places: Places | None) -> None:
        """Keeps the state and the data on a mesh from now on, or on one device."""
        self._places = places
        data = (self.problem.train, self.problem.test)
        self._train, self._test = data if places is None else places.data(data)

    def initial_state(self) -> RunState:
        """The state before the first step, a function of the seed."""
        key = jax.random.key(self.config.seed)
        if self._places is None:
            state = self._initial(key)
        else:
            state = self._places.initial(self._state_zero, key)
        warn_if_equal(state.particles)  # inside jit it cannot look at them
        return state

    def advance(self, state: RunState, count: int) -> RunState:
        """Takes ``count`` steps; the state is donated.

        The number is traced: no length of a call compiles again. A step whose direction is NaN or
        infinite is refused: the state stays as before that step but for its status bit, and no
        further step is taken.
        """
        return self._advance(state, self._train, count)

    def measure(self, state: RunState) -> dict[str, Any]:
        """The numbers one watches, as Python numbers; a function of the state alone."""
        values = jax.device_get(self._measure(state, self._train, self._test))
        return {name: value.item() for name, value in values.items()}

    def explain(self, state: RunState) -> str:
        """One line: which sum serves these particles, and why."""
        options: Any = self.config.svgd
        if options.per != "particle":
            return f"{options.engine}: one kernel for each {options.per}"
        return str(
            explain(
                state.particles, options.bandwidth, kernel=options.kernel, engine=options.engine
            )
        )

    def status(self, state: RunState) -> int:
        """The status bits of the latest step."""
        return int(get_state(state.opt_state).status)

    def _state_zero(self, key: Key) -> RunState:
        target, size = self.problem.target, self.config.num_particles
        particles = self._first_particles(key)
        model_state = init_model_state(jax.random.fold_in(key, _MODEL_STATE), target, size)
        opt_state = self.optimizer.init(particles)
        return RunState(jnp.zeros((), jnp.int32), particles, model_state, opt_state, key)

    def _first_particles(self, key: Key) -> ParticleTree:
        key = jax.random.fold_in(key, _INIT)
        return init_particles(key, self.problem.target, self.config.num_particles)

    def _many_steps(self, state: RunState, train: PyTree, count) -> RunState:
        size, end = self.config.batch_size, state.step + count

        def go_on(carry):
            return (carry[0].step < end) & ~_failed(carry[0].opt_state)

        if not size:
            return jax.lax.while_loop(go_on, lambda c: (self._one_step(c[0], train),), (state,))[0]
        batches = self._rows // size  # of one epoch
        key = jax.random.fold_in(state.key, _BATCHES)

        def body(carry):
            state, epoch, order = carry
            now = state.step // batches
            order = jax.lax.cond(
                now == epoch, lambda: order, lambda: epoch_order(key, now, self._rows, size)
            )
            rows = order[state.step % batches]
            batch = jax.tree.map(lambda leaf: leaf[rows], train)
            return self._one_step(state, batch), now, order

        none = (jnp.full((), -1, jnp.int32), jnp.zeros((batches, size), jnp.int32))
        return jax.lax.while_loop(go_on, body, (state, *none))[0]

    def _one_step(self, state: RunState, batch: PyTree) -> RunState:
        grads, model_state = self._gradients(state, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.particles)
        particles = optax.apply_updates(state.particles, updates)
        return self.keep_finite(
            state, RunState(state.step + 1, particles, model_state, opt_state, state.key)
        )

    def keep_finite(self, old: RunState, new: RunState) -> RunState:
        """The new state; the old one with the new status if the step was not finite."""
        return RunState(*_unless(_failed(new.opt_state), new[:4], old[:4]), key=old.key)

    def _gradients(self, state: RunState, batch: PyTree) -> tuple[PyTree, PyTree]:
        key = jax.random.fold_in(jax.random.fold_in(state.key, _NOISE), state.step)
        return particle_grads(
            self.problem.target, state.particles, batch, key=key, model_state=state.model_state
        )

    def blame(self, state: RunState) -> str:
        """Says in which leaves and members the gradient of the refused step is not finite."""
        train, size = self.problem.train, self.config.batch_size
        if size:
            rows = batch_rows(self.config.seed, int(state.step), self._rows, size)
            train = jax.tree.map(lambda leaf: leaf[rows], train)
        grads, _ = jax.jit(self._gradients)(state, train)
        lines = []
        for name, leaf in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True):
            finite = np.isfinite(np.asarray(leaf, np.float32).reshape(len(leaf), -1)).all(axis=1)
            if not finite.all():
                lines.append(f"{name} of members {_listed(np.flatnonzero(~finite))}")
        where = "; ".join(lines) or "no leaf, but in the sum over the particles"
        return f"NaN or infinite values in the gradient of {where}"

    def _measurements(self, state, train, test):
        svgd_state = get_state(state.opt_state)
        batch = jax.tree.map(lambda leaf: leaf[:_MEASURED_ROWS], train)
        log_density = jax.vmap(lambda p, m: self.problem.target.apply(p, m, batch)[0])
        return {
            "log_density": jnp.mean(log_density(state.particles, state.model_state)),
            "spread": spread(state.particles),
            # The mean, where each leaf or coordinate has a kernel of its own; none has been used
            # before the first step.
            "bandwidth": jnp.where(state.step > 0, jnp.mean(svgd_state.bandwidth), jnp.nan),
            "status": svgd_state.status,
            "error": svgd_state.error,
            "error_step": svgd_state.error_step,
            **self.problem.evaluate(state, test),
        }


def _failed(opt_state: PyTree) -> Array:
    return (get_state(opt_state).status & Status.NONFINITE.value) != 0


def _unless(failed: Array, new: PyTree, old: PyTree) -> PyTree:
    """The new state, or the old one with the status of the new."""

    def choose(a, b):
        kept = jax.tree.map(lambda new, old: jnp.where(failed, old, new), a, b)
        return kept._replace(status=a.status) if isinstance(a, SvgdState) else kept

    return jax.tree.map(choose, new, old, is_leaf=lambda node: isinstance(node, SvgdState))


def _listed(members: np.ndarray) -> str:
    shown = ", ".join(map(str, members[:5]))
    return f"{shown} and {len(members) - 5} more" if len(members) > 5 else shown


def fit(config: ExperimentConfig, problem: Problem, start: RunState) -> RunState:
    """A whole run in memory, without files, from the particles of ``start``; the final state."""
    stepper = Stepper(config, problem)
    opt_state = jax.jit(stepper.optimizer.init)(start.particles)
    state = start._replace(step=jnp.zeros((), jnp.int32), opt_state=opt_state)
    # Advancing donates the state, and the caller's start must survive.
    return stepper.advance(jax.tree.map(jnp.copy, state), config.num_steps)


def spread(particles: ParticleTree) -> Array:
    """Root mean square distance of the particles from their mean, all leaves together; ()."""
    squares = jax.tree.map(
        lambda leaf: jnp.sum(jnp.square(leaf - jnp.mean(leaf, 0))) / leaf.shape[0], particles
    )
    return jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.float32(0)))


def num_rows(data: PyTree) -> int:
    """Rows of the data, or 0 without any."""
    leaves = jax.tree.leaves(data)
    return leaves[0].shape[0] if leaves else 0


def batch_rows(seed: int, step: int, rows: int, batch_size: int) -> Array:
    """The rows ``(batch_size,)`` of the minibatch of one step, as a run takes them.

    Example:
      >>> batch_rows(0, 10, 6, 2).shape
      (2,)
    """
    key = jax.random.fold_in(jax.random.key(seed), _BATCHES)
    epoch, index = divmod(step, rows // batch_size)
    return epoch_order(key, epoch, rows, batch_size)[index]
