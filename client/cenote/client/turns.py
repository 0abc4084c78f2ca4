"""One thread at a time, with a deadline, and safe from Ctrl-C."""

from __future__ import annotations

import threading
import time
from typing import Final, final

from cenote.api.errors import DeadlineExceeded

__all__ = ["Turn"]

_NOBODY: Final = 0


@final
class Turn:
    """What a lock would be for, were it not for KeyboardInterrupt.

    An interrupt can come between the return of `Lock.acquire(timeout=...)` and the `try` behind it,
    and then the lock stays locked for ever. Here the owner is written down, so that `give` knows
    whether there is anything to give back:

        try:
            turn.take(until_s, "another thread is at it")
            ...
        finally:
            turn.give()
    """

    __slots__ = ("_changed", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._owner = _NOBODY

    def take(self, until_s: float, why: str) -> None:
        """Wait for the turn until `until_s` on the monotonic clock.

        Raises DeadlineExceeded saying `why`. A thread that has it already keeps it.
        """
        me = threading.get_ident()
        with self._lock:
            while self._owner not in (_NOBODY, me):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(why)
                self._changed.wait(left_s)
            self._owner = me

    def give(self) -> None:
        """Let the next thread have it; nothing where this thread has not got it."""
        with self._lock:
            if self._owner == threading.get_ident():
                self._owner = _NOBODY
                self._changed.notify_all()
