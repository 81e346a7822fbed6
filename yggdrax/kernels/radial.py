r"""Radial kernels k(x, y) = f(u), u = |x - y|^2 / h^2, as a family of profiles.

Everything the project needs of a kernel is the family

.. math:: \kappa_0 = f(u), \qquad \kappa_{m+1} = -2\, \mathrm{d}\kappa_m / \mathrm{d}u ,

from which gradients follow: the gradient of k in y is :math:`\kappa_1 (x - y) / h^2`, and so on
(:math:`\kappa_m` here is :math:`h^{2m}` times the one that has units).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from yggdrax.typing import Array

__all__ = ["IMQ", "RBF", "Kernel", "Radial", "resolve_kernel"]


class Kernel:
    """A radial kernel. Subclasses are frozen dataclasses, hashable, and define no ``__call__``.

    (``optax.inject_hyperparams`` takes every callable for a schedule.)
    """

    single_profile: ClassVar[bool] = False
    """Whether all members of the family are one function, so that one matrix serves for all."""

    def kappa(self, m: int, u: Array) -> Array:
        """The m-th member of the family at squared scaled distances ``u``; same shape as ``u``."""
        raise NotImplementedError

    def reach(self, dtype) -> float:
        """The ``u`` beyond which every member of the family underflows to 0; inf if there is none.

        Pairs further apart than that may be left out of a sum without changing a bit of it.
        """
        del dtype
        return float("inf")


@dataclasses.dataclass(frozen=True)
class RBF(Kernel):
    """The Gaussian kernel ``exp(-u / 2)``; every member of its family is the kernel itself.

    Example:
      >>> float(RBF().kappa(0, jnp.array(0.0)))
      1.0
    """

    single_profile: ClassVar[bool] = True

    def kappa(self, m: int, u: Array) -> Array:
        """``exp(-u / 2)`` for every ``m``."""
        del m
        return jnp.exp(-0.5 * u)

    def reach(self, dtype) -> float:
        """Where ``exp(-u / 2)`` is less than half the smallest subnormal number."""
        info = jnp.finfo(dtype)
        # From its exponent: the number itself is 0 where subnormals are flushed, as they are while
        # XLA compiles.
        return 2.0 * math.log(2) * (1 + info.nmant - int(info.minexp))


@dataclasses.dataclass(frozen=True)
class IMQ(Kernel):
    """The inverse multiquadric ``(1 + u) ** -1/2``, a softened 1/r potential with long tails.

    Example:
      >>> float(IMQ().kappa(0, jnp.array(3.0)))
      0.5
    """

    def kappa(self, m: int, u: Array) -> Array:
        """``1 * 3 * ... * (2m - 1) * (1 + u) ** (-1/2 - m)``."""
        factor = 1
        for i in range(m):
            factor *= 2 * i + 1
        inverse = jax.lax.rsqrt(1 + u)
        return factor * inverse ** (2 * m + 1)


@dataclasses.dataclass(frozen=True)
class Radial(Kernel):
    """A user's own radial profile, differentiated automatically.

    Args:
      profile: a smooth function of ``u = |x - y|^2 / h^2``, elementwise, with ``profile(0)`` finite
        and derivatives that are finite at 0 (so a function of ``u``, not of its square root).

    Example:
      >>> kernel = Radial(lambda u: 1 / (1 + u))
      >>> float(kernel.kappa(1, jnp.array(0.0)))
      2.0
    """

    profile: Callable[[Array], Array]

    def __post_init__(self):
        """Refuses what cannot be called."""
        if not callable(self.profile):
            raise TypeError(f"Radial takes a profile, a function of u, not {self.profile!r}.")

    def kappa(self, m: int, u: Array) -> Array:
        """The profile's m-th derivative times ``(-2) ** m``, by forward differentiation.

        Raises:
          ValueError: for a profile that is not elementwise.
        """
        function = self._elementwise
        for _ in range(m):
            function = _minus_twice_derivative(function)
        return function(u)

    def _elementwise(self, u: Array) -> Array:
        value = jnp.asarray(self.profile(u))
        if value.shape != jnp.shape(u):
            raise ValueError(
                f"the profile of Radial must be elementwise: for u of shape {jnp.shape(u)} it "
                f"returned shape {value.shape}. (A constant is jnp.ones_like(u).)"
            )
        return value


def _minus_twice_derivative(function):
    def derivative(u):
        return -2 * jax.jvp(function, (u,), (jnp.ones_like(u),))[1]

    return derivative


def resolve_kernel(kernel: "Kernel | str") -> Kernel:
    """Returns the kernel for an object or for one of the names ``"rbf"`` and ``"imq"``.

    Raises:
      ValueError: for an unknown name.
      TypeError: for an object that is no kernel.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        names = {"rbf": RBF, "imq": IMQ}
        if kernel.lower() in names:
            return names[kernel.lower()]()
        raise ValueError(
            f"unknown kernel {kernel!r}: choose one of {sorted(names)}, or pass RBF(), IMQ() or "
            "Radial(profile)."
        )
    raise TypeError(
        f"kernel must be a yggdrax Kernel or a name, not {type(kernel).__name__}: wrap a profile "
        "of u = |x - y|^2 / h^2 as Radial(profile)."
    )
