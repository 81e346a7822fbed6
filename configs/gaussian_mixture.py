"""Three Gaussians of weights 1 : 2 : 3 on a circle; the particles start from a broad cloud."""

from yggdrax.experiment import ExperimentConfig, MixtureProblem


def get_config() -> ExperimentConfig:
    """Returns a run in which all three modes are found.

    Particles cannot cross an empty region in the end, so they start wide enough to reach all modes.
    """
    config = ExperimentConfig(MixtureProblem(modes=3, radius=2.5, start_scale=3.0))
    config.num_particles = 300
    config.num_steps = 1500
    config.optimizer.learning_rate = 0.1
    config.optimizer.schedule = "cosine"
    return config
