"""The steps are functions of (seed, step), however the calls are cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.experiment import (
    BananaProblem,
    ConfigError,
    ExperimentConfig,
    OptimizerConfig,
    Problem,
    SvgdConfig,
)
from yggdrax.experiment.steps import Stepper, batch_rows, make_optimizer, spread
from yggdrax.particles import EqualParticlesWarning
from yggdrax.targets import LogDensity


def noisy_problem(rows=7):
    """A target whose gradient shows its batch and its key."""
    data = jnp.arange(float(rows))

    class Noisy(LogDensity):
        def __call__(self, particle, batch=None, *, key=None):
            noise = 0.0 if key is None else jax.random.normal(key)
            return -0.5 * jnp.sum((particle - batch.mean() - noise) ** 2)

    return Problem(Noisy(lambda p: 0.0, init=jnp.zeros(2)), train=data)


CONFIG = ExperimentConfig(
    BananaProblem(),
    num_particles=4,
    num_steps=12,
    batch_size=3,
    seed=5,
    svgd=SvgdConfig(bandwidth=0.1),
    optimizer=OptimizerConfig("momentum", 0.1, "cosine"),
).freeze()


@pytest.fixture(scope="module")
def stepper():
    return Stepper(CONFIG, noisy_problem())


def run_in_pieces(stepper, pieces):
    state = stepper.initial_state()
    for count in pieces:
        state = stepper.advance(state, count)
    return state._replace(key=jax.random.key_data(state.key))


def test_calls_of_any_length_give_the_same_bits_and_one_executable(stepper):
    whole = run_in_pieces(stepper, [12])
    assert int(whole.step) == 12
    assert float(spread(whole.particles)) > 0
    for pieces in ([1] * 12, [5, 0, 7], [2, 3, 7]):
        jax.tree.map(np.testing.assert_array_equal, whole, run_in_pieces(stepper, pieces))
    assert stepper._advance._cache_size() == 1


def test_a_run_that_starts_with_equal_particles_is_warned_of():
    halves = Problem(LogDensity(jnp.sum, lambda key: jnp.round(jax.random.uniform(key, (1,)))))
    with pytest.warns(EqualParticlesWarning, match="only 2 of 4 particles differ"):
        Stepper(dataclasses.replace(CONFIG, batch_size=0, seed=1), halves).initial_state()


def test_a_run_takes_the_minibatches_of_batch_rows():
    seen = []

    class Recording(LogDensity):
        def __call__(self, particle, batch=None, *, key=None):
            jax.debug.callback(lambda b: seen.append(np.asarray(b).tolist()), batch)
            return -0.5 * jnp.sum(particle**2)

    problem = Problem(Recording(lambda p: 0.0, init=jnp.zeros(1)), train=jnp.arange(7.0))
    stepper = Stepper(CONFIG.replace(num_particles=1).freeze(), problem)
    state = stepper.initial_state()
    for _ in range(4):
        state = stepper.advance(state, 2)
    jax.effects_barrier()
    expected = [batch_rows(5, step, 7, 3).tolist() for step in range(8)]
    assert [[int(v) for v in batch] for batch in seen] == expected


def test_an_epoch_uses_no_row_twice_and_each_has_an_order_of_its_own():
    epochs = np.concatenate([batch_rows(0, step, 7, 3) for step in range(6)]).reshape(3, 6)
    assert all(len(set(epoch)) == 6 and set(epoch) < set(range(7)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert batch_rows(1, 0, 7, 3).tolist() != batch_rows(0, 0, 7, 3).tolist()
    assert sorted(batch_rows(0, 5, 7, 7).tolist()) == list(range(7))


def test_noise_differs_between_particles_and_steps_but_not_between_runs(stepper):
    first, again = (run_in_pieces(stepper, [1]) for _ in range(2))
    np.testing.assert_array_equal(first.particles, again.particles)
    # So far apart that the kernel is 1 for j = i and 0 else: each moves by its own score only,
    # 0.1 (batch mean + noise - x) / 4.
    state = stepper.initial_state()
    x = 10.0 * np.arange(4, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    mean = float(batch_rows(5, 0, 7, 3).mean())
    moved = np.asarray(stepper.advance(state._replace(particles=jnp.asarray(x)), 1).particles)
    noise = (moved - x) * 40 + x - mean
    np.testing.assert_allclose(noise[:, 0], noise[:, 1], atol=1e-3)  # 30 times rounding of 30
    assert np.abs(np.subtract.outer(noise[:, 0], noise[:, 0]))[np.triu_indices(4, 1)].min() > 0.01


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"batch_size must be at most the 2 rows .* not 3"):
        Stepper(CONFIG, noisy_problem(rows=2))
    with pytest.raises(ConfigError, match="at most the 0 rows"):
        Stepper(CONFIG, Problem(noisy_problem().target))


def test_the_data_of_a_run_leak_into_no_other(stepper):
    """Run, run on other data, run again: the first and the third agree in every bit."""
    first = run_in_pieces(stepper, [12])
    other = run_in_pieces(Stepper(CONFIG, noisy_problem(rows=9)), [12])
    third = run_in_pieces(stepper, [12])
    jax.tree.map(np.testing.assert_array_equal, first, third)
    assert not np.array_equal(first.particles, other.particles)


def test_the_seed_decides_particles_minibatches_and_noise(stepper):
    other = Stepper(CONFIG.replace(seed=6).freeze(), noisy_problem()).initial_state()
    mine = stepper.initial_state()
    assert not np.array_equal(other.particles, mine.particles)
    # The same particles move elsewhere under another key.
    moved = stepper.advance(mine._replace(key=other.key), 1).particles
    assert not np.array_equal(moved, stepper.advance(stepper.initial_state(), 1).particles)


def test_the_cosine_schedule_ends_at_a_hundredth():
    config = CONFIG.replace(optimizer=OptimizerConfig("sgd", 0.5, "cosine")).freeze()
    optimizer = make_optimizer(config)
    x = jnp.array([[1.0], [-0.5]])
    state = optimizer.init(x)
    moves, update = [], jax.jit(optimizer.update)
    for _ in range(CONFIG.num_steps + 1):
        updates, state = update(x, state, x)
        moves.append(float(updates[0, 0]))
    assert moves[-1] / moves[0] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad", "momentum", "sgd"])
def test_every_optimizer_moves_in_proportion_to_its_rate(name):
    x = jnp.array([[1.0], [-0.5]])

    def step(rate):
        config = CONFIG.replace(optimizer=OptimizerConfig(name, rate)).freeze()
        optimizer = make_optimizer(config)
        return jax.jit(optimizer.update)(x, optimizer.init(x), x)[0]

    # Every one of them is linear in the rate at its first step.
    np.testing.assert_allclose(step(0.2), 2 * step(0.1), rtol=1e-5)
    assert float(jnp.abs(step(0.1)).min()) > 0


def test_spread_is_the_root_mean_square_distance_from_the_mean():
    particles = {"a": jnp.array([[0.0], [2.0]]), "b": jnp.array([0.0, 4.0])}
    assert float(spread(particles)) == pytest.approx(np.sqrt(1 + 4))
