"""The independent float64 reference: a plain double loop in NumPy, for tests only."""

import numpy as np


def _rbf(u):
    k = np.exp(-u / 2)
    return k, k


def _imq(u):
    return (1 + u) ** -0.5, (1 + u) ** -1.5


PROFILES = {"rbf": _rbf, "imq": _imq}


def attraction_and_repulsion(x, s, h, *, kernel="rbf", rows=None):
    """Both parts of phi at the given rows, each (len(rows), d), row by row in float64."""
    x, s = np.asarray(x, np.float64), np.asarray(s, np.float64)
    rows = range(len(x)) if rows is None else rows
    attraction, repulsion = [], []
    for i in rows:
        difference = x[i] - x
        k0, k1 = PROFILES[kernel]((difference**2).sum(1) / h**2)
        attraction.append(k0 @ s / len(x))
        repulsion.append(k1 @ difference / h**2 / len(x))
    return np.array(attraction), np.array(repulsion)


def phi(x, s, h, *, kernel="rbf", rows=None):
    """B(X, S, h): phi at the given rows."""
    attraction, repulsion = attraction_and_repulsion(x, s, h, kernel=kernel, rows=rows)
    return attraction + repulsion


def error(value, x, s, h, *, kernel="rbf", rows=None):
    """The error norm: |value - phi| / sqrt(|attraction|^2 + |repulsion|^2) over the rows."""
    a, r = attraction_and_repulsion(x, s, h, kernel=kernel, rows=rows)
    gross = np.sqrt((a**2).sum() + (r**2).sum())
    value = np.asarray(value, np.float64)
    if rows is not None and len(value) != len(a):
        value = value[np.asarray(rows)]
    return float(np.linalg.norm(value - a - r) / gross)
