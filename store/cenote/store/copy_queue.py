"""Copies that the master ordered and a thread has not taken yet, and how many it is at."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, final

from .copy_jobs import Copy

__all__ = ["CopyQueue"]

_LOOK_S: Final = 1.0  # a bound only: whoever adds wakes who waits


@final
class CopyQueue:
    """For any thread. Its length is the copies that nobody has taken."""

    def __init__(self) -> None:
        self._copies: deque[Copy] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.taken = 0
        """Copies that were taken and have not ended."""

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, copies: list[Copy]) -> None:
        with self._lock:
            self._copies.extend(copies)
            self._changed.notify_all()

    def forget(self, epoch: int) -> None:
        """Forget what leaders of earlier epochs planned."""
        with self._lock:
            self._copies = deque(one for one in self._copies if one.epoch >= epoch)

    def end(self) -> None:
        """Forget all, and wake who waits."""
        with self._lock:
            self._copies.clear()
            self._changed.notify_all()

    def take(self, most: int = 1, *, wait: bool) -> list[Copy]:
        """The next ones, as far as there are any; `wait` for the first, a second at most."""
        with self._lock:
            if wait and not self._copies:
                self._changed.wait(_LOOK_S)
            some = [self._copies.popleft() for _ in range(min(most, len(self._copies)))]
            self.taken += len(some)
            return some

    def ended(self, count: int) -> None:
        """So many of those taken have."""
        with self._lock:
            self.taken -= count
