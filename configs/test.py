"""A few seconds of everything: network, minibatches, checkpoints, report and pictures."""

from yggdrax.experiment import ExperimentConfig, RegressionProblem


def get_config() -> ExperimentConfig:
    """Returns a run far too short to be good."""
    config = ExperimentConfig(RegressionProblem(hidden=8, activation="tanh", prior_scale=0.7))
    config.num_particles = 5
    config.num_steps = 60
    config.batch_size = 50
    config.log_every = 10
    config.optimizer.schedule = "cosine"
    config.checkpoint_every = 20
    return config
