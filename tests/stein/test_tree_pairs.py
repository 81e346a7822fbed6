"""Every pair exactly once, for every number of particles and every awkward cloud."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.stein.trees import QUADRATIC, compiled, phi_of, without_exact_tiles
from yggdrax.geometry.layout import Layout
from yggdrax.kernels import RBF

ROWS = 130


@pytest.mark.parametrize("leaf_size", [1, 7, 8, 32])
def test_every_pair_once_for_every_number_of_particles(leaf_size):
    """With S = 1 and a kernel that expansions reproduce, phi shows a pair left out or doubled."""
    engine = without_exact_tiles(leaf_size=leaf_size, theta=0.7)
    run = compiled(engine, QUADRATIC, ROWS)
    rng = np.random.default_rng(leaf_size)
    x = rng.normal(size=(ROWS, 2)).astype(np.float32)
    s = rng.normal(size=(ROWS, 2)).astype(np.float32)
    far_pairs = 0
    for num in range(1, ROWS + 1):
        phi, status, _, far = run(x, np.ones_like(s), np.float32(1e15), np.float32(0.7), num)
        np.testing.assert_allclose(phi[:num], 1, rtol=1e-6)
        phi, status, _, far = run(x, s, np.float32(1.5), np.float32(0.7), num)
        expected = _quadratic(x[:num], s[:num], 1.5)
        np.testing.assert_allclose(phi[:num], expected, atol=5e-6)
        assert status == 0
        far_pairs += int(far)
    assert far_pairs > 1000


def _quadratic(x, s, h):
    """phi of the kernel 1 + 0.3 u in float64."""
    x, s = x.astype(np.float64), s.astype(np.float64)
    difference = x[:, None] - x[None]
    k0 = 1 + 0.3 * (difference**2).sum(-1) / h**2
    return (k0 @ s - 0.6 * difference.sum(1) / h**2) / len(x)


@pytest.mark.parametrize("leaf_size", [1, 7, 8, 32])
def test_leaves_tile_the_particles(leaf_size):
    for num in range(1, ROWS + 1):
        layout = Layout.of(num, leaf_size)
        filled = np.asarray(layout.filled())
        assert filled.sum() == num
        assert layout.leaf <= leaf_size
        counts = filled.sum(1)
        assert counts.max() - counts.min() <= 1


def _clouds(d: int, n: int = 300):
    rng = np.random.default_rng(d)
    normal = rng.normal(size=(n, d))
    half = np.where(np.arange(n)[:, None] < 0.6 * n, normal[:1], normal)
    side = int(np.ceil(n ** (1 / d)))
    lattice = np.stack(np.meshgrid(*[np.arange(side)] * d), -1).reshape(-1, d)[:n]
    line = normal[:, :1] * np.ones(d)
    outlier = normal.copy()
    outlier[7] = 1e9
    constant = normal.copy()
    constant[:, -1] = 3.0
    tight = np.where(np.arange(n)[:, None] % 2 == 0, 1e-6 * normal, 5 + normal)
    return {
        "normal": normal,
        "all equal": np.ones((n, d)),
        "60 % equal": half,
        "two heaps": np.where(np.arange(n)[:, None] % 2 == 0, 0.0, 1.0) * np.ones(d),
        "lattice": lattice.astype(float),
        "one constant column": constant,
        "a line": line,
        "contrast of 1e6": tight,
        "outlier at 1e9": outlier,
        "at 1e4": 1e4 + normal,
        "far heaps": normal + np.where(np.arange(n)[:, None] % 2 == 0, -5e5, 5e5),
    }


@pytest.mark.parametrize("d", [1, 2, 3, 5, 10])
def test_every_cloud_and_bandwidth(d):
    """rtol = 1e-3 on clouds with ties, duplicates, outliers and offsets."""
    engine = without_exact_tiles(leaf_size=8)
    far_pairs = 0
    for name, cloud in _clouds(d).items():
        x = cloud.astype(np.float32)
        s = np.random.default_rng(1).normal(size=x.shape).astype(np.float32) + 0.5
        for h in (1e-3, 0.1, 1.0, 30.0, 1e15):
            phi, status, _, far = phi_of(engine, RBF(), x, s, h)
            far_pairs += far
            assert status == 0, (name, h)
            assert reference.error(phi, x, s, h) < 1e-3, (name, h)
    assert far_pairs > 1000


def test_a_permutation_of_the_input_permutes_the_output():
    engine = without_exact_tiles(leaf_size=8)
    x = np.asarray(jax.random.normal(jax.random.key(0), (300, 3)))
    order = np.random.default_rng(0).permutation(300)
    phi, _, _, far = phi_of(engine, RBF(), x, 1 - x, 20.0)
    shuffled, *_ = phi_of(engine, RBF(), x[order], 1 - x[order], 20.0)
    assert far > 0
    np.testing.assert_allclose(shuffled, phi[order], atol=1e-6)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_poisons_the_sum(bad):
    engine = without_exact_tiles(leaf_size=8)
    x = np.asarray(jax.random.normal(jax.random.key(0), (300, 3)))
    wrong = x.copy()
    wrong[17, 1] = bad
    for positions, scores in ((wrong, x), (x, wrong)):
        phi, *_ = phi_of(engine, RBF(), positions, scores, 1.0)
        assert np.isnan(phi).all()
