"""A bandwidth and scales for each dimension, learned by gradients of whole SVGD runs."""

from yggdrax.experiment import ExperimentConfig, LearnBandwidthProblem


def get_config() -> ExperimentConfig:
    """Returns 60 outer steps of 30 inner ones on N(0, diag(1, 9)), a minute or so."""
    config = ExperimentConfig(LearnBandwidthProblem())
    config.num_particles = 1000
    config.num_steps = 60
    config.optimizer.learning_rate = 0.05
    config.log_every = 1
    config.checkpoint_every = 10
    return config
