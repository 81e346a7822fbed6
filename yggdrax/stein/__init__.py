"""The sum over all pairs: exact, by a tree, by Fourier sums, and the choice among them."""
