"""What the tests of deadlines measure with: it can fail, and not because the machine is busy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from promptness import _sleeper, ends_within, stopwatch, wait_ended
from waiting import stop_process


def test_a_block_that_is_late_fails() -> None:
    never = threading.Event()
    with pytest.raises(AssertionError, match=r"its limit"), ends_within(0.1):
        never.wait(2.0)
    with pytest.raises(AssertionError, match="only"), ends_within(0.5, at_least_s=0.3):
        never.wait(0.01)
    with ends_within(0.2, at_least_s=0.2):
        never.wait(0.2)


def test_waiting_for_a_lock_is_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the sleeper sees is the machine, which may well be busy.
    monkeypatch.setattr("promptness._Sleeper.late_s", lambda self: 0.0)
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(1.0, lock.release).start()
    with stopwatch() as watch, lock:
        pass
    assert watch.delayed_s < watch.took_s - 0.5


def test_a_machine_that_stands_still_is_allowed_for() -> None:
    sleeper = _sleeper()._process.pid
    with stopwatch() as watch:
        stop_process(sleeper)
        threading.Event().wait(0.4)
        os.kill(sleeper, signal.SIGCONT)
    assert watch.delayed_s > 0.3


def test_what_children_wait_for_is_allowed_for() -> None:
    cpu = {min(os.sched_getaffinity(0))}
    spin = f"import os\nos.sched_setaffinity(0, {cpu})\nprint(flush=True)\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
            stack.enter_context(child)
            stack.callback(child.kill)
            assert child.stdout is not None
            child.stdout.readline()
        with stopwatch() as watch:
            threading.Event().wait(1.0)
    assert watch.delayed_s > 0.5


def test_a_machine_that_is_busy_is_allowed_for() -> None:
    cpus = os.sched_getaffinity(0)
    cpu = {min(cpus)}
    spin = f"import os\nos.sched_setaffinity(0, {cpu})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        try:
            os.sched_setaffinity(0, cpu)
            with stopwatch() as watch:
                until_s = time.thread_time() + 0.3
                while time.thread_time() < until_s:
                    pass
        finally:
            os.sched_setaffinity(0, cpus)
            spinning.kill()
    assert watch.took_s > 0.4
    watch.check(0.3)


def test_what_a_child_waited_for_until_its_end_is_allowed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("promptness._Sleeper.late_s", lambda self: 0.0)
    cpu = {min(os.sched_getaffinity(0))}
    pinned = f"import os, time\nos.sched_setaffinity(0, {cpu})\n"
    spin = "print(flush=True)\nwhile True: pass"
    work = "until_s = time.thread_time() + 0.5\nwhile time.thread_time() < until_s: pass"
    with contextlib.ExitStack() as stack:
        spinning, ending = (
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", pinned + what], stdout=subprocess.PIPE)
            )
            for what in (spin, work)
        )
        stack.callback(spinning.kill)
        with stopwatch() as watch:
            assert wait_ended(ending.pid, ending.poll) == 0
    # What the other one waited for is more.
    assert watch.delayed_s > watch.ended_s[str(ending.pid)] > 0.2
