"""Median splits against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.geometry.ordering import median_order


@pytest.mark.parametrize("d", [1, 3])
def test_every_split_separates_along_the_widest_axis(d):
    z = np.asarray(jax.random.normal(jax.random.key(d), (64, d))) * np.arange(1, d + 1)
    order = np.asarray(median_order(jnp.asarray(z), 3))
    assert sorted(order) == list(range(64))
    for level in range(3):
        for cell in z[order].reshape(2**level, -1, d):
            axis = np.ptp(cell, axis=0).argmax()
            lower, upper = np.split(cell[:, axis], 2)
            assert lower.max() <= upper.min()


def test_ties_and_equal_points_keep_their_order():
    assert median_order(jnp.zeros((8, 2)), 2).tolist() == list(range(8))
