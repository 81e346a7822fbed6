"""Learning a bandwidth, or scales for each dimension, through the sampler, as an experiment.

One step of the run is a whole inner run of ``svgd`` from the same particles, the gradient of a loss
of its final particles, and a step of the optimizer on the logarithms of bandwidth and scales. The
run's particles are those of the latest inner run, its ``model_state`` what is learned: the numbers
after the step that this inner run led to.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from yggdrax import plots
from yggdrax.diagnostics import ksd_squared, mmd_squared
from yggdrax.experiment.config import ConfigError, ExperimentConfig, ProblemConfig, require_positive
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.experiment.steps import Stepper, make_plain_optimizer, spread
from yggdrax.experiment.toys import Started
from yggdrax.kernels import MedianRule
from yggdrax.particles import particle_grads
from yggdrax.status import Status
from yggdrax.targets import Gaussian
from yggdrax.transform import SvgdState, get_state, svgd
from yggdrax.typing import Array, Key, ParticleTree, PyTree
from yggdrax.unroll import unrolled

__all__ = ["LearnBandwidthProblem"]


@dataclasses.dataclass
class LearnBandwidthProblem(ProblemConfig):
    """A bandwidth for an axis-aligned Gaussian, learned by gradients of whole runs.

    ``num_steps``, ``optimizer`` and the checkpoints are those of the outer loop; ``svgd.bandwidth``
    is where it starts, ``"median"`` for the median rule of the particles in which a run by the
    median rule ends: far below that the loss is flat, rough, and then steep.

    Attributes:
      variances: of the target, one for each dimension.
      start_scale: standard deviation of the initial particles.
      inner_steps: steps of ``optax.chain(svgd, adam)`` in one inner run.
      inner_learning_rate: Adam's.
      per_dimension: whether scales for each dimension are learned besides the bandwidth.
      loss: ``"mmd"``, to held-out exact samples, or ``"ksd"``, which needs none.
      loss_bandwidth: of the loss's own kernel, fixed.
      held_out: number of exact samples.
    """

    variances: tuple[float, ...] = (1.0, 9.0)
    start_scale: float = 0.5
    inner_steps: int = 30
    inner_learning_rate: float = 0.3
    per_dimension: bool = True
    loss: str = "mmd"
    loss_bandwidth: float = 2.0
    held_out: int = 2000

    def validate(self) -> None:
        """Checks ranges."""
        names = ("start_scale", "inner_learning_rate", "loss_bandwidth")
        require_positive(**{name: getattr(self, name) for name in names})
        if not self.variances or not all(0 < v < np.inf for v in self.variances):
            raise ConfigError(f"variances must be positive numbers, not {self.variances!r}")
        if self.inner_steps < 1 or self.held_out < 2:
            raise ConfigError(
                "inner_steps must be at least 1 and held_out at least 2, not "
                f"{self.inner_steps!r} and {self.held_out!r}"
            )
        if self.loss not in ("mmd", "ksd"):
            raise ConfigError(f"loss must be 'mmd' or 'ksd', not {self.loss!r}")

    def build(self, seed: int) -> Problem:
        """The target and its held-out samples, a function of the seed."""
        variances = np.array(self.variances, np.float32)
        gaussian = Gaussian(np.zeros_like(variances), np.diag(variances))
        target = Started(gaussian, 0.0, self.start_scale)
        return _Learned(self, target, gaussian.sample(jax.random.key(seed), self.held_out))


class _Stepper(Stepper):
    """Takes outer steps: everything else of a run is as usual."""

    problem: "_Learned"

    def _state_zero(self, key: Key) -> RunState:
        state = super()._state_zero(key)
        bandwidth: Any = self.config.svgd.bandwidth
        if bandwidth == "median":
            bandwidth = MedianRule().bandwidth((self.run_by_median(state.particles),))
        learned = {"log_bandwidth": jnp.log(jnp.asarray(bandwidth, state.particles.dtype))}
        if self.problem.options.per_dimension:
            learned["log_scales"] = jnp.zeros(state.particles.shape[1:], state.particles.dtype)
        inner = get_state(state.opt_state)
        outer = make_plain_optimizer(self.config).init(learned)
        return state._replace(model_state=learned, opt_state=(outer, inner))

    def _one_step(self, state: RunState, batch: PyTree) -> RunState:
        del batch
        start = self._first_particles(state.key)

        def loss(learned):
            particles, inner = self.inner_run(learned, start)
            return self.problem.loss(particles), (particles, inner)

        slopes, (particles, inner) = jax.grad(loss, has_aux=True)(state.model_state)
        optimizer = make_plain_optimizer(self.config)
        outer: Any = state.opt_state
        updates, outer = optimizer.update(slopes, outer[0], state.model_state)
        learned = jax.tree.map(jnp.add, state.model_state, updates)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(s)) for s in jax.tree.leaves(slopes)]))
        status = inner.status | jnp.where(finite, 0, Status.NONFINITE.value)
        inner = inner._replace(status=status.astype(inner.status.dtype))
        return self.keep_finite(
            state, RunState(state.step + 1, particles, learned, (outer, inner), state.key)
        )

    def inner_run(self, learned: PyTree, start: ParticleTree) -> tuple[ParticleTree, SvgdState]:
        """The final particles and svgd's state, differentiable in what is learned."""
        scale = jnp.exp(learned["log_scales"]) if "log_scales" in learned else None
        return self._run(jnp.exp(learned["log_bandwidth"]), scale, start)

    def run_by_median(self, start: ParticleTree) -> ParticleTree:
        """The final particles of a run by the median rule at each step."""
        return self._run("median", None, start)[0]

    def _run(self, bandwidth, scale, start: ParticleTree) -> tuple[ParticleTree, SvgdState]:
        options, inner = self.config.svgd, self.problem.options
        transformation = svgd(
            bandwidth,
            kernel=options.kernel,
            engine=options.engine,
            temperature=options.temperature,
            scale=scale,
        )
        tx = optax.chain(transformation, optax.adam(inner.inner_learning_rate))
        run = unrolled(self.problem.target, tx, start, inner.inner_steps)
        return run.particles, get_state(run.opt_state)

    def blame(self, state: RunState) -> str:
        """Says which numbers led to a gradient that is not finite."""
        learned = jax.tree.map(lambda v: np.exp(np.asarray(v)).tolist(), state.model_state)
        return f"NaN or infinite values in the gradient of the inner run with {learned}"

    def _measurements(self, state: RunState, train: PyTree, test: PyTree):
        del train
        inner = get_state(state.opt_state)
        return {
            "log_density": jnp.mean(jax.vmap(self.problem.target)(state.particles)),
            "spread": spread(state.particles),
            "bandwidth": jnp.exp(state.model_state["log_bandwidth"]),
            "status": inner.status,
            "error": inner.error,
            "error_step": inner.error_step,
            **self.problem.evaluate(state, test),
        }


class _Learned(Problem):
    """Watches the loss and the widths; reports them beside those of the median rule."""

    target: Started
    watch = ("loss", "width_error")
    stepper_type = _Stepper

    def __init__(self, options: LearnBandwidthProblem, target: Started, held_out: Array) -> None:
        super().__init__(target, test=held_out)
        self.options = options

    def loss(self, particles: Array) -> Array:
        """MMD squared to the held-out samples, or KSD squared."""
        h = self.options.loss_bandwidth
        if self.options.loss == "ksd":
            scores = -particle_grads(self.target, particles)
            return ksd_squared(particles, scores, h)
        return mmd_squared(particles, self.test, h)

    def evaluate(self, state: RunState, test: PyTree) -> dict[str, Array]:
        """The loss of the latest inner run, and the largest relative error of a width."""
        del test
        exact = jnp.sqrt(jnp.asarray(self.options.variances))
        widths = jnp.std(state.particles, axis=0)
        scales = state.model_state.get("log_scales", jnp.zeros_like(exact))
        named = {f"scale_{i}": jnp.exp(s) for i, s in enumerate(scales)}
        return {
            "loss": self.loss(state.particles),
            "width_error": jnp.max(jnp.abs(widths / exact - 1)),
            **named,
        }

    def report(
        self, config: ExperimentConfig, state: RunState, initial: RunState
    ) -> dict[str, Any]:
        """Loss and widths: of what was learned, of the start, of the median rules."""
        stepper = _Stepper(config, self)

        @jax.jit
        def figures(state: RunState, initial: RunState):
            kept = {"log_bandwidth": jnp.log(MedianRule().bandwidth((initial.particles,)))}
            runs = {
                "learned": stepper.inner_run(state.model_state, initial.particles)[0],
                "start": stepper.inner_run(initial.model_state, initial.particles)[0],
                "median_rule_of_start": stepper.inner_run(kept, initial.particles)[0],
                "median_rule_each_step": stepper.run_by_median(initial.particles),
            }
            return {
                name: {"loss": self.loss(x), "widths": jnp.std(x, axis=0)}
                for name, x in runs.items()
            }

        exact = {"exact_widths": jnp.sqrt(jnp.asarray(self.options.variances))}
        learned = {
            name.removeprefix("log_"): jnp.exp(value) for name, value in state.model_state.items()
        }
        return figures(state, initial) | exact | learned

    def references(self, summary: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Where the median rule is."""
        return {"loss": {"median rule": float(summary["median_rule_each_step"]["loss"])}}

    def pictures(self, state: RunState, initial: RunState):
        """The first two coordinates over the density, for targets in the plane."""
        if len(self.options.variances) != 2:
            return {}
        figure = plots.density(
            state.particles,
            self.target.inner,
            initial=initial.particles,
            samples=self.test,
            title=f"after {int(state.step)} outer steps",
        )
        return {"density": figure}
