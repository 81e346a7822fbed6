"""Status bits that a jitted step leaves in its state, and the advice for each.

Nothing can be raised inside ``jax.jit``. What goes wrong there is recorded as a bit of
``SvgdState.status``; :func:`yggdrax.check` turns the bits into an exception on the host.
"""

import enum

__all__ = ["Status", "StatusError", "explain"]


class Status(enum.IntFlag):
    """Bits of ``SvgdState.status``. They accumulate: a bit once set stays set."""

    OK = 0
    NONFINITE = 1
    """A particle or a score was NaN or infinite; so is the update, of those particles at least."""
    CAPACITY = 2
    """A list of the tree was too short; the exact sum served in the same call."""
    MODES = 4
    """The Fourier sum would have needed more modes; another engine served in the same call."""
    INACCURATE = 8
    """The measured error exceeded ``rtol``; the exact sum serves from the next step on."""
    BANDWIDTH_FLOOR = 16
    """The bandwidth fell to its floor (median of zero, or a number that small)."""
    COLLAPSED = 32
    """All particles coincide: equal particles receive equal updates and can never separate."""
    OUT_OF_RANGE = 64
    """Temperature, scale or bandwidth was not positive and finite. A NaN makes the update NaN, and
    so does a temperature or scale that is not positive; a bandwidth is raised to its floor."""


_ADVICE = {
    Status.NONFINITE: (
        "a particle or a score was NaN or infinite, or too large for its dtype, and so is the "
        "update. Find the cause in the target or its data (labels out of range are one), or guard "
        "the chain with "
        "optax.apply_if_finite(optax.chain(yg.svgd(...), ...), 5)."
    ),
    Status.CAPACITY: (
        "the tree needed longer lists than its capacity, so the exact sum served. "
        "Give the tree a larger capacity or a smaller opening angle."
    ),
    Status.MODES: (
        "the extent of the particles over the bandwidth asks for more Fourier modes than allowed, "
        "so another engine served. One far outlier is the usual cause; otherwise raise max_modes "
        "or choose engine='tree'."
    ),
    Status.INACCURATE: (
        "the measured error exceeded rtol, so the exact sum serves since; where it does "
        "already, what is left is the rounding of its dtype. Raise rtol, use float64, choose "
        "engine='exact', or clear the bit in the state to let the fast engine try again."
    ),
    Status.BANDWIDTH_FLOOR: (
        "the bandwidth is at its floor: more than half of the pairs coincide, or the number given "
        "was too small. Spread the initial particles or give a larger bandwidth."
    ),
    Status.COLLAPSED: (
        "all particles coincide, and equal particles can never separate. Initialise each with a "
        "key of its own, as init_particles does."
    ),
    Status.OUT_OF_RANGE: (
        "the temperature, the scale or the bandwidth was not a positive, finite number: look at "
        "the schedule, rule or outer loop that it comes from, and learn logarithms of such numbers."
    ),
}


class StatusError(RuntimeError):
    """Raised by :func:`yggdrax.check`; the message holds one line of advice for each bit."""

    def __init__(self, status: int, advice: list[str]):
        """Keeps the bits as ``self.status``."""
        self.status = Status(status)
        super().__init__("\n".join(advice))


def explain(status: int) -> list[str]:
    """Returns one line of advice for each bit that is set.

    Example:
      >>> explain(0)
      []
      >>> explain(Status.CAPACITY)[0].split(":")[0]
      'CAPACITY'
    """
    bits = Status(int(status))
    return [f"{bit.name}: {_ADVICE[bit]}" for bit in Status if bit and bit in bits]
