"""Ctrl-C and its kin, for commands that have to clean up behind themselves.

The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread, and so does each
further one until somebody takes the matter in hand (`take`); from then on signals only set `hurry`,
so that no cleanup is torn apart halfway. Who owes a result whatever comes holds signals back
(`holding`) and looks at `number` from time to time.

A signal that comes twice at once is one wish: `timeout` sends it to its child and then to the whole
group, and so do a terminal and a parent that passes it on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, final

__all__ = ["Interrupts", "current_interrupts"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO_S: Final = 0.1
_INSISTING: Final = 3


@final
class Interrupts:
    """What signals came. `catching` is for the main thread; elsewhere nothing is caught."""

    def __init__(self) -> None:
        self.taken = False
        self.hurry = False
        """A signal came after `take`: end now, not nicely."""
        self.number = 0
        """Of the first signal; 0: none came."""
        self.last_words = ""
        """What it means for the command that a KeyboardInterrupt ends it; `main` says it."""
        self.told = False
        """The command has said itself how it ended."""
        self._held = False
        self._held_back = 0
        self._let_through = False
        self._seen_s = 0.0

    def take(self) -> None:
        """Cleaning up has begun: no more KeyboardInterrupt."""
        self.taken = True

    def check(self) -> None:
        """Raises KeyboardInterrupt where a signal came whose own was lost.

        Python swallows what is raised while it runs a finalizer or another callback, and many run
        while modules are imported.
        """
        if self.number and not self.taken:
            raise KeyboardInterrupt

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, signals raise nothing: look at `number`, at least ten times a second.

        For a result that is owed however it ends. Who sends a third signal doesn't want it.
        """
        self._held_back = 0
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside `holding`: a signal raises KeyboardInterrupt here after all, but one only.

        For a call that waits for somebody else and can't look at `number`.
        """
        self._let_through = True
        try:
            yield
        finally:
            self._let_through = False

    @property
    def exit_code(self) -> int:
        """Of a command that a signal ended."""
        return 128 + (self.number or signal.SIGINT)

    @property
    def name(self) -> str:
        """Of the signal."""
        return signal.Signals(self.number or signal.SIGINT).name

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
        now_s = time.monotonic()
        if self.number and now_s - self._seen_s < _ECHO_S:
            return
        self._seen_s = now_s
        self.number = self.number or number
        if self.taken:
            self.hurry = True
            return
        if self._held and not self._let_through:
            self._held_back += 1
            if self._held_back < _INSISTING:
                return
        self._let_through = False  # before anything can run that owes a result
        raise KeyboardInterrupt


_current: Interrupts | None = None


def current_interrupts() -> Interrupts:
    """Those of the command that runs: `main` catches signals for all of them."""
    return Interrupts() if _current is None else _current
