"""Time as an argument: the one way the programs read a clock.

Whatever decides by time (leases, deadlines, probes) is handed a `Clock`, so that a test or the
simulator can hand it one that moves only when told to. The clock is monotonic and its zero means
nothing: its values are never stored, sent, or compared with those of another process. For what has
to be stored there is `unix_s`, which may jump: whoever reads it back allows for that.
"""

from __future__ import annotations

import time
from typing import Final, Protocol, final

__all__ = ["SYSTEM_CLOCK", "Clock", "ManualClock", "SystemClock"]

NS_PER_S: Final = 1_000_000_000


class Clock(Protocol):
    """A monotonic clock."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary zero."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since the same zero."""
        ...

    def unix_s(self) -> float:
        """What the wall clock says: seconds since 1970 UTC. May jump, also back."""
        ...


@final
class SystemClock:
    """The machine's monotonic clock.

    The methods are the C functions themselves, so that reading the clock through this object costs
    the same as calling `time.monotonic()`.
    """

    __slots__ = ()

    monotonic_s = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)
    unix_s = staticmethod(time.time)


SYSTEM_CLOCK: Final = SystemClock()


@final
class ManualClock:
    """A clock that stands still until `advance_s` or `advance_ns` moves it.

    It counts whole nanoseconds, so that a thousand steps of a millisecond are one second exactly.
    """

    __slots__ = ("_now_ns",)

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_ns = round(start_s * NS_PER_S)

    def monotonic_s(self) -> float:
        """Seconds since this clock's zero."""
        return self._now_ns / NS_PER_S

    def monotonic_ns(self) -> int:
        """Nanoseconds since this clock's zero."""
        return self._now_ns

    def unix_s(self) -> float:
        """The same as `monotonic_s`."""
        return self.monotonic_s()

    def advance_s(self, seconds: float) -> None:
        """Move the clock forward. Raises ValueError where `seconds` is negative."""
        self.advance_ns(round(seconds * NS_PER_S))

    def advance_ns(self, nanoseconds: int) -> None:
        """Move the clock forward. Raises ValueError where `nanoseconds` is negative."""
        if nanoseconds < 0:
            raise ValueError(f"a monotonic clock can't go back by {-nanoseconds} ns")
        self._now_ns += nanoseconds
