"""The command line: ``python -m yggdrax --config=FILE --workdir=FOLDER [--config.field=value]``.

======  ==========================================================================================
status  meaning
======  ==========================================================================================
0       the run is complete
1       the run failed: its particles became NaN or infinite, or a file could not be written
2       the command, the configuration or the working directory is wrong; one line on stderr
75      stopped and saved; the same command continues
130     interrupted by Ctrl-C before it had started
======  ==========================================================================================
"""

import contextlib
import dataclasses
import difflib
import pathlib
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from yggdrax.checkpoint import CheckpointError, CheckpointWriteError
from yggdrax.experiment.config import ConfigError, ExperimentConfig, OptimizerConfig, SvgdConfig
from yggdrax.experiment.launch import take_flags, together
from yggdrax.experiment.loop import run
from yggdrax.experiment.workdir import WorkdirError
from yggdrax.status import StatusError

__all__ = ["EX_TEMPFAIL", "main", "parse"]

EX_TEMPFAIL = 75
"""The exit status of a run that stopped and can be continued, as in ``sysexits.h``."""

_USAGE = """\
usage: python -m yggdrax --config=FILE --workdir=FOLDER [--config.FIELD=VALUE ...] [--noprogress]

  --config=FILE         a Python file that ends in get_config(); configs/ holds examples
  --workdir=FOLDER      where everything goes; called again, a run continues there
  --config.FIELD=VALUE  sets a field, for example --config.num_steps=500
                        or --config.svgd.bandwidth=0.5
  --noprogress          no progress bar

several processes, each started with the same command (SLURM and MPI launchers set the last three):
  --coordinator=HOST:PORT  a port of process 0
  --num_processes=N --process_id=I
  --start_seconds=S     how long to wait for the others to come (120)
  --silence_seconds=S   after how long a process that is not heard of counts as dead (20)"""


class _UsageError(Exception):
    """A command that cannot be understood; the message is one line."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Args:
      argv: the program's name and its arguments, as in ``sys.argv``.

    Raises:
      ImportError: without absl and ml_collections, naming the extra.
    """
    if {"-h", "--help"} & set(argv[1:]):
        print(_USAGE)
        return 0
    try:
        launch, argv = take_flags(argv)
        config, workdir, progress = parse(argv)
        shared = pathlib.Path(workdir).expanduser()
        with contextlib.nullcontext() if launch is None else together(launch, shared):
            outcome = run(config, workdir, progress=progress)
        if launch is not None and launch.index > 0:
            return 0 if outcome.complete else EX_TEMPFAIL
    except StatusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except CheckpointWriteError as error:
        return _end_with(error, 1)
    except (_UsageError, ConfigError, WorkdirError, CheckpointError) as error:
        return _end_with(error, 2)
    except OSError as error:  # such as a full disk
        return _end_with(error, 1)
    except KeyboardInterrupt:  # before the run answers signals by itself
        print("interrupted before the first step", file=sys.stderr)
        return 128 + signal.SIGINT
    print(outcome.message)
    for line in _headline(outcome.summary or {}):
        print(line)
    return 0 if outcome.complete else EX_TEMPFAIL


def _end_with(error: Exception, status: int) -> int:
    """Prints an error as one line; returns the status."""
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return status


def parse(argv: Sequence[str]) -> tuple[ExperimentConfig, str, bool]:
    """Reads the command line.

    Args:
      argv: the program's name and its arguments.

    Returns:
      The frozen configuration, the working directory, and whether to show a progress bar.

    Raises:
      ConfigError: for a wrong field, value or type.
    """
    try:
        from absl import flags
        from ml_collections import config_flags
    except ImportError as error:
        raise ImportError(
            "the command line needs absl-py and ml-collections: "
            "python -m pip install 'yggdrax[experiments]'"
        ) from error
    # Flags and module of its own, so that calls in one process do not see each other's.
    values = flags.FlagValues()
    sys.modules.pop("config_config", None)
    holder = config_flags.DEFINE_config_file(
        "config", None, "configuration file", flag_values=values, sys_argv=list(argv)
    )
    flags.DEFINE_string("workdir", None, "where everything goes", flag_values=values)
    flags.DEFINE_boolean("progress", True, "show a progress bar", flag_values=values)
    try:
        with warnings.catch_warnings():
            # ml_collections 1.1 loads the file by a method that Python 3.12 deprecates.
            warnings.filterwarnings("ignore", r"the load_module\(\)", DeprecationWarning)
            rest = values(list(argv))[1:]
    except (Exception, SystemExit) as error:  # whatever a configuration file raises
        raise _UsageError(_explain(error, argv)) from error
    if rest:
        raise _UsageError(f"unexpected argument {rest[0]!r}: write flags as --name=value")
    for name in ("config", "workdir"):
        if not values[name].present or values[name].value == "":
            raise _UsageError(f"--{name} is missing; --help shows the usage")
    config: Any = holder.value
    if type(config).__name__ == "_ErrorConfig":
        path = config_flags.get_config_filename(values["config"])
        raise _UsageError(f"cannot read the configuration file {path!r}: no such file")
    if not isinstance(config, ExperimentConfig):
        raise _UsageError(
            f"get_config() must return an ExperimentConfig, not {type(config).__name__}"
        )
    return config.freeze(), str(values["workdir"].value), bool(values["progress"].value)


def _explain(error: BaseException, argv: Sequence[str]) -> str:
    """One line for whatever parsing raised, from its root cause."""
    root = error
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__ or root
    if isinstance(root, ConfigError):
        return str(root)
    if missing := re.search(r"Field (\w+) not found on dataclass", str(root)):
        return _unknown_override(missing[1], argv)
    if missing := re.search(r"Attribute .*\.(\w+) does not exist", str(root)):
        return _unknown_override(missing[1], argv)
    if "has no attribute 'get_config'" in str(root):
        return "the configuration file defines no get_config()"
    if isinstance(root, SyntaxError):
        return f"{root.filename}, line {root.lineno}: {root.msg}"
    where = traceback.extract_tb(root.__traceback__)
    files = [frame for frame in where if f"{frame.filename}" in " ".join(argv)]
    if files:
        return f"{files[-1].filename}, line {files[-1].lineno}: {type(root).__name__}: {root}"
    return str(error)


def _unknown_override(name: str, argv: Sequence[str]) -> str:
    flag = next((a.split("=")[0] for a in argv if re.search(rf"\.{name}\b", a)), f"--config.{name}")
    parts = (ExperimentConfig, SvgdConfig, OptimizerConfig)
    known = [field.name for part in parts for field in dataclasses.fields(part)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"{flag}: the configuration has no field {name!r}; {hint}"
        "help(yggdrax.experiment.ExperimentConfig) lists the fields"
    )


def _headline(summary: dict[str, Any]) -> list[str]:
    """The test scores of each model, aligned, one line a model."""
    models = {name: scores for name, scores in summary.items() if isinstance(scores, dict)}
    return [
        f"  {name.replace('_', ' '):<15}"
        + "  ".join(
            f"{key.replace('_', ' ')} {value:.4g}"
            for key, value in scores.items()
            if isinstance(value, float)
        )
        for name, scores in models.items()
        if any(key.startswith("test_") for key in scores)
    ]
