"""The run loop: steps, metrics, checkpoints, signals, and the report at the end.

What is computed is a function of the configuration and the restored state; the loop only decides
where the calls are cut. Order matters on a kill: the metrics of a step are on the disk before its
checkpoint, and the log is cut back to the checkpoint that a run continues from.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from yggdrax.checkpoint import Checkpointer, CheckpointWriteError
from yggdrax.checkpoint.folder import numbered_folders
from yggdrax.experiment.config import ExperimentConfig
from yggdrax.experiment.launch import agree_on
from yggdrax.experiment.places import Places
from yggdrax.experiment.problem import Problem, RunState
from yggdrax.experiment.report import write_report
from yggdrax.experiment.signals import StopFlag, stop_on_signals
from yggdrax.experiment.steps import Stepper, make_stepper
from yggdrax.experiment.workdir import Workdir, WorkdirError
from yggdrax.processes import Group
from yggdrax.status import Status, StatusError, explain

__all__ = ["Outcome", "run"]

# A call of the compiled steps lasts about this long, so that a signal is answered within it.
_SECONDS_A_CALL = 0.5
# How long the other processes wait for the report of process 0; its death they notice earlier.
_SECONDS_FOR_REPORT = 86_400.0
# What a row holds whatever the problem.
_FIELDS = ("log_density", "spread", "bandwidth", "status", "error", "error_step")


class Outcome(NamedTuple):
    """How a run ended."""

    complete: bool
    step: int
    summary: dict[str, Any] | None
    """The figures of ``summary.json``, or None for a run that stopped before its end."""
    message: str
    """One line for the user."""


def run(
    config: ExperimentConfig,
    workdir: str | os.PathLike[str],
    *,
    progress: bool = False,
    problem: Problem | None = None,
) -> Outcome:
    """Runs an experiment in a directory, or continues it, or says that it is complete.

    Args:
      config: validated and frozen here if it is not yet.
      workdir: holds everything the run leaves, and nothing else; created if missing.
      progress: show a progress bar on stderr.
      problem: instead of ``config.problem.build(config.seed)``.

    Returns:
      How it ended. SIGINT and SIGTERM end it early, at most about half a second or one step later,
      after a checkpoint; a second one ends the process at once.

    Raises:
      ConfigError: for a wrong configuration.
      WorkdirError: for a directory that cannot be written or belongs to another configuration.
      StatusError: if a particle or a score became NaN or infinite; the checkpoints before stay.

    Example:
      >>> import tempfile
      >>> from yggdrax.experiment import ExperimentConfig, GaussianProblem
      >>> config = ExperimentConfig(GaussianProblem(), num_particles=8, num_steps=20, plots=False)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     run(config, folder).step
      20
    """
    config = config.freeze()
    group = Group("run")
    agree_on(config)
    places = Places(config)
    files = Workdir(workdir)
    if not files.checkpoints.exists():
        files.compare(config.to_dict())  # a directory that is refused stays as it was
    with stop_on_signals(_announce) as stop, _checkpointer(config, files) as checkpointer:
        latest = checkpointer.latest_step()
        saved = None if latest is None else checkpointer.info(latest)["config"]
        files.compare(config.to_dict(), saved)
        summary = group.agree(files.summary(config.to_dict()))
        if summary is not None:
            return Outcome(True, config.num_steps, summary, _complete_message(config, files))
        stepper = make_stepper(config, problem or config.problem.build(config.seed))
        try:
            with places.context():
                stepper.use(places)
                state = stepper.initial_state()
                earlier = 0.0
                # Perhaps an older one, if the latest is damaged; an error, if all are.
                if latest is not None or numbered_folders(files.checkpoints):
                    state = checkpointer.restore(state)
                    earlier = checkpointer.metadata(checkpointer.restored_step)["seconds"]
                # Not earlier: a run refused for its data or values leaves the directory free.
                files.claim(config.to_dict(), saved)
                loop = _Loop(stepper, checkpointer, files, stop, progress and group.leads, earlier)
                step, state, rows = loop.run(state, checkpointer.restored_step)
            if step < config.num_steps or loop.asked:
                return Outcome(False, step, None, _stopped_message(config, files, step, stop))
            # Process 0 alone reports, from the host's memory and on one device.
            state = places.host(state)
            stepper.use(None)
            reporting = Group("report", timeout=_SECONDS_FOR_REPORT)
            summary = reporting.lead(
                lambda: write_report(stepper, files, state, rows, loop.seconds())
            )
        finally:
            files.close()
    return Outcome(True, step, summary, _complete_message(config, files))


class _Loop:
    """The parts of one call of :func:`run`, and the clock."""

    def __init__(
        self,
        stepper: Stepper,
        checkpointer: Checkpointer,
        files: Workdir,
        stop: StopFlag,
        progress: bool,
        earlier: float,
    ) -> None:
        self.config, self.stepper = stepper.config, stepper
        self.checkpointer, self.files = checkpointer, files
        self.stop, self.progress = stop, progress
        self._group = Group("loop")
        self.asked = False
        self._seen = 0
        self._started, self._earlier = time.monotonic(), earlier

    def seconds(self) -> float:
        """Seconds spent on the run, by earlier processes as well up to their last checkpoint."""
        return self._earlier + time.monotonic() - self._started

    def run(
        self, state: RunState, restored: int | None
    ) -> tuple[int, RunState, list[dict[str, Any]]]:
        """Steps until the end, a signal, or ``stop_at``; returns step, state and all rows."""
        step = restored or 0
        rows = self.files.open_metrics(
            -1 if restored is None else restored,
            fields=(*_FIELDS, *self.stepper.problem.watch),
            expected=range(0, step, self.config.log_every),
            surely_saved=2 * self.config.checkpoint_every,
        )
        bar = _progress_bar(self.config.num_steps, step) if self.progress else None
        show = self._shower(bar)
        if bar is not None:
            bar.set_postfix_str("compiling")
        if self.progress and jax.process_count() == 1:
            _say(f"engine {self.stepper.explain(state)}")
        # Also where the row of the restored step is lost: it is a function of the state.
        there = bool(rows) and rows[-1]["step"] == step
        if self._group.agree(restored is None or (self._logs(step) and not there)):
            rows.append(self._log(state, step, show))
        elif rows:
            show(rows[-1])
        pace = _Pace()
        end = self._end(step)
        self._ask()
        while step < end and not self.asked:
            # Processes keep different time; they take the same steps.
            count = self._group.agree(pace.count(self._boundary(step, end) - step))
            state = jax.block_until_ready(self.stepper.advance(state, count))
            pace.done(count)
            step += count
            self._ask()
            if bar is not None:
                bar.update(count)
            if self._logs(step):
                rows.append(self._log(state, step, show))
            if step % self.config.checkpoint_every == 0 or step == end or self.asked:
                self._save(state, step)
        if bar is not None:
            bar.close()
        return step, state, rows

    def _logs(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.num_steps

    def _ask(self) -> None:
        """Whether a signal has reached any of the processes: then all stop at the same step."""
        reasons = [reason for reason in self._group.gather(self.stop.reason) if reason]
        if reasons:
            self.asked = True
            self.stop.reason = self.stop.reason or reasons[0]

    def _end(self, step: int) -> int:
        """Where this process stops: half-way if it was asked to and has not been there yet."""
        if step < self.config.stop_at < self.config.num_steps:
            return self.config.stop_at
        return self.config.num_steps

    def _boundary(self, step: int, end: int) -> int:
        """The next step at which something is logged or saved."""
        periods = (self.config.log_every, self.config.checkpoint_every)
        return min(end, *((step // period + 1) * period for period in periods))

    def _log(self, state: RunState, step: int, show) -> dict[str, Any]:
        values = self.stepper.measure(state)
        self._check(state, step, values["status"])
        row = self.files.append_metrics({"step": step} | values)
        show(row)
        return row

    def _check(self, state: RunState, step: int, status: int) -> None:
        """Ends a run at a step that was refused; says once what else a status bit advises."""
        if status & Status.NONFINITE:
            lines = [f"step {int(state.step) + 1} was refused: {self.stepper.blame(state)}"]
            saved = self.checkpointer.latest_step()
            if saved is not None:
                lines.append(f"the checkpoints before it stay, the latest of step {saved}")
            raise StatusError(status, lines + explain(status))
        new = status & ~self._seen
        self._seen |= status
        for line in explain(new):
            _say(f"step {step}: {line}")

    def _save(self, state: RunState, step: int) -> None:
        """Saves a step that is finite, its metrics first."""
        self._check(state, step, self.stepper.status(state))
        self.files.sync_metrics()
        self.checkpointer.save(step, state, metadata={"seconds": self.seconds()})

    def _shower(self, bar) -> Callable[[dict[str, Any]], None]:
        names = self.stepper.problem.watch

        def show(row: dict[str, Any]) -> None:
            if bar is None:
                return
            shown = {"log p": row["log_density"], "h": row["bandwidth"], "spread": row["spread"]}
            shown |= {name.removeprefix("test_"): row[name] for name in names}
            numbers = {
                name: "-" if value is None else f"{value:.4g}" for name, value in shown.items()
            }
            bits = Status(row["status"])
            bar.set_postfix(numbers | {"status": (bits.name or "OK").lower()}, refresh=False)

        return show


class _Pace:
    """Chooses how many steps one call takes, from the time that the latest took."""

    def __init__(self) -> None:
        self._each: float | None = None
        self._calls = 0
        self._start = 0.0

    def count(self, most: int) -> int:
        """One step at first (it compiles), one more to time it, then some half a second's worth."""
        self._start = time.monotonic()
        if self._each is None:
            return 1
        return max(1, min(most, int(_SECONDS_A_CALL / max(self._each, 1e-9))))

    def done(self, count: int) -> None:
        """Times the call, except the first, which compiled."""
        self._calls += 1
        if self._calls > 1:
            self._each = (time.monotonic() - self._start) / count


def _checkpointer(config: ExperimentConfig, files: Workdir) -> Checkpointer:
    try:
        return Checkpointer(
            files.checkpoints, keep_latest=config.keep_checkpoints, config=config.to_dict()
        )
    except CheckpointWriteError as error:
        raise WorkdirError(str(error)) from error


def _progress_bar(total: int, done: int):
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "the progress bar needs tqdm: python -m pip install 'yggdrax[experiments]'"
        ) from error
    # A log file that is no terminal gets a line now and then instead of a moving bar.
    pause = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=pause)


def _say(message: str) -> None:
    """A line on stderr that does not break the progress bar."""
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(message, file=sys.stderr)
    else:
        print(message, file=sys.stderr)


def _announce(signal_name: str) -> None:
    _say(f"{signal_name}: saving after this step; a second one leaves at once.")


def _complete_message(config: ExperimentConfig, files: Workdir) -> str:
    return f"{files.path} is complete ({config.num_steps} steps); see summary.json there."


def _stopped_message(config: ExperimentConfig, files: Workdir, step: int, stop: StopFlag) -> str:
    why = stop.reason or "stop_at"
    if step == 0:
        return f"stopped before the first step ({why}); the same command starts again."
    return (
        f"stopped at step {step} of {config.num_steps} ({why}) and saved in {files.path}; "
        "the same command continues."
    )
