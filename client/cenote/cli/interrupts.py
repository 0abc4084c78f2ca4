"""Ctrl-C and its kin, for commands that have to clean up behind themselves.

The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread, and so does each
further one until somebody takes the matter in hand (`take`); from then on signals only set `hurry`,
so that no cleanup is torn apart halfway.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, final

__all__ = ["Interrupts", "current_interrupts"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Interrupts:
    """What signals came. `catching` is for the main thread; elsewhere nothing is caught."""

    def __init__(self) -> None:
        self.taken = False
        self.hurry = False
        """A signal came after `take`: end now, not nicely."""
        self.number = 0
        """Of the first signal; 0: none came."""

    def take(self) -> None:
        """Cleaning up has begun: no more KeyboardInterrupt."""
        self.taken = True

    @property
    def exit_code(self) -> int:
        """Of a command that a signal ended."""
        return 128 + (self.number or signal.SIGINT)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Handle the signals inside the block, as before outside of it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        global _current
        outer, _current = _current, self
        before = {
            number: signal.signal(number, self._on_signal)
            for number in _SIGNALS
            # nohup and the like: who asked to survive the terminal's end does.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            _current = outer

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number
        if self.taken:
            self.hurry = True
        else:
            raise KeyboardInterrupt


_current: Interrupts | None = None


def current_interrupts() -> Interrupts:
    """Those of the command that runs: `main` catches signals for all of them."""
    return Interrupts() if _current is None else _current
