"""An ensemble of small convolutional networks on scikit-learn's digits, beside a single one."""

from yggdrax.experiment import DigitsProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a run of about a minute on two cores, the single network included."""
    # Chosen on a quarter of the rows to fit; at a scale of 10 or less networks learn too little.
    config = ExperimentConfig(DigitsProblem(prior_scale=30.0))
    config.num_particles = 20
    config.num_steps = 1000
    config.batch_size = 100
    config.log_every = 20
    config.optimizer.learning_rate = 0.01
    config.optimizer.schedule = "cosine"
    return config
