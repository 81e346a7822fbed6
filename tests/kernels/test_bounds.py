"""Bounds of the kernels' derivatives against brute force."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yggdrax.kernels import IMQ, RBF, Radial
from yggdrax.kernels.bounds import derivative_bound

KERNELS = {"rbf": RBF(), "imq": IMQ(), "cauchy": Radial(lambda u: 1 / (1 + u))}
INTERVALS = [(0.0, 0.5), (0.3, 1.1), (1.0, 3.0), (2.0, 6.0), (4.0, 4.5)]


def _norms(kernel, m, distances):
    """The m-th derivative along all lines through points at these distances, its largest size."""
    angles = jnp.linspace(0, math.pi / 2, 91)

    def along(r, angle):
        def line(t):
            return kernel.kappa(0, (r + t * jnp.cos(angle)) ** 2 + (t * jnp.sin(angle)) ** 2)

        function = line
        for _ in range(m):
            function = jax.grad(function)
        return jnp.abs(function(0.0))

    return jax.jit(jax.vmap(lambda r: jnp.max(jax.vmap(lambda a: along(r, a))(angles))))(distances)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("m", [0, 1, 2, 3, 4])
@pytest.mark.usefixtures("x64")
def test_bounds_hold_over_the_interval_and_are_tight(name, m):
    kernel = KERNELS[name]
    distances = jnp.stack([jnp.linspace(*interval, 41) for interval in INTERVALS])
    norms = _norms(kernel, m, distances.reshape(-1)).reshape(distances.shape)
    for (low, high), largest in zip(INTERVALS, norms.max(1).tolist(), strict=True):
        bound = float(derivative_bound(kernel, m, jnp.asarray(low), jnp.asarray(high)))
        assert bound >= largest * (1 - 1e-9)
        # Useless if it were far above. 1 % for the grid of distances and angles.
        assert bound <= largest * {"rbf": 1.01, "imq": 6.0, "cauchy": 20.0}[name] + 1e-12


def test_the_bound_is_a_supremum_not_the_value_at_the_centre():
    """At r = 4, a = 2 these are 0.41 and 0.005."""
    around = derivative_bound(RBF(), 2, jnp.asarray(2.0), jnp.asarray(6.0))
    centre = derivative_bound(RBF(), 2, jnp.asarray(4.0), jnp.asarray(4.0))
    np.testing.assert_allclose([around, centre], [0.406, 0.005], rtol=0.02)
