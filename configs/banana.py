"""A bent Gaussian in the plane: particles must flow around the bend."""

from yggdrax.experiment import BananaProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a run of a few seconds."""
    config = ExperimentConfig(BananaProblem())
    config.num_particles = 300
    config.num_steps = 1500
    config.optimizer.learning_rate = 0.1
    config.optimizer.schedule = "cosine"
    return config
