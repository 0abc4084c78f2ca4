"""What came of copies, and when they may still become visible. Safe from threads."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from cenote.api.rows import COPIED, CopyStatus

from .copy_jobs import Copy

__all__ = ["CopierCounters", "Outcomes"]

TOLD_MAX: Final = 2048
"""Copies that one heartbeat reports."""


@dataclass(slots=True)
class CopierCounters:
    """Since the start."""

    demoted: int = 0
    demoted_bytes: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    failed: int = 0
    """Copies that came to nothing, for whatever reason."""


@final
class Outcomes:
    """See the module."""

    def __init__(self) -> None:
        self.counters = CopierCounters()
        self.placing = threading.Lock()
        """Held while copies on an SSD become slots."""
        self.landing = threading.Lock()
        """Held while a copy lands in memory that others can be given, or becomes a slot there."""
        self.epoch = 0
        """Of the latest leader. To be looked at under one of the two."""
        self._lock = threading.Lock()
        self._results: deque[tuple[int, int]] = deque()

    def fence(self, epoch: int) -> None:
        """No copy of an earlier leader lands or becomes a slot after this."""
        with self.placing, self.landing:
            self.epoch = max(self.epoch, epoch)

    def report(self, copies: list[Copy]) -> None:
        """These have ended."""
        counters = self.counters
        with self._lock:
            for one in copies:
                counters.failed += one.status != CopyStatus.DONE
                if one.epoch >= self.epoch:
                    self._results.append((one.copy_id, int(one.status)))

    @property
    def untold(self) -> int:
        """How many results the master does not know yet."""
        return len(self._results)

    def tell(self) -> bytes:
        """For the next heartbeat: packed COPIED rows. `told` once that was answered."""
        with self._lock:
            results = [self._results[i] for i in range(min(len(self._results), TOLD_MAX))]
        rows = np.zeros(len(results), COPIED)
        if results:
            pairs = np.array(results, np.uint64)
            rows["copy_id"], rows["status"] = pairs[:, 0], pairs[:, 1]
        return rows.tobytes()

    def told(self, packed: bytes) -> None:
        """The master knows of these."""
        with self._lock:
            for _ in range(len(packed) // COPIED.itemsize):
                self._results.popleft()
