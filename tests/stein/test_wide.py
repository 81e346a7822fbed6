"""Few particles of very many dimensions: the sums in slices against the float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from yggdrax.kernels import IMQ, RBF, MedianRule
from yggdrax.kernels.wide import COLUMNS, is_wide
from yggdrax.stein.exact import Exact

# One slice and a little more, a leaf smaller than a slice, and exactly one slice.
SIZES = (COLUMNS + 3, 5, COLUMNS)


def particles(shift=0.0):
    random = np.random.RandomState(0)
    x = [(random.randn(7, d) + shift).astype(np.float32) for d in SIZES]
    s = [random.randn(7, d).astype(np.float32) for d in SIZES]
    return x, s


@pytest.mark.parametrize(("kernel", "name"), [(RBF(), "rbf"), (IMQ(), "imq")])
# Particles are about sqrt(65547) = 256 apart: by products, and where they would lose digits.
@pytest.mark.parametrize("h", [150.0, 20.0])
def test_phi_is_that_of_the_double_loop(kernel, name, h):
    x, s = particles(shift=3.0)
    assert is_wide(x)
    engine = Exact()
    phi = jax.jit(lambda x, s: engine.stein_leaves(tuple(x), tuple(s), jnp.float32(h), kernel))(
        x, s
    )
    assert [leaf.shape for leaf in phi] == [leaf.shape for leaf in x]
    joined = [np.concatenate(leaves, axis=1) for leaves in (phi, x, s)]
    # Float32 sums over 32776 coordinates.
    assert reference.error(joined[0], joined[1], joined[2], h, kernel=name) < 2e-5


def test_the_median_rule_sees_every_column_once():
    x, _ = particles(shift=-2.0)
    joined = np.concatenate(x, axis=1).astype(np.float64)
    rows, columns = np.triu_indices(7, 1)
    squares = ((joined[rows] - joined[columns]) ** 2).sum(axis=1)
    expected = np.sqrt(np.median(squares) / (2 * np.log(8)))
    assert float(MedianRule().bandwidth(tuple(x))) == pytest.approx(expected, rel=1e-5)


def test_gradients_and_batches_go_through():
    x = tuple(map(jnp.asarray, particles()[0]))
    none = tuple(map(jnp.zeros_like, x))

    def value(scale):
        moved = tuple(scale * leaf for leaf in x)
        phi = Exact().stein_leaves(moved, none, MedianRule().bandwidth(moved), RBF())
        return sum(jnp.sum(leaf * leaf) for leaf in phi)

    scales = np.array([1.0, 2.0], np.float32)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(value)))(scales)
    # The bandwidth grows along, so the repulsion falls as 1 / scale, and its square as 1 / scale^2.
    assert float(values[0]) > 0
    np.testing.assert_allclose(values, values[0] / scales**2, rtol=1e-4)
    np.testing.assert_allclose(slopes, -2 * values / scales, rtol=1e-3)


def test_nan_stays_nan():
    x, s = particles()
    x[0][2, 100] = np.nan
    phi = Exact().stein_leaves(tuple(x), tuple(s), jnp.float32(100.0), RBF())
    assert np.isnan(phi[0][:, 100]).all()
