"""Real data: scikit-learn's bundled sets or a file of the user's, split and standardised."""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from yggdrax.data import DataError, Standardizer, Table, read_csv
from yggdrax.experiment.config import ConfigError

__all__ = [
    "Images",
    "Split",
    "load_classification",
    "load_digits",
    "load_regression",
    "split",
    "uci_split",
]


class Split(NamedTuple):
    """Rows to fit and rows to test, standardised by the former's means and deviations."""

    x_train: np.ndarray  # (rows, features) float32
    y_train: np.ndarray  # (rows,) float32, standardised for a regression
    x_test: np.ndarray  # (rows, features) float32
    y_test: np.ndarray  # (rows,) float32, in the units of the data
    unit: Standardizer  # of y; undo() takes predictions to the units of the data


class Images(NamedTuple):
    """Pictures to fit and pictures to test, grey values from 0 to 1."""

    x_train: np.ndarray  # (rows, height, width) float32
    y_train: np.ndarray  # (rows,) int32
    x_test: np.ndarray  # (rows, height, width) float32
    y_test: np.ndarray  # (rows,) int32


def load_regression(data: str) -> tuple[Table, str]:
    """Loads ``"diabetes"`` (442 rows, bundled with scikit-learn) or a CSV file, target last.

    Args:
      data: the name, or the path of a file that :func:`yggdrax.data.read_csv` can read.

    Returns:
      The table, and what its target is called.

    Raises:
      ConfigError: for a file that is missing or cannot be used.
      ImportError: without scikit-learn, for its data.
    """
    if data == "diabetes":
        bunch = _datasets().load_diabetes(scaled=False)
        label = "disease progression after one year"
        return Table(bunch.data, bunch.target, tuple(bunch.feature_names)), label
    try:
        table = read_csv(data)
    except (OSError, DataError) as error:
        raise ConfigError(f"problem.data must be 'diabetes' or a CSV file: {error}") from error
    if len(table.y) < 2:
        raise ConfigError(f"problem.data needs at least 2 rows, and {data!r} has {len(table.y)}")
    return table, f"target of {pathlib.Path(data).stem}"


def load_classification() -> Table:
    """Loads the breast cancer data (569 rows, bundled with scikit-learn); 1 means malignant.

    Raises:
      ImportError: without scikit-learn.
    """
    bunch = _datasets().load_breast_cancer()
    return Table(bunch.data, 1.0 - bunch.target, tuple(map(str, bunch.feature_names)))


def load_digits(*, test_fraction: float, seed: int) -> Images:
    """Loads and splits scikit-learn's digits: 1797 pictures of 8 x 8 pixels, ten classes.

    Raises:
      ImportError: without scikit-learn.
    """
    bunch = _datasets().load_digits()
    x, y = (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int32)
    train, test = _shuffled(len(y), test_fraction, seed)
    return Images(x[train], y[train], x[test], y[test])


def split(table: Table, *, test_fraction: float, seed: int, labels: bool = False) -> Split:
    """Splits rows at random, as a function of the seed alone, and standardises.

    Args:
      table: the data.
      test_fraction: share of the rows to test on, rounded, at least one row and not all.
      seed: of the permutation.
      labels: leave y as it is.

    Example:
      >>> table = Table(np.arange(20.0)[:, None], np.arange(20.0), ("x",))
      >>> parts = split(table, test_fraction=0.1, seed=0)
      >>> parts.x_train.shape, parts.x_test.shape, round(float(parts.y_train.std()), 4)
      ((18, 1), (2, 1), 1.0)
    """
    train, test = _shuffled(len(table.y), test_fraction, seed)
    return _standardised(table, train, test, labels)


def uci_split(table: Table, seed: int) -> Split:
    """The split that published figures on small regression tables use, by its number.

    Split s permutes the rows by ``numpy.random.RandomState(s).permutation``; the first 90 % are to
    fit, the rest to test.

    Example:
      >>> table = Table(np.arange(20.0)[:, None], np.arange(20.0), ("x",))
      >>> uci_split(table, 0).y_test.tolist()
      [15.0, 12.0]
    """
    order = np.random.RandomState(seed).permutation(len(table.y))
    train, test = np.split(order, [int(0.9 * len(order))])
    return _standardised(table, train, test, labels=False)


def _shuffled(rows: int, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers to fit and to test."""
    order = np.random.default_rng(seed).permutation(rows)
    test_rows = min(max(1, round(test_fraction * rows)), rows - 1)
    return order[test_rows:], order[:test_rows]


def _standardised(table: Table, train: np.ndarray, test: np.ndarray, labels: bool) -> Split:
    features = Standardizer.fit(table.x[train])
    unit = Standardizer(np.zeros(()), np.ones(())) if labels else Standardizer.fit(table.y[train])
    return Split(
        x_train=features.apply(table.x[train]),
        y_train=unit.apply(table.y[train]),
        x_test=features.apply(table.x[test]),
        y_test=table.y[test].astype(np.float32),
        unit=unit,
    )


def _datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the bundled data need scikit-learn: python -m pip install 'yggdrax[experiments]'"
        ) from error
    return datasets
