"""A target in coordinates in which it is about a standard normal."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from yggdrax.targets.base import Target, check_scalar
from yggdrax.typing import Array, Key, ParticleTree, PyTree

__all__ = ["Whitened"]

_HIGHEST = jax.lax.Precision.HIGHEST


class Whitened(Target):
    r"""Another target, with a particle z (d,) standing for ``mean + factor @ z``.

    With ``factor`` a root of the posterior's covariance, z is about N(0, I): all coordinates have
    one width and no linear correlation. Then ``svgd(per="coordinate")``, one kernel for each
    coordinate, keeps means and variances in many dimensions, where one kernel over all of them
    under-states the variance, and kernels of correlated coordinates know nothing of each other.

    The density changes by a constant only, so the particles of the original target are those
    returned by :meth:`restore`; predict with those and with the original target.

    Args:
      target: the target to whiten.
      mean: a particle of the target, such as the posterior's mode; it also gives the structure.
      covariance: (d, d), symmetric and positive definite, in the order of
        ``jax.flatten_util.ravel_pytree``; (d,) for variances alone.

    Raises:
      ValueError: if shapes do not fit or the covariance is not positive definite.

    Example:
      >>> from yggdrax.targets import Gaussian
      >>> target = Gaussian([1.0, 2.0], [[4.0, 1.0], [1.0, 2.0]])
      >>> white = Whitened(target, target.mean(), target.covariance())
      >>> [round(float(s), 4) for s in jax.grad(white)(jnp.array([0.5, -1.0]))]
      [-0.5, 1.0]
      >>> white.restore(jnp.zeros((3, 2))).shape
      (3, 2)
    """

    def __init__(self, target: Any, mean: PyTree, covariance: ArrayLike):
        """Takes the root of the covariance."""
        flat, self.unravel = ravel_pytree(jax.tree.map(jnp.asarray, mean))
        spread = jnp.asarray(covariance, flat.dtype)
        if spread.shape not in ((flat.size,), (flat.size, flat.size)):
            raise ValueError(
                f"the covariance of a particle of {flat.size} numbers must have shape "
                f"{(flat.size, flat.size)} or {(flat.size,)}, not {spread.shape}."
            )
        root = jnp.sqrt(spread) if spread.ndim == 1 else jnp.linalg.cholesky(spread)
        diagonal = root if root.ndim == 1 else jnp.diag(root)
        if not bool(jnp.all(jnp.isfinite(root)) & jnp.all(diagonal > 0)):
            raise ValueError("the covariance must be positive definite and finite.")
        self.target, self.shift, self.factor = target, flat, root
        self.num_data = getattr(target, "num_data", None)
        self.dimension = flat.size

    @classmethod
    def laplace(
        cls, target: Any, start: PyTree, batch: Any = None, *, max_steps: int = 100
    ) -> "Whitened":
        """Whitens by the Laplace approximation: the mode, and the inverse Hessian there.

        The mode is found by Newton's method with halved steps, so the Hessian (d, d) must fit in
        memory: up to some thousand coordinates.

        Args:
          target: a smooth target with one mode of interest.
          start: a particle to start from.
          batch: handed to the target; all the data is what is wanted.
          max_steps: of Newton's method.

        Raises:
          ValueError: if no mode with a positive definite curvature is found.

        Example:
          >>> from yggdrax.targets import Gaussian
          >>> white = Whitened.laplace(Gaussian([1.0, 2.0], [[4.0, 1.0], [1.0, 2.0]]), jnp.zeros(2))
          >>> [round(float(v), 3) for v in white.shift]
          [1.0, 2.0]
        """
        flat, unravel = ravel_pytree(jax.tree.map(jnp.asarray, start))

        def loss(x):
            return -check_scalar(target(unravel(x), batch), "the log density")

        mode, precision = _newton(loss, flat, max_steps)
        return cls(target, unravel(mode), _inverse(precision))

    def refined(self, particles: ArrayLike, batch: Any = None) -> "Whitened":
        """Whitens again, by the particles of a first run instead of the mode alone.

        The new mean is the particles' own, the new covariance the inverse of the curvature
        -grad^2 log p averaged over them: for a skewed posterior both are nearer to the right ones
        than the mode and the curvature there.

        Args:
          particles: z (N, d), in the coordinates of this object.
          batch: handed to the target.

        Raises:
          ValueError: if the averaged curvature is not positive definite.
        """
        curvature = jax.hessian(lambda z: -self(z, batch))
        average = jnp.mean(jax.lax.map(curvature, jnp.asarray(particles), batch_size=16), axis=0)
        covariance = _inverse(0.5 * (average + average.T))
        if self.factor.ndim == 1:
            outer = covariance * self.factor[:, None] * self.factor
        else:
            left = jnp.matmul(self.factor, covariance, precision=_HIGHEST)
            outer = jnp.matmul(left, self.factor.T, precision=_HIGHEST)
        mean = self._one(jnp.mean(jnp.asarray(particles), axis=0))
        return Whitened(self.target, mean, 0.5 * (outer + outer.T))

    def init_many(self, key: Key, num_particles: int) -> Array:
        """Draws z (N, d) to start from, with mean 0 and covariance I exactly if N > d.

        A kernel for each coordinate moves every coordinate to its own distribution and leaves
        correlations as they were: those of chance, of size 1 / sqrt(N), are best taken out before.
        """
        z = jax.random.normal(key, (num_particles, self.dimension), self.shift.dtype)
        if num_particles <= self.dimension:
            return z
        z = z - jnp.mean(z, axis=0)
        covariance = jnp.matmul(z.T, z, precision=_HIGHEST) / num_particles
        root = jnp.linalg.cholesky(covariance)
        return jax.scipy.linalg.solve_triangular(root, z.T, lower=True).T

    def __call__(self, particle: Array, batch: Any = None, *, key: Key | None = None) -> Array:
        """The target's log density at the particle that z (d,) stands for, up to a constant."""
        return self.target(self._one(particle), batch, key=key)

    def init(self, key: Key) -> Array:
        """One draw from N(0, I), (d,)."""
        return jax.random.normal(key, (self.dimension,), self.shift.dtype)

    def restore(self, particles: ArrayLike) -> ParticleTree:
        """Particles z (N, d) as particles of the original target, leading axis N."""
        return jax.vmap(self._one)(jnp.asarray(particles))

    def _one(self, z: Array) -> PyTree:
        if self.factor.ndim == 1:
            return self.unravel(self.shift + self.factor * z)
        return self.unravel(self.shift + jnp.matmul(self.factor, z, precision=_HIGHEST))


def _inverse(matrix: Array) -> Array:
    """The inverse of a positive definite matrix, symmetric; NaN for any other."""
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), identity)
    return 0.5 * (inverse + inverse.T)


def _newton(loss, x: Array, max_steps: int) -> tuple[Array, Array]:
    """The minimum of ``loss`` and the Hessian there."""
    value = jax.jit(loss)

    @jax.jit
    def propose(x):
        gradient, hessian = jax.grad(loss)(x), jax.hessian(loss)(x)
        hessian = 0.5 * (hessian + hessian.T)
        # Away from the mode the curvature may be negative: enough of the identity mends that.
        lowest = jnp.linalg.eigvalsh(hessian)[0]
        shift = jnp.where(lowest > 0, 0, 1e-3 - 2 * lowest)
        step = jnp.linalg.solve(hessian + shift * jnp.eye(x.size, dtype=x.dtype), gradient)
        return hessian, lowest, step, gradient @ step, loss(x)

    for _ in range(max_steps):
        hessian, lowest, step, decrement, here = propose(x)
        # The loss changes by half of the decrement; below this it is lost in rounding.
        length, eps = 1.0, float(jnp.finfo(x.dtype).eps)
        if float(decrement) > 4 * eps * max(1.0, abs(float(here))):
            while length > 1e-6 and not bool(value(x - length * step) < here):
                length /= 2
            if length > 1e-6:
                x = x - length * step
                continue
        if bool(lowest > 0):
            return x, hessian
        break
    raise ValueError(
        "Newton's method found no mode with a positive definite curvature: start nearer to it, or "
        "pass mean and covariance, such as those of a first run, to Whitened itself."
    )
