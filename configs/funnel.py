"""A funnel in the plane: the width of the second coordinate varies by orders of magnitude."""

from yggdrax.experiment import ExperimentConfig, FunnelProblem


def get_config() -> ExperimentConfig:
    """Returns a run with a fixed bandwidth, smaller than the median's, to reach into the neck."""
    config = ExperimentConfig(FunnelProblem())
    config.num_particles = 300
    config.num_steps = 2000
    config.optimizer.learning_rate = 0.05
    config.optimizer.schedule = "cosine"
    return config
