"""Why an engine serves: the answer to a user's question, computed outside jit."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from yggdrax.kernels import RBF, Kernel, MedianRule, as_bandwidth, floor_of, resolve_kernel
from yggdrax.stein.auto import Auto, Price, share_within_reach
from yggdrax.stein.choose import resolve_engine
from yggdrax.stein.engine import Engine
from yggdrax.stein.fourier import Fourier
from yggdrax.stein.leaves import layout_of
from yggdrax.stein.modes import bounding_box
from yggdrax.typing import Number, ParticleTree

__all__ = ["Explanation", "explain"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves, and why. ``str()`` of it is one line."""

    engine: str
    """What serves these particles: ``"exact"``, ``"fourier"``, or another engine's name."""
    reason: str
    num_particles: int
    dimension: int
    bandwidth: float
    extent: float | None = None
    """The longest side of the particles' box over the bandwidth, where the engine looks at it."""
    share: float | None = None
    """The share of pairs within the kernel's reach, sampled, where the engine looks at it."""
    modes: int | None = None
    """Fourier modes along each axis, where there are any."""

    def __str__(self) -> str:
        """One line."""
        seen = f"N = {self.num_particles}, d = {self.dimension}, h = {self.bandwidth:.3g}"
        if self.extent is not None:
            seen += f", extent {self.extent:.3g} h"
        if self.share is not None:
            seen += f", {self.share:.0%} of the pairs within reach"
        modes = "" if self.modes is None else f" with {self.modes} modes an axis"
        return f"{self.engine}{modes}: {self.reason} ({seen})"


def explain(
    particles: ParticleTree,
    bandwidth: Number | str | MedianRule = "median",
    *,
    kernel: Kernel | str = RBF(),  # noqa: B008  (frozen)
    engine: Engine | str = "auto",
) -> Explanation:
    """Says which sum ``svgd`` runs for these particles on a CPU, and why.

    Args:
      particles: pytree of concrete arrays with a leading axis N.
      bandwidth: h, or ``"median"``.
      kernel: as for ``svgd``.
      engine: as for ``svgd``.

    Returns:
      An :class:`Explanation`; printed, it is one line.

    Raises:
      ValueError: for particles or a bandwidth that ``svgd`` refuses.
      ImportError: for the Fourier engine without its library.

    Example:
      >>> import jax
      >>> print(explain(jax.random.normal(jax.random.key(0), (100, 2)), 0.5))
      exact: N = 100 is so small that the exact sum is the fastest (N = 100, d = 2, h = 0.5)
    """
    layout, kernel = layout_of(particles), resolve_kernel(kernel)
    leaves = layout.join(layout.matrices(particles))
    if isinstance(bandwidth, str | MedianRule):
        if bandwidth not in ("median", MedianRule()):
            raise ValueError(f"unknown bandwidth {bandwidth!r}: pass 'median' or a number.")
        h = jnp.maximum(MedianRule().bandwidth(leaves), floor_of(layout.dtype))
    else:
        h = as_bandwidth(bandwidth, layout.dtype)
    n, d, asked = layout.num_particles, layout.dimension, resolve_engine(engine)
    (x, *others) = leaves
    if others:
        reason = f"d = {d} is taken leaf by leaf, which only the exact sum does"
        return Explanation("exact", reason, n, d, float(h))
    if isinstance(asked, Auto):
        chosen, reason = asked.decide(n, d, layout.dtype, kernel)
    else:
        reason = "it was asked for by name"
        chosen = asked.choose(n, d, layout.dtype, kernel)
    if not isinstance(chosen, Fourier):
        return Explanation(type(chosen).__name__.lower(), reason, n, d, float(h))
    problem = chosen.refuses((n, d), layout.dtype, kernel)
    if problem:
        raise ValueError(problem)
    return _explain_fourier(chosen, reason, x, h, kernel)


def _explain_fourier(chosen: Fourier, reason: str, x, h, kernel: Kernel) -> Explanation:
    """The choice that the engine makes at run time, made here on the host."""
    n, d = x.shape
    box = bounding_box(x, h)
    extent, share = float(box.extent), float(share_within_reach(box.points, kernel))
    seen = {"num_particles": n, "dimension": d, "bandwidth": float(h), "extent": extent}
    reaches, ladder = chosen.reaches(d, x.dtype, kernel), chosen.ladder(d, x.dtype, kernel)
    if not np.all(np.isfinite(np.asarray(box.points))):
        return Explanation("none", "not all particles are finite, so phi is NaN", **seen)
    index = int(np.sum(extent > reaches))
    if index == len(reaches):
        reason = (
            f"the extent asks for more than {ladder[-1]} modes an axis, the most that are "
            "allowed or worth their price"
        )
        return Explanation(type(chosen.fallback).__name__.lower(), reason, **seen)
    if not np.broadcast_to(chosen.serves(box.points, kernel), reaches.shape)[index]:
        reason = "few pairs are within reach, and passing over the others is cheaper than the modes"
        return Explanation("exact", reason, share=share, **seen)
    modes = chosen.modes_of(index, d, x.dtype, kernel)
    if type(chosen) is not Fourier:
        price = Price.of(d, x.dtype, kernel)
        ratio = price.exact(n, share) / price.fourier(n, modes, d)
        reason = f"some {ratio:.2g} times cheaper than the exact sum"
    return Explanation("fourier", reason, modes=modes, share=share, **seen)
