"""The end of a run: particles, pictures, and the summary that says it is complete."""

from typing import Any

from yggdrax import plots
from yggdrax.checkpoint.settings import current_settings
from yggdrax.checkpoint.values import fingerprint
from yggdrax.experiment.problem import RunState
from yggdrax.experiment.steps import Stepper
from yggdrax.experiment.workdir import Workdir
from yggdrax.export import to_arrays
from yggdrax.status import Status

__all__ = ["write_report"]


def write_report(
    stepper: Stepper,
    files: Workdir,
    state: RunState,
    rows: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Writes everything that a finished run leaves; may be repeated after an interruption.

    Args:
      stepper: of the run, with its configuration and problem.
      files: the run's directory.
      state: after the last step.
      rows: of the metrics, all of them.
      seconds: spent on the steps so far.

    Returns:
      The summary, as written.
    """
    config, problem = stepper.config, stepper.problem
    initial = stepper.initial_state()
    files.write_npz("particles.npz", to_arrays(problem.exported(state)))
    svgd_state = {name: rows[-1][name] for name in ("bandwidth", "status", "error", "error_step")}
    summary = {
        "complete": True,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "fingerprint": fingerprint(config.to_dict()),
        **problem.report(config, state, initial),
        "svgd": svgd_state | {"status": Status(rows[-1]["status"]).name or "OK"},
        "seconds": round(seconds, 2),
        "settings": current_settings(),
    }
    if config.plots:
        figures = {
            "learning_curves": plots.learning_curves(rows, references=problem.references(summary)),
            "spread": plots.spread(
                state.particles, initial=initial.particles, bandwidth=rows[-1]["bandwidth"]
            ),
            **problem.pictures(state, initial),
        }
        for name, figure in figures.items():
            files.write_figure(f"{name}.png", figure)
    return files.write_json("summary.json", summary)
