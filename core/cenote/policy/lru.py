"""Least recently used, with a prefix chain touched so that its root is newest."""

from __future__ import annotations

from typing import final

import numpy as np

from .base import Mask, Positions, Stamps

__all__ = ["LruPolicy"]

_SAMPLE = 4096
_SELECT_ALL_MAX = 16 * _SAMPLE


@final
class LruPolicy:
    """Stamps are a counter; the lowest go first.

    There is no linked list: a touch is a store into a column, and victims are found in bulk by
    selection, a few thousand at a time. One selection costs about 3 ns per row of the table, which
    its caller spreads over the victims that it yields.
    """

    __slots__ = ("_clock",)

    name = "lru"

    def __init__(self, clock: int = 1) -> None:
        self._clock = clock

    @property
    def clock(self) -> int:
        return self._clock

    def take(self, count: int) -> int:
        first = self._clock
        self._clock = first + count
        return first

    def fresh(self, count: int, chain: bool) -> Stamps:
        first = self._clock
        self._clock = last = first + count
        if chain:
            return np.arange(last - 1, first - 1, -1, dtype=np.uint64)
        return np.arange(first, last, dtype=np.uint64)

    def victims(self, stamps: Stamps, evictable: Mask, count: int) -> Positions:
        positions = np.flatnonzero(evictable)
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
