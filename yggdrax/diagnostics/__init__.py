"""Was it good: discrepancies, spread, and scores of predictions."""

from yggdrax.diagnostics.discrepancy import ksd_squared, mmd_squared
from yggdrax.diagnostics.scores import (
    brier_score,
    calibration_curve,
    classification_scores,
    crps_gaussian_mixture,
    crps_samples,
    expected_calibration_error,
    interval_coverage,
    regression_scores,
    rmse,
)
from yggdrax.diagnostics.spread import (
    CollapseWarning,
    Spread,
    check_spread,
    expected_variance_ratio,
    moments,
)

__all__ = [
    "CollapseWarning",
    "Spread",
    "brier_score",
    "calibration_curve",
    "check_spread",
    "classification_scores",
    "crps_gaussian_mixture",
    "crps_samples",
    "expected_calibration_error",
    "expected_variance_ratio",
    "interval_coverage",
    "ksd_squared",
    "mmd_squared",
    "moments",
    "regression_scores",
    "rmse",
]
