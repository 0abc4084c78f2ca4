"""Whether a call ends when it promised to, on a machine that has other things to do.

A call's deadline is promised to 0.1 s. A test that measures it in real time measures the machine,
too, and one that allows for the worst machine allows for the worst code. So what the machine takes
is measured beside the call, and is all that is allowed on top:

- how long threads of this process, and of all that it started, were ready to run and did not (the
  kernel keeps account; of a process that ends meanwhile it is lost, unless `wait_ended` waits for
  that end);
- how late a process of its own was woken up that does nothing but sleep: that catches what the
  kernel can't see, such as a virtual machine that stands still.

Neither grows because of what a call waits for, computes, or locks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from waiting import wait_until

__all__ = ["HANG_S", "LATE_S", "Stopwatch", "ends_within", "stopwatch", "wait_ended"]

LATE_S: Final = 0.1
"""What is promised: a call ends by its deadline, give or take so much."""
HANG_S: Final = 60.0
"""Whoever takes so much longer than he may is not waited for, whatever the machine does."""
EARLY_S: Final = 0.01
"""Of clocks and timers that are rounded."""

_SEEN: Final = struct.Struct("<dd")
# Sleeps 5 ms at a time until its parent is gone, and writes down how late it was so far, wherever.
_SLEEPER: Final = """
import os, select, struct, time
late_s = 0.0
now_s = time.monotonic()
while not select.select([0], [], [], 0)[0]:
    due_s = now_s + 0.005
    select.select([0], [], [], 0.005)
    now_s = time.monotonic()
    if now_s - due_s > 0.002:
        late_s += now_s - due_s
    os.pwrite(1, struct.pack("<dd", now_s, late_s), 0)
"""


class _Sleeper:
    """The process that is woken up late when the machine is busy. One per test process."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as seen:
            self._seen = os.dup(seen.fileno())
        reading, self._writing = os.pipe()  # its end is how the sleeper learns of ours
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SLEEPER], stdin=reading, stdout=self._seen
        )
        os.close(reading)
        atexit.register(self._end)
        wait_until(lambda: self._read()[0], what="the sleeper to begin")

    def _end(self) -> None:
        os.close(self._writing)
        self._process.wait(10)
        os.close(self._seen)

    def _read(self) -> tuple[float, float]:
        data = os.pread(self._seen, _SEEN.size, 0)
        if len(data) < _SEEN.size:
            return 0.0, 0.0
        now_s, late_s = _SEEN.unpack(data)
        return now_s, late_s

    def late_s(self) -> float:
        """How late it woke up, in all, up to now."""
        asked_s = time.monotonic()
        wait_until(lambda: self._read()[0] >= asked_s, 30.0, what="the sleeper to wake up")
        return self._read()[1]


@cache
def _sleeper() -> _Sleeper:
    return _Sleeper()


def _waits_s(pid: int) -> dict[str, float]:
    """For each thread of a process and of its descendants: how long it was ready to run and did
    not."""
    found: dict[str, float] = {}
    todo = [str(pid)]
    while todo:
        with contextlib.suppress(OSError):  # it ended meanwhile, or the kernel keeps no account
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                todo += (task / "children").read_text().split()
                found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


class Stopwatch:
    """What a block of code took, and how much of that the machine may have added."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self.delayed_s = 0.0
        self.ended_s: dict[str, float] = {}
        """Of threads that may have ended meanwhile, by name: as `_waits_s`."""

    def check(self, limit_s: float, what: str = "it", *, late_s: float = LATE_S) -> None:
        """Raises AssertionError where it took longer than `limit_s`, but for what is allowed."""
        assert self.took_s <= limit_s + late_s + self.delayed_s, (
            f"{what} took {self.took_s:.3f} s, {limit_s:g} s (and {late_s:g} s) is its limit; the"
            f" machine may have added {self.delayed_s:.3f} s"
        )


_running: list[Stopwatch] = []


def wait_ended(pid: int, poll: Callable[[], int | None], timeout_s: float = HANG_S) -> int | None:
    """Wait for the end of a child: what `poll` (Popen's) returns then; None after `timeout_s`.

    What its threads waited for a processor until then counts for the stopwatches that run.
    """
    until_s = time.monotonic() + timeout_s

    def has_ended() -> bool:
        for watch in _running:
            watch.ended_s |= _waits_s(pid)
        return poll() is not None or time.monotonic() > until_s

    wait_until(has_ended, timeout_s + HANG_S, what=f"process {pid} to end")
    return poll()


@contextlib.contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the block; read the result behind it."""
    sleeper = _sleeper()
    watch = Stopwatch()
    late_s, waits_s = sleeper.late_s(), _waits_s(os.getpid())
    _running.append(watch)
    began_s = time.monotonic()
    try:
        yield watch
    finally:
        watch.took_s = time.monotonic() - began_s
        _running.remove(watch)
        after_s = watch.ended_s | _waits_s(os.getpid())
        waited_s = sum(s - waits_s.get(name, 0.0) for name, s in after_s.items())
        watch.delayed_s = waited_s + sleeper.late_s() - late_s


@contextlib.contextmanager
def ends_within(
    limit_s: float, what: str = "it", *, at_least_s: float = 0.0, late_s: float = LATE_S
) -> Iterator[None]:
    """The block takes `at_least_s` to `limit_s`, `late_s` more at the most."""
    with stopwatch() as watch:
        yield
    watch.check(limit_s, what, late_s=late_s)
    assert watch.took_s >= at_least_s - EARLY_S, f"{what} took {watch.took_s:.3f} s only"
