"""Objects to look at again at a given time: those with a time to live, and pins that end.

An object is named by digest and seq, since its row may move meanwhile; a batch is one entry.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ObjectTimers", "Timed"]


class Timed(NamedTuple):
    at_s: float
    number: int
    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    tag: int
    """The caller's."""


class ObjectTimers:
    __slots__ = ("_number", "entries")

    def __init__(self) -> None:
        self.entries: list[Timed] = []
        """A heap."""
        self._number = 0

    def __len__(self) -> int:
        return len(self.entries)

    def add(
        self, at_s: float, digests: NDArray[np.uint64], seqs: NDArray[np.uint64], tag: int = 0
    ) -> None:
        self._number += 1
        heappush(self.entries, Timed(at_s, self._number, digests, seqs, tag))

    def due(self, now_s: float) -> Timed | None:
        """Take out one batch whose time has come."""
        if not self.entries or self.entries[0].at_s > now_s:
            return None
        return heappop(self.entries)
