"""Tables of numbers: read from a file with all faults named, standardised, cut into minibatches.

A batch may come from anywhere: ``particle_grads`` takes any pair (x, y), so the batches of any
other iterator serve as well as these.
"""

import csv
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from yggdrax.typing import Array, Key, is_whole

__all__ = [
    "DataError",
    "DataWarning",
    "Standardizer",
    "Table",
    "batches",
    "epoch_order",
    "read_csv",
]

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


class DataError(ValueError):
    """A table that cannot be used, with the line and the column."""


class DataWarning(UserWarning):
    """A table that can be used, but holds something that helps nobody."""


class Table(NamedTuple):
    """Features and targets of a data set."""

    x: np.ndarray
    """(rows, features) float64."""
    y: np.ndarray
    """(rows,) float64."""
    names: tuple[str, ...]
    """Names of the features."""


class Standardizer(NamedTuple):
    """An affine map to mean 0 and deviation 1, fitted on training rows only."""

    mean: np.ndarray
    """(features,) or ()."""
    scale: np.ndarray
    """(features,) or (); 1 for a constant column."""

    @classmethod
    def fit(cls, values: np.ndarray) -> "Standardizer":
        """Learns means and deviations over the rows.

        Example:
          >>> standardizer = Standardizer.fit(np.array([1.0, 3.0]))
          >>> standardizer.apply(np.array([5.0])).tolist()
          [3.0]
        """
        values = np.asarray(values, np.float64)
        mean, scale = values.mean(0), values.std(0)
        # A column that is constant but for rounding has no scale of its own.
        constant = scale <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
        return cls(mean, np.where(constant, 1.0, scale))

    def apply(self, values: Any) -> np.ndarray:
        """Standardised values, float32."""
        return np.asarray((np.asarray(values) - self.mean) / self.scale, np.float32)

    def undo(self, values: Any) -> Any:
        """Back to the units of the data."""
        return values * self.scale + self.mean


def read_csv(path: str | os.PathLike, *, target: int = -1, batch_size: int | None = None) -> Table:
    """Reads a table of numbers separated by commas, with or without a line of names.

    Args:
      path: the file.
      target: which column is y, the last by default.
      batch_size: refuse a table with fewer rows than this.

    Raises:
      FileNotFoundError: if there is no such file.
      DataError: for text, a missing value, other separators, lines of different length, fewer than
        two columns, a constant target, or fewer rows than ``batch_size``; the message names line
        and column.

    Warns:
      DataWarning: for constant features, by name: they carry no information.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no data file {path!r}.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = enumerate(csv.reader(file), 1)
            lines = [(i, row) for i, row in rows if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8 ({error.reason}): save it as UTF-8."
        ) from error
    if not lines:
        raise DataError(f"{path}: the file holds no rows.")
    names = [f"column {i + 1}" for i in range(len(lines[0][1]))]
    first = lines[0][1]
    if not any(map(_is_number, first)) and not all(map(_is_missing, first)):
        names = [entry.strip() for entry in lines.pop(0)[1]]
    table = np.array([_numbers(path, i, row, names) for i, row in lines], np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(f"{path}: a table needs at least one feature, one target and one row.")
    if batch_size is not None and len(table) < batch_size:
        raise DataError(
            f"{path} has {len(table)} rows, fewer than a batch of {batch_size}: choose a "
            f"batch_size of at most {len(table)}."
        )
    if not -table.shape[1] <= target < table.shape[1]:
        raise DataError(f"{path} has {table.shape[1]} columns, so target={target} is none of them.")
    y_name = names.pop(target)
    y, x = table[:, target], np.delete(table, target % table.shape[1], axis=1)
    if len(y) > 1 and np.ptp(y) == 0:
        raise DataError(f"{path}: the target ({y_name}) is constant, there is nothing to learn.")
    constant = [name for name, spread in zip(names, np.ptp(x, 0), strict=True) if spread == 0]
    if constant and len(y) > 1:
        warnings.warn(
            f"{path}: constant columns carry no information and may be left out: {constant}.",
            DataWarning,
            stacklevel=2,
        )
    return Table(x, y, tuple(names))


def epoch_order(key: Key, epoch: Any, num_data: int, batch_size: int) -> Array:
    """Row numbers of one epoch's minibatches, a function of the key and the epoch alone; jittable.

    Args:
      key: the run's key.
      epoch: which epoch, from 0.
      num_data: rows of the data set.
      batch_size: B; rows that fill no batch wait for another epoch's order.

    Returns:
      (num_data // B, B) int32, no row twice.

    Raises:
      ValueError: if there are fewer rows than B.

    Example:
      >>> epoch_order(jax.random.key(0), 0, 10, 3).shape
      (3, 3)
    """
    if not is_whole(batch_size, 1) or batch_size > num_data:
        raise ValueError(
            f"batch_size must be an integer between 1 and the {num_data} rows of the data, not "
            f"{batch_size!r}."
        )
    order = jax.random.permutation(jax.random.fold_in(key, epoch), num_data)
    whole = num_data // batch_size
    return order[: whole * batch_size].reshape(whole, batch_size)


def batches(
    x: Any, y: Any, batch_size: int, *, seed: int = 0, start: int = 0
) -> Iterator[tuple[Array, Array]]:
    """Minibatches without end from arrays; batch k is a function of (seed, k) alone.

    Args:
      x: (rows, ...).
      y: (rows, ...).
      batch_size: B.
      seed: of the order.
      start: the first batch, to go on where a stopped run was.

    Yields:
      The pair (x, y) with B rows each.

    Raises:
      ValueError: if x and y differ in rows, or there are fewer rows than B.

    Example:
      >>> import itertools
      >>> x = np.arange(6.0)
      >>> [b[0].shape for b in itertools.islice(batches(x, x, 2), 4)]
      [(2,), (2,), (2,), (2,)]
    """
    x, y = np.asarray(x), np.asarray(y)
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same rows, not {len(x)} and {len(y)}.")
    key, step = jax.random.key(seed), start
    order = np.asarray(epoch_order(key, 0, len(x), batch_size))
    epoch = 0
    while True:
        if step // len(order) != epoch:
            epoch = step // len(order)
            order = np.asarray(epoch_order(key, epoch, len(x), batch_size))
        rows = order[step % len(order)]
        yield jnp.asarray(x[rows]), jnp.asarray(y[rows])
        step += 1


def _numbers(path: str, line: int, row: list[str], names: list[str]) -> list[float]:
    if separator := next(filter(None, map(_separator, row)), None):
        raise DataError(
            f"{path}, line {line}: the entries are separated by {separator}, not by commas; write "
            "the file with commas between entries and points before decimals."
        )
    if len(row) != len(names):
        raise DataError(
            f"{path}, line {line}: {len(row)} entries where there should be {len(names)}."
        )
    values = []
    for entry, name in zip(row, names, strict=True):
        if _is_missing(entry):
            raise DataError(
                f"{path}, line {line}, {name}: the value is missing; drop the row or fill it in."
            )
        if not _is_number(entry):
            raise DataError(
                f"{path}, line {line}, {name}: {entry.strip()!r} is no finite number; encode text "
                "as numbers first."
            )
        values.append(float(entry))
    return values


def _separator(entry: str) -> str | None:
    """What stands between the numbers of an entry that holds several, in words."""
    for character, name in ((";", "semicolons"), ("\t", "tabs"), (" ", "spaces")):
        parts = entry.strip(" ").split(character)
        if len(parts) > 1 and all(part == "" or _is_number(part) for part in parts):
            return name
    return None


def _is_missing(entry: str) -> bool:
    return entry.strip().lower() in _MISSING


def _is_number(entry: str) -> bool:
    if "_" in entry:  # which Python reads as a separator of thousands
        return False
    try:
        return math.isfinite(float(entry))
    except ValueError:
        return False
