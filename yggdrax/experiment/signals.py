"""SIGINT and SIGTERM: the first asks the run to stop between two steps, the second ends it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["StopFlag", "stop_on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopFlag:
    """Tells whether a signal has asked the run to stop, and which.

    Attributes:
      reason: the signal's name, or None while nothing was asked.
    """

    def __init__(self) -> None:
        """Starts with nothing asked."""
        self.reason: str | None = None

    def __bool__(self) -> bool:
        """True once a signal came."""
        return self.reason is not None


@contextlib.contextmanager
def stop_on_signals(on_first: Callable[[str], None] | None = None) -> Iterator[StopFlag]:
    """Yields a flag that the first SIGINT or SIGTERM sets; a second one ends the process at once.

    Python runs signal handlers between two bytecodes of the main thread, which may sit in compiled
    code for seconds. The C-level handler writes each signal's number to a pipe at once, so a thread
    that reads the pipe sees a second signal even then. Outside the main thread of a program no
    handler can be installed: the flag then never sets.

    Args:
      on_first: called with the signal's name, from the reading thread, when the first arrives.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] not in _SIGNALS:
                continue
            if flag:
                os._exit(128 + number[0])
            flag.reason = signal.Signals(number[0]).name
            if on_first is not None:
                on_first(flag.reason)

    thread = threading.Thread(target=watch, name="yggdrax-signals", daemon=True)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield flag
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)
