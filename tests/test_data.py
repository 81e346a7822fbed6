"""Tables from files with every fault named, and minibatches by seed and epoch."""

import itertools
import warnings

import jax
import numpy as np
import pytest

from yggdrax import data


def _write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("header", ["", "first,second,answer\n"])
def test_reads_numbers_with_or_without_names(tmp_path, header):
    table = data.read_csv(_write(tmp_path, header + "1,2,3\n4,5.5,-6e1\n\n"))
    assert table.x.tolist() == [[1, 2], [4, 5.5]] and table.y.tolist() == [3, -60]
    assert table.names == (("first", "second") if header else ("column 1", "column 2"))


def test_any_column_can_be_the_target(tmp_path):
    table = data.read_csv(_write(tmp_path, "a,b,c\n1,2,3\n4,5,7\n"), target=0)
    assert table.y.tolist() == [1, 4] and table.names == ("b", "c")
    assert table.x.tolist() == [[2, 3], [5, 7]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2\n3,red\n", r"line 2, column 2: 'red' is no finite number"),
        ("a,b\n1,2\n3,\n", r"line 3, b: the value is missing"),
        ("1,2\nNA,4\n", "line 2, column 1: the value is missing"),
        ("1,2\ninf,4\n", "'inf' is no finite number"),
        ("1,2\n1,2,3\n", "line 2: 3 entries where there should be 2"),
        ("a;b\n1,5;2\n", "line 2: the entries are separated by semicolons, not by commas"),
        ("1\t2\n3\t\n", "line 2: the entries are separated by tabs"),
        ("1 2\n 3 4\n", "line 2: the entries are separated by spaces"),
        ("1,2\n3,a;b\n", "'a;b' is no finite number"),
        ("1\n2\n", "at least one feature"),
        ("", "holds no rows"),
        ("a,b\n", "at least one feature"),
        ("1,5\n2,5\n", r"the target \(column 2\) is constant"),
    ],
)
def test_faults_are_named_with_line_and_column(tmp_path, text, words):
    with pytest.raises(data.DataError, match=words):
        data.read_csv(_write(tmp_path, text))


def test_a_batch_size_that_is_no_number_of_rows():
    with pytest.raises(ValueError, match=r"batch_size must be an integer .* not 2.5"):
        next(data.batches(np.ones(5), np.ones(5), 2.5))  # pyright: ignore[reportArgumentType]


def test_fewer_rows_than_a_batch_a_bad_target_and_no_file(tmp_path):
    path = _write(tmp_path, "1,2\n3,4\n")
    with pytest.raises(data.DataError, match="2 rows, fewer than a batch of 100"):
        data.read_csv(path, batch_size=100)
    with pytest.raises(data.DataError, match="target=2 is none"):
        data.read_csv(path, target=2)
    with pytest.raises(FileNotFoundError, match=r"no data file .*gone\.csv"):
        data.read_csv(tmp_path / "gone.csv")


def test_constant_features_are_warned_of_and_harmless(tmp_path):
    with pytest.warns(data.DataWarning, match=r"\['column 2'\]"):
        table = data.read_csv(_write(tmp_path, "1,0.1,3\n4,0.1,6\n5,0.1,9\n"))
    standardised = data.Standardizer.fit(table.x).apply(table.x)
    assert np.isfinite(standardised).all() and np.allclose(standardised[:, 1], 0)


def test_standardizer_undoes_itself():
    values = np.random.RandomState(0).randn(50, 3) * [1, 10, 100] + [0, 5, 1000]
    standardizer = data.Standardizer.fit(values)
    standardised = standardizer.apply(values)
    np.testing.assert_allclose(standardised.std(0), 1, rtol=1e-5)
    np.testing.assert_allclose(standardizer.undo(standardised), values, rtol=1e-5, atol=1e-4)


def test_an_epoch_holds_no_row_twice_and_follows_from_key_and_epoch():
    order = jax.jit(data.epoch_order, static_argnums=(2, 3))
    key = jax.random.key(1)
    first = np.asarray(order(key, 0, 20, 6))
    assert len(set(first.ravel().tolist())) == 18
    np.testing.assert_array_equal(first, order(key, 0, 20, 6))
    assert not np.array_equal(first, order(key, 1, 20, 6))
    with pytest.raises(ValueError, match="between 1 and the 20 rows of the data, not 21"):
        data.epoch_order(key, 0, 20, 21)


def test_batches_go_on_where_a_run_stopped():
    x = np.arange(10.0)
    whole = list(itertools.islice(data.batches(x, -x, 3, seed=5), 8))
    rest = list(itertools.islice(data.batches(x, -x, 3, seed=5, start=5), 3))
    for (xa, ya), (xb, yb) in zip(whole[5:], rest, strict=True):
        np.testing.assert_array_equal(xa, xb)
        np.testing.assert_array_equal(ya, -xb)
        np.testing.assert_array_equal(yb, -xb)
    with pytest.raises(ValueError, match="same rows, not 10 and 9"):
        next(data.batches(x, x[:9], 3))


def test_reading_a_clean_table_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.read_csv(_write(tmp_path, "1,2\n3,4\n"), batch_size=2).y) == 2
