"""Logistic regression on the breast cancer data, as good as NUTS, and NUTS beside it.

Needs BlackJAX for the comparison: ``python -m pip install 'yggdrax[benchmarks]'``; without it set
``--config.problem.nuts_draws=0``.
"""

from yggdrax.experiment import ClassificationProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a run in whitened coordinates with one kernel for each; docs/bayesian_networks.md."""
    config = ExperimentConfig(ClassificationProblem(whiten=True, nuts_draws=2500))
    config.num_particles = 200
    config.num_steps = 200
    config.svgd.per = "coordinate"
    config.svgd.bandwidth = 0.35
    config.optimizer.learning_rate = 0.1
    config.optimizer.schedule = "cosine"
    return config
