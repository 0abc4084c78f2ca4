"""Waiting for a condition: the only place in the tests that may let time pass.

A test never sleeps for as long as something "should" take; it says what it waits for and the
longest that may take, and goes on at once when it is so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["children_of", "loop_turns", "stop_process", "wait_until", "wait_until_async"]

T = TypeVar("T")
_POLL_S = 0.005
# Far longer than anything takes that tests wait for: a busy machine decides nothing.
_TIMEOUT_S = 30.0


def wait_until(predicate: Callable[[], T], timeout_s: float = _TIMEOUT_S, *, what: str) -> T:
    """Call `predicate` until it returns something true, and return that.

    Raises AssertionError, saying `what` was waited for and what the predicate returned last, after
    `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"waited {timeout_s} s for {what}; last seen: {value!r}")
        time.sleep(_POLL_S)


async def wait_until_async(
    predicate: Callable[[], T], timeout_s: float = _TIMEOUT_S, *, what: str
) -> T:
    """`wait_until` for a test that shares the event loop with what it waits for."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"waited {timeout_s} s for {what}; last seen: {value!r}")
        await asyncio.sleep(_POLL_S)


async def loop_turns(n: int = 1) -> None:
    """Let the event loop run everything that is ready, `n` times."""
    for _ in range(n):
        await asyncio.sleep(0)


def stop_process(pid: int) -> None:
    """SIGSTOP; returns once every thread of the process stands still (the signal alone is only a
    request: another core may still be running one)."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(stands_still, timeout_s=10, what=f"process {pid} to stop")


def children_of(pid: int, module: str = "") -> list[int]:
    """Child processes, those that run `module`."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in path.read_text().split()]
    lines = {child: Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in found}
    return [child for child in found if not module or module.encode() in lines[child]]
