"""Whole runs as functions: values, gradients in everything that goes in, memory, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import yggdrax as yg
from yggdrax.status import Status
from yggdrax.stein.fourier import Fourier

N, D, STEPS = 48, 2, 20


def start(dtype=np.float64):
    return np.random.default_rng(0).standard_normal((N, D)).astype(dtype)


def everything(dtype=np.float64):
    """All that a run may be differentiated in."""
    return {
        "h": np.asarray(0.8, dtype),
        "scale": np.array([1.0, 1.5], dtype),
        "temperature": np.asarray(1.3, dtype),
        "learning_rate": np.asarray(0.1, dtype),
        "start": start(dtype),
        "mean": np.array([0.5, -0.3], dtype),
        "cholesky": np.array([[1.0, 0.0], [0.4, 1.6]], dtype),
    }


def final(inputs, engine, **options):
    covariance = inputs["cholesky"] @ inputs["cholesky"].T
    target = yg.Gaussian(inputs["mean"], covariance)
    tx = optax.chain(
        yg.svgd(
            inputs["h"], scale=inputs["scale"], temperature=inputs["temperature"], engine=engine
        ),
        optax.adam(inputs["learning_rate"]),
    )
    return yg.unrolled(target, tx, inputs["start"], STEPS, **options).particles


ENGINES = {
    "exact": yg.Exact(),
    "tiles": yg.Exact(16),
    # The adjoint is that of the sum to within rtol, which is so taken far below the tolerance.
    "fourier": Fourier(rtol=1e-10, max_modes=63),
    # By angle, with an expansion of low order: a coarse sum, whose gradient is exact all the same.
    "tree": yg.Tree(leaf_size=4, theta=0.9, order=1, exact_above=1.0),
}


def test_the_tree_of_these_particles_has_far_pairs(x64):
    lists = ENGINES["tree"].topology(jnp.asarray(start()), 0.8, yg.RBF()).lists
    assert int(jnp.sum(lists.far_count)) > 10 and int(jnp.sum(lists.near_count)) > 10


@pytest.mark.parametrize("name", list(ENGINES))
def test_the_gradient_of_twenty_steps_is_the_central_difference(name, x64):
    inputs = everything()
    weights = np.random.default_rng(1).standard_normal((N, D))

    @jax.jit
    def loss(inputs):
        return jnp.sum(weights * jnp.sin(final(inputs, ENGINES[name])))

    gradient = jax.jit(jax.grad(loss))(inputs)
    rng = np.random.default_rng(2)
    for leaf in inputs:
        # One random direction for each leaf, so that none hides behind another.
        direction = rng.standard_normal(np.shape(inputs[leaf]))
        step = 1e-6
        sides = [loss({**inputs, leaf: inputs[leaf] + sign * step * direction}) for sign in (1, -1)]
        difference = (sides[0] - sides[1]) / (2 * step)
        slope = np.sum(np.asarray(gradient[leaf]) * direction)
        # Differences of 1e-6 keep nine digits of a loss of order 10, over a slope of order 1.
        np.testing.assert_allclose(slope, difference, rtol=1e-5, atol=1e-7, err_msg=leaf)
        assert abs(slope) > 1e-4, leaf


def test_the_median_rule_is_differentiated_as_the_pair_that_is_the_median(x64):
    target = yg.Gaussian(np.zeros(D), np.eye(D))
    tx = optax.chain(yg.svgd("median"), optax.sgd(0.3))

    @jax.jit
    def loss(x):
        return jnp.sum(jnp.cos(yg.unrolled(target, tx, x, 5).particles))

    direction = np.random.default_rng(3).standard_normal((N, D))
    step = 1e-7  # so small that the median stays the same pair
    difference = (loss(start() + step * direction) - loss(start() - step * direction)) / (2 * step)
    slope = jnp.sum(jax.grad(loss)(start()) * direction)
    np.testing.assert_allclose(slope, difference, rtol=1e-5)


def test_gradients_reach_the_parameters_of_a_module(x64):
    class Mean(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(1, D, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

        def __call__(self, particle, batch=None, *, key=None):
            del batch, key
            return -0.5 * jnp.sum((particle - self.layer(jnp.ones((1, 1)))[0]) ** 2)

    graph, state = nnx.split(Mean())
    tx = optax.chain(yg.svgd(1.0), optax.sgd(0.2))

    @jax.jit
    def loss(state):
        return jnp.sum(yg.unrolled(nnx.merge(graph, state), tx, start(), 10).particles ** 2)

    gradient = jax.grad(loss)(state)
    bias = state["layer"]["bias"]
    step = 1e-6
    sides = []
    for sign in (1, -1):
        moved = jax.tree.map(lambda leaf: leaf, state)
        moved["layer"]["bias"][...] = bias[...] + sign * step * np.array([1.0, -2.0])
        sides.append(loss(moved))
    slope = jnp.sum(gradient["layer"]["bias"][...] * np.array([1.0, -2.0]))
    np.testing.assert_allclose(slope, (sides[0] - sides[1]) / (2 * step), rtol=1e-5)


def test_checkpointing_changes_memory_and_nothing_else():
    inputs = everything(np.float32)

    def gradient(**options):
        f = jax.jit(jax.grad(lambda v: jnp.sum(final(v, "exact", **options) ** 2)))
        return f(inputs), f.lower(inputs).compile().memory_analysis().temp_size_in_bytes

    (plain, more), (saved, less) = gradient(checkpoint=False), gradient()
    kept, _ = gradient(policy=jax.checkpoint_policies.dots_saveable)
    for leaf in inputs:
        # Recomputed by the same code; only fusion may differ.
        np.testing.assert_allclose(plain[leaf], saved[leaf], rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(plain[leaf], kept[leaf], rtol=2e-3, atol=1e-4)
    assert less <= more


def test_memory_grows_with_steps_times_particles_not_with_pairs():
    n, steps = 10_000, 50
    target = yg.Gaussian(np.zeros(3, np.float32), np.eye(3, dtype=np.float32))

    def loss(h, x):
        tx = optax.chain(yg.svgd(h, engine="exact"), optax.adam(0.1))
        return jnp.sum(yg.unrolled(target, tx, x, steps).particles ** 2)

    x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    h = jax.ShapeDtypeStruct((), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(h, x).compile()
    # Particles and Adam's two moments of every step are 18 MB; one (N, N) matrix would be 400 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6


def test_a_sampled_run_is_the_unrolled_run():
    target, key = yg.Banana(), jax.random.key(0)
    tx = optax.chain(yg.svgd(0.5), optax.adam(0.1))
    run = yg.sample(target, key, 10, 7, optimizer=tx)
    begin = yg.init_particles(key, target, 10)
    again = jax.jit(lambda x: yg.unrolled(target, tx, x, 7).particles)(begin)
    np.testing.assert_allclose(run.particles, again, rtol=1e-6)
    halves = yg.unrolled(target, tx, begin, 3)
    halves = yg.unrolled(target, tx, halves.particles, 4, opt_state=halves.opt_state)
    np.testing.assert_allclose(halves.particles, again, rtol=1e-5)
    assert int(yg.get_state(halves.opt_state).count) == 7


def test_a_batch_may_be_a_function_of_the_step():
    data = jnp.arange(6.0).reshape(3, 2)

    def log_density(particle, batch, *, key=None):
        del key
        return -0.5 * jnp.sum((particle - batch) ** 2)

    tx = optax.chain(yg.svgd(1.0), optax.sgd(1.0))
    x = jnp.zeros((1, 2))
    # One particle follows its score: after each step it is at that step's datum.
    run = yg.unrolled(log_density, tx, x, 3, batch=lambda step: data[step])
    np.testing.assert_allclose(run.particles[0], data[2], rtol=1e-6)


def test_a_bandwidth_driven_to_either_end_keeps_finite_gradients():
    x = start(np.float32)

    @jax.jit
    def slope_and_state(log_h):
        def loss(log_h):
            tx = optax.chain(yg.svgd(jnp.exp(log_h)), optax.adam(0.1))
            run = yg.unrolled(yg.Gaussian(np.zeros(D), np.eye(D)), tx, x, 5)
            return jnp.sum(run.particles**2), run.opt_state

        return jax.grad(loss, has_aux=True)(log_h)

    for log_h in (-200.0, -30.0, 0.0, 30.0, 80.0):
        slope, opt_state = slope_and_state(jnp.float32(log_h))
        assert np.isfinite(slope)
        at_floor = bool(int(yg.get_state(opt_state).status) & Status.BANDWIDTH_FLOOR)
        assert at_floor == (log_h < -34.6)  # the floor is 1e-15
        # At both ends no change of h matters: the kernel reaches nobody, or everybody alike.
        assert (abs(slope) > 1e-3) == (log_h == 0)


def test_coincident_particles_have_finite_gradients():
    x = np.zeros((6, D), np.float32)
    x[4:] = 1.0

    def loss(h, x):
        tx = optax.chain(yg.svgd(h), optax.sgd(0.1))
        target = yg.Gaussian(np.zeros(D), np.eye(D))
        return jnp.sum(yg.unrolled(target, tx, x, 5).particles ** 3)

    slopes = jax.grad(loss, argnums=(0, 1))(jnp.float32(0.7), x)
    assert all(np.isfinite(s).all() for s in slopes)
    assert abs(slopes[0]) > 0


def test_a_step_that_is_not_finite_is_flagged_and_explained():
    def log_density(particle, batch=None, *, key=None):
        del key
        return -0.5 * jnp.sum(particle**2) * batch

    tx = optax.chain(yg.svgd(1.0), optax.sgd(0.1))
    scores = jnp.array([1.0, jnp.nan, 1.0])
    run = yg.unrolled(log_density, tx, start(np.float32), 3, batch=lambda step: scores[step])
    with pytest.raises(yg.StatusError, match=r"not finite|NaN"):
        yg.check(run.opt_state)


def test_refusals_say_what_to_do():
    tx = optax.chain(yg.svgd(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match="num_steps must be an integer"):
        yg.unrolled(yg.Banana(), tx, start(np.float32), -1)
    with pytest.raises(ValueError, match="there is no SvgdState"):
        yg.unrolled(yg.Banana(), optax.sgd(0.1), start(np.float32), 1)

    def last(h):
        chain = optax.chain(yg.svgd(h), optax.sgd(0.1))
        return yg.unrolled(yg.Banana(), chain, start(np.float32), 2).particles

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(last, (1.0,), (1.0,))
