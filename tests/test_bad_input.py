"""What is refused with a name and a remedy, and what is flagged where nothing can be raised."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import yggdrax as yg
from yggdrax import targets
from yggdrax.particles import EqualParticlesWarning
from yggdrax.stein import phi as tree_sum
from yggdrax.stein.check import measured_error
from yggdrax.stein.topology import _refresh

X = jnp.array([[1.0, 0.5], [-1.0, 0.0], [0.3, -2.0]])


def one_step(x, **options):
    tx = yg.svgd(options.pop("bandwidth", 1.0), engine="exact", **options)
    return tx.update(x, tx.init(x), x)


@pytest.mark.parametrize(
    ("option", "value", "is_nan"),
    [
        ("temperature", -1.0, True),
        ("temperature", 0.0, True),
        ("temperature", math.inf, False),
        ("scale", -1.0, True),
        ("bandwidth", math.inf, False),
        ("bandwidth", math.nan, True),
        ("bandwidth", -1.0, False),
        ("bandwidth", 0.0, False),
    ],
)
def test_a_traced_number_out_of_range_is_flagged(option, value, is_nan):
    updates, state = jax.jit(lambda v: one_step(X, **{option: v}))(value)
    assert yg.Status.OUT_OF_RANGE in yg.Status(int(state.status))
    assert bool(jnp.all(jnp.isnan(updates))) is is_nan
    with pytest.raises(yg.StatusError, match="OUT_OF_RANGE: the temperature"):
        yg.check(state)
    if option == "bandwidth" and value == math.inf:  # every kernel value is 1: the mean score
        np.testing.assert_allclose(updates, jnp.broadcast_to(X.mean(0), X.shape), rtol=1e-6)


def test_a_schedule_of_the_temperature_below_zero_is_flagged():
    updates, state = one_step(X, temperature=lambda count: 0.5 - count)
    assert int(state.status) == 0 and bool(jnp.all(jnp.isfinite(updates)))
    tx = yg.svgd(1.0, temperature=lambda count: 0.5 - count)
    updates, state = tx.update(X, state, X)
    assert yg.Status.OUT_OF_RANGE in yg.Status(int(state.status))


@pytest.mark.parametrize("option", ["temperature", "scale"])
def test_the_gradient_through_a_number_out_of_range_is_nan(option):
    slope = jax.jit(jax.grad(lambda v: jnp.sum(one_step(X, **{option: v})[0] ** 2)))
    assert bool(jnp.isnan(slope(0.0))) and bool(jnp.isfinite(slope(2.0)))


def test_a_second_derivative_through_a_loop_is_refused():
    def once(h, x):
        return x + 0.3 * yg.exact_phi(x, -x, h)

    def looped(h):
        return jnp.sum(jax.lax.scan(lambda x, _: (once(h, x), None), X, None, length=2)[0] ** 2)

    with pytest.raises(NotImplementedError, match=r"a loop .* differentiated twice"):
        jax.grad(jax.grad(looped))(0.7)
    # One sum may be differentiated twice; the differences are of float32, about 1e-3 here.
    slope = jax.grad(lambda h: jnp.sum(once(h, X) ** 2))
    difference = (slope(0.71) - slope(0.69)) / 0.02
    np.testing.assert_allclose(jax.grad(slope)(0.7), difference, rtol=1e-2)


@pytest.mark.parametrize("phi", [yg.exact_phi, yg.svgd_phi])
def test_a_traced_bandwidth_that_is_not_positive_gives_nan(phi):
    total = jax.jit(lambda h: phi(X, X, h))
    assert bool(jnp.all(jnp.isnan(total(-1.0))))
    assert bool(jnp.all(jnp.isfinite(total(1.0))))


@pytest.mark.parametrize("steps", [1, 5])
def test_gradients_stay_finite_where_the_median_is_zero(steps):
    # The derivative between equal particles grows as 1 / h^2, and h is at its floor of 1e-15.
    target = yg.LogDensity(lambda p: -0.5 * jnp.sum(p**2), init=jnp.zeros(2))
    tx = optax.chain(yg.svgd("median", engine="exact"), optax.sgd(0.3))
    x = jnp.concatenate([jnp.ones((5, 2)), jnp.array([[0.3, -1.0]])])
    slope = jax.grad(lambda x: jnp.mean(yg.unrolled(target, tx, x, steps).particles ** 3))(x)
    # Far apart in units of h, each particle follows its own score / 6, the equal five theirs.
    shares = jnp.array([5 / 6] * 5 + [1 / 6])[:, None]
    kept = (1 - 0.3 * shares) ** steps
    own = 3 * (kept * x) ** 2 / 12
    expected = own[-1] * kept[-1]
    np.testing.assert_allclose(slope[-1], expected, rtol=1e-4)
    assert bool(jnp.all(jnp.isfinite(slope)))


def test_the_measured_error_does_not_drift_with_the_number_of_particles():
    # Kernel values just below 1, added up in a row in float32, would be off by 1e-5.
    x, h = jnp.linspace(-0.05, 0.05, 30_000)[:, None], jnp.float32(1)
    s = jnp.ones_like(x)
    assert measured_error(x, s, h, yg.RBF(), yg.exact_phi(x, s, h), jnp.array(0)) < 1e-6


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_measured_error_knows_no_unit(size):
    x, h = jnp.linspace(-1.0, 1.0, 50)[:, None], jnp.float32(1e3)
    s = size * jnp.cos(7 * x)
    phi = yg.exact_phi(x, s, h)
    wrong = measured_error(x, s, h, yg.RBF(), 1.01 * phi, jnp.array(0))
    right = measured_error(x, s, h, yg.RBF(), phi, jnp.array(0))
    assert right < 1e-4
    if size > 1:  # else the repulsion is all there is, and the scores go unseen
        np.testing.assert_allclose(wrong, 0.01, rtol=0.02)


def test_engines_refuse_at_init_what_they_would_refuse_later():
    for engine, words in (
        (yg.Fourier(), "d = 4"),
        (yg.Tree(ordering="morton"), "Morton order"),
        (yg.Fourier(rtol=1e-9), "rtol = 1e-09"),
    ):
        particles = jnp.ones((4, 4 if "rtol" not in words else 2))
        with pytest.raises(ValueError, match=words):
            yg.svgd(1.0, engine=engine).init(particles)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: yg.Fourier(fallback="exact"), TypeError, "fallback must be an engine"),
        (lambda: yg.Fourier(max_modes=33.5), ValueError, "max_modes must be an integer"),
        (lambda: yg.Tree(check_every=1.5), ValueError, "check_every"),
        (lambda: yg.Tree(rtol="a"), TypeError, "rtol must be a number"),
        (lambda: yg.Tree(order=True), ValueError, "order must be one of"),
        (lambda: yg.build_svgd_topology(X, 1.0, reuse=None), TypeError, "reuse must be a number"),
        (lambda: yg.svgd_phi_from_topology(X, X, 1.0, None), TypeError, "build_svgd_topology"),
        (lambda: yg.Tree(theta=True), TypeError, "theta, unless None, must be a number"),
        (lambda: yg.Fourier(rtol="1e-3"), TypeError, "rtol must be a number"),
        (lambda: yg.Fourier(rtol=jnp.float32(1e-3)), TypeError, "rtol must be a number"),
        (lambda: yg.Auto(rtol=np.array(1e-3)), TypeError, "rtol must be a number"),
        (lambda: yg.Auto(check_every=2**40), ValueError, "check_every must be 0"),
        (lambda: yg.Exact().stein(X, X[:, :1], 1.0, yg.RBF()), ValueError, "of one shape"),
        (lambda: yg.Fourier().stein(X, X[1:], 1.0, yg.RBF()), ValueError, "of one shape"),
        (lambda: yg.Tree().stein(X, X[0], 1.0, yg.RBF()), ValueError, "of one shape"),
        (lambda: yg.Tree(leaf_size=math.nan), ValueError, "leaf_size"),
        (lambda: yg.Radial(3), TypeError, "Radial takes a profile"),
        (lambda: yg.BandwidthRule(3), TypeError, "BandwidthRule takes a function"),
        (lambda: yg.svgd(jnp.array(True)), TypeError, "not a truth value"),
        (lambda: yg.svgd(10**400), ValueError, "bandwidth must be positive and finite"),
        (lambda: yg.svgd(1.0, distances=[1]), TypeError, "names of leaves"),
        (lambda: one_step(X, scale="a"), TypeError, "scale must be one number"),
        (lambda: one_step(X, kernel=yg.Radial(lambda u: 1.0)), ValueError, "elementwise"),
        (lambda: one_step(X, kernel=yg.Radial(jnp.sum)), ValueError, "elementwise"),
        (lambda: targets.Gaussian([math.nan], 1.0), ValueError, "mean must be finite"),
        (lambda: targets.Banana(1.0, math.nan), ValueError, "curvature"),
        (lambda: targets.Funnel(2.5), ValueError, "dimension must be an integer"),
    ],
)
def test_options_are_refused_by_name(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_plain_function_and_a_seed_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match="LogDensity"):
        yg.sample(lambda x: -x @ x / 2, jax.random.key(0), 10, 2)
    with pytest.raises(TypeError, match="LogDensity"):
        yg.particle_grads(lambda x: -x @ x / 2, X)
    with pytest.raises(TypeError, match=r"jax\.random\.key\(0\), not 0"):
        yg.sample(yg.Banana(), 0, 10, 2)


def test_particles_given_to_sample_are_looked_at():
    target = yg.Gaussian([0.0, 0.0], 1.0)
    with pytest.raises(ValueError, match="num_particles is 9"):
        yg.sample(target, jax.random.key(0), 9, 1, particles=X)
    with pytest.warns(EqualParticlesWarning):
        yg.sample(target, jax.random.key(0), 3, 1, particles=jnp.zeros((3, 2)))


def test_equal_networks_are_warned_of_although_their_noise_differs():
    def build(rngs):
        del rngs
        return nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    target = yg.BayesianNetwork(build)
    with pytest.warns(EqualParticlesWarning, match="only 1 of 4 particles differ"):
        particles = yg.init_particles(jax.random.key(0), target, 4)
    assert len(set(particles["log_noise_precision"].tolist())) == 4


@pytest.mark.parametrize(
    ("likelihood", "outputs", "label"),
    [
        (targets.Categorical(4), 4, 4),
        (targets.Categorical(4), 4, -1),
        (targets.Bernoulli(), 1, 2),
        (targets.Poisson(), 1, -1),
    ],
)
def test_labels_out_of_range_in_a_batch(likelihood, outputs, label):
    target = yg.BayesianNetwork(partial(nnx.Linear, 3, outputs), likelihood)
    particles = yg.init_particles(jax.random.key(0), target, 2)
    x, good, bad = jnp.ones((5, 3)), jnp.ones(5, int), jnp.array([1, 1, label, 1, 1])
    with pytest.raises(ValueError, match="found values from"):
        yg.particle_grads(target, particles, (x, bad))
    # Inside jit nothing can be raised: the gradient is NaN, and svgd says so.
    step = jax.jit(lambda y: yg.particle_grads(target, particles, (x, y)))
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(step(good)))
    assert bool(jnp.all(jnp.isnan(step(bad)["params"]["bias"])))


def test_labels_that_are_no_integers_are_named():
    target = yg.BayesianNetwork(partial(nnx.Linear, 3, 4), targets.Categorical(4))
    particles = yg.init_particles(jax.random.key(0), target, 2)
    step = jax.jit(lambda y: yg.particle_grads(target, particles, (jnp.ones((5, 3)), y)))
    with pytest.raises(TypeError, match="labels must be integers"):
        step(jnp.ones(5))


@pytest.mark.parametrize("num_data", [0, -5, 2.5, True, "a"])
def test_num_data_must_be_a_number_of_rows(num_data):
    with pytest.raises(ValueError, match="num_data must be a positive integer"):
        yg.BayesianNetwork(partial(nnx.Linear, 3, 1), num_data=num_data)
    with pytest.raises(ValueError, match="num_data must be a positive integer"):
        yg.LogDensity(jnp.sum, jnp.zeros(2), num_data=num_data)


def test_data_are_looked_at():
    build = partial(nnx.Linear, 3, 1)
    with pytest.raises(ValueError, match="x holds values that are not finite"):
        yg.BayesianNetwork(build, data=(np.array([[1.0, np.nan, 0.0]]), np.ones(1)))
    with pytest.raises(ValueError, match="not finite in 1 rows, the first of them row 2: drop"):
        yg.BayesianNetwork(build, data=(np.ones((4, 3)), np.array([0.0, 1.0, np.nan, 2.0])))
    target = yg.BayesianNetwork(build, num_data=5)
    particles = yg.init_particles(jax.random.key(0), target, 2)
    with pytest.raises(ValueError, match="the batch has 10 rows, but num_data"):
        yg.particle_grads(target, particles, (jnp.ones((10, 3)), jnp.ones(10)))
    with pytest.raises(TypeError) as caught:
        yg.particle_grads(target, particles, (jnp.ones((5, 4)), jnp.ones(5)))
    assert "inputs x of shape (5, 4)" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="one number, not of shape"):
        yg.predict(target, particles, jnp.ones((2, 3))).quantile(jnp.array([0.1, 0.9]))


def test_tree_functions_called_outside_jit_compile_once():
    x = jax.random.normal(jax.random.key(0), (64, 2))
    results, compiled = [], []
    for factor in (1, 2):
        topology = yg.build_svgd_topology(factor * x, 0.3, leaf_size=8, reuse=0.2)
        topology = topology.refresh(factor * x)
        results.append(yg.svgd_phi_from_topology(factor * x, -x, 0.3, topology))
        # Nothing is left outside these, so nothing else compiles either.
        compiled.append([f._cache_size() for f in (tree_sum._build, tree_sum._phi, _refresh)])
    assert compiled[0] == compiled[1]
    assert not np.allclose(*results)


def test_help_shows_the_arguments_of_a_target():
    import inspect

    assert "likelihood" in inspect.signature(yg.BayesianNetwork).parameters
    assert "function" in inspect.signature(yg.LogDensity).parameters


def test_outside_jit_a_second_call_compiles_nothing():
    events = []

    def listen(event, seconds, **kwargs):
        del seconds, kwargs
        events.append(event)

    x = jax.random.normal(jax.random.key(0), (40, 2))
    tx = yg.svgd("median")
    state = tx.init(x)
    for factor in (1, 2, 3):
        if factor == 3:
            jax.monitoring.register_event_duration_secs_listener(listen)
        phi = yg.exact_phi(factor * x, -x, 0.5 * factor)
        updates, state = tx.update(x, state, factor * x)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if "compile" in event], events
    assert np.isfinite(phi).all() and np.isfinite(updates).all()


def test_a_rule_where_a_number_is_needed():
    with pytest.raises(TypeError, match=r"not 'median'. .*MedianRule\(\).bandwidth"):
        yg.exact_phi(jnp.ones((3, 2)), jnp.ones((3, 2)), "median")
    with pytest.raises(TypeError, match="the array has dtype int32"):
        yg.svgd("median").init(jnp.ones((3, 2), int))
