"""A write that goes on while the program computes, and is finished before the program ends."""

import contextlib
import sys
import threading
from collections.abc import Callable

__all__ = ["BackgroundWrite"]

_unfinished: set["BackgroundWrite"] = set()


class BackgroundWrite:
    """Runs one function in a thread; its error is raised in whoever waits."""

    def __init__(self, function: Callable[[], None], label: str):
        """Starts at once.

        Args:
          function: what to run.
          label: what the message says when the program ends without having waited.
        """
        self._label = label
        self._error: BaseException | None = None
        # The thread forgets the function, and with it the copied arrays, when it has run.
        self._thread = threading.Thread(target=self._run, args=(function,), name=label)
        _unfinished.add(self)
        self._thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error

    def running(self) -> bool:
        """Whether the function has not returned yet."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Blocks until the function has returned."""
        self._thread.join()

    def raise_error(self) -> None:
        """Raises what the function raised, once; to be called after :meth:`join`."""
        _unfinished.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_at_exit(self) -> None:
        """Blocks; there is nobody left to catch an error, so it is printed."""
        with contextlib.suppress(BaseException):
            self._thread.join()
        if self._error is not None:
            print(f"yggdrax: {self._label} failed: {self._error}", file=sys.stderr)


def _finish_all() -> None:
    for write in list(_unfinished):
        write.wait_at_exit()


# Orbax uses executors, and those refuse work once the interpreter starts to shut down; a function
# registered with `atexit` runs after that. The hook that runs before it has no public name
# (concurrent.futures uses the same one, and hooks run in reverse order). Without it, as on an
# interpreter that lacks it, a program must call close() to be sure of its last save.
getattr(threading, "_register_atexit", lambda function: None)(_finish_all)
