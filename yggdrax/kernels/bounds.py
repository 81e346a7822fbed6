r"""Bounds of the derivatives of radial kernels over an interval of distances.

The m-th derivative of k at r, as a symmetric form on unit vectors v, has the norm
:math:`\sup_v |D^m k(r)[v, ..., v]|`, which depends on the distance |r| alone. Everything here is in
scaled distances r = |x - y| / h, so derivatives are :math:`h^m` times the ones with units.

* Gaussian: along a line, :math:`D^m k(r)[v, ..., v] = (-1)^m He_m(z) e^{-r^2/2}` with z = r . v, so
  the norm is :math:`e^{-r^2/2} \max_{|z| \le r} |He_m(z)|` (Hermite polynomials).
* Inverse multiquadric: the generating function of the Legendre polynomials gives
  :math:`m!\, P_m(z/\sqrt q)\, q^{-(m+1)/2}` with q = 1 + r^2, at most :math:`m!\, q^{-(m+1)/2}`.
* Any other profile: :math:`\sum_i \frac{m!}{i! (m-2i)! 2^i} |\kappa_{m-i}| r^{m-2i}` bounds the
  norm at one distance; it is sampled at a few, with a margin. This one is an estimate.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.kernels.radial import IMQ, RBF, Kernel
from yggdrax.typing import Array

__all__ = ["derivative_bound"]

_SAMPLES = 9
_MARGIN = 1.5


def derivative_bound(kernel: Kernel, m: int, low: Array, high: Array) -> Array:
    """The supremum of the norm of the m-th derivative over scaled distances in [low, high].

    Args:
      kernel: the kernel.
      m: order of the derivative, 0 for the kernel itself.
      low: smallest distance over h, any shape.
      high: largest distance over h, the same shape; ``low <= high``.

    Returns:
      The bound, of the same shape: exact for :class:`RBF`, an upper bound for :class:`IMQ`, an
      estimate from samples for any other kernel.

    Example:
      >>> import jax.numpy as jnp
      >>> bound = derivative_bound(RBF(), 2, jnp.array(2.0), jnp.array(6.0))
      >>> round(float(bound), 2)  # at the distance 4 alone it is 0.005
      0.41
    """
    if isinstance(kernel, RBF):
        return _gaussian(m, low, high)
    if isinstance(kernel, IMQ):
        return math.factorial(m) * jax.lax.rsqrt(1 + low * low) ** (m + 1)
    return _sampled(kernel, m, low, high)


def _hermite(m: int) -> np.polynomial.HermiteE:
    return np.polynomial.HermiteE.basis(m)


def _positive_roots(m: int) -> list[float]:
    """The roots of He_m that are not negative."""
    if m < 1:
        return []
    return [abs(float(z)) for z in _hermite(m).roots() if z > -1e-9]


def _evaluate(m: int, z: Array) -> Array:
    """He_m(z) by Horner's rule."""
    value = jnp.zeros_like(z)
    for coefficient in np.polynomial.hermite_e.herme2poly([0] * m + [1])[::-1]:
        value = value * z + float(coefficient)
    return value


def _gaussian(m: int, low: Array, high: Array) -> Array:
    low, high = jnp.minimum(low, 50.0), jnp.minimum(high, 50.0)
    # For a distance r the best z <= r may lie below `low`; then r = low is the best distance.
    inner = jnp.abs(_evaluate(m, low))
    for z in _positive_roots(m - 1):
        inner = jnp.maximum(inner, jnp.where(z <= low, abs(_hermite(m)(z)), 0))
    bound = inner * jnp.exp(-0.5 * low * low)
    # Otherwise z = r, and |He_m(r)| exp(-r^2 / 2) has its peaks at the roots of He_{m+1}.
    for z in _positive_roots(m + 1):
        peak = abs(_hermite(m)(z)) * math.exp(-0.5 * z * z)
        bound = jnp.maximum(bound, jnp.where((low <= z) & (z <= high), peak, 0))
    return jnp.maximum(bound, jnp.abs(_evaluate(m, high)) * jnp.exp(-0.5 * high * high))


def _sampled(kernel: Kernel, m: int, low: Array, high: Array) -> Array:
    bound = jnp.zeros_like(low)
    for fraction in np.linspace(0, 1, _SAMPLES):
        r = low + (high - low) * float(fraction)
        norm = jnp.zeros_like(low)
        for i in range(m // 2 + 1):
            factor = math.factorial(m) / (math.factorial(i) * math.factorial(m - 2 * i) * 2**i)
            norm = norm + factor * jnp.abs(kernel.kappa(m - i, r * r)) * r ** (m - 2 * i)
        bound = jnp.maximum(bound, norm)
    return _MARGIN * bound
