"""ARC, the adaptive replacement cache, on stamps instead of linked lists.

Textbook: N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. T1 holds what was used once, T2 what was used again, both in order of use. B1 and B2
remember the keys that each has lost lately. A key that comes back from B1 says that T1 is too small
and raises its target p by max(1, |B2| / |B1|); one from B2 lowers it by max(1, |B1| / |B2|). The
oldest of T1 goes while T1 is larger than p, else the oldest of T2. |T1| + |B1| <= c, and all four
together hold at most 2 c keys. There is no other parameter.

What is different from the figure, since victims are chosen ahead and in bulk:

* c is not set but found: as many objects as may be evicted when victims are chosen. p is kept as a
  share of it.
* A batch of victims is split as if one object were stored for each, of which as many come back from
  B1 or B2 as lately.
* The keys of one batch are looked up in B1 and B2 at once, then p moves for all of them.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from .base import MAIN, STEP, Keys, Links, Mask, Positions, Stamps, key_words
from .ghosts import GhostQueue
from .lru import evenly_mixed, oldest_first

__all__ = ["ArcPolicy"]

_MAIN: Final = np.uint64(MAIN)
_ZERO: Final = np.uint64(0)
_LITTLE: Final = 2.0**-40


@final
class ArcPolicy:
    """T1 and T2 are one bit of the stamp.

    Memory: the 8 bytes of the stamp, and up to 28 for each key in B1 and B2, of which there are as
    many as objects. A touch is a store into the column; a key that is stored is looked up in two
    packed tables; choosing a 64th of the table as victims costs about 1 us for each of them.

    After a restart everything is in T1, in order of use as far as it is known (see LRU), B1 and B2
    are empty and p is 0: until objects are used again that is LRU.
    """

    __slots__ = ("_b1", "_b2", "_clock", "_owed", "_returning", "_size", "_t1", "_target_share")

    name = "arc"
    remembers = True
    chained = False
    by_age = False
    victims_at_once = 32

    def __init__(self, clock: int = STEP) -> None:
        self._clock = clock
        self._b1, self._b2 = GhostQueue(), GhostQueue()
        self._target_share = 0.0
        """p, as a share of the cache."""
        self._size = self._t1 = 0
        """c and |T1| when victims were chosen last."""
        self._returning = 0.0
        """Which share of what is stored comes back from B1 or B2: a moving average."""
        self._owed = 0
        """Evicted since something was stored last: as many will be stored."""

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def ghosts(self) -> GhostQueue:
        """B1: what may have gone too early."""
        return self._b1

    def take_over(self, remembered: GhostQueue | None) -> None:
        """Another policy was in force."""
        if remembered is not None:
            self._b1.adopt(remembered)

    # ---- what comes -----------------------------------------------------------------------------

    def admit_one(self, key: int) -> int:
        stamp = self._clock
        self._clock = stamp + STEP
        self._owed = 0
        if not self._size:
            return stamp
        from_b1 = self._b1.take_one(key)
        from_b2 = not from_b1 and self._b2.take_one(key)
        self._returned(int(from_b1), int(from_b2), 1)
        return stamp | MAIN if from_b1 or from_b2 else stamp

    def admit(self, keys: Keys, chain: bool) -> Stamps:
        fresh = self._fresh(len(keys), chain)
        self._owed = 0
        if self._size:
            words = key_words(keys)
            from_b1 = self._b1.take(words)
            from_b2 = self._b2.take(words)
            self._returned(int(from_b1.sum()), int(from_b2.sum()), len(words))
            fresh |= np.where(from_b1 | from_b2, _MAIN, _ZERO)
        return fresh

    def _returned(self, from_b1: int, from_b2: int, count: int) -> None:
        """The target moves towards what was missed."""
        weight = min(1.0, count / 256)
        self._returning += weight * ((from_b1 + from_b2) / count - self._returning)
        # Sizes as they were before: the keys are out of their queues already.
        b1, b2 = len(self._b1) + from_b1, len(self._b2) + from_b2
        moved = 0.0
        if from_b1:
            moved += from_b1 * max(1.0, b2 / b1)
        if from_b2:
            moved -= from_b2 * max(1.0, b1 / b2)
        self._target_share = min(1.0, max(0.0, self._target_share + moved / max(1, self._size)))

    def restored(self, count: int) -> Stamps:
        return self._fresh(count, False)

    def _fresh(self, count: int, chain: bool) -> Stamps:
        first = self._clock
        self._clock = last = first + STEP * count
        if chain:
            return np.arange(last - STEP, first - STEP, -STEP, dtype=np.uint64)
        return np.arange(first, last, STEP, dtype=np.uint64)

    # ---- what is used ---------------------------------------------------------------------------

    def touch_one(self, words: memoryview, row: int) -> None:
        stamp = self._clock
        self._clock = stamp + STEP
        words[row] = stamp | MAIN

    def touch(self, stamps: Stamps, rows: Positions, chain: bool) -> None:
        stamps[rows] = self._fresh(len(rows), chain) | _MAIN

    def order(self, stamps: Stamps, rows: Positions) -> None:
        stamps[rows] = self._fresh(len(rows), True) | (stamps[rows] & _MAIN)

    def requeue(self, stamps: Stamps, rows: Positions) -> None:
        """These may not go yet (`chains`); root first."""
        self.order(stamps, rows)

    # ---- what goes ------------------------------------------------------------------------------

    def evicted(self, keys: Keys, stamps: Stamps) -> None:
        words = key_words(keys)
        was_main = (stamps & _MAIN) != _ZERO
        count = len(words)
        self._owed += count
        from_t2 = int(np.count_nonzero(was_main))
        limit = max(1, self._size - self._t1)
        if from_t2 < count:
            self._b1.add(words if not from_t2 else words[~was_main], limit)
        if from_t2:
            limit = max(1, self._size - len(self._b1))
            self._b2.add(words if from_t2 == count else words[was_main], limit)
        else:
            self._b2.trim(self._size - len(self._b1))

    def victims(
        self, stamps: Stamps, evictable: Mask, count: int, links: Links | None = None
    ) -> Positions:
        positions = np.flatnonzero(evictable)
        if count <= 0 or not len(positions):
            return positions[:0]
        is_main = (stamps[positions] & _MAIN) != _ZERO
        t1, t2 = positions[~is_main], positions[is_main]
        self._size, self._t1 = len(positions) + self._owed, len(t1)
        from_t1, in_t1 = self._split(len(t1), len(t2), min(count, len(positions)))
        chosen = np.empty(len(from_t1), np.int64)
        chosen[from_t1] = oldest_first(stamps, t1, in_t1)[:in_t1]
        in_t2 = len(from_t1) - in_t1
        chosen[~from_t1] = oldest_first(stamps, t2, in_t2)[:in_t2]
        return chosen

    def _split(self, t1: int, t2: int, count: int) -> tuple[Mask, int]:
        """(of each victim whether it is T1's, how many are)."""
        target = self._target_share * self._size
        grows = 1.0 - self._returning
        virtual = t1 + self._owed * grows
        left1, left2 = t1, t2
        taken: list[bool] = []
        for _ in range(count):
            if left1 and (virtual > target or not left2):
                taken.append(True)
                left1 -= 1
                virtual += grows - 1.0
            else:
                taken.append(False)
                left2 -= 1
                virtual += grows
        return np.array(taken, np.bool_), t1 - left1

    def coldest(self, stamps: Stamps, positions: Positions, count: int) -> Positions:
        count = min(count, len(positions))
        is_main = (stamps[positions] & _MAIN) != _ZERO
        t1, t2 = positions[~is_main], positions[is_main]
        # As `_split` has it for so many: T1 down to its target, then of both, so that it stays.
        excess = max(0.0, len(t1) - self._target_share * len(positions))
        alone = min(float(count), excess / max(self._returning, _LITTLE))
        in_t1 = min(len(t1), round(alone + (1.0 - self._returning) * (count - alone)))
        in_t1 = max(in_t1, count - len(t2))
        in_t2 = count - in_t1
        return evenly_mixed(
            oldest_first(stamps, t1, in_t1)[:in_t1], oldest_first(stamps, t2, in_t2)[:in_t2]
        )

    def memory_bytes(self) -> int:
        return self._b1.memory_bytes() + self._b2.memory_bytes()
