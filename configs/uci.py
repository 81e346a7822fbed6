"""A Bayesian network on one split of a small regression table, by the usual protocol.

    python -m yggdrax --config=configs/uci.py --workdir=FOLDER \
        --config.problem.data=DIR/concrete.csv --config.problem.split_seed=3

The file holds numbers, the target last. Split s permutes the rows by
``numpy.random.RandomState(s).permutation``; the first 90 % are to fit. Without a file
scikit-learn's diabetes data serve. ``examples/benchmarks/uci.py`` runs many splits at once.
"""

from yggdrax.experiment import ExperimentConfig, RegressionProblem


def get_config() -> ExperimentConfig:
    """Returns a run of less than a minute on two cores, baselines and pictures included."""
    problem = RegressionProblem(data="diabetes", hidden=50, activation="relu", split_rule="uci")
    config = ExperimentConfig(problem)
    config.num_particles = 20
    config.num_steps = 4000
    config.batch_size = 100
    config.checkpoint_every = 1000
    config.log_every = 100
    config.optimizer.learning_rate = 0.02
    config.optimizer.schedule = "cosine"
    return config
