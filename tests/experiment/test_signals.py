"""Signals: the first sets a flag, the second ends the process even inside compiled code."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from yggdrax.experiment.signals import stop_on_signals

PROGRAM = """
import os, signal, sys, threading, time
from yggdrax.experiment.signals import stop_on_signals
with stop_on_signals(lambda name: print(name, flush=True)) as stop:
    print("ready", flush=True)
    {wait}
print("left", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_flag_and_handlers_come_back(number):
    before = signal.getsignal(number)
    seen = []
    with stop_on_signals(seen.append) as stop:
        assert not stop and stop.reason is None
        os.kill(os.getpid(), number)
        deadline = threading.Event()
        for _ in range(500):
            if seen:
                break
            deadline.wait(0.01)
        assert stop and stop.reason == signal.Signals(number).name == seen[0]
    assert signal.getsignal(number) is before
    assert len(seen) == 1


def test_the_second_signal_leaves_at_once():
    """The main thread sits in a call that never returns to the interpreter."""
    # A lock taken twice by the main thread: only a second thread or the kernel can end this.
    program = PROGRAM.format(wait="lock = threading.Lock(); lock.acquire(); lock.acquire()")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "left" not in out


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def body():
        with stop_on_signals() as stop:
            seen.append((bool(stop), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
