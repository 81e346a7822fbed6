"""What several benchmarks measure against: a plain contraction, a float64 loop, a process apart."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

PROFILES = {
    "rbf": lambda u: (np.exp(-u / 2),) * 2,
    "imq": lambda u: ((1 + u) ** -0.5, (1 + u) ** -1.5),
}


@functools.partial(jax.jit, static_argnames=("rows", "columns"))
def contraction(x, s, h, rows=512, columns=1024):
    """Phi (N, d) by tiles of rows x columns, distances from dot products.

    What one would write in a few lines; plain reverse mode of it keeps every tile.
    """
    n, d = x.shape
    counts = -(-n // rows), -(-n // columns)
    weights = jnp.concatenate([s - x / h**2, jnp.ones((n, 1), x.dtype)], axis=1)

    def tiles(v, size, count):
        return jnp.pad(v, ((0, size * count - n), (0, 0))).reshape(count, size, v.shape[1])

    sources = tiles(x, columns, counts[1]), tiles(weights, columns, counts[1])

    def one_row(t):
        def add(total, source):
            y, w = source
            u = jnp.sum(t * t, 1)[:, None] + jnp.sum(y * y, 1)[None] - 2 * t @ y.T
            return total + jnp.exp(-jnp.maximum(u, 0) / (2 * h * h)) @ w, None

        total, _ = jax.lax.scan(add, jnp.zeros((rows, d + 1), x.dtype), sources)
        return total[:, :d] + t * total[:, d:] / h**2

    return jax.lax.map(one_row, tiles(x, rows, counts[0])).reshape(-1, d)[:n] / n


def errors(phi, x, s, h, kernel="rbf", count=200):
    """Errors at ``count`` particles against a loop in float64: in the norm, and relative to phi."""
    rows = np.random.default_rng(0).choice(len(x), min(count, len(x)), replace=False)
    x, s = np.asarray(x, np.float64), np.asarray(s, np.float64)
    parts = []
    for i in rows:
        difference = x[i] - x
        k0, k1 = PROFILES[kernel]((difference**2).sum(1) / h**2)
        parts.append((k0 @ s / len(x), k1 @ difference / h**2 / len(x)))
    attraction, repulsion = (np.array(v) for v in zip(*parts, strict=True))
    wrong = np.linalg.norm(np.asarray(phi, np.float64)[rows] - attraction - repulsion)
    gross = np.sqrt((attraction**2).sum() + (repulsion**2).sum())
    return float(wrong / gross), float(wrong / np.linalg.norm(attraction + repulsion))


def row_of_own_process(script, *arguments):
    """Runs ``script --row ARGUMENTS``, which prints a row as JSON; the row, or None and why not."""
    command = [sys.executable, script, "--row", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def write_rows(file, rows) -> None:
    """Writes a table as JSON, if a file is named."""
    if file:
        with open(file, "w") as out:
            json.dump({"jax": jax.__version__, "rows": rows}, out, indent=1)
