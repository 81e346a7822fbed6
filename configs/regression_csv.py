"""Regression from a CSV file of your own: numbers, with or without a line of names, target last.

    python -m yggdrax --config=configs/regression_csv.py --workdir=FOLDER \
        --config.problem.data=FILE.csv

Without a file scikit-learn's diabetes data serve, so that the configuration runs as it stands.
"""

from yggdrax.experiment import ExperimentConfig, RegressionProblem


def get_config() -> ExperimentConfig:
    """Returns a run of less than a minute on two cores, baselines and pictures included."""
    config = ExperimentConfig(RegressionProblem(data="diabetes", activation="tanh"))
    config.num_particles = 20
    config.num_steps = 2000
    config.batch_size = 100
    config.checkpoint_every = 500
    config.log_every = 50
    config.optimizer.learning_rate = 0.01
    config.optimizer.schedule = "cosine"
    return config
