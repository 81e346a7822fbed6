"""Tables: where they come from, how they are split."""

import numpy as np
import pytest

from yggdrax.data import Table
from yggdrax.experiment.config import ConfigError
from yggdrax.experiment.data import load_classification, load_regression, split


def test_bundled_data_have_their_known_shapes():
    (diabetes, label), cancer = load_regression("diabetes"), load_classification()
    assert label.startswith("disease progression")
    assert diabetes.x.shape == (442, 10) and len(diabetes.names) == 10
    assert (diabetes.y.min(), diabetes.y.max()) == (25.0, 346.0)
    assert cancer.x.shape == (569, 30) and cancer.y.sum() == 212  # malignant


def test_a_csv_file_has_its_target_last(tmp_path):
    table = np.arange(36.0).reshape(12, 3)
    np.savetxt(tmp_path / "mine.csv", table, delimiter=",")
    data, label = load_regression(str(tmp_path / "mine.csv"))
    np.testing.assert_array_equal(data.x, table[:, :2])
    np.testing.assert_array_equal(data.y, table[:, 2])
    assert label == "target of mine"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "1\n2\n", "1,2\n3,nan\n"])
def test_unusable_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"problem.data .*bad.csv"):
        load_regression(str(tmp_path / "bad.csv"))


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'diabetes' .*no data file 'nowhere.csv'"):
        load_regression("nowhere.csv")


def test_the_split_is_a_partition_standardised_by_the_rows_to_fit():
    data, _ = load_regression("diabetes")
    parts = split(data, test_fraction=0.1, seed=3)
    assert len(parts.y_train) == 398 and len(parts.y_test) == 44
    # float32 sums of 398 standardised numbers: errors of some 1e-6.
    np.testing.assert_allclose(parts.x_train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(parts.x_train.std(0), 1, atol=1e-5)
    assert abs(parts.y_train.mean()) < 1e-5 and abs(parts.y_train.std() - 1) < 1e-5
    both = np.concatenate([parts.unit.undo(parts.y_train), parts.y_test])
    np.testing.assert_allclose(np.sort(both), np.sort(data.y), rtol=1e-5)
    again, other = (split(data, test_fraction=0.1, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(again.x_test, parts.x_test)
    assert not np.array_equal(other.x_test, parts.x_test)


def test_constant_columns_and_tiny_tables_stay_finite():
    data = Table(np.ones((3, 2)), np.array([1.0, 1.0, 1.0]), ("a", "b"))
    parts = split(data, test_fraction=0.01, seed=0)
    assert len(parts.y_test) == 1 and len(parts.y_train) == 2
    assert all(np.isfinite(part).all() for part in parts[:4])
