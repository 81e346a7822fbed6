"""Discrepancies against the case values and a double loop; bounded memory; the collapse warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.diagnostics import (
    CollapseWarning,
    check_spread,
    expected_variance_ratio,
    ksd_squared,
    mmd_squared,
    moments,
)
from yggdrax.kernels import IMQ

P = np.array([[1.0, 2.0], [10.0, 5.0], [7.0, 3.0], [2.0, -1.0]])
MEDIAN_LIKE = np.sqrt(25 / (2 * np.log(5)))


@pytest.mark.parametrize(
    ("h", "statistic", "value"),
    [
        (np.sqrt(0.5), "v", 13.0621853),
        (np.sqrt(0.5), "u", -0.00041959),
        (MEDIAN_LIKE, "v", 16.7023090),
        (MEDIAN_LIKE, "u", 6.1005753),
    ],
)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_ksd_of_four_points(x64, h, statistic, value, block_size):
    found = ksd_squared(P, -P, h, statistic=statistic, block_size=block_size)
    # The values are given to eight digits after the point.
    assert float(found) == pytest.approx(value, abs=1e-7)


def _imq_ksd(x, s, h):
    """The double loop, with the kernel (1 + u)^(-1/2) differentiated by hand."""
    total = 0.0
    for a, sa in zip(x, s, strict=True):
        for b, sb in zip(x, s, strict=True):
            d = a - b
            q = 1 + d @ d / h**2
            total += q**-0.5 * sa @ sb + q**-1.5 * (sa - sb) @ d / h**2
            total += q**-1.5 * len(d) / h**2 - 3 * q**-2.5 * d @ d / h**4
    return total / len(x) ** 2


@pytest.mark.parametrize("d", [2, 40])
def test_ksd_with_another_kernel_against_a_double_loop(x64, d):
    rng = np.random.RandomState(0)
    x, s = rng.randn(23, d) + 100, rng.randn(23, d)
    found = float(ksd_squared(x, s, 1.3, kernel="imq", block_size=8))
    # float64, the product form of distances included (d = 40): centred, so 1e-10 is rounding.
    assert found == pytest.approx(_imq_ksd(x, s, 1.3), rel=1e-10)
    assert float(ksd_squared(x, s, 1.3, kernel=IMQ())) == pytest.approx(found, rel=1e-12)


def test_mmd_against_a_double_loop(x64):
    rng = np.random.RandomState(1)
    x, y = rng.randn(11, 3), rng.randn(17, 3) + 0.5

    def k(a, b):
        return np.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * 0.7**2))

    v = k(x, x).mean() + k(y, y).mean() - 2 * k(x, y).mean()
    assert float(mmd_squared(x, y, 0.7, block_size=4)) == pytest.approx(v, rel=1e-12)
    u = (k(x, x).sum() - 11) / 110 + (k(y, y).sum() - 17) / 272 - 2 * k(x, y).mean()
    assert float(mmd_squared(x, y, 0.7, statistic="u")) == pytest.approx(u, rel=1e-10)


def test_discrepancies_fall_for_better_particles():
    good = jax.random.normal(jax.random.key(0), (400, 2))
    exact = jax.random.normal(jax.random.key(1), (400, 2))
    for bad in (good + 0.5, 1.5 * good):
        assert ksd_squared(bad, -bad, 1.0) > 3 * ksd_squared(good, -good, 1.0)
        assert mmd_squared(bad, exact) > 3 * mmd_squared(good, exact)


def test_trees_are_flattened_side_by_side():
    x = jax.random.normal(jax.random.key(0), (20, 6))
    tree = {"a": x[:, :4].reshape(20, 2, 2), "b": x[:, 4:]}
    scores = jax.tree.map(jnp.negative, tree)
    assert float(ksd_squared(tree, scores)) == pytest.approx(float(ksd_squared(x, -x)), rel=1e-6)


def test_no_array_of_all_pairs_exists():
    n = 4096
    shape = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    compiled = jax.jit(lambda x: ksd_squared(x, -x, 1.0, block_size=256)).lower(shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * n / 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ksd_squared(P, -P[:3]), "scores must be shaped like the particles"),
        (lambda: ksd_squared(P, -P, -1.0), "bandwidth must be positive and finite, not -1.0"),
        (lambda: ksd_squared(P, -P, "mean"), "a number or 'median', not 'mean'"),
        (lambda: ksd_squared(P, -P, 1.0, statistic="w"), "'v' or 'u', not 'w'"),
        (lambda: ksd_squared(P[:1], -P[:1], 1.0, statistic="u"), "at least 2 points"),
        (lambda: ksd_squared(P, -P, 1.0, block_size=0), "block_size must be positive, not 0"),
        (lambda: mmd_squared(P, P[:, :1], 1.0), "2 coordinates and samples 1"),
        (lambda: mmd_squared({"a": P, "b": P[:2]}, P, 1.0), "share the leading axis N"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_coinciding_particles_are_finite():
    x = jnp.zeros((5, 2))
    assert np.isfinite(float(ksd_squared(x, -x))) and float(mmd_squared(x, x)) == 0


def test_spread_measures_the_variance_ratio_without_samples():
    x = jax.random.normal(jax.random.key(0), (4000, 5))
    scores = {"a": -x[:, :2], "b": -x[:, 2:]}
    wide = check_spread({"a": x[:, :2], "b": x[:, 2:]}, scores)
    assert wide.variance_ratio == pytest.approx(1, abs=0.05)  # 20,000 squares, 1 % standard error
    narrow = {"a": x[:, :2] * 0.9, "b": x[:, 2:] * 0.1}
    narrow_scores = jax.tree.map(jnp.negative, narrow)
    with pytest.warns(CollapseWarning, match=r"per='leaf'"):
        found = check_spread(narrow, narrow_scores)
    assert found.by_leaf["['a']"] == pytest.approx(0.81, abs=0.05)
    assert found.by_leaf["['b']"] == pytest.approx(0.01, abs=0.002)
    squares = float(jnp.sum((x - x.mean(0)) ** 2 * jnp.array([0.81] * 2 + [0.01] * 3))) / 3999
    assert found.distance == pytest.approx(np.sqrt(2 * squares), rel=1e-4)


def test_expected_ratio_is_near_the_measured_fixed_points():
    # Measured fixed points of 500 particles: 0.112 to 0.114 (d = 50), 0.58 to 0.61 (d = 10),
    # 0.975 (d = 2); the formula is that of equally distant particles, 10 % high at most.
    assert expected_variance_ratio(500, 50) == pytest.approx(0.113, rel=0.12)
    assert expected_variance_ratio(500, 10) == pytest.approx(0.595, rel=0.12)
    assert expected_variance_ratio(500, 2) == 1


def test_spread_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least 2 particles"):
        check_spread(jnp.zeros((1, 2)), jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match="scores must be shaped like"):
        check_spread(jnp.zeros((3, 2)), jnp.zeros((3, 1)))


def test_moments_leaf_by_leaf():
    mean, variance = moments({"a": jnp.array([[1.0], [3.0]]), "b": jnp.array([2.0, 2.0])})
    assert mean["a"].tolist() == [2.0] and variance["a"].tolist() == [1.0]
    assert float(mean["b"]) == 2 and float(variance["b"]) == 0
