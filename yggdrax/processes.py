"""Several processes of one run: what they tell each other besides the arrays.

JAX's own service (``jax.distributed``) starts the processes together and moves arrays between
them. The few words that the host programs exchange (which step was saved, who wants to stop, what
differs) go through the same service's table of keys and values, never through devices, so that a
process that is gone is noticed by name after a stated time instead of blocking the others.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the table of keys and values has no public name

__all__ = ["Group", "ProcessLost"]

TIMEOUT = 300.0
"""Seconds after which a process that has not answered is given up."""


class ProcessLost(RuntimeError):
    """A process of the run has died, failed, or did not answer in time; the message says which."""


class Group:
    """The processes of this run, as one conversation: all make the same calls in the same order.

    Args:
      topic: name of the conversation; one for each thread that talks.
      timeout: seconds to wait for an answer.

    Example:
      >>> group = Group("example")
      >>> group.count, group.agree("from process 0"), group.gather("mine")
      (1, 'from process 0', ['mine'])
    """

    def __init__(self, topic: str, timeout: float | None = None) -> None:
        """Opens the conversation; nothing is said yet."""
        # Not jax.process_count(), which would start the devices before the processes have met.
        self.index = distributed.global_state.process_id or 0
        self.count = distributed.global_state.num_processes or 1
        self._timeout = TIMEOUT if timeout is None else timeout
        self._topic = f"yggdrax/{topic}/{_number(topic)}"
        self._said = 0

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which writes and decides."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """What every process says, in their order; JSON types.

        Raises:
          ProcessLost: naming the processes that did not answer.
        """
        if self.count == 1:
            return [value]
        place = self._next()
        _table().key_value_set(f"{place}/{self.index}", json.dumps(value))
        return [self._read(f"{place}/{other}", other) for other in range(self.count)]

    def agree(self, value: Any) -> Any:
        """What process 0 says; the others' values are ignored.

        Raises:
          ProcessLost: if process 0 does not answer.
        """
        if self.count == 1:
            return value
        place = self._next()
        if self.leads:
            _table().key_value_set(f"{place}/0", json.dumps(value))
            return value
        return self._read(f"{place}/0", 0)

    def lead(self, function: Callable[[], Any]) -> Any:
        """What ``function()`` returns in process 0 (JSON types), the only one that calls it.

        Raises:
          Exception: whatever it raises, in process 0 as it is.
          ProcessLost: with the same message, in the others.
        """
        if self.count == 1:
            return function()
        if not self.leads:
            answer = self.agree(None)
            if "error" in answer:
                raise ProcessLost(f"process 0 of {self.count}: {answer['error']}")
            return answer["value"]
        try:
            value = function()
        except BaseException as error:
            self.agree({"error": f"{type(error).__name__}: {error}"})
            raise
        self.agree({"value": value})
        return value

    def _next(self) -> str:
        """The next place in the table; what everybody must have read long ago is removed."""
        self._said += 1
        if self.leads and self._said > 100:
            _table().key_value_delete(f"{self._topic}/{self._said - 100}/")
        return f"{self._topic}/{self._said}"

    def _read(self, key: str, process: int) -> Any:
        try:
            text = _table().blocking_key_value_get(key, int(1000 * self._timeout))
        except Exception as error:  # the service raises many types
            raise ProcessLost(
                f"process {process} of {self.count} did not answer within {self._timeout:.0f} s. "
                "If it has died, start the run again with the processes that are left: it "
                "continues from the last checkpoint."
            ) from error
        return json.loads(text)


def _table() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("several processes need jax.distributed.initialize.")
    return client


_opened: dict[str, int] = {}
_opening = threading.Lock()


def _number(topic: str) -> int:
    """How many conversations of that name there were: keys are never used twice."""
    with _opening:
        _opened[topic] = _opened.get(topic, 0) + 1
        return _opened[topic]


def report_failure(message: str) -> None:
    """Tells the other processes that this one ends."""
    if jax.process_count() > 1:
        _table().key_value_set(f"yggdrax/failed/{jax.process_index()}", message)


class Watch:
    """Notices from a thread of its own that a process is gone, whatever this one is waiting for.

    Args:
      on_loss: called once, in that thread, with one line that says which process.
      every: seconds between two looks.
    """

    def __init__(self, on_loss: Callable[[str], None], every: float = 1.0) -> None:
        """Starts looking."""
        self._on_loss, self._every = on_loss, every
        self._done = threading.Event()
        self._index, self._count = jax.process_index(), jax.process_count()
        threading.Thread(target=self._look, name="yggdrax-processes", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._done.set()

    def _look(self) -> None:
        while not self._done.wait(self._every):
            loss = self._loss()
            if loss is not None and not self._done.is_set():
                self._on_loss(loss)
                return

    def _loss(self) -> str | None:
        try:
            # Answers when all have been heard of lately, or somebody has not been for too long.
            live = _table().get_live_nodes(list(range(self._count)))
            failed = _table().key_value_dir_get("yggdrax/failed/")
        except Exception:
            return None if self._done.is_set() else self._leader_gone()
        for key, message in failed:
            other = int(key.rsplit("/", 1)[1])
            if other != self._index:
                return f"process {other} of {self._count} failed: {message}"
        missing = sorted(set(range(self._count)) - set(live))
        if missing and not self._done.is_set():
            names = ", ".join(str(process) for process in missing)
            return f"process {names} of {self._count} has died or answers no more"
        return None

    def _leader_gone(self) -> str | None:
        time.sleep(self._every)
        try:
            _table().key_value_set(f"yggdrax/alive/{self._index}", "", allow_overwrite=True)
        except Exception:
            return f"process 0 of {self._count}, which the others talk through, has died"
        return None
