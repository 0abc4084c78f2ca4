"""Threads, and what they wait for, as an argument: so that the simulator can hand in its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, final

__all__ = ["ThreadWorkers", "Waker", "Worker", "Workers"]


class Waker(Protocol):
    """Wakes one that waits. A `wake` that comes before the `wait` ends that one at once."""

    def wake(self) -> None:
        """From any thread."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it was woken in time."""
        ...


class Worker(Protocol):
    """Something that runs beside us."""

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        ...


class Workers(Protocol):
    """Makes them."""

    def spawn(self, name: str, run: Callable[[], None]) -> Worker: ...

    def waker(self) -> Waker: ...


@final
class _ThreadWaker:
    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        woken = self._event.wait(max(timeout_s, 0.0))
        if woken:
            self._event.clear()
        return woken


@final
class _Thread:
    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


@final
class ThreadWorkers:
    """Real ones."""

    def spawn(self, name: str, run: Callable[[], None]) -> Worker:
        return _Thread(name, run)

    def waker(self) -> Waker:
        return _ThreadWaker()
