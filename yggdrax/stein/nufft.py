"""The only place that touches the library of non-uniform Fourier transforms (extra ``nufft``).

Real weights travel two to a complex transform, all transforms of a step in one call, so that the
library sorts the points once. Points are numbers in [-pi, pi]; modes are odd in number, -m .. m
along every axis, so that each has its conjugate partner at the mirrored place.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from yggdrax.sharding import Axes, total
from yggdrax.typing import Array

__all__ = ["analyse", "missing", "pack", "require", "synthesise", "unpack"]


@functools.cache
def missing() -> str | None:
    """Why the library cannot be used, or None if it can."""
    try:
        importlib.import_module("jax_finufft")
    except ModuleNotFoundError as error:
        if error.name == "jax_finufft":
            return "jax-finufft is not installed (pip install 'yggdrax[nufft]')"
        return f"jax-finufft cannot be imported ({error})"
    except (ImportError, OSError) as error:
        return f"jax-finufft cannot be imported ({error})"
    return None


def require() -> None:
    """Raises an ImportError that names the extra where the library is missing."""
    problem = missing()
    if problem:
        raise ImportError(
            f"the Fourier engine needs jax-finufft, but {problem}: pip install 'yggdrax[nufft]', "
            "or choose engine='exact', engine='tree' or engine='auto'."
        )


@functools.cache
def _options(transforms: int):
    # One transform a thread: every transform is summed by one thread in one order, so results
    # repeat bit for bit. The parallel spreading of one transform would add in the order in which
    # threads arrive.
    from jax_finufft.options import Opts, SpreadSort, SpreadThread

    return Opts(
        nthreads=0 if transforms > 1 else 1,
        spread_thread=SpreadThread.Parallel,
        spread_sort=SpreadSort.Sort,
        upsampfac=1.25,
        # Points whose weights are added up in a row before they are added to the grid: with the
        # library's own choice, 10 to 100 times as many, sums of one sign drift by 2e-5 in float32.
        spread_max_sp_size=2048,
    )


def pack(values: Array) -> Array:
    """Real or Hermitian rows (c, K), two to a complex row: ``v[i] + i v[i + (c + 1) // 2]``."""
    half = (len(values) + 1) // 2
    if len(values) % 2:
        values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
    if jnp.iscomplexobj(values):
        return values[:half] + 1j * values[half:]
    return jax.lax.complex(values[:half], values[half:])


def analyse(theta: Array, weights: Array, modes: int, eps: float, axes: Axes = ()) -> Array:
    r"""The transforms ``sum_j w_j exp(-i k . theta_j)`` of real weights.

    Args:
      theta: points, (N, d), in [-pi, pi] and finite (the library crashes on others).
      weights: (c, N), real. Rows are to be of like size: two of them share the rounding.
      modes: modes along each axis, odd.
      eps: relative accuracy asked of the library.
      axes: the points are those of one shard along these mesh axes; the sum is over all shards.

    Returns:
      Complex modes, (c, modes ** d); reversing the second axis turns k into -k.
    """
    from jax_finufft import nufft1

    count, shape = len(weights), (modes,) * theta.shape[1]
    packed = pack(weights)
    values = nufft1(shape, packed, *theta.T, iflag=-1, eps=eps, opts=_options(len(packed)))
    values = total(values.reshape(len(packed), -1), axes)
    mirrored = jnp.conj(values[:, ::-1])
    both = jnp.concatenate([0.5 * (values + mirrored), -0.5j * (values - mirrored)])
    return both[:count]


def synthesise(theta: Array, packed: Array, modes: int, eps: float) -> Array:
    r"""The fields ``sum_k f_k exp(i k . theta_j)`` at the points, complex, (c, N).

    Args:
      theta: points, (N, d), in [-pi, pi] and finite.
      packed: spectra, (c, modes ** d), complex; of real fields two at a time as :func:`pack` does.
      modes: modes along each axis, odd.
      eps: relative accuracy asked of the library.
    """
    from jax_finufft import nufft2

    spectra = packed.reshape((-1,) + (modes,) * theta.shape[1])
    return nufft2(spectra, *theta.T, iflag=1, eps=eps, opts=_options(len(packed)))


def unpack(values: Array, count: int) -> Array:
    """The real rows of packed fields, (count, N)."""
    return jnp.concatenate([values.real, values.imag])[:count]
