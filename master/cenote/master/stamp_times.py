"""When stamps were given: the policy's ticks are not seconds."""

from __future__ import annotations

from bisect import bisect_right
from typing import final

__all__ = ["StampTimes"]

_TIMES_MAX = 4096


@final
class StampTimes:
    """What the policy's clock said when, more coarsely the longer ago it is."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: list[tuple[int, float]] = []

    def note(self, clock: int, now_s: float) -> None:
        """Remember it, once a second at most."""
        times = self._times
        if times and now_s - times[-1][1] < 1.0:
            return
        times.append((clock, now_s))
        if len(times) > _TIMES_MAX:
            del times[: _TIMES_MAX // 2 : 2]

    def idle_s(self, stamp: int, now_s: float) -> float:
        """About how long ago this stamp was given; of one from before the first that is known, as
        after a restart, at least how long."""
        times = self._times
        at = bisect_right(times, (stamp, float("inf")))
        return max(0.0, now_s - times[max(0, at - 1)][1]) if times else 0.0
