"""Means and standard deviations of a real posterior in 31 dimensions, against NUTS."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import yggdrax as yg
from yggdrax.experiment.data import load_classification
from yggdrax.experiment.nuts import Chains, compare_moments

REFERENCE = pathlib.Path(__file__).parent / "data" / "breast_cancer_nuts.json"


@pytest.fixture(scope="module")
def posterior():
    table = load_classification()
    x = (table.x - table.x.mean(axis=0)) / table.x.std(axis=0)
    found = json.loads(REFERENCE.read_text())
    moments = np.array(found["mean"]), np.array(found["deviation"])
    return yg.LogisticRegression(x, table.y), Chains(*moments, effective_size=1e4)


def run(target, transformation, steps, num_particles=200):
    schedule = optax.cosine_decay_schedule(0.1, steps)
    optimizer = optax.chain(transformation, optax.adam(schedule))
    return yg.sample(target, jax.random.key(0), num_particles, steps, optimizer=optimizer).particles


def test_whitened_coordinates_are_as_right_as_nuts(posterior):
    target, chains = posterior
    by_coordinate = yg.svgd(0.35, per="coordinate")
    white = yg.Whitened.laplace(target, jnp.zeros(31))
    mode = np.asarray(white.shift)
    # The posterior is skewed: its mode is no good mean.
    assert np.max(np.abs(mode - chains.mean) / chains.deviation) > 0.3
    white = white.refined(run(white, by_coordinate, 200))
    found = compare_moments(white.restore(run(white, by_coordinate, 200)), chains)
    # NUTS itself is uncertain by 0.01 deviations and 0.7 %.
    assert found["mean_error"] < 0.05
    assert 0.9 < found["deviation_ratio_low"] < found["deviation_ratio_high"] < 1.1


def test_one_kernel_with_the_median_rule_shrinks(posterior):
    target, chains = posterior
    found = compare_moments(run(target, yg.svgd("median"), 600, num_particles=50), chains)
    assert found["deviation_ratio_high"] < 0.6


def test_exact_moments_at_the_start(posterior):
    target, _ = posterior
    white = yg.Whitened(target, jnp.zeros(31), jnp.ones(31))
    z = np.asarray(yg.init_particles(jax.random.key(0), white, 100), np.float64)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(z.T @ z / 100, np.eye(31), atol=1e-4)
    few = yg.init_particles(jax.random.key(0), white, 20)
    assert few.shape == (20, 31) and 0.8 < float(few.std()) < 1.2
