"""The Fourier engine's adjoint against central differences and against the exact engine's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.stein.dense import Dense
from yggdrax.kernels import IMQ, RBF
from yggdrax.stein.fourier import Fourier

pytest.importorskip("jax_finufft")

KERNELS = {"rbf": RBF(), "imq": IMQ()}


@functools.cache
def functions(kernel, rtol, max_modes):
    engine = Fourier(rtol=rtol, max_modes=max_modes, fallback=Dense())

    def total(x, s, h, u):
        return jnp.sum(engine.stein(x, s, h, KERNELS[kernel]).phi * u)

    def exactly(x, s, h, u):
        return jnp.sum(Dense().stein(x, s, h, KERNELS[kernel]).phi * u)

    return jax.jit(total), *(jax.jit(jax.grad(f, (0, 1, 2))) for f in (total, exactly))


def problem(d, n, dtype):
    keys = jax.random.split(jax.random.key(d), 3)
    return tuple(jax.random.normal(key, (n, d), dtype) for key in keys)


@pytest.mark.parametrize(("d", "kernel"), [(1, "rbf"), (3, "rbf"), (1, "imq")])
def test_central_differences(x64, d, kernel):
    total, gradient, _ = functions(kernel, 1e-8, 35 if kernel == "rbf" else 143)
    x, s, u = problem(d, 40, jnp.float64)
    h = jnp.float64(0.8)
    dx, ds, dh = gradient(x, s, h, u)
    step = 1e-4
    for seed in range(3):
        vx, vs, _ = problem(d + 10 * seed + 1, 40, jnp.float64)[:3]
        vx, vs, vh = vx[:, :1] * jnp.ones_like(x), vs[:, :1] * jnp.ones_like(s), seed - 1.0
        ahead = total(x + step * vx, s + step * vs, h + step * vh, u)
        behind = total(x - step * vx, s - step * vs, h - step * vh, u)
        slope = jnp.sum(dx * vx) + jnp.sum(ds * vs) + dh * vh
        # About rtol / step for the transforms, step^2 for the differences.
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("h", [0.7, 2.0, 30.0, 1e4, 1e-3])
def test_the_exact_adjoint_at_every_bandwidth(h):
    # In order: a rung, another, the small box, a box too small for it, and the fallback.
    _, gradient, exactly = functions("rbf", 1e-3, 27)
    args = problem(2, 300, jnp.float32)
    args = (*args[:2], jnp.float32(h), args[2])
    for mine, right in zip(gradient(*args), exactly(*args), strict=True):
        # A derivative amplifies what is cut off by the largest frequency, below 10 / h.
        np.testing.assert_array_less(
            np.linalg.norm(mine - right), 1e-2 * np.linalg.norm(right) + 1e-30
        )


def test_equal_particles_have_finite_derivatives():
    _, gradient, exactly = functions("rbf", 1e-3, 27)
    x, s, u = problem(2, 300, jnp.float32)
    x = jnp.ones_like(x)
    for mine, right in zip(
        gradient(x, s, jnp.float32(1), u), exactly(x, s, jnp.float32(1), u), strict=True
    ):
        np.testing.assert_allclose(mine, right, atol=1e-6)


def test_forward_mode_is_refused():
    x, s, _ = problem(1, 10, jnp.float32)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: Fourier().stein(x, s, jnp.float32(1), RBF()).phi, (x,), (s,))
