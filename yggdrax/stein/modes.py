r"""The kernel sum on a grid of Fourier modes: box, period, symbols, and the sum with its adjoint.

Lengths are in units of the bandwidth h here, so that float32 serves h = 1e-15 and h = 1e15 alike.
With the period P and the frequencies :math:`\omega = 2 \pi k / P`,

.. math::
    \phi_c(x) = \frac1N \sum_\omega e^{i \omega x} \hat g(\omega)
                \Big[ \hat S_c(\omega) - \frac{i \omega_c}{h} \hat 1(\omega) \Big] ,

so that the repulsion is minus the gradient of the smoothed density and needs no weights of its
own. :math:`\hat g` is the kernel's *symbol*: its Fourier coefficients over one period.

Of particles split over shards, each shard transforms its own. The box is that of all particles,
and the modes are added over the shards; nothing else is exchanged, whatever N.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.kernels import RBF, Kernel
from yggdrax.sharding import Axes, largest, shard_count, smallest, total
from yggdrax.stein import nufft
from yggdrax.typing import Array

__all__ = [
    "Box",
    "Grid",
    "adjoint_sum",
    "bounding_box",
    "forward_sum",
    "forward_sum_of_a_small_box",
    "make_grid",
    "reach",
]


class Box(NamedTuple):
    """Where the particles are, in units of the bandwidth."""

    points: Array
    """Coordinates from the centre of the box, (N, d)."""
    extent: Array
    """The longest side of the box, ()."""


def bounding_box(x: Array, h: Array, axes: Axes = ()) -> Box:
    """Coordinates from the centre of the smallest box of all shards, divided by the bandwidth."""
    low, high = smallest(jnp.min(x, 0), axes), largest(jnp.max(x, 0), axes)
    centre = low + 0.5 * (high - low)
    return Box((x - centre) / h, jnp.max((high - low) / h))


# --- how many modes for which extent ---------------------------------------------------------


def _cutoffs(kernel: Kernel, tolerance: float) -> tuple[float, float, float]:
    """(a, r, w): the period must be a * extent + r at least, the modes must reach w.

    The Gaussian falls below the tolerance at the distance and at the frequency
    sqrt(2 ln(1 / tolerance)). The inverse multiquadric does not fall off in space, so all
    differences, twice the extent, must lie in one period; its transform falls like exp(-w).
    """
    if isinstance(kernel, RBF):
        q = math.sqrt(2 * math.log(1 / tolerance))
        return 1.0, q, q
    return 2.0, 8.0, math.log(1 / tolerance)


def reach(kernel: Kernel, tolerance: float, modes: int) -> float:
    """The longest extent, in bandwidths, that a number of modes serves (negative if none)."""
    stretch, room, cut = _cutoffs(kernel, tolerance)
    return (math.pi * modes / cut - room) / stretch


def _period(kernel: Kernel, tolerance: float, modes: int, extent: Array) -> Array:
    """The period that spreads what a number of modes has to spare over both errors."""
    if isinstance(kernel, RBF):
        # The cut-off q for which modes = (extent + q) q / pi holds exactly.
        return 0.5 * (jnp.sqrt(extent**2 + 4 * math.pi * modes) + extent)
    _, _, cut = _cutoffs(kernel, tolerance)
    return jnp.full_like(extent, math.pi * modes / cut)


class Grid(NamedTuple):
    """Modes of one box. Grids of modes are flat: K = modes ** d entries, the mirror image last."""

    modes: int
    theta: Array
    """Points on the circle, (N, d), in [-pi, pi]."""
    frequency: Array
    """Frequencies in 1 / h, (d, K)."""
    period: Array
    """The period in units of h, ()."""
    extent: Array
    """The longest side of the box, ()."""
    sharpness: float
    """How sharply a kernel that does not decay is bent into its period; sqrt(ln(1 / tolerance))."""


def make_grid(box: Box, kernel: Kernel, tolerance: float, modes: int) -> Grid:
    """The grid of ``modes`` (odd) modes along each axis for a box within their reach."""
    d = box.points.shape[1]
    period = _period(kernel, tolerance, modes, box.extent)
    step = 2 * math.pi / period
    theta = jnp.clip(box.points * step, -math.pi, math.pi)
    # The traced step comes first: a grid of plain indices would be folded into a constant.
    line = step * jnp.arange(-(modes // 2), modes // 2 + 1, dtype=theta.dtype)
    axes = [line.reshape((1,) * a + (-1,) + (1,) * (d - 1 - a)) for a in range(d)]
    frequency = jnp.stack([jnp.broadcast_to(axis, (modes,) * d).reshape(-1) for axis in axes])
    sharpness = math.sqrt(math.log(1 / tolerance))
    return Grid(modes, theta, frequency, period, box.extent, sharpness)


# --- symbols ---------------------------------------------------------------------------------


def _symbol(grid: Grid, kernel: Kernel, member: int = 0) -> Array:
    """Fourier coefficients of a member of the kernel's family, (K,)."""
    if isinstance(kernel, RBF):
        factor = (math.sqrt(2 * math.pi) / grid.period) ** len(grid.frequency)
        return factor * jnp.exp(-0.5 * jnp.sum(grid.frequency**2, 0))
    return _sampled_symbol(grid, lambda u: kernel.kappa(member, u))


def _symbol_in_h(grid: Grid, kernel: Kernel) -> Array:
    """h times the derivative of the symbol in h, the period held, (K,)."""
    if isinstance(kernel, RBF):
        d = len(grid.frequency)
        return _symbol(grid, kernel) * (d - jnp.sum(grid.frequency**2, 0))
    return _sampled_symbol(grid, lambda u: u * kernel.kappa(1, u))


def _bend(grid: Grid, t: Array) -> Array:
    """Distances along an axis: t up to the extent, level and so periodic at half the period.

    The slope is half of erfc; both its ends are as exact, and its spectrum as narrow, as asked.
    """
    middle = 0.5 * (grid.extent + 0.5 * grid.period)
    width = 0.5 * (0.5 * grid.period - grid.extent) / grid.sharpness
    z = (t - middle) / width
    bent = z * (1 + jax.lax.erf(z)) + jnp.exp(-(z**2)) / math.sqrt(math.pi)
    return t - 0.5 * width * bent


def _sampled_symbol(grid: Grid, profile) -> Array:
    """Coefficients of an even function from its values at as many points as there are modes.

    The function is even along every axis, so a cosine transform of one corner gives them all.
    """
    modes, d = grid.modes, len(grid.frequency)
    index = np.arange(modes // 2 + 1)
    # The argument is reduced in integers: cos(2 pi k n / M) of large k n loses digits.
    cosines = np.cos((2 * np.pi / modes) * (np.outer(index, index) % modes))
    cosines = cosines * np.where(index == 0, 1, 2) / modes
    cosines = np.concatenate([cosines[:0:-1], cosines])
    distance = _bend(grid, grid.period / modes * jnp.asarray(index, grid.period.dtype))
    axes = [distance.reshape((-1,) + (1,) * (d - 1 - axis)) ** 2 for axis in range(d)]
    values = profile(sum(axes))
    for _ in range(d):
        # Contracting the first axis and appending the result as the last turns the axes once.
        values = jnp.tensordot(
            values,
            jnp.asarray(cosines, values.dtype),
            ((0,), (1,)),
            precision=jax.lax.Precision.HIGHEST,
        )
    return values.reshape(-1)


# --- the sum and its adjoint -----------------------------------------------------------------


def _field(grid: Grid, symbol: Array, density: Array, scores: Array) -> Array:
    """Spectra of phi's components, (d, K); ``density`` is that of the weights 1 / h."""
    return symbol * (scores - 1j * grid.frequency * density)


def forward_sum(
    box: Box, s: Array, h: Array, kernel: Kernel, modes: int, rule, axes: Axes = ()
) -> Array:
    """phi, (N, d), by Fourier modes; ``rule`` gives the tolerance and the library's accuracy."""
    n, d = s.shape
    grid = make_grid(box, kernel, rule.tolerance, modes)
    weights = jnp.concatenate([s.T, jnp.full((1, n), 1 / h)])
    spectra = nufft.analyse(grid.theta, weights, modes, rule.eps, axes)
    symbol = _symbol(grid, kernel) / (n * shard_count(axes))
    field = _field(grid, symbol, spectra[d], spectra[:d])
    values = nufft.synthesise(grid.theta, nufft.pack(field), modes, rule.eps)
    return nufft.unpack(values, d).T


def forward_sum_of_a_small_box(
    box: Box, s: Array, h: Array, kernel: Kernel, modes: int, rule, axes: Axes = ()
) -> Array:
    """The same for a box that is small against the bandwidth.

    There the density is all but flat and its gradient is lost in the error of the transforms, so
    the repulsion is taken as ``(x (K 1) - K X) / h``, which is the ill-conditioned form elsewhere.
    """
    n, d = s.shape
    # Both terms in units of the extent: what is transformed together is of like size.
    scale = box.extent / h
    everybody = n * shard_count(axes)
    mean = total(jnp.mean(box.points, 0), axes) / shard_count(axes)
    y = (box.points - mean).T
    y = y / jnp.where(box.extent > 0, box.extent, 1)
    grid = make_grid(box, kernel, rule.tolerance, modes)
    weights = jnp.concatenate([s.T, scale * y, jnp.full((1, n), scale)])
    spectra = nufft.analyse(grid.theta, weights, modes, rule.eps, axes)
    scores, places, density = spectra[:d], spectra[d : 2 * d], spectra[2 * d :]
    attraction, repulsion = (_symbol(grid, kernel, member) / everybody for member in (0, 1))
    fields = jnp.concatenate([attraction * scores - repulsion * places, repulsion * density])
    values = nufft.synthesise(grid.theta, nufft.pack(fields), modes, rule.eps)
    values = nufft.unpack(values, d + 1)
    return (values[:d] + y * values[d]).T


def adjoint_sum(
    box: Box, s: Array, h: Array, u: Array, kernel: Kernel, modes: int, rule, axes: Axes = ()
) -> tuple[Array, Array, Array]:
    r"""Cotangents of x, s and h for the cotangent ``u`` (N, d) of phi.

    With F the field whose values at the particles are phi and V the field of the weights U / N
    (no repulsion), :math:`dS_j = V(x_j)`, :math:`dx_j = \sum_c U_{jc} \nabla F_c(x_j) +
    S_{jc} \nabla V_c(x_j) + \nabla (\nabla \cdot V)(x_j)`, and dh is a product of modes.
    """
    n, d = s.shape
    grid = make_grid(box, kernel, rule.tolerance, modes)
    weights = jnp.concatenate([s.T, jnp.full((1, n), 1 / h), u.T])
    spectra = nufft.analyse(grid.theta, weights, modes, rule.eps, axes)
    scores, density, cotangents = spectra[:d], spectra[d], spectra[d + 1 :]
    everybody = n * shard_count(axes)
    symbol = _symbol(grid, kernel) / everybody
    field = _field(grid, symbol, density, scores)
    back = symbol * cotangents
    slope = 1j * grid.frequency / h
    divergence = jnp.sum(slope * back, 0)
    both = slope[:, None] * (field + 1j * back)
    packed = jnp.concatenate([both.reshape(d * d, -1), back + 1j * slope * divergence])
    values = nufft.synthesise(grid.theta, packed, modes, rule.eps)
    gradients = values[: d * d].reshape(d, d, n)
    dx = jnp.sum(gradients.real * u.T + gradients.imag * s.T, 1) + values[d * d :].imag
    in_h = _field(grid, _symbol_in_h(grid, kernel) / everybody, density, scores)
    dh = jnp.sum(jnp.sum((jnp.conj(cotangents) * in_h).real, 1)) / h
    return dx.T, values[d * d :].real.T, dh
