r"""Whether the particles have the target's width, or have collapsed for reasons of dimension.

In d dimensions the fixed point of SVGD with N particles and the median rule on a Gaussian has about
:math:`\ln(N + 1) / d` of its variance, once d is large: the method's own limit, no error of a run.
(For particles equally far apart, :math:`h^2 = d \sigma^2 / \ln(N+1)`, and attraction and repulsion
balance at :math:`h = 1`.) What the particles really have, Stein's identity tells without samples:
:math:`E[(x - a) \cdot \nabla \log p(x)] = -d` for samples of p and any a.
"""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from yggdrax.kernels import MedianRule
from yggdrax.typing import Array, ParticleTree

__all__ = ["CollapseWarning", "Spread", "check_spread", "expected_variance_ratio", "moments"]


class CollapseWarning(UserWarning):
    """The particles are much narrower than their target."""


class Spread(NamedTuple):
    """How wide the particles are."""

    variance_ratio: float
    """Variance over the target's, by Stein's identity; exact for a Gaussian target. 1 is right."""
    expected_ratio: float
    """What the median rule lets expect for this N and d."""
    distance: float
    """Root mean squared distance of distinct particles."""
    bandwidth: float
    """The median rule's h."""
    by_leaf: dict[str, float]
    """The variance ratio of each leaf."""


def expected_variance_ratio(num_particles: int, dimension: int) -> float:
    """About the share of a Gaussian's variance at SVGD's fixed point under the median rule.

    Example:
      >>> round(expected_variance_ratio(500, 50), 3)
      0.124
    """
    return min(1.0, math.log(num_particles + 1) / dimension)


def moments(particles: ParticleTree) -> tuple[ParticleTree, ParticleTree]:
    """Mean and variance over the particles, leaf by leaf; N in the denominator.

    Example:
      >>> mean, variance = moments(jnp.array([[0.0], [2.0]]))
      >>> float(mean[0]), float(variance[0])
      (1.0, 1.0)
    """
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), particles)
    return mean, jax.tree.map(lambda leaf: jnp.var(leaf, axis=0), particles)


def check_spread(
    particles: ParticleTree, scores: ParticleTree, *, threshold: float = 0.5
) -> Spread:
    """Compares the particles' width with the target's, and warns of a collapse with advice.

    What is measured is Stein's identity, E[-x . score] = d for centred x, in all coordinates
    together and in each leaf (where it may be off, even negative, for few particles). It sees
    particles that are too close, not a shape that is wrong: on a bent or many-peaked target
    particles can pass that miss most of it.

    Args:
      particles: leaves (N, ...), after the run.
      scores: the gradient of log p at each particle over all the data, like ``particles``.
      threshold: variance ratio below which a :class:`CollapseWarning` is given.

    Returns:
      A :class:`Spread`.

    Raises:
      ValueError: for fewer than two particles, or trees that differ.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (2000, 3))
      >>> round(check_spread(x, -x).variance_ratio, 1)
      1.0
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(particles)]
    xs, ss = jax.tree.leaves(particles), jax.tree.leaves(scores)
    if [leaf.shape for leaf in xs] != [leaf.shape for leaf in ss]:
        raise ValueError(
            f"scores must be shaped like the particles: {[leaf.shape for leaf in ss]} against "
            f"{[leaf.shape for leaf in xs]}."
        )
    n = xs[0].shape[0]
    if n < 2:
        raise ValueError("the spread needs at least 2 particles.")
    xs = [_rows(leaf) - jnp.mean(_rows(leaf), axis=0) for leaf in xs]
    # N - 1: the mean is the particles' own, so exact samples give 1 on average.
    shares = [-float(jnp.sum(x * _rows(s))) / (n - 1) for x, s in zip(xs, ss, strict=True)]
    sizes = [x.shape[1] for x in xs]
    ratio, expected = sum(shares) / sum(sizes), expected_variance_ratio(n, sum(sizes))
    if ratio < threshold:
        warnings.warn(_advice(ratio, expected, n, sum(sizes)), CollapseWarning, stacklevel=2)
    return Spread(
        variance_ratio=ratio,
        expected_ratio=expected,
        distance=math.sqrt(2 * n / (n - 1) * sum(float(jnp.mean(jnp.sum(x**2, 1))) for x in xs)),
        bandwidth=float(MedianRule().bandwidth(tuple(xs))),
        by_leaf=dict(zip(names, (v / d for v, d in zip(shares, sizes, strict=True)), strict=True)),
    )


def _rows(leaf: Array) -> Array:
    return jnp.reshape(leaf, (leaf.shape[0], -1)).astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _advice(ratio: float, expected: float, n: int, d: int) -> str:
    return (
        f"the particles have {ratio:.2g} of the target's variance (the median rule lets expect "
        f"about {expected:.2g} for {n} particles in {d} dimensions). Predictions of networks often "
        "stand this; variances do not. Let fewer dimensions enter the kernel "
        "(svgd(distances=[...])), use a kernel for each leaf or coordinate (per='leaf', "
        "per='coordinate'), measure distances between predictions instead of parameters, or take "
        "more particles."
    )
