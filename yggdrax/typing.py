"""Array aliases and the axis vocabulary used in every docstring.

========  ==========================================================================
``N``     number of particles, the leading axis of every leaf
``d``     dimension of one particle, all floating leaves together
``B``     rows of a minibatch
``X``     particles ``(N, d)``; in general a pytree whose leaves are ``(N, ...)``
``S``     scores ``(N, d)``, the gradient of log p at each particle
``h``     bandwidth, in the units of X
``u``     squared scaled distance ``|x - y|^2 / h^2``, without units
========  ==========================================================================
"""

import numbers
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike as ArrayLike

Array: TypeAlias = jax.Array
"""Any array."""

Key: TypeAlias = jax.Array
"""A random key, typed (``jax.random.key``) or legacy."""

PyTree: TypeAlias = Any
"""A nest of arrays."""

ParticleTree: TypeAlias = Any
"""A nest of arrays, each with the leading axis N."""

Number: TypeAlias = float | int | np.number | jax.Array
"""A number given by the user: Python, NumPy, or a traced scalar."""


def is_whole(value: Any, least: int) -> bool:
    """Whether an option is an integer, no truth value, and not below ``least``.

    Example:
      >>> is_whole(3, 1), is_whole(True, 0), is_whole(2.0, 0)
      (True, False, False)
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and bool(value >= least)


def is_real(value: Any) -> bool:
    """Whether an option is a real number of Python or NumPy: no array, no truth value.

    Example:
      >>> is_real(1e-3), is_real(True), is_real("1e-3"), is_real(np.array(1e-3))
      (True, False, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
