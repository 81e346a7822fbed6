"""The median rule against NumPy's median over distinct pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.kernels import MedianRule


def squared_distances(x):
    x = np.asarray(x, np.float64)
    upper = np.triu_indices(len(x), 1)
    gram = x @ x.T
    squares = np.diag(gram)
    return (squares[:, None] + squares[None] - 2 * gram)[upper]


def median_rule(x):
    return np.sqrt(np.median(squared_distances(x)) / (2 * np.log(len(x) + 1)))


def bandwidth(*leaves):
    return float(jax.jit(lambda *v: MedianRule().bandwidth(v))(*leaves))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([[0.0], [1], [3], [7]], 1.970620),
        ([[1.0, 2], [10, 5], [7, 3], [2, -1]], 3.48080899),
        ([[1.0], [-1]], 1.349251),
    ],
)
def test_check_values(x, expected):
    assert bandwidth(jnp.array(x)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 2), (20, 3), (21, 5), (512, 2), (100, 300)])
def test_small_stacks_use_every_pair(n, d):
    x = np.asarray(jax.random.normal(jax.random.key(n), (n, d)))
    assert bandwidth(jnp.asarray(x)) == pytest.approx(median_rule(x), rel=2e-6)


@pytest.mark.parametrize("sort", [False, True])
def test_large_stacks_are_within_one_per_cent_in_rank(sort):
    x = np.asarray(jax.random.normal(jax.random.key(5), (2000, 2)))
    # Sorted particles would betray a sample of pairs with structure.
    x = x[np.argsort(x[:, 0])] if sort else x
    h = bandwidth(jnp.asarray(x))
    rank = np.mean(squared_distances(x) < h**2 * 2 * np.log(2001))
    assert abs(rank - 0.5) < 0.01


def test_leaves_count_together():
    x = jax.random.normal(jax.random.key(0), (30, 5))
    assert bandwidth(x[:, :2], x[:, 2:]) == pytest.approx(bandwidth(x), rel=1e-6)


def test_degenerate_stacks_are_finite():
    assert bandwidth(jnp.zeros((1, 2))) > 0
    assert bandwidth(jnp.ones((9, 2))) == 0.0
    assert bandwidth(jnp.array([0.0, 0, 0, 0, 1])[:, None]) == 0.0
    assert np.isnan(bandwidth(jnp.array([[0.0], [np.nan], [1.0]])))


@pytest.mark.parametrize("n", [7, 8, 600])
def test_the_derivative_is_that_of_the_median_pair(x64, n):
    rng = np.random.default_rng(n)
    x, v = (jnp.asarray(rng.normal(size=(n, 2))) for _ in range(2))

    def h(x):
        return MedianRule().bandwidth((x,))

    gradient = jax.jit(jax.grad(h))(x)
    difference = (h(x + 1e-7 * v) - h(x - 1e-7 * v)) / 2e-7
    np.testing.assert_allclose(jnp.sum(gradient * v), difference, rtol=1e-5)


def test_the_derivative_at_a_median_of_zero_is_zero():
    gradient = jax.grad(lambda x: MedianRule().bandwidth((x,)))(jnp.ones((5, 2)))
    np.testing.assert_array_equal(gradient, 0)
