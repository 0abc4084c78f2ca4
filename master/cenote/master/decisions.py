"""What became of keys, the last of it: why an object is not here any more, in a bounded log.

Nothing is made per key: a decision on many objects is one row, and their digests, stamps and seqs
are copied in one piece each into ring arrays. The oldest is overwritten. It is of one tenure, is
not journaled, and nothing is decided by it: it is for people, who ask why a key is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "DecisionLog", "Fate", "Why"]

_BATCH: Final = np.dtype(
    [
        ("first", "<u8"),
        ("at_s", "<f8"),
        ("count", "<u4"),
        ("fate", "u1"),
        ("why", "u1"),
    ]
)
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

    __slots__ = ("_batches", "_digests", "_end", "_seqs", "_stamps", "batches", "keys_max")

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        # Untouched pages cost nothing.
        self._digests = np.zeros((keys_max, 2), np.uint64)
        self._stamps = np.zeros(keys_max, np.uint64)
        self._seqs = np.zeros(keys_max, np.uint64)
        self._batches = np.zeros(max(_BATCHES_MIN, keys_max // _KEYS_A_BATCH), _BATCH)
        self._end = 0
        """Keys since the start of the tenure."""
        self.batches = 0
        """Likewise."""

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
        first = self._end
        for start in range(0, count, room):  # once, but for a batch that is larger than the log
            part = slice(start, min(count, start + room))
            self._write(
                digests[part],
                stamps if isinstance(stamps, int) else stamps[part],
                seqs if isinstance(seqs, int) else seqs[part],
            )
        batches = self._batches
        batches[self.batches % len(batches)] = (first, now_s, count, fate, why)
        self.batches += 1

    def _write(
        self,
        digests: NDArray[np.uint64],
        stamps: NDArray[np.uint64] | int,
        seqs: NDArray[np.uint64] | int,
    ) -> None:
        count, room = len(digests), self.keys_max
        at = self._end % room
        self._end += count
        where: slice | NDArray[np.int64] = slice(at, at + count)
        if at + count > room:
            where = np.arange(at, at + count) % room
        self._digests[where] = digests
        self._stamps[where] = stamps
        self._seqs[where] = seqs

    def __len__(self) -> int:
        """Keys that it holds."""
        return min(self._end, self.keys_max)

    def _kept(self) -> NDArray[np.void]:
        """Batches, oldest first."""
        size = len(self._batches)
        if self.batches <= size:
            return self._batches[: self.batches]
        return np.roll(self._batches, -(self.batches % size))

    def oldest_s(self) -> float | None:
        """When the oldest decision was taken that it holds as a whole; None where it has none."""
        kept = self._kept()
        whole = kept[kept["first"].astype(np.int64) >= self._end - self.keys_max]
        return float(whole["at_s"][0]) if len(whole) else None

    def find(self, digest: NDArray[np.uint64]) -> list[Decision]:
        """What was decided about one key (uint64[2]), newest first, the last few."""
        held = len(self)
        at = np.flatnonzero(
            (self._digests[:held, 0] == digest[0]) & (self._digests[:held, 1] == digest[1])
        )
        kept = self._kept()
        firsts = kept["first"].astype(np.int64)
        # Where in the order of all keys each place of the ring stands.
        places = at + (self._end - 1 - at) // self.keys_max * self.keys_max
        found = []
        for place in np.sort(places)[::-1][:_FOUND_MAX].tolist():
            number = int(np.searchsorted(firsts, place, "right")) - 1
            if number < 0:
                break  # its batch is forgotten
            batch, index = kept[number], place % self.keys_max
            found.append(
                Decision(
                    Fate(int(batch["fate"])),
                    Why(int(batch["why"])),
                    float(batch["at_s"]),
                    int(batch["count"]),
                    int(self._stamps[index]),
                    int(self._seqs[index]),
                )
            )
        return found
