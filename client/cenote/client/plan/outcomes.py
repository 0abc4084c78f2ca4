"""What came of a put, key by key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.rows import DIGEST_BYTES
from cenote.api.types import PutStatus as Outcome

from .state import Call

__all__ = ["PutOutcome", "count_outcome"]

I64 = NDArray[np.int64]

_STORED: Final = int(Outcome.STORED)
_ONE_STORED: Final = bytes([_STORED])


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

    def all_stored(self) -> None:
        self.statuses.fill(_STORED)

    def existed(self, positions: I64, sameness: int | NDArray[np.uint8]) -> None:
        self.statuses[positions] = Outcome.EXISTED
        self.sameness[positions] = sameness

    def fail(self, positions: I64, error: CenoteError) -> None:
        if len(positions):
            self.statuses[positions] = Outcome.FAILED
            self.codes[positions] = error.code
            self.errors.setdefault(error.code, error)

    def copy_duplicates(self, digests: bytes, todo: I64, duplicates: I64) -> None:
        """A key that stands earlier in the batch `todo` (positions) has that one's outcome."""
        rows = np.frombuffer(digests, f"V{DIGEST_BYTES}")[todo].tolist()
        first: dict[bytes, int] = {}
        for position, digest in zip(todo.tolist(), rows, strict=True):
            first.setdefault(digest, position)
        for index in duplicates.tolist():
            source, target = first[rows[index]], int(todo[index])
            if self.statuses[source] == Outcome.STORED:
                self.statuses[target] = Outcome.EXISTED
            else:
                self.statuses[target] = self.statuses[source]
                self.codes[target] = self.codes[source]
            self.sameness[target] = self.sameness[source]


def count_outcome(call: Call, outcome: PutOutcome, sizes: NDArray[np.uint64]) -> None:
    counters = call.space.counters
    if outcome.statuses.tobytes() == _ONE_STORED * len(sizes):
        counters.stored += len(sizes)
        counters.written_bytes += int(sizes.sum())
        call.space.spares.note_stored(len(sizes), call.now())
        return
    _, stored, existed, failed = np.bincount(outcome.statuses, minlength=4).tolist()
    counters.stored += stored
    counters.existed += existed
    counters.failed += failed
    if existed:
        call.space.spares.note_existed()
    elif stored:
        call.space.spares.note_stored(stored, call.now())
    if stored:
        counters.written_bytes += int(sizes[outcome.statuses == _STORED].sum())
