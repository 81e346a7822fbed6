"""Profiles against their definition kappa_{m+1} = -2 d kappa_m / du."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.kernels import IMQ, RBF, Radial


@pytest.mark.parametrize(
    "kernel", [RBF(), IMQ(), Radial(lambda u: 1 / (1 + u))], ids=["rbf", "imq", "own"]
)
@pytest.mark.parametrize("m", range(4))
def test_each_profile_is_the_derivative_of_the_one_before(x64, kernel, m):
    u = jnp.linspace(0.1, 9, 7)
    derivative = jax.vmap(jax.grad(lambda v: kernel.kappa(m, v)))(u)
    np.testing.assert_allclose(kernel.kappa(m + 1, u), -2 * derivative, rtol=1e-12)


def test_profiles_are_one_at_zero_and_have_their_closed_forms(x64):
    u = jnp.array([0.0, 1.0, 8.0])
    np.testing.assert_allclose(RBF().kappa(0, u), np.exp([0, -0.5, -4]))
    np.testing.assert_allclose(IMQ().kappa(0, u), [1, 2**-0.5, 1 / 3])
    np.testing.assert_allclose(IMQ().kappa(3, u), 15 * np.array([1, 2.0, 9]) ** -3.5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_beyond_its_reach_the_gaussian_is_zero_to_the_last_bit(x64, dtype):
    reach = RBF().reach(dtype)
    assert float(RBF().kappa(0, jnp.asarray(reach * 1.0001, dtype))) == 0.0
    assert reach < 2000, "a reach that leaves nothing out"
    assert IMQ().reach(dtype) == float("inf")


def test_kernels_are_no_callables_and_compare_by_value():
    # inject_hyperparams takes every callable for a schedule; jit caches by equality.
    assert not callable(RBF()) and not callable(IMQ())
    assert RBF() == RBF() and hash(IMQ()) == hash(IMQ())
