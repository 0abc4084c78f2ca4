"""What became of keys, the last of it: why an object is not here any more, in a bounded log.

Nothing is made per key: a decision on many objects is one row, and their digests, stamps and seqs
are copied in one piece each into ring arrays. The oldest is overwritten. It is of one tenure, is
not journaled, and nothing is decided by it: it is for people, who ask why a key is missing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "DecisionLog", "Fate", "Why"]

_KEYS_A_BATCH: Final = 4
"""Room is for so many fewer batches than keys."""
_BATCHES_MIN: Final = 64
_FOUND_MAX: Final = 16


class Fate(IntEnum):
    """The first ones are those of `effects.GoneReason`."""

    EVICTED = 1
    REMOVED = 2
    LOST = 3
    RESET = 4
    EXPIRED = 5
    REFUSED = 6
    """A put that found no room."""


class Why(IntEnum):
    """Why something was evicted."""

    NONE = 0
    ON_DEMAND = 1
    """A put needed room."""
    AHEAD = 2
    """Room is kept ahead of need."""
    NEARBY = 3
    """Free space around it was joined, for a large object."""
    TABLE_FULL = 4
    ASKED = 5
    """An administrator asked for it."""
    MOVED_IN = 6
    """What moved here, from a node that is left, was warmer."""
    SSD_FULL = 7


@dataclass(frozen=True, slots=True)
class Decision:
    fate: Fate
    why: Why
    at_s: float
    batch: int
    """Objects that it was about."""
    stamp: int
    """When the policy saw the object last; 0 where that is not known."""
    seq: int


@final
class DecisionLog:
    """The last `keys_max` objects about which something was decided; 32 bytes each."""

    __slots__ = (
        *("_at_s", "_counts", "_digests", "_end", "_firsts", "_kinds", "_rows", "_seqs"),
        *("_stamps", "batches", "keys_max"),
    )

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        # Untouched pages cost nothing.
        self._digests = np.zeros((keys_max, 2), np.uint64)
        self._stamps = np.zeros(keys_max, np.uint64)
        self._seqs = np.zeros(keys_max, np.uint64)
        self._end = 0
        """Keys since the start of the tenure."""
        self.batches = 0
        """Likewise."""
        # Of batches, a ring, too; `array` because one value at a time is written.
        self._rows = max(_BATCHES_MIN, keys_max // _KEYS_A_BATCH)
        self._firsts = array("q", bytes(8 * self._rows))
        self._at_s = array("d", bytes(8 * self._rows))
        self._counts = array("L", bytes(array("L").itemsize * self._rows))
        self._kinds = array("H", bytes(2 * self._rows))
        """Fate, and why."""

    def note(
        self,
        fate: int,
        why: int,
        digests: NDArray[np.uint64],
        now_s: float,
        stamps: NDArray[np.uint64] | int = 0,
        seqs: NDArray[np.uint64] | int = 0,
    ) -> None:
        """Take down one decision on these keys."""
        count, room = len(digests), self.keys_max
        if not count or not room:
            return
        row = self.batches % self._rows
        self._firsts[row], self._at_s[row], self._counts[row] = self._end, now_s, count
        self._kinds[row] = fate << 8 | why
        self.batches += 1
        at = self._end % room
        if at + count <= room:
            end = at + count
            self._digests[at:end] = digests
            self._stamps[at:end] = stamps
            self._seqs[at:end] = seqs
            self._end += count
        else:
            self._write_around(digests, stamps, seqs)

    def _write_around(
        self,
        digests: NDArray[np.uint64],
        stamps: NDArray[np.uint64] | int,
        seqs: NDArray[np.uint64] | int,
    ) -> None:
        """Over the end of the ring."""
        count, room = len(digests), self.keys_max
        kept = slice(max(0, count - room), count)
        where = np.arange(self._end + kept.start, self._end + count) % room
        self._digests[where] = digests[kept]
        self._stamps[where] = stamps if isinstance(stamps, int) else stamps[kept]
        self._seqs[where] = seqs if isinstance(seqs, int) else seqs[kept]
        self._end += count

    def __len__(self) -> int:
        """Keys that it holds."""
        return min(self._end, self.keys_max)

    def _kept(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of the batches that are kept, oldest first, and where each of them begins."""
        oldest = max(0, self.batches - self._rows)
        rows = np.arange(oldest, self.batches) % self._rows
        return rows, np.frombuffer(self._firsts, np.int64)[rows]

    def oldest_s(self) -> float | None:
        """When the oldest decision was taken that it holds as a whole; None where it has none."""
        rows, firsts = self._kept()
        whole = rows[firsts >= self._end - self.keys_max]
        return self._at_s[int(whole[0])] if len(whole) else None

    def find(self, digest: NDArray[np.uint64]) -> list[Decision]:
        """What was decided about one key (uint64[2]), newest first, the last few."""
        held = len(self)
        at = np.flatnonzero(
            (self._digests[:held, 0] == digest[0]) & (self._digests[:held, 1] == digest[1])
        )
        if not len(at):
            return []
        rows, firsts = self._kept()
        # Where in the order of all keys each place of the ring stands.
        places = at + (self._end - 1 - at) // self.keys_max * self.keys_max
        found = []
        for place in np.sort(places)[::-1][:_FOUND_MAX].tolist():
            number = int(np.searchsorted(firsts, place, "right")) - 1
            if number < 0:
                break  # its batch is forgotten
            row, index = int(rows[number]), place % self.keys_max
            kind = self._kinds[row]
            found.append(
                Decision(
                    Fate(kind >> 8),
                    Why(kind & 0xFF),
                    self._at_s[row],
                    self._counts[row],
                    int(self._stamps[index]),
                    int(self._seqs[index]),
                )
            )
        return found
