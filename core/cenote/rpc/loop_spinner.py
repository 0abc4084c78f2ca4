"""An event loop that looks for the next request for a while before it sleeps.

To be woken takes 20 to 80 µs (more in virtual machines, where an idle core halts), which is longer
than most requests take to serve. After a request the loop is therefore kept turning, without
waiting, for `spin_s`; each turn steps aside for whoever else may need the core. Where no request
came meanwhile, the next ones are not waited for: none after the first time in vain, then 1, 2, 4,
8, 15, so that a client that asks now and then costs about one spin in 16 requests. Where others
want the cores, it sleeps at once (`runtime.scheduling`).
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final, final

from cenote.runtime.scheduling import CONTENTION, STEP_CONTENDED_S

from .lane_limits import LaneStats

__all__ = ["LoopSpinner"]

_SKIP_MAX: Final = 15
_MISSES_MAX: Final = 6


@final
class LoopSpinner:
    """`served` after each request, on the loop. `spin_s` 0: never spins."""

    __slots__ = ("_loop", "_misses", "_skip", "_spin_s", "_stats", "_until_s", "spinning")

    def __init__(self, spin_s: float, stats: LaneStats) -> None:
        self._spin_s = spin_s
        self._stats = stats
        self._until_s = 0.0
        self._misses = 0  # in a row
        self._skip = 0  # requests after which the loop sleeps at once
        self._loop: asyncio.AbstractEventLoop | None = None
        self.spinning = False

    def served(self) -> None:
        """A request was served: look for the next one, if that was not in vain lately."""
        if self.spinning:
            self._stats.requests_spun_for += 1
            self._misses = 0
            self._until_s = time.monotonic() + self._spin_s
        elif self._skip:
            self._skip -= 1
        elif self._spin_s and time.monotonic() >= CONTENTION.until_s:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self.spinning = True
            self._stats.spins += 1
            self._until_s = time.monotonic() + self._spin_s
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s < self._until_s:
            os.sched_yield()
            after_s = time.monotonic()
            if after_s - now_s > STEP_CONTENDED_S:
                CONTENTION.note(after_s)
                self.spinning = False
                return
            assert self._loop is not None
            self._loop.call_soon(self._turn)
            return
        self.spinning = False
        self._misses = min(self._misses + 1, _MISSES_MAX)
        self._skip = min((1 << self._misses) >> 2, _SKIP_MAX)
