"""Which objects are read: one in so many of the reads that the master is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["STEP", "Heat", "Hot"]

STEP: Final = 16
_SAMPLES_MAX: Final = 65_536
"""Between two looks; more are forgotten."""

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Hot:
    """An object that is watched."""

    seq: int
    bytes_per_s: float = 0.0
    cool_since_s: float = -1.0
    """Since when one replica less would do; below 0: it would not."""


@final
class Heat:
    __slots__ = ("_batches", "_held", "_ones", "extra", "known", "left", "look_at_s")

    def __init__(self) -> None:
        self.left = STEP
        """Reads until the next one that is noted."""
        self.known: dict[tuple[int, int], Hot] = {}
        """By digest."""
        self.extra: dict[tuple[int, int], list[int]] = {}
        """Digest -> replicas that load has added."""
        self.look_at_s = 0.0
        self._ones: list[tuple[int, int]] = []
        self._batches: list[tuple[Rows, NDArray[np.uint64]]] = []
        self._held = 0

    @property
    def has_news(self) -> bool:
        return self._held > 0

    def note_one(self, row: int, seq: int) -> None:
        """This read is one of those that are noted: `left` came to 0."""
        self.left = STEP
        if self._held < _SAMPLES_MAX:
            self._held += 1
            self._ones.append((row, seq))

    def choose(self, rows: Rows) -> Rows:
        """Those of a batch that are noted."""
        chosen = rows[self.left - 1 :: STEP]
        self.left = (
            STEP - (len(rows) - self.left) % STEP
            if len(rows) >= self.left
            else (self.left - len(rows))
        )
        return chosen

    def note(self, rows: Rows, seqs: NDArray[np.uint64]) -> None:
        """Some that were chosen."""
        if self._held < _SAMPLES_MAX and len(rows):
            self._held += len(rows)
            self._batches.append((rows, seqs))

    def take(self) -> tuple[Rows, NDArray[np.uint64]]:
        """(rows, seqs) of what was noted since this was last called."""
        ones = np.array(self._ones, np.uint64).reshape(-1, 2)
        rows = [ones[:, 0].astype(np.int64), *(rows for rows, _ in self._batches)]
        seqs = [ones[:, 1], *(seqs for _, seqs in self._batches)]
        self._ones, self._batches, self._held = [], [], 0
        return np.concatenate(rows), np.concatenate(seqs)
