"""NUTS by BlackJAX, to compare with: an optional package, imported when asked for."""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from yggdrax.targets import Whitened
from yggdrax.typing import Key

__all__ = ["Chains", "compare_moments", "load_blackjax", "nuts"]

CHAINS, WARMUP = 4, 500


class Chains(NamedTuple):
    """What NUTS found, in the coordinates of the original target, flattened."""

    mean: np.ndarray
    """(d,)."""
    deviation: np.ndarray
    """Standard deviations, (d,)."""
    effective_size: float
    """The smallest number of independent draws that a coordinate's draws are worth."""


def load_blackjax() -> Any:
    """Imports BlackJAX.

    Raises:
      ImportError: naming the extra.
    """
    try:
        return importlib.import_module("blackjax")
    except ImportError as error:
        raise ImportError(
            "NUTS needs BlackJAX: python -m pip install 'yggdrax[benchmarks]'"
        ) from error


def nuts(target: Whitened, key: Key, draws: int) -> Chains:
    """Four chains with 500 steps of adaptation each, in whitened coordinates.

    Args:
      target: the target; its coordinates are what makes NUTS fast as well.
      key: a random key.
      draws: of each chain, after adaptation.

    Raises:
      ImportError: without BlackJAX, naming the extra.
    """
    blackjax = load_blackjax()
    adaptation = blackjax.window_adaptation(blackjax.nuts, target, target_acceptance_rate=0.8)

    def chain(key):
        start_key, adapt_key, draw_key = jax.random.split(key, 3)
        (state, parameters), _ = adaptation.run(adapt_key, target.init(start_key), WARMUP)
        kernel = blackjax.nuts(target, **parameters).step

        def step(state, key):
            state, _ = kernel(key, state)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(draw_key, draws))[1]

    positions = jax.jit(jax.vmap(chain))(jax.random.split(key, CHAINS))
    flat = positions.reshape(-1, positions.shape[-1])
    sizes = blackjax.diagnostics.effective_sample_size(positions)
    moved = jax.vmap(lambda p: ravel_pytree(p)[0])(target.restore(flat))
    moved = np.asarray(moved, np.float64)
    return Chains(moved.mean(axis=0), moved.std(axis=0, ddof=1), float(jnp.min(sizes)))


def compare_moments(particles: Any, chains: Chains) -> dict[str, float]:
    """Largest error of a mean in deviations, smallest and largest ratio of deviations.

    Args:
      particles: (N, d), in the coordinates of the original target.
      chains: the reference.

    Example:
      >>> reference = Chains(np.zeros(1), np.ones(1), 100.0)
      >>> compare_moments(np.array([[-1.0], [1.0]]), reference)["mean_error"]
      0.0
    """
    points = np.asarray(particles, np.float64)
    ratio = points.std(axis=0, ddof=1) / chains.deviation
    error = np.abs(points.mean(axis=0) - chains.mean) / chains.deviation
    return {
        "mean_error": float(error.max()),
        "deviation_ratio_low": float(ratio.min()),
        "deviation_ratio_high": float(ratio.max()),
    }
