"""An experiment that stops itself half-way; the same command continues and ends it.

The first call leaves with exit status 75 at step 250, the second with 0 at step 500. What they
leave is what one unbroken run would have left, bit for bit on a CPU.
"""

from yggdrax.experiment import BananaProblem, ExperimentConfig


def get_config() -> ExperimentConfig:
    """Returns a short run with ``stop_at`` half-way."""
    config = ExperimentConfig(BananaProblem())
    config.num_particles = 50
    config.num_steps = 500
    config.stop_at = 250
    config.checkpoint_every = 50
    config.optimizer.learning_rate = 0.05
    return config
