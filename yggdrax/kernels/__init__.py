"""What two particles say to each other: radial kernels, their bounds, and bandwidth rules."""

from yggdrax.kernels.radial import IMQ, RBF, Kernel, Radial, resolve_kernel

__all__ = ["IMQ", "RBF", "Kernel", "Radial", "resolve_kernel"]
