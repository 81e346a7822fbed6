"""Pictures: what is in them, not how they look."""

import jax
import matplotlib
import numpy as np
import pytest

from yggdrax import plots
from yggdrax.targets import Banana, Gaussian, Mixture


def test_learning_curves_have_a_panel_for_each_number_and_lines_to_compare_with():
    rows = [
        {"step": s, "status": 0, "error": None, "bandwidth": None if s == 0 else 1.0, "mine": s**2}
        for s in range(0, 50, 10)
    ]
    figure = plots.learning_curves(rows, references={"mine": {"other": 7.0}})
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert set(panels) == {"bandwidth $h$", "mine"}
    x, y = panels["mine"].lines[0].get_data()
    assert x.tolist() == [0, 10, 20, 30, 40] and y.tolist() == [0, 100, 400, 900, 1600]
    assert panels["bandwidth $h$"].lines[0].get_xdata().tolist() == [10, 20, 30, 40]
    assert panels["mine"].lines[1].get_label() == "other"
    with pytest.raises(ValueError, match="no rows"):
        plots.learning_curves([])


def test_curves_keep_their_shape_when_the_start_is_far_off():
    rows = [{"step": s, "mine": -1e6 if s == 0 else float(s % 3)} for s in range(30)]
    low, high = plots.learning_curves(rows).axes[0].get_ylim()
    assert -1 < low < 0 and 2 < high < 3


def test_predictions_count_the_rows_outside():
    truth, mean = np.array([0.0, 1.0, 9.0]), np.array([0.5, 0.2, 2.0])
    figure = plots.predictions(truth, mean, mean - 1, mean + 1, level=0.8, baseline=truth)
    left, right = figure.axes
    assert right.get_title(loc="left") == "2 of 3 rows inside their 80 % interval"
    assert left.get_legend_handles_labels()[1] == ["ridge regression", "mean and 80 % interval"]
    outside = next(line for line in right.lines if line.get_label() == "truth, outside")
    assert outside.get_ydata().tolist() == [9.0]
    with pytest.raises(ValueError, match=r"must be \(n,\) with n > 0"):
        plots.predictions(truth, mean[:2], mean, mean)


def test_spread_shows_every_pair_and_the_two_main_directions():
    line = np.linspace(-1, 1, 11)[:, None] * np.array([[3.0, 4.0]])
    figure = plots.spread({"a": line[:, :1], "b": line[:, 1:]}, initial=None, bandwidth=0.5)
    left, right = figure.axes
    total = sum(bar.get_height() * bar.get_width() for bar in left.patches)
    assert total == pytest.approx(1)
    assert "100 % of its variance" in right.get_xlabel()
    assert right.get_title(loc="left") == "11 particles of dimension 2"
    np.testing.assert_allclose(
        np.sort(right.lines[0].get_xdata()), np.linspace(-5, 5, 11), atol=1e-12
    )
    single = plots.spread(np.zeros((1, 1)))
    assert single.axes[1].get_title(loc="left") == "1 particles of dimension 1"


def test_density_in_one_two_and_three_dimensions():
    key = jax.random.key(0)
    line = Mixture([1, 2], [Gaussian([-2.0], 1.0), Gaussian([2.0], 1.0)])
    plane, space = Banana(), Gaussian(np.zeros(3, np.float32), 1.0)
    for target in (line, plane, space):
        samples = target.sample(key, 300)
        figure = plots.density(samples[:50], target, initial=samples[50:], samples=samples)
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["start", "particles"]
        figure.canvas.draw()
    curve = plots.density(line.sample(key, 9), line).axes[0].lines[0].get_data()
    # The curve is normalised over what is shown; its mass is 1 and it peaks at the heavier mode.
    assert np.trapezoid(curve[1], curve[0]) == pytest.approx(1, abs=0.01)
    with pytest.raises(ValueError, match="matrix"):
        plots.density(np.zeros(3), line)


def test_contours_hold_the_mass_that_they_should():
    grid = np.linspace(-5, 5, 201)
    mass = np.exp(-(grid[:, None] ** 2 + grid**2) / 2)
    levels = plots._mass_levels(mass, (0.9, 0.5))
    # In the plane a Gaussian's level set of height t holds 1 - t of the mass.
    np.testing.assert_allclose(levels, [0.1, 0.5], atol=0.01)


def test_coefficients_are_sorted_by_median():
    points = np.array([[3.0, 0.0, -1.0], [5.0, 0.2, -3.0], [4.0, 0.1, -2.0]])
    figure = plots.coefficients(points, ["c", "b", "a"])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.lines[1].get_xdata().tolist() == [-2.0, 0.1, 4.0]
    with pytest.raises(ValueError, match=r"must be \(N, 2\)"):
        plots.coefficients(points, ["a", "b"])


def test_pictures_touch_no_global_setting(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.spread(np.eye(3)).savefig(tmp_path / "spread.png")
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "spread.png").read_bytes().startswith(b"\x89PNG")
