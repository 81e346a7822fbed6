"""The defaults: 100 particles on a correlated Gaussian in the plane."""

from yggdrax.experiment import ExperimentConfig, GaussianProblem


def get_config() -> ExperimentConfig:
    """Every field keeps its default; override any with --config.FIELD=VALUE."""
    return ExperimentConfig(GaussianProblem())
