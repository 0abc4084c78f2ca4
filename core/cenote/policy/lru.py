"""Least recently used, with a prefix chain touched so that its root is newest."""

from __future__ import annotations

from typing import final

import numpy as np

from .base import MAIN, STEP, Keys, Links, Mask, Positions, Stamps

__all__ = ["LruPolicy", "evenly_mixed", "oldest_first"]

_SAMPLE = 4096
_SELECT_ALL_MAX = 16 * _SAMPLE


@final
class LruPolicy:
    """Stamps are a counter; the lowest go first.

    There is no linked list: a touch is a store into a column, and victims are found in bulk by
    selection, a few thousand at a time. One selection costs about 3 ns per row of the table, which
    its caller spreads over the victims that it yields.

    State: the counter. Memory: the 8 bytes of the stamp. After a restart objects come in the order
    of the journal, snapshots being written oldest use first.
    """

    __slots__ = ("_clock",)

    name = "lru"
    remembers = False
    chained = False
    by_age = True
    victims_at_once = 256

    def __init__(self, clock: int = STEP) -> None:
        self._clock = clock

    @property
    def clock(self) -> int:
        return self._clock

    def admit_one(self, key: int) -> int:
        stamp = self._clock
        self._clock = stamp + STEP
        return stamp

    def admit(self, keys: Keys, chain: bool) -> Stamps:
        first = self._clock
        self._clock = last = first + STEP * len(keys)
        if chain:
            return np.arange(last - STEP, first - STEP, -STEP, dtype=np.uint64)
        return np.arange(first, last, STEP, dtype=np.uint64)

    def restored(self, count: int) -> Stamps:
        first = self._clock
        self._clock = last = first + STEP * count
        return np.arange(first, last, STEP, dtype=np.uint64)

    # A touch says MAIN, though it does not matter here: a policy that takes over may want to know.

    def touch_one(self, words: memoryview, row: int) -> None:
        stamp = self._clock
        self._clock = stamp + STEP
        words[row] = stamp | MAIN

    def touch(self, stamps: Stamps, rows: Positions, chain: bool) -> None:
        first = self._clock | MAIN
        count = STEP * len(rows)
        self._clock += count
        if chain:
            last = first + count
            stamps[rows] = np.arange(last - STEP, first - STEP, -STEP, dtype=np.uint64)
        else:
            stamps[rows] = np.arange(first, first + count, STEP, dtype=np.uint64)

    def order(self, stamps: Stamps, rows: Positions) -> None:
        first = self._clock
        self._clock = last = first + STEP * len(rows)
        fresh = np.arange(last - STEP, first - STEP, -STEP, dtype=np.uint64)
        stamps[rows] = fresh | (stamps[rows] & np.uint64(MAIN))

    def requeue(self, stamps: Stamps, rows: Positions) -> None:
        """These may not go yet (`chains`); root first."""
        self.order(stamps, rows)

    def evicted(self, keys: Keys, stamps: Stamps) -> None:
        pass

    def victims(
        self, stamps: Stamps, evictable: Mask, count: int, links: Links | None = None
    ) -> Positions:
        return oldest_first(stamps, np.flatnonzero(evictable), count)

    def coldest(self, stamps: Stamps, positions: Positions, count: int) -> Positions:
        return oldest_first(stamps, positions, count)

    def memory_bytes(self) -> int:
        return 0


def oldest_first(stamps: Stamps, positions: Positions, count: int) -> Positions:
    """About `count` of `positions`, the lowest stamps first; at least min(count, all)."""
    if count <= 0 or not len(positions):
        return positions[:0]
    ages = stamps[positions]
    if len(positions) > count:
        chosen = _below_sampled_threshold(ages, count)
        if chosen is None:
            chosen = np.argpartition(ages, count - 1)[:count]
        positions = positions[chosen]
        ages = ages[chosen]
    return positions[np.argsort(ages, kind="stable")]


def evenly_mixed(one: Positions, other: Positions) -> Positions:
    """Both, each in its order: anywhere along the way the same share of either is behind."""
    shares = [np.arange(len(part)) / max(1, len(part)) for part in (one, other)]
    order = np.argsort(np.concatenate(shares), kind="stable")
    mixed: Positions = np.concatenate((one, other))[order]
    return mixed


def _below_sampled_threshold(ages: Stamps, count: int) -> Positions | None:
    """All positions up to a threshold that a sample suggests, if they are count .. 2 * count.

    The exact coldest ones as argpartition would find them, only not exactly `count`: one comparison
    over the column instead of a partition of it.
    """
    n = len(ages)
    if n < _SELECT_ALL_MAX:
        return None
    sample = ages[:: n // _SAMPLE]
    rank = int(len(sample) * count * 1.4 / n) + 4
    if rank >= len(sample):
        return None
    threshold = np.partition(sample, rank)[rank]
    chosen = np.flatnonzero(ages <= threshold)
    return chosen if count <= len(chosen) <= 2 * count + 4 * (n // _SAMPLE) else None
