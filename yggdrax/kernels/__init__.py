"""What two particles say to each other: radial kernels, their bounds, and bandwidth rules."""

from yggdrax.kernels.bandwidth import (
    BandwidthRule,
    MedianRule,
    as_bandwidth,
    ceiling_of,
    check_positive,
    floor_of,
    nan_unless_positive,
)
from yggdrax.kernels.radial import IMQ, RBF, Kernel, Radial, resolve_kernel

__all__ = [
    "IMQ",
    "RBF",
    "BandwidthRule",
    "Kernel",
    "MedianRule",
    "Radial",
    "as_bandwidth",
    "ceiling_of",
    "check_positive",
    "floor_of",
    "nan_unless_positive",
    "resolve_kernel",
]
