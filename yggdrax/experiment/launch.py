"""Several processes of one experiment: how they find each other, and what ends them together.

Every process is started with the same command. Who coordinates, how many there are and which one
this is comes from flags or from the environment that SLURM, Open MPI, MPICH and Intel MPI set;
``jax.distributed`` does the rest. A process that never comes, dies or fails is named by the others,
which end within a stated time instead of waiting for ever.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from yggdrax.checkpoint.settings import current_settings
from yggdrax.checkpoint.values import first_difference
from yggdrax.experiment.config import ConfigError, ExperimentConfig
from yggdrax.processes import Group, ProcessLost, Watch, report_failure

__all__ = ["Launch", "agree_on", "launch_of", "take_flags", "together"]

START_SECONDS = 120.0
SILENCE_SECONDS = 20.0
# How long process 0 stays when it ends for an error, so that the others can read of it.
_SECONDS_TO_HEAR = 3.0
# How long a process of an earlier run may take to end.
_SECONDS_TO_LEAVE = 5.0

# Count and index as launchers name them, and the variables in which JAX finds the coordinator, if
# it does. A batch script of SLURM that is no task of a step has no STEP_NUM_TASKS; Open MPI sets
# its variable up to the fourth version.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_MCA_orte_hnp_uri",)),
    ("PMI_SIZE", "PMI_RANK", None),
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", None),
)
# What must be equal everywhere; the rest of the settings may differ from host to host.
_SAME = ("enable_x64", "default_matmul_precision", "threefry_partitionable")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process among several.

    Attributes:
      coordinator: ``host:port`` of process 0, or None where JAX finds it in the environment.
      count: number of processes.
      index: which one this is.
      start_seconds: how long to wait for the others to come.
      silence_seconds: after how long a process that is not heard of counts as dead.
    """

    coordinator: str | None
    count: int
    index: int
    start_seconds: float = START_SECONDS
    silence_seconds: float = SILENCE_SECONDS


def take_flags(argv: Sequence[str]) -> tuple[Launch | None, list[str]]:
    """Takes the flags of several processes out of a command; the rest is for others to read.

    Raises:
      ConfigError: for flags that are incomplete or out of range.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--start_seconds", type=float, default=START_SECONDS)
    parser.add_argument("--silence_seconds", type=float, default=SILENCE_SECONDS)
    try:
        flags, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    seconds = {"start_seconds": flags.start_seconds, "silence_seconds": flags.silence_seconds}
    launch = launch_of(
        os.environ, flags.coordinator, flags.num_processes, flags.process_id, **seconds
    )
    return launch, rest


def launch_of(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    **seconds: float,
) -> Launch | None:
    """Reads flags, then the environment; None for a process on its own.

    Raises:
      ConfigError: for flags that are incomplete or out of range.

    Example:
      >>> launch_of({"PMI_SIZE": "4", "PMI_RANK": "2"}, coordinator="node1:8476").index
      2
      >>> launch_of({}) is None
      True
    """
    known_to_jax = False
    if count is None and index is None:
        for size, rank, where in _LAUNCHERS:
            if size in environment and rank in environment:
                count, index = _number(environment, size), _number(environment, rank)
                known_to_jax = where is not None and all(name in environment for name in where)
                break
    if coordinator is None:
        coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if count is None and index is None and coordinator is None:
        return None
    if count is None or index is None:
        raise ConfigError(
            "several processes need --num_processes and --process_id, or a launcher that sets them"
        )
    if count < 1:
        raise ConfigError(f"num_processes must be at least 1, not {count}")
    if not 0 <= index < count:
        raise ConfigError(f"process_id must lie between 0 and {count - 1}, not {index}")
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a positive number of seconds, not {value}")
    if count == 1:
        return None
    if coordinator is None and not known_to_jax:
        raise ConfigError("several processes need --coordinator=HOST:PORT of process 0")
    if coordinator is not None:
        _address(coordinator)
    return Launch(coordinator, count, index, **seconds)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, not {environment[name]!r}") from None


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"coordinator must be HOST:PORT, a port from 1 to {2**16 - 1}, not {coordinator!r}"
        )
    return host.strip("[]"), int(port)


def _check_host(coordinator: str) -> None:
    host, port = _address(coordinator)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise ConfigError(f"the host of --coordinator={coordinator} is unknown: {error}") from None


@contextlib.contextmanager
def together(launch: Launch, shared: pathlib.Path) -> Iterator[None]:
    """Starts the processes together, watches over them, and ends them together.

    If a process does not come, dies or fails, this one prints which and exits with status 1.

    Args:
      launch: which process this is.
      shared: a directory that all processes see; says who has come.

    Raises:
      ConfigError: another process of this run has the same number, or the coordinator's host is
        unknown.
    """
    presence = _start(launch, shared)
    lost = _Lost(launch)
    watch = Watch(lost.found)
    try:
        yield
        _end(watch)
    except Exception as error:
        if not isinstance(error, ConfigError | ProcessLost):
            # Of a process that died others learn from a broken collective, which names nobody.
            if _leader_is_gone(launch):
                _exit(f"process 0 of {launch.count} has died{_GO_ON}")
            lost.wait(launch.silence_seconds + 10)
        watch.stop()
        _leave_after(error, launch)
        raise
    finally:
        presence.leave()


_GO_ON = (
    ". Start the run again with the processes that are left: it continues from the last "
    "checkpoint, on any number of devices that divides the number of particles."
)


def _leader_is_gone(launch: Launch) -> bool:
    """Whether nobody listens at the port of process 0 any more; then JAX soon ends this one."""
    if launch.coordinator is None or launch.index == 0:
        return False
    try:
        socket.create_connection(_address(launch.coordinator), timeout=1).close()
    except OSError:
        return True
    return False


class _Lost:
    """Ends this process when the watch has found that another is gone."""

    def __init__(self, launch: Launch) -> None:
        self._found = threading.Event()
        self._leads = launch.index == 0

    def found(self, loss: str) -> None:
        self._found.set()
        if self._leads:
            # The others find it at the same time, through this process.
            time.sleep(_SECONDS_TO_HEAR)
        _exit(f"{loss}{_GO_ON}")

    def wait(self, seconds: float) -> None:
        self._found.wait(seconds)


def _exit(message: str, status: int = 1) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: the main thread may wait for ever in a collective.
    os._exit(status)


def _leave_after(error: Exception, launch: Launch) -> None:
    """Tells the others why, and gives them time to hear it from the process they talk through."""
    with contextlib.suppress(Exception):
        report_failure(" ".join(str(error).split())[:500])
        if launch.index == 0:
            time.sleep(_SECONDS_TO_HEAR)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    os._exit(2 if isinstance(error, ConfigError) else 1)


def _start(launch: Launch, shared: pathlib.Path) -> "_Presence":
    if launch.coordinator is not None:
        _check_host(launch.coordinator)
    # A process that is gone must not end the others before they have said which one it was.
    jax.config.update("jax_enable_recoverability", True)
    # Signals stop a run between two steps, by yggdrax.experiment.signals.
    jax.config.update("jax_enable_preemption_service", False)
    with _Presence(launch, shared) as presence:
        jax.distributed.initialize(
            launch.coordinator,
            launch.count,
            launch.index,
            # The presence ends the waiting, and says who is missing.
            initialization_timeout=int(launch.start_seconds) + 60,
            heartbeat_timeout_seconds=max(1, int(launch.silence_seconds)),
        )
    return presence


class _Presence:
    """Shows the others that this process has come, and after some time names who has not.

    Each process has a file that says how many it expects, and locks it as long as it lives: so a
    second one with its number is noticed at once, and a file that a dead one left means nothing.
    """

    def __init__(self, launch: Launch, shared: pathlib.Path) -> None:
        self._launch = launch
        self._folder = shared / ".yggdrax-processes"
        self._mine = self._folder / str(launch.index)
        self._done = threading.Event()
        self._descriptor: int | None = None

    def __enter__(self) -> "_Presence":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._take_number()
        threading.Thread(target=self._wait, name="yggdrax-presence", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._done.set()
        if kind is None:
            # Who talks to this process has come before: a wrong number is seen here at the latest.
            self._check_counts()

    def leave(self) -> None:
        """Gives the number free; the end of the process does so too."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_number(self) -> None:
        descriptor = os.open(self._mine, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        until = time.monotonic() + min(_SECONDS_TO_LEAVE, self._launch.start_seconds)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    other = _said(os.pread(descriptor, 1000, 0)).get("who", "another")
                    os.close(descriptor)
                    raise ConfigError(
                        f"two processes say that they are number {self._launch.index}: {_who()} "
                        f"and {other}. Give each a --process_id of its own."
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"who": _who(), "count": self._launch.count}).encode(), 0)

    def _check_counts(self) -> None:
        """Ends this process if another that lives expects another number of processes."""
        for path in self._folder.iterdir():
            if path == self._mine or not path.name.isdigit() or not _is_locked(path):
                continue
            said = _said(path.read_bytes())
            if said.get("count", self._launch.count) != self._launch.count:
                time.sleep(_SECONDS_TO_HEAR)  # the other looks every second
                _exit(
                    f"process {path.name} ({said['who']}) was started with "
                    f"--num_processes={said['count']}, and process {self._launch.index} "
                    f"({_who()}) with {self._launch.count}. Start all with the same.",
                    status=2,
                )

    def _wait(self) -> None:
        started = time.monotonic()
        before: dict[int, int] = {}
        while not self._done.wait(1.0):
            os.utime(self._mine)
            self._check_counts()
            waited = time.monotonic() - started
            if waited < self._launch.start_seconds - 3:
                before = self._times()
            elif waited > self._launch.start_seconds:
                self._give_up(before)

    def _times(self) -> dict[int, int]:
        """When each process last showed itself, by its own clock."""
        times = {}
        for process in range(self._launch.count):
            with contextlib.suppress(OSError):
                times[process] = (self._folder / str(process)).stat().st_mtime_ns
        return times

    def _give_up(self, before: dict[int, int]) -> None:
        now = self._times()
        missing = [p for p in range(self._launch.count) if now.get(p) == before.get(p)]
        missing = [str(process) for process in missing if process != self._launch.index]
        if missing:
            what = f"process {', '.join(missing)} of {self._launch.count} did not come"
        else:
            what = f"all {self._launch.count} processes have come, but could not talk"
        where = self._launch.coordinator or "the coordinator that the launcher names"
        _exit(f"{what} within {self._launch.start_seconds:.0f} s (they meet at {where})")


def _who() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _said(text: bytes) -> dict[str, Any]:
    """What the file of a process says; nothing while it is being written."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _is_locked(path: pathlib.Path) -> bool:
    """Whether the process that wrote a file still lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _end(watch: Watch) -> None:
    """Leaves when all are done; process 0, through which the others talk, is the last."""
    group = Group("end")
    group.gather(True)
    watch.stop()
    group.gather(True)
    if group.leads:
        time.sleep(1)
    jax.distributed.shutdown()


def agree_on(config: ExperimentConfig) -> None:
    """Refuses a process with other versions, options or another configuration than process 0.

    Raises:
      ConfigError: in every process, naming the one that differs, its host and the difference.
    """
    if jax.process_count() == 1:
        return
    settings = current_settings()
    same = {k: v for k, v in settings.items() if k in _SAME or k.startswith("version of ")}
    everybody: list[dict[str, Any]] = Group("start").gather(
        {"host": platform.node(), "settings": same, "config": config.to_dict()}
    )
    first = everybody[0]
    for process, other in enumerate(everybody):
        for what in ("settings", "config"):
            difference = first_difference(first[what], other[what])
            if difference is not None:
                kind = "another version" if what == "settings" else "another configuration"
                text = difference.replace(" was ", " is ")
                text = text.replace(" and is now ", " in process 0 and ")
                raise ConfigError(
                    f"process {process} of {len(everybody)} (on {other['host']}) has {kind} than "
                    f"process 0 (on {first['host']}): {text} in process {process}"
                )
