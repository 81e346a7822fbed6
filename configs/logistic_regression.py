"""Bayesian logistic regression on scikit-learn's breast cancer data: 31 coefficients."""

from yggdrax.experiment import ClassificationProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a run of a few seconds with minibatches of 100 of 455 rows."""
    config = ExperimentConfig(ClassificationProblem())
    config.num_particles = 100
    config.num_steps = 1500
    config.batch_size = 100
    config.optimizer.learning_rate = 0.05
    config.optimizer.schedule = "cosine"
    return config
