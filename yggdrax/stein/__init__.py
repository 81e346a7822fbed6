"""The sum over all pairs: exact or by Fourier sums, and its measured error."""
