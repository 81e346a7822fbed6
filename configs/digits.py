"""A small convolutional network on scikit-learn's digits: an ensemble that knows what it knows."""

from yggdrax.experiment import DigitsProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a run of about a minute on two cores, the single network included."""
    config = ExperimentConfig(DigitsProblem())
    config.num_particles = 20
    config.num_steps = 600
    config.batch_size = 100
    config.log_every = 20
    config.optimizer.learning_rate = 0.01
    config.optimizer.schedule = "cosine"
    return config
