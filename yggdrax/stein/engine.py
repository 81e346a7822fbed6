"""What every engine of the sum over pairs looks like, and how one is asked for by name."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.kernels import Kernel
from yggdrax.sharding import Axes, may_be_sharded
from yggdrax.typing import Array, is_real, is_whole

__all__ = ["Engine", "SteinSum"]


class SteinSum(NamedTuple):
    """What an engine returns."""

    phi: Array
    """phi at every particle, ``(N, d)``, in the caller's order."""
    status: Array
    """Status bits, ``()`` int32."""


class Engine:
    r"""A way to compute phi. Subclasses are frozen dataclasses, hashable, without ``__call__``.

    .. math::
        \phi_i = \frac1N \sum_j \Big[ \kappa_0(u_{ij}) S_j
                 + \kappa_1(u_{ij}) \frac{x_i - x_j}{h^2} \Big], \qquad
        u_{ij} = |x_i - x_j|^2 / h^2 .
    """

    needs_one_matrix: ClassVar[bool] = True
    """Whether particles of any dimension are put into one (N, d) matrix for this engine."""

    rtol: float = 0.0
    """What the error should stay below; 0 for rounding alone."""

    check_every: int = 0
    """Steps between measurements of the error by ``svgd``; 0 for never."""

    shards: ClassVar[bool] = False
    """Whether particles may be split over several devices."""

    def choose(self, n: int, d: int, dtype, kernel: Kernel) -> "Engine":
        """The engine that serves particles (n, d): itself, unless it is one that chooses."""
        del n, d, dtype, kernel
        return self

    def refuses(self, shape: tuple[int, int], dtype, kernel: Kernel) -> str | None:
        """Why this engine cannot serve particles of such a shape, or None if it can."""
        del shape, dtype, kernel
        return None

    def stein(self, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """Computes phi for ``x`` and ``s`` of shape (N, d) and a bandwidth ``h`` of shape ().

        Jittable, and differentiable in ``x``, ``s`` and ``h`` in reverse mode.
        """
        raise NotImplementedError

    def on_shard(self, axes: Axes, x: Array, s: Array, h: Array, kernel: Kernel) -> SteinSum:
        """phi at the particles of one shard, from those of all shards along the mesh axes.

        With no axes the particles are all there are. The status is the same on every shard. Not
        differentiable; :meth:`on_shard_adjoint` is its adjoint.
        """
        self._require_one_device(axes)
        return self.stein(x, s, h, kernel)

    def on_shard_adjoint(
        self, axes: Axes, x: Array, s: Array, u: Array, h: Array, kernel: Kernel
    ) -> tuple[Array, Array, Array]:
        """Cotangents of one shard's x and s, and of h, for the cotangent ``u`` of its phi."""
        self._require_one_device(axes)
        _, pullback = jax.vjp(lambda x, s, h: self.stein(x, s, h, kernel).phi, x, s, h)
        return pullback(u)

    def require_place(self, x: Array) -> None:
        """Refuses particles on a mesh of several devices if this engine does not serve them.

        Raises:
          ValueError: naming the engine and those that do.
        """
        if not self.shards and may_be_sharded(x):
            self._require_one_device(("a mesh",))

    def _require_one_device(self, axes: Axes) -> None:
        if axes:
            raise ValueError(
                f"the engine {type(self).__name__} does not serve particles on a mesh of several "
                "devices: choose engine='auto', engine='exact' or engine='fourier'."
            )


def require_matrices(x: Array, s: Array) -> None:
    """Refuses anything but particles and scores that are matrices (N, d) alike.

    Raises:
      ValueError: naming both shapes.
    """
    if jnp.ndim(x) != 2 or jnp.shape(s) != jnp.shape(x):
        raise ValueError(
            "particles and scores must be matrices (N, d) of one shape, but have shapes "
            f"{jnp.shape(x)} and {jnp.shape(s)}."
        )


def require_number(name: str, value, low: float, high: float) -> None:
    """Refuses an option that is no number between ``low`` and ``high``.

    Raises:
      TypeError: for anything but a number of Python or NumPy.
      ValueError: for one out of range.
    """
    if not is_real(value):
        raise TypeError(f"{name} must be a number of Python or NumPy, not {value!r}.")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}, not {value!r}.")


def require_interval(check_every: int) -> None:
    """Refuses a number of steps between measurements that is none.

    Raises:
      ValueError: naming it.
    """
    if not is_whole(check_every, 0) or check_every >= 2**31:
        raise ValueError(f"check_every must be 0 (never) or a positive int32, not {check_every!r}.")


def no_status() -> Array:
    """The status of a sum that went well."""
    return jnp.zeros((), jnp.int32)
