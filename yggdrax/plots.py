"""Pictures of runs with Matplotlib, which is imported here and nowhere else.

Every function returns a :class:`matplotlib.figure.Figure` of its own and touches neither pyplot
nor global settings: ``figure.savefig("name.png", dpi=150)`` writes it, and a notebook shows it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike

from yggdrax.typing import Array, ParticleTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["calibration", "coefficients", "density", "learning_curves", "predictions", "spread"]

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0b6fa4", "#d9822b", "#3a923a", "#b8333b", "#8c8c8c"
_COLORS = (_BLUE, _ORANGE, _GREEN, _RED)
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "both",
    "axes.axisbelow": True,
    "axes.labelcolor": "#222222",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.75,
    "lines.linewidth": 1.5,
    "xtick.color": "#444444",
    "xtick.labelsize": 8,
    "ytick.color": "#444444",
    "ytick.labelsize": 8,
}
_LABELS = {  # in the order of the panels
    "log_density": "mean log density",
    "test_rmse": "test RMSE",
    "test_log_likelihood": "test log-likelihood per row",
    "test_accuracy": "test accuracy",
    "mean_error": "error of the mean / target's scale",
    "variance_ratio": "variance / target's variance",
    "spread": "spread of the particles",
    "bandwidth": "bandwidth $h$",
}
# Numbers of a row that are no curves.
_NO_CURVE = ("step", "status", "error", "error_step")


def learning_curves(
    rows: Sequence[Mapping[str, Any]],
    *,
    references: Mapping[str, Mapping[str, float]] | None = None,
) -> "Figure":
    """Curves of every number in the rows of ``metrics.jsonl`` against the step.

    Args:
      rows: dictionaries with ``"step"`` and numbers by name; None is left out.
      references: horizontal lines by the name of the number and then by label, for example
        ``{"test_rmse": {"ridge regression": 54.0}}``.

    Returns:
      A figure with one panel a number, three in a row.

    Raises:
      ValueError: without rows.
      ImportError: without Matplotlib.

    Example:
      >>> rows = [{"step": 0, "bandwidth": 1.0}, {"step": 10, "bandwidth": 0.5}]
      >>> [axes.get_ylabel() for axes in learning_curves(rows).axes]
      ['bandwidth $h$']
    """
    if not rows:
        raise ValueError("there are no rows to draw: log at least one step.")
    known = [name for name in _LABELS if any(name in row for row in rows)]
    others = dict.fromkeys(name for row in rows for name in row if name not in _NO_CURVE)
    names = list(dict.fromkeys([*known, *others]))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    with _style():
        figure = _figure(3.1 * columns, 2.3 * lines)
        for i, name in enumerate(names):
            axes = figure.add_subplot(lines, columns, i + 1)
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            steps, values = np.array(points, float).reshape(-1, 2).T
            axes.plot(steps, values, color=_BLUE, label="particles")
            _reference_lines(axes, (references or {}).get(name, {}))
            _limit_to_the_later_part(axes, values, (references or {}).get(name, {}))
            axes.set_xlabel("step")
            axes.set_ylabel(_LABELS.get(name, name.replace("_", " ")))
        labelled = [axes for axes in figure.axes if len(axes.lines) > 1]
        if labelled and len(names) < lines * columns:  # there is an empty place
            figure.legend(*labelled[0].get_legend_handles_labels(), loc="lower right")
        else:
            for axes in labelled:
                axes.legend()
    return figure


def predictions(
    truth: ArrayLike,
    mean: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    level: float = 0.9,
    label: str = "y",
    baseline: ArrayLike | None = None,
    baseline_label: str = "ridge regression",
) -> "Figure":
    """Predictions with their intervals against the truth, on rows that were not used to fit.

    The left panel sets prediction against truth; the right one sorts the rows by prediction and
    shows which truths leave their interval.

    Args:
      truth: (n,), in the units of the data.
      mean: (n,), the predictive mean.
      lower: (n,), the lower end of each interval.
      upper: (n,), the upper end.
      level: the probability that the intervals should hold.
      label: name of the predicted quantity, with its unit.
      baseline: (n,), predictions of another model to show beside.
      baseline_label: its name.

    Returns:
      A figure with two panels.

    Raises:
      ValueError: if the arrays differ in shape or are empty.
      ImportError: without Matplotlib.

    Example:
      >>> figure = predictions([1.0, 2.0], [1.1, 2.2], [0.0, 1.0], [2.0, 3.0])
      >>> figure.axes[1].get_title(loc="left")
      '2 of 2 rows inside their 90 % interval'
    """
    truth, mean, lower, upper = (np.asarray(a, float) for a in (truth, mean, lower, upper))
    shapes = {a.shape for a in (truth, mean, lower, upper)}
    if len(shapes) != 1 or truth.ndim != 1 or truth.size == 0:
        raise ValueError(
            f"truth, mean, lower and upper must be (n,) with n > 0, not {sorted(shapes)}."
        )
    inside = (lower <= truth) & (truth <= upper)
    with _style():
        figure = _figure(9.0, 3.7)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        left.axline((mean[0], mean[0]), slope=1, color=_GREY, linewidth=1, linestyle="--")
        left.errorbar(
            truth,
            mean,
            yerr=np.stack([mean - lower, upper - mean]),
            fmt="o",
            markersize=3.5,
            color=_BLUE,
            ecolor=_BLUE + "55",
            elinewidth=1.2,
            label=f"mean and {level:.0%} interval".replace("%", " %"),
        )
        if baseline is not None:
            left.plot(truth, np.asarray(baseline, float), "x", color=_ORANGE, markersize=4)
            left.lines[-1].set_label(baseline_label)
        left.set_xlabel(f"true {label}")
        left.set_ylabel(f"predicted {label}")
        left.set_title(f"{truth.size} rows not used to fit")
        left.legend(loc="upper left")
        order = np.argsort(mean)
        ranks = np.arange(truth.size)
        right.fill_between(ranks, lower[order], upper[order], color=_BLUE, alpha=0.15, linewidth=0)
        right.plot(ranks, mean[order], color=_BLUE, label="predictive mean")
        for mask, color, name in ((inside, _GREEN, "inside"), (~inside, _RED, "outside")):
            shown = mask[order]
            right.plot(ranks[shown], truth[order][shown], "o", color=color, markersize=4)
            right.lines[-1].set_label(f"truth, {name}")
        right.set_xlabel("rows, sorted by prediction")
        right.set_ylabel(label)
        right.set_title(
            f"{inside.sum()} of {truth.size} rows inside their {100 * level:.0f} % interval"
        )
        right.legend(loc="upper left")
    return figure


def spread(
    particles: ParticleTree,
    *,
    initial: ParticleTree | None = None,
    bandwidth: float | None = None,
) -> "Figure":
    """How far apart the particles are: distances of pairs, and their two main directions.

    Args:
      particles: a tree with leaves (N, ...).
      initial: the particles of the start, to compare with.
      bandwidth: h, marked among the distances.

    Returns:
      A figure with two panels. With many particles the first 2000 are shown.

    Raises:
      ImportError: without Matplotlib.

    Example:
      >>> figure = spread(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]), bandwidth=1.0)
      >>> len(figure.axes)
      2
    """
    final = _matrix(particles)
    start = None if initial is None else _matrix(initial)
    with _style():
        figure = _figure(9.0, 3.4)
        left, right = figure.subplots(1, 2)
        for points, color, name in ((start, _GREY, "at the start"), (final, _BLUE, "at the end")):
            if points is None or len(points) < 2:
                continue
            distances = _pair_distances(points)
            bins = min(40, max(5, round(distances.size**0.5)))
            left.hist(distances, bins, density=True, alpha=0.55, color=color, label=name)
        if bandwidth is not None:
            left.axvline(bandwidth, color=_ORANGE, label=f"bandwidth $h$ = {bandwidth:.3g}")
        left.set_xlabel("distance between two particles")
        left.set_ylabel("density")
        if left.get_legend_handles_labels()[0]:  # one particle has no distances
            left.legend()
        centre = final.mean(0)
        _, singular, directions = np.linalg.svd(final - centre, full_matrices=False)
        shares = singular**2 / max(np.sum(singular**2), np.finfo(float).tiny)
        for points, color, name in ((start, _GREY, "at the start"), (final, _BLUE, "at the end")):
            if points is None:
                continue
            plane = (points - centre) @ directions[:2].T
            second = plane[:, 1] if plane.shape[1] > 1 else np.zeros(len(plane))
            right.plot(plane[:, 0], second, "o", color=color, markersize=4, alpha=0.7, label=name)
        right.set_xlabel(
            f"first main direction at the end ({100 * shares[0]:.0f} % of its variance)"
        )
        second_share = f" ({100 * shares[1]:.0f} %)" if len(shares) > 1 else ""
        right.set_ylabel(f"second main direction{second_share}")
        right.set_title(f"{_count(particles)} particles of dimension {final.shape[1]}")
        right.legend()
    return figure


def calibration(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]], *, x_label: str, y_label: str
) -> "Figure":
    """What was promised against what came true, on the diagonal if all is well.

    Args:
      curves: the pair of promised and observed shares, (n,) each, by the name of the model: such as
        confidences and accuracies of a classifier, or levels of intervals and their coverage.
      x_label: of the promised shares.
      y_label: of the observed shares.

    Raises:
      ImportError: without Matplotlib, naming the extra.

    Example:
      >>> figure = calibration({"mine": ([0.5, 0.9], [0.4, 0.9])}, x_label="level", y_label="share")
      >>> [line.get_label() for line in figure.axes[0].lines][1:]
      ['mine']
    """
    with _style():
        figure = _figure(3.6, 3.4)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1.0, linestyle=":")
        for (label, (x, y)), color in zip(curves.items(), _COLORS * len(curves), strict=False):
            axes.plot(np.asarray(x), np.asarray(y), "o-", markersize=3.5, color=color, label=label)
        axes.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel=x_label, ylabel=y_label, aspect="equal")
        axes.legend(loc="upper left")
    return figure


def coefficients(particles: ArrayLike, names: Sequence[str], *, level: float = 0.9) -> "Figure":
    """Median and interval of every coordinate, the largest medians at the top.

    Args:
      particles: (N, d).
      names: d names.
      level: the share of the particles that an interval holds.

    Returns:
      A figure with one line a coordinate.

    Raises:
      ValueError: if there is not one name for each coordinate.
      ImportError: without Matplotlib.

    Example:
      >>> figure = coefficients(np.array([[0.0, 1.0], [1.0, 2.0]]), ["a", "b"])
      >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
      ['a', 'b']
    """
    points = np.asarray(particles, float)
    if points.ndim != 2 or points.shape[1] != len(names):
        raise ValueError(
            f"particles must be (N, {len(names)}) to fit the names, not of shape {points.shape}."
        )
    tail = (1 - level) / 2
    lower, median, upper = np.quantile(points, (tail, 0.5, 1 - tail), axis=0)
    order = np.argsort(median)
    places = np.arange(len(names))
    with _style():
        figure = _figure(5.5, 1.0 + 0.19 * len(names))
        axes = figure.subplots()
        axes.axvline(0, color=_GREY, linewidth=1)
        axes.hlines(places, lower[order], upper[order], color=_BLUE, linewidth=2, alpha=0.5)
        axes.plot(median[order], places, "o", color=_BLUE, markersize=4)
        axes.set_yticks(places, [str(names[i]) for i in order])
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.set_xlabel(f"coefficient: median and interval of {100 * level:.0f} % of the particles")
    return figure


def density(
    particles: ArrayLike,
    log_density: Callable[[Array], Array],
    *,
    initial: ArrayLike | None = None,
    samples: ArrayLike | None = None,
    names: Sequence[str] = ("$x_1$", "$x_2$"),
    title: str = "",
) -> "Figure":
    """Particles over the contours of a density in the plane, or over its curve on the line.

    Args:
      particles: (N, 1) or (N, 2), or (N, d) of which the first two coordinates are shown.
      log_density: log p of one particle (d,), a function that JAX can map; contours are drawn for
        d = 2, the curve for d = 1.
      initial: (N, d), the particles of the start; drawn in a panel of their own.
      samples: (n, d), exact samples; they set the limits and, for d > 2, stand for the contours.
      names: of the coordinates.
      title: above the last panel.

    Returns:
      A figure with one panel, or two with ``initial``.

    Raises:
      ValueError: for particles that are not a matrix.
      ImportError: without Matplotlib.

    Example:
      >>> figure = density(np.zeros((3, 2)), lambda x: -(x @ x) / 2, samples=np.eye(2))
      >>> len(figure.axes)
      1
    """
    final = np.asarray(particles, float)
    if final.ndim != 2:
        raise ValueError(f"particles must be a matrix (N, d), not of shape {final.shape}.")
    panels = [] if initial is None else [(np.asarray(initial, float), "start")]
    panels.append((final, title or "particles"))
    cloud = final if samples is None else np.asarray(samples, float)
    limits = [_limits([cloud, *(p for p, _ in panels)], k) for k in range(min(2, final.shape[1]))]
    with _style():
        figure = _figure(4.2 * len(panels), 3.7)
        grid = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (points, heading) in zip(grid, panels, strict=True):
            if final.shape[1] == 1:
                _line(axes, points, log_density, limits[0])
            else:
                _plane(axes, points, log_density, limits, samples)
                axes.set_ylabel(names[1])
            axes.set_xlabel(names[0])
            axes.set_title(heading)
        for axes in grid[1:]:
            axes.set_ylabel("")
    return figure


def _line(axes: "Axes", points, log_density, limits) -> None:
    x = np.linspace(limits[0], limits[1], 400)
    logs = np.asarray(jax.vmap(log_density)(np.asarray(x[:, None], np.float32)), float)
    heights = np.exp(logs - logs.max())
    heights /= heights.sum() * (x[1] - x[0])
    axes.fill_between(x, heights, color=_GREY, alpha=0.2, linewidth=0)
    axes.plot(x, heights, color="#444444", label="density")
    bins = np.linspace(limits[0], limits[1], 50).tolist()
    axes.hist(points[:, 0], bins=bins, density=True, color=_BLUE, alpha=0.6, label="particles")
    axes.plot(points[:, 0], np.zeros(len(points)), "|", color=_BLUE, markersize=10)
    axes.set_ylabel("density")
    axes.legend()


def _plane(axes: "Axes", points, log_density, limits, samples) -> None:
    if points.shape[1] == 2:
        first, second = (np.linspace(low, high, 160) for low, high in limits)
        mesh = np.stack(np.meshgrid(first, second), axis=-1)
        flat = np.asarray(mesh.reshape(-1, 2), np.float32)
        logs = np.asarray(jax.vmap(log_density)(flat), float).reshape(mesh.shape[:2])
        # Levels that hold 99, 90, ... per cent of the mass, so that every shape shows its bulk.
        mass = np.exp(logs - logs.max())
        levels = _mass_levels(mass, (0.99, 0.95, 0.85, 0.7, 0.5, 0.25))
        axes.contourf(mesh[..., 0], mesh[..., 1], mass, [*levels, 1.01], cmap="Greys", alpha=0.65)
        axes.contour(mesh[..., 0], mesh[..., 1], mass, levels, colors="#777777", linewidths=0.5)
    elif samples is not None:
        shown = np.asarray(samples, float)[:4000]
        axes.plot(shown[:, 0], shown[:, 1], ".", color=_GREY, markersize=2, alpha=0.4)
    axes.plot(
        points[:, 0],
        points[:, 1],
        "o",
        color=_BLUE,
        markersize=4 if len(points) <= 500 else 2,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])


def _mass_levels(mass: np.ndarray, shares: Sequence[float]) -> list[float]:
    """Heights above which the given shares of the mass lie, rising and distinct."""
    heights = np.sort(mass.ravel())[::-1]
    held = np.cumsum(heights) / heights.sum()
    return sorted({float(heights[min(np.searchsorted(held, s), held.size - 1)]) for s in shares})


def _limits(clouds: Sequence[np.ndarray], k: int) -> tuple[float, float]:
    """Limits of coordinate k that show the bulk of every cloud (outliers beyond 0.2 % cut)."""
    ends = [np.nanquantile(cloud[:, k], (0.002, 0.998)) for cloud in clouds]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    margin = 0.12 * (high - low) or 1.0
    return float(low - margin), float(high + margin)


def _reference_lines(axes: "Axes", lines: Mapping[str, float]) -> None:
    # The gaps of one leave room for the dashes of the next, so that equal lines are both seen.
    colors = enumerate((_ORANGE, _GREEN, _RED))
    for (label, value), (i, color) in zip(lines.items(), colors, strict=False):
        dashes = (5 * i, (5, 5))
        axes.axhline(value, color=color, linewidth=1.2, linestyle=dashes, label=label)


def _limit_to_the_later_part(axes: "Axes", values: np.ndarray, lines: Mapping[str, float]) -> None:
    """Keeps a bad start from flattening the rest: limits follow the last nine tenths."""
    later = np.concatenate([values[len(values) // 10 :], list(lines.values())])
    later = later[np.isfinite(later)]
    if later.size:
        low, high = later.min(), later.max()
        margin = 0.08 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)


def _matrix(particles: ParticleTree) -> np.ndarray:
    """The first 2000 particles as rows (n, d), all leaves side by side, in float64."""
    leaves = [np.asarray(leaf)[:2000].astype(float) for leaf in jax.tree.leaves(particles)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def _count(particles: ParticleTree) -> int:
    return jax.tree.leaves(particles)[0].shape[0]


def _pair_distances(points: np.ndarray) -> np.ndarray:
    """Distances of all pairs among at most 300 points."""
    points = points[:300]
    rows, columns = np.triu_indices(len(points), 1)
    return np.linalg.norm(points[rows] - points[columns], axis=1)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "pictures need Matplotlib: python -m pip install 'yggdrax[plots]'"
        ) from error
    return matplotlib.rc_context(_STYLE)
