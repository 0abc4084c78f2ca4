"""Copies between memory and SSD, as the master plans them.

    demote    memory -> device, flushed -> slots, flushed -> reported      (`demoter.py`)
    promote   device -> staging (hashed) -> memory -> slot -> reported     (`promoter.py`)

A source is held by nothing: its object may be evicted and its space given to others meanwhile, for
no put waits for a copy. So what was copied is believed only by its checksum. A copy takes over its
source's record, version and all.

`fence` ends what an earlier leader planned. Nothing of it lands in memory or becomes a slot when
that returns. Writes to the device may still be under way then: whoever reads there takes the
checksum anyway, and the next leader's copies are written after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import CopyStatus

from .copy_jobs import Copy, unpack_copies
from .copy_outcomes import CopierCounters, Outcomes
from .demoter import Demoter
from .dram import DramSegment
from .endurance import Endurance
from .promoter import Promoter
from .segments import LocalSegments

__all__ = ["Copier", "CopierCounters"]

QUEUE_MAX: Final = 65_536


@final
class Copier:
    """See the module. Everything but `start` and `stop` may be called from any thread."""

    def __init__(
        self,
        segments: LocalSegments,
        *,
        write_limit: int = 0,
        endurance: Endurance | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`write_limit`: bytes a second that go to the SSD, 0: as many as it takes. `endurance`:
        what they are charged to. `wait(s)` is how time passes until then; it tells whether to
        stop."""
        self._segments = segments
        self._endurance = endurance
        self._outcomes = Outcomes()
        self._demoter = Demoter(segments, self._outcomes, write_limit, wait)
        self._promoter = Promoter(segments, self._outcomes)

    @property
    def counters(self) -> CopierCounters:
        """Since the start."""
        return self._outcomes.counters

    def start(self) -> None:
        """Begin to take copies."""
        self._demoter.start()
        self._promoter.start()

    def stop(self) -> None:
        """End after the copies under way."""
        self._demoter.stop()
        self._promoter.stop()

    @property
    def queued(self) -> int:
        """Copies that were not begun."""
        return len(self._demoter.queue) + len(self._promoter.queue)

    @property
    def under_way(self) -> int:
        """Copies that were begun and have not ended, about."""
        return self._demoter.queue.taken + self._promoter.queue.taken

    @property
    def is_busy(self) -> bool:
        """Whether the master will soon hear of copies."""
        return bool(self.queued or self.under_way or self._outcomes.untold)

    # ---- the agent's side ---------------------------------------------------------------------

    def enqueue(self, rows: NDArray[np.void], epoch: int) -> None:
        """Take copies (COPY rows) of a leader's plan."""
        copies = unpack_copies(rows, epoch)
        room = max(0, QUEUE_MAX - self.queued)
        for one in copies[room:]:
            one.status = CopyStatus.FAILED
        self._outcomes.report(copies[room:])
        up: list[Copy] = []
        down: list[Copy] = []
        beyond: list[Copy] = []
        for one in copies[:room]:
            if isinstance(self._segments.by_id(one.segment_id), DramSegment):
                up.append(one)
            elif self._endurance is None or self._endurance.charge(
                0 if one.twin is not None else one.length
            ):
                down.append(one)
            else:  # its master knows of the budget, too, a little later
                one.status = CopyStatus.FAILED
                beyond.append(one)
        self._outcomes.report(beyond)
        if up:
            self._promoter.queue.add(up)
        if down:
            self._demoter.queue.add(down)

    def fence(self, epoch: int) -> None:
        """Nothing that leaders of earlier epochs planned becomes visible after this."""
        self._outcomes.fence(epoch)
        self._demoter.queue.forget(epoch)
        self._promoter.queue.forget(epoch)

    def tell(self) -> bytes:
        """For the next heartbeat: packed COPIED rows. `told` once that was answered."""
        return self._outcomes.tell()

    def told(self, packed: bytes) -> None:
        """The master knows of these."""
        self._outcomes.told(packed)
