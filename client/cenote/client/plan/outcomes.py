"""What came of a put, key by key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.types import PutStatus as Outcome

from .state import Call

__all__ = ["PutOutcome", "count_outcome"]

I64 = NDArray[np.int64]

_STORED: Final = int(Outcome.STORED)


@dataclass(slots=True)
class PutOutcome:
    """Per key: `api.types.PutStatus` (0 while open), Sameness, error code."""

    statuses: NDArray[np.uint8]
    sameness: NDArray[np.uint8]
    codes: NDArray[np.uint16]
    errors: dict[int, CenoteError] = field(default_factory=dict)
    """The first error of each code."""

    @classmethod
    def blank(cls, count: int) -> PutOutcome:
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.uint16))

    def stored(self, positions: I64) -> None:
        self.statuses[positions] = _STORED

    def existed(self, positions: I64, sameness: int | NDArray[np.uint8]) -> None:
        self.statuses[positions] = Outcome.EXISTED
        self.sameness[positions] = sameness

    def fail(self, positions: I64, error: CenoteError) -> None:
        if len(positions):
            self.statuses[positions] = Outcome.FAILED
            self.codes[positions] = error.code
            self.errors.setdefault(error.code, error)


def count_outcome(call: Call, outcome: PutOutcome, sizes: NDArray[np.uint64]) -> None:
    counters = call.space.counters
    _, stored, existed, failed = np.bincount(outcome.statuses, minlength=4).tolist()
    counters.stored += stored
    counters.existed += existed
    counters.failed += failed
    if existed:
        call.space.spares.note_existed()
    elif stored:
        call.space.spares.note_stored(stored, call.now())
    if stored == len(sizes):
        counters.written_bytes += int(sizes.sum())
    elif stored:
        counters.written_bytes += int(sizes[outcome.statuses == _STORED].sum())
