"""S3-FIFO: three queues, none of which is reordered when an object is used.

Textbook: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO queues are all you need for cache
eviction", SOSP 2023, algorithm 1, with its parameters: the small queue S has 10 % of the objects,
the main queue M the rest; uses are counted up to 3; an object that was used at least twice when it
comes to the end of S moves to M; the ghost queue G remembers as many keys as M has objects. What is
stored and found in G goes to M at once. The end of S goes while S has its 10 %, else that of M;
there an object with uses goes round once more for each.

What is different from the algorithm, since victims are chosen ahead and in bulk:

* The size of the cache is not set but found: as many objects as may be evicted when victims are
  chosen.
* A batch of victims is chosen as if one object were stored for each, of which as many are found in
  G as lately.
* A walk along M ends after 4 times as many objects as it is to find, and 1024 more: then those with
  the fewest uses go. A victim that is used before its turn comes is kept.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from .base import FREQUENCY, MAIN, STEP, Keys, Links, Mask, Positions, Stamps, key_words
from .ghosts import GhostQueue
from .lru import evenly_mixed, oldest_first

__all__ = ["S3FifoPolicy"]

_SMALL_SHARE: Final = 0.1
_PROMOTED_USES: Final = 2
_MAIN: Final = np.uint64(MAIN)
_FREQUENCY: Final = np.uint64(FREQUENCY)
_FLAGS: Final = _MAIN | _FREQUENCY
_ZERO: Final = np.uint64(0)
_ONE: Final = np.uint64(1)
_LITTLE: Final = 2.0**-40


@final
class S3FifoPolicy:
    """Which queue an object is in, its place there and its uses are in its stamp.

    Memory: the 8 bytes of the stamp, and up to 28 for each key in G, of which there are 0.9 for an
    object. A use is counted in the column; a key that is stored is looked up in a packed table;
    choosing a 64th of the table as victims costs about 0.5 us for each of them.

    After a restart everything is in M with no uses, in the order of the journal, and G is empty. As
    stamps tell the place in a queue, `idle` in `cenote ls` tells the time since an object took it.
    """

    __slots__ = ("_clock", "_ghosts", "_owed", "_returning", "_size")

    name = "s3fifo"
    remembers = True
    chained = False
    by_age = False
    victims_at_once = 32

    def __init__(self, clock: int = STEP) -> None:
        self._clock = clock
        self._ghosts = GhostQueue()
        self._size = 0
        """Of the cache, when victims were chosen last."""
        self._returning = 0.0
        """Which share of what is stored is found in G: a moving average."""
        self._owed = 0
        """Evicted since something was stored last: as many will be stored."""

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def ghosts(self) -> GhostQueue:
        return self._ghosts

    def take_over(self, remembered: GhostQueue | None) -> None:
        """Another policy was in force."""
        if remembered is not None:
            self._ghosts.adopt(remembered)

    # ---- what comes -----------------------------------------------------------------------------

    def admit_one(self, key: int) -> int:
        stamp = self._clock
        self._clock = stamp + STEP
        self._owed = 0
        if not self._size:
            return stamp
        returns = self._ghosts.take_one(key)
        self._returning += (returns - self._returning) / 256
        return stamp | MAIN if returns else stamp

    def admit(self, keys: Keys, chain: bool) -> Stamps:
        fresh = self._fresh(len(keys), chain)
        self._owed = 0
        if self._size:
            returns = self._ghosts.take(key_words(keys))
            weight = min(1.0, len(keys) / 256)
            self._returning += weight * (float(returns.mean()) - self._returning)
            fresh |= np.where(returns, _MAIN, _ZERO)
        return fresh

    def restored(self, count: int) -> Stamps:
        return self._fresh(count, False) | _MAIN

    def _fresh(self, count: int, chain: bool) -> Stamps:
        first = self._clock
        self._clock = last = first + STEP * count
        if chain:
            return np.arange(last - STEP, first - STEP, -STEP, dtype=np.uint64)
        return np.arange(first, last, STEP, dtype=np.uint64)

    # ---- what is used ---------------------------------------------------------------------------

    def touch_one(self, words: memoryview, row: int) -> None:
        stamp = words[row]
        if stamp & FREQUENCY != FREQUENCY:
            words[row] = stamp + 1

    def touch(self, stamps: Stamps, rows: Positions, chain: bool) -> None:
        before = stamps[rows]
        stamps[rows] = before + ((before & _FREQUENCY) != _FREQUENCY)

    def order(self, stamps: Stamps, rows: Positions) -> None:
        # What is new in S exchanges places: a chain is put front to back, and its root is to be
        # newest there.
        places = stamps[rows]
        new = (places & _FLAGS) == _ZERO
        stamps[rows[new]] = np.sort(places[new])[::-1]

    def requeue(self, stamps: Stamps, rows: Positions) -> None:
        """These may not go yet (`chains`); root first."""
        stamps[rows] = self._fresh(len(rows), True) | _MAIN

    # ---- what goes ------------------------------------------------------------------------------

    def evicted(self, keys: Keys, stamps: Stamps) -> None:
        self._owed += len(stamps)
        small = (stamps & _MAIN) == _ZERO
        if small.any():
            words = key_words(keys)
            limit = max(1, self._size - int(_SMALL_SHARE * self._size))
            self._ghosts.add(words if small.all() else words[small], limit)

    def victims(
        self, stamps: Stamps, evictable: Mask, count: int, links: Links | None = None
    ) -> Positions:
        positions = np.flatnonzero(evictable)
        if count <= 0 or not len(positions):
            return positions[:0]
        self._size = len(positions) + self._owed
        count = min(count, len(positions))
        is_main = (stamps[positions] & _MAIN) != _ZERO
        small, main = positions[~is_main], positions[is_main]
        look = count + (count >> 1) + 16
        while True:
            ends = oldest_first(stamps, small, look)
            uses = (stamps[ends] & _FREQUENCY).tolist()
            plan, walked = self._plan(uses, len(small), len(main), count)
            if walked < len(ends) or len(ends) == len(small):
                break
            look *= 8  # more of them move to M than usual
        from_small = np.array(plan, np.bool_)
        passed = ends[:walked]
        keeps = np.array(uses[:walked], np.int64) >= _PROMOTED_USES
        gone, moved = passed[~keeps], passed[keeps]
        if len(moved):
            stamps[moved] = self._fresh(len(moved), False) | _MAIN
        found = self._walk_main(stamps, main, count - len(gone))
        if len(gone) + len(found) < count:
            # M has no more, and of S everything that was looked at moved there: that goes, too.
            chosen = np.concatenate((gone, found))
            rest = np.setdiff1d(positions, chosen, assume_unique=True)
            return np.concatenate((chosen, oldest_first(stamps, rest, count - len(chosen))))
        chosen = np.empty(count, np.int64)
        chosen[from_small] = gone
        chosen[~from_small] = found
        return chosen

    def coldest(self, stamps: Stamps, positions: Positions, count: int) -> Positions:
        count = min(count, len(positions))
        is_main = (stamps[positions] & _MAIN) != _ZERO
        small, main = positions[~is_main], positions[is_main]
        again = (stamps[small] & _FREQUENCY) >= np.uint64(_PROMOTED_USES)
        going, moving = small[~again], small[again]
        # As `_plan` has it for so many: S down to its share, then of both, so that it stays.
        kept = len(going) / max(1, len(small))
        falls = self._returning + (1.0 - kept) / max(kept, _LITTLE)
        excess = max(0.0, len(small) - _SMALL_SHARE * len(positions))
        alone = min(float(count), excess / max(falls, _LITTLE))
        share = (1.0 - self._returning) * kept
        in_small = min(len(going), round(alone + share * (count - alone)))
        in_main = min(len(main), count - in_small)
        in_small = min(len(going), count - in_main)
        chosen = evenly_mixed(
            oldest_first(stamps, going, in_small)[:in_small],
            self._least_used(stamps, main, in_main),
        )
        rest = count - len(chosen)
        return np.concatenate((chosen, oldest_first(stamps, moving, rest)[:rest]))

    def _least_used(self, stamps: Stamps, main: Positions, wanted: int) -> Positions:
        """In the order in which they come to the end of M for good, about."""
        uses = stamps[main] & _FREQUENCY
        found = [main[:0]]
        for count in range(FREQUENCY + 1):
            if wanted <= 0:
                break
            found.append(oldest_first(stamps, main[uses == np.uint64(count)], wanted)[:wanted])
            wanted -= len(found[-1])
        return np.concatenate(found)

    def _plan(self, uses: list[int], small: int, main: int, count: int) -> tuple[list[bool], int]:
        """(of each victim whether it comes from S, how far along the end of S that goes)."""
        quota = _SMALL_SHARE * self._size
        returning = self._returning
        virtual = small + self._owed * (1.0 - returning)
        plan: list[bool] = []
        walked = from_main = 0
        while len(plan) < count:
            if walked < len(uses) and (virtual >= quota or from_main >= main):
                if uses[walked] >= _PROMOTED_USES:
                    virtual -= 1.0
                else:
                    plan.append(True)
                    virtual -= returning
                walked += 1
            else:
                plan.append(False)
                from_main += 1
                virtual += 1.0 - returning
        return plan, walked

    def _walk_main(self, stamps: Stamps, main: Positions, wanted: int) -> Positions:
        """Victims from the end of M; what was used goes round once more."""
        if wanted <= 0 or not len(main):
            return main[:0]
        ends = oldest_first(stamps, main, 4 * wanted + 1024)
        uses = stamps[ends] & _FREQUENCY
        unused = uses == _ZERO
        found = np.flatnonzero(unused)
        if len(found) >= wanted:
            end = int(found[wanted - 1])
            again = ends[:end][~unused[:end]]
            self._go_round(stamps, again)
            return ends[found[:wanted]]
        order = np.argsort(uses, kind="stable")[:wanted]
        again = np.ones(len(ends), np.bool_)
        again[order] = False
        self._go_round(stamps, ends[again])
        return ends[order]

    def _go_round(self, stamps: Stamps, rows: Positions) -> None:
        if len(rows):
            uses = (stamps[rows] & _FREQUENCY) - _ONE
            stamps[rows] = self._fresh(len(rows), False) | _MAIN | uses

    def memory_bytes(self) -> int:
        return self._ghosts.memory_bytes()
