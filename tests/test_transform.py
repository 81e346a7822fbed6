"""What svgd does beyond Optax's contract: options, status bits, and where it ends up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import yggdrax as yg
from tests import reference
from yggdrax.status import Status


def update(x, g, **options):
    tx = yg.svgd(engine="exact", **options)
    return jax.jit(tx.update)(g, tx.init(x), x)


def test_a_bandwidth_is_the_same_number_in_any_type():
    x = jax.random.normal(jax.random.key(0), (20, 2))
    results = [update(x, x, bandwidth=h)[0] for h in (5, 5.0, np.float32(5), jnp.float32(5))]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_temperature_divides_the_score_and_nothing_else(x64):
    x = np.random.default_rng(0).normal(size=(12, 2))
    updates, _ = update(jnp.asarray(x), jnp.asarray(x), bandwidth=0.8, temperature=4.0)
    np.testing.assert_allclose(updates, -reference.phi(x, -x / 4, 0.8), atol=1e-13)


def test_scale_is_a_kernel_on_scaled_coordinates(x64):
    rng = np.random.default_rng(0)
    x, s, scale = rng.normal(size=(12, 2)), rng.normal(size=(12, 2)), np.array([0.5, 3.0])
    updates, _ = update(jnp.asarray(x), jnp.asarray(-s), bandwidth=0.8, scale=jnp.asarray(scale))
    difference = x[:, None] - x[None]
    k = np.exp(-((difference / scale / 0.8) ** 2).sum(-1) / 2)
    expected = (k @ s + (k[:, :, None] * difference).sum(1) / (0.8 * scale) ** 2) / 12
    np.testing.assert_allclose(-updates, expected, atol=1e-13)


def test_running_scale_makes_the_run_blind_to_units():
    # Coordinates in units 100 times smaller: the same run, 100 times smaller.
    x = jax.random.normal(jax.random.key(0), (40, 2))
    unit = jnp.array([1.0, 0.01])
    tx = yg.svgd(engine="exact", scale=yg.RunningScale())
    plain, scaled = tx.init(x), tx.init(x * unit)
    y, z = x, x * unit
    for _ in range(3):
        a, plain = tx.update(y, plain, y)
        b, scaled = tx.update(z / unit**2, scaled, z)
        np.testing.assert_allclose(b * unit, a, rtol=2e-4, atol=1e-6)
        y, z = y - 0.1 * a, z - 0.1 * b * unit**2


def test_distances_over_chosen_leaves_move_all_leaves(x64):
    rng = np.random.default_rng(0)
    x = {"net": {"w": jnp.asarray(rng.normal(size=(9, 2)))}, "p": jnp.asarray(rng.normal(size=9))}
    updates, state = update(x, x, distances=["net/w"])
    h, w, p = float(state.bandwidth), np.asarray(x["net"]["w"]), np.asarray(x["p"])
    np.testing.assert_allclose(updates["net"]["w"], -reference.phi(w, -w, h), atol=1e-13)
    k = np.exp(-((w[:, None] - w[None]) ** 2).sum(-1) / 2 / h**2)
    np.testing.assert_allclose(updates["p"], k @ p / 9, atol=1e-13)
    with pytest.raises(ValueError, match="no leaf of the particles is named 'bias': there are net"):
        update(x, x, distances=["bias"])


def test_one_kernel_for_each_leaf_or_coordinate(x64):
    rng = np.random.default_rng(0)
    x = {"a": jnp.asarray(rng.normal(size=(9, 2))), "b": jnp.asarray(rng.normal(size=(9, 1)) * 9)}
    by_leaf, state = update(x, x, per="leaf")
    assert state.bandwidth.shape == (2,)
    for name, h in zip("ab", state.bandwidth, strict=True):
        leaf = np.asarray(x[name])
        np.testing.assert_allclose(by_leaf[name], -reference.phi(leaf, -leaf, h), atol=1e-12)
    by_coordinate, state = update(x, x, per="coordinate")
    assert state.bandwidth.shape == (3,)
    column = np.asarray(x["a"][:, 1:])
    np.testing.assert_allclose(
        by_coordinate["a"][:, 1:], -reference.phi(column, -column, state.bandwidth[1]), atol=1e-12
    )


def test_status_bits_are_set_accumulate_and_give_advice():
    x = jnp.ones((5, 2))
    tx = yg.svgd(engine="exact")
    _, state = tx.update(x, tx.init(x), x)
    assert Status(int(state.status)) == Status.BANDWIDTH_FLOOR | Status.COLLAPSED
    good = jax.random.normal(jax.random.key(0), (5, 2))
    _, state = tx.update(good, state, good)
    assert Status.COLLAPSED in Status(int(state.status))
    chain = optax.chain(tx, optax.sgd(0.1))
    with pytest.raises(yg.StatusError, match="COLLAPSED: all particles coincide"):
        yg.check((state, chain.init(x)[1]))
    yg.check(chain.init(x))
    with pytest.raises(ValueError, match="no SvgdState"):
        yg.check(optax.adam(0.1).init(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_scores_and_particles_are_flagged(bad):
    x = jax.random.normal(jax.random.key(0), (20, 2))
    spoiled = x.at[3, 1].set(bad)
    for params, grads in ((x, spoiled), (spoiled, x)):
        updates, state = update(params, grads, bandwidth=0.5)
        assert int(state.status) == Status.NONFINITE
        assert not np.isfinite(np.asarray(updates)).all()


def test_a_traced_bandwidth_below_the_floor_is_raised_and_flagged():
    x = jax.random.normal(jax.random.key(0), (20, 2))
    both = Status.BANDWIDTH_FLOOR | Status.OUT_OF_RANGE
    for h, status in ((1e-30, Status.BANDWIDTH_FLOOR), (0.0, both), (-1.0, both)):
        updates, state = update(x, x, bandwidth=lambda step, h=h: jnp.asarray(h))
        assert int(state.status) == status
        np.testing.assert_allclose(updates, x / 20, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bandwidth": -1.0}, ValueError, "bandwidth must be positive and finite, not -1.0"),
        ({"bandwidth": float("nan")}, ValueError, "bandwidth must be positive and finite, not nan"),
        ({"bandwidth": "mean"}, ValueError, "unknown bandwidth 'mean'"),
        ({"bandwidth": [1.0, 2.0]}, ValueError, "bandwidth must be one number"),
        ({"bandwidth": None}, TypeError, "bandwidth must be a number, not NoneType"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, not 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive"),
        ({"engine": "fmm"}, ValueError, "unknown engine 'fmm': choose one of"),
        ({"engine": 3}, TypeError, "engine must be an engine or one of"),
        ({"kernel": "laplace"}, ValueError, "unknown kernel 'laplace'"),
        ({"per": "layer"}, ValueError, "per must be"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        yg.svgd(**options)


def test_a_scale_that_does_not_fit_is_refused():
    x = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(3)}
    with pytest.raises(ValueError, match="a tree like one particle"):
        yg.svgd(scale={"a": 1.0}).init(x)
    with pytest.raises(ValueError, match=r"scale of shape \(3,\) does not fit.*\(2,\)"):
        yg.svgd(scale={"a": jnp.ones(3), "b": 1.0}).init(x)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            yg.svgd(scale=wrong).init(x)


@pytest.mark.parametrize("n", [0, 3])
def test_particles_without_their_axis_are_refused(n):
    x = jnp.zeros((0, 2)) if n == 0 else {"a": jnp.zeros((3, 2)), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match="no particles" if n == 0 else "no leading axis"):
        yg.svgd().init(x)


def test_gradient_through_an_update(x64):
    x = jax.random.normal(jax.random.key(0), (8, 2), jnp.float64)

    def loss(x, h, t):
        tx = yg.svgd(engine="exact", bandwidth=h, temperature=t)
        updates, _ = tx.update(jnp.sin(x), tx.init(x), x)
        return jnp.sum(updates**2)

    gradient = jax.grad(loss, (1, 2))(x, 0.7, 2.0)
    for i, point in enumerate(((0.7, 2.0), (0.7, 2.0))):
        step = np.eye(2)[i] * 1e-6
        difference = (loss(x, *(point + step)) - loss(x, *(point - step))) / 2e-6
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-6)


def test_moments_of_a_normal_target():
    run = yg.sample(
        yg.Gaussian([0.0, 0.0], jnp.eye(2)),
        jax.random.key(0),
        200,
        300,
        optimizer=optax.chain(yg.svgd(), optax.adam(0.05)),
    )
    x = np.asarray(run.particles)
    # The method's own fixed point has a variance of about 0.975 here (shared figures of the field).
    np.testing.assert_allclose(x.mean(0), 0, atol=0.01)
    np.testing.assert_allclose(x.var(0), 0.975, atol=0.05)
    yg.check(run.opt_state)


def test_a_mixture_is_found_from_far_away(optimised):
    target = yg.LogDensity(
        lambda x: jnp.logaddexp(
            jnp.log(1 / 3) - (x[0] + 2) ** 2 / 2, jnp.log(2 / 3) - (x[0] - 2) ** 2 / 2
        ),
        init=lambda key: jax.random.normal(key, (1,)) - 10,
    )
    rate = optax.piecewise_constant_schedule(0.3, {1000: 1 / 6})
    run = yg.sample(
        target,
        jax.random.key(1),
        250,
        3000,
        optimizer=optax.chain(yg.svgd(engine="exact"), optax.rmsprop(rate)),
    )
    x = np.asarray(run.particles)[:, 0]
    assert x.mean() == pytest.approx(0.667, abs=0.06)
    assert (x**2).mean() == pytest.approx(5, abs=0.15)
    assert (x > 0).mean() == pytest.approx(0.659, abs=0.02)


def test_a_skewed_target_tells_the_sign_of_the_score(optimised):
    # sigma ~ Exp(1), u = log sigma: mean -0.5772, variance 1.6449 and a long left tail.
    target = yg.LogDensity(
        lambda u: (u - jnp.exp(u))[0], init=lambda key: jax.random.normal(key, (1,))
    )
    run = yg.sample(target, jax.random.key(0), 200, 1500)
    u = np.asarray(run.particles)[:, 0]
    # 200 particles of SVGD: a few per cent below the variance, which is the method's own.
    assert u.mean() == pytest.approx(-0.577216, abs=0.05)
    assert u.var() == pytest.approx(1.644934, abs=0.2)
    assert ((u - u.mean()) ** 3).mean() < -1
    single = yg.sample(target, jax.random.key(0), 1, 300)
    np.testing.assert_allclose(single.particles, [[0.0]], atol=1e-3)


def test_runs_repeat_and_leak_nothing():
    def run(mean):
        return yg.sample(yg.Gaussian([mean], [[1.0]]), jax.random.key(0), 20, 50).particles

    first, other, again = run(0.0), run(3.0), run(0.0)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sample_names_what_is_wrong():
    target = yg.Gaussian([0.0], [[1.0]])
    with pytest.raises(ValueError, match="num_steps must be an integer"):
        yg.sample(target, jax.random.key(0), 5, -1)
    with pytest.raises(ValueError, match="is svgd in its chain"):
        yg.sample(target, jax.random.key(0), 5, 1, optimizer=optax.adam(0.1))


class _Wrong(yg.Fourier):
    """A Fourier engine that is 1 % wrong."""

    def stein(self, x, s, h, kernel):
        total = super().stein(x, s, h, kernel)
        return total._replace(phi=1.01 * total.phi)


def test_the_error_is_measured_and_a_safer_engine_takes_over():
    x = jax.random.normal(jax.random.key(0), (500, 2))
    good = yg.svgd(0.5, engine=yg.Fourier(rtol=1e-3, check_every=2))
    step = jax.jit(good.update)
    _, state = step(x, good.init(x), x)
    assert 0 < float(state.error) < 1e-3 and int(state.error_step) == 0 and int(state.status) == 0
    _, later = step(x, state, x)
    assert float(later.error) == float(state.error) and int(later.error_step) == 0
    _, later = step(x, later, x)
    assert int(later.error_step) == 2

    wrong = yg.svgd(0.5, engine=_Wrong(rtol=1e-3, check_every=1))
    step = jax.jit(wrong.update)
    updates, state = step(x, wrong.init(x), x)
    assert reference.error(-updates, x, -x, 0.5) == pytest.approx(float(state.error), rel=0.5)
    assert int(state.status) == Status.INACCURATE
    updates, state = step(x, state, x)
    # The exact sum, in float32.
    assert reference.error(-updates, x, -x, 0.5) < 1e-6
    # Told otherwise, the engine tries again.
    updates, state = step(x, state._replace(status=jnp.zeros((), jnp.int32)), x)
    assert reference.error(-updates, x, -x, 0.5) > 1e-3


def test_members_of_a_batch_that_count_differently_are_measured_all_the_same():
    # Two heaps of coincident particles with scores of random sign, whose sums cancel.
    x = jnp.zeros((2000, 2)).at[1000:].set(1.0)
    s = jnp.tile(jnp.array([[5.0, -5.0], [-5.0, 5.0]]), (1000, 1))
    tx = yg.svgd(0.3, engine=yg.Fourier(check_every=3))
    states = jax.vmap(tx.init)(jnp.stack([x, x]))
    states = states._replace(count=jnp.array([0, 1], jnp.int32))
    update = jax.jit(jax.vmap(lambda s, state, x: tx.update(-s, state, x)))
    for step in range(3):
        _, states = update(jnp.stack([s, s]), states, jnp.stack([x, x]))
        flagged = (np.asarray(states.status) & Status.INACCURATE.value) != 0
        assert flagged.tolist() == [True, step == 2]
    assert states.error_step.tolist() == [0, 3]


def test_a_fourier_step_costs_no_exact_one_under_vmap():
    x = jax.random.normal(jax.random.key(0), (2, 300, 2))
    tx = yg.svgd(0.5, engine="fourier")
    states = jax.vmap(tx.init)(x)
    batched, _ = jax.jit(jax.vmap(tx.update))(x, states, x)
    for i in range(2):
        single, _ = tx.update(x[i], tx.init(x[i]), x[i])
        np.testing.assert_allclose(batched[i], single, rtol=1e-4, atol=1e-6)
