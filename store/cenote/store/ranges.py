"""A small set of disjoint byte ranges, for the parts of a segment that were given up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray


@final
class RangeSet:
    """Immutable; ranges are (offset, length) in bytes, sorted, and merged where they touch."""

    __slots__ = ("_ends", "_starts", "ranges")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for offset, length in sorted(r for r in ranges if r[1] > 0):
            if merged and offset <= merged[-1][0] + merged[-1][1]:
                first, before = merged.pop()
                merged.append((first, max(before, offset + length - first)))
            else:
                merged.append((offset, length))
        self.ranges: tuple[tuple[int, int], ...] = tuple(merged)
        self._starts = np.array([offset for offset, _ in merged], np.uint64)
        self._ends = np.array([offset + length for offset, length in merged], np.uint64)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @property
    def total_bytes(self) -> int:
        """The bytes in all ranges together."""
        return sum(length for _, length in self.ranges)

    def added(self, offset: int, length: int) -> RangeSet:
        """This set and one more range."""
        return RangeSet((*self.ranges, (offset, length)))

    def covers(self, offset: int, length: int) -> bool:
        """Whether all of `[offset, offset + length)` is inside one range."""
        at = bisect_right(self.ranges, (offset, 1 << 63)) - 1
        if at < 0:
            return False
        first, size = self.ranges[at]
        return offset + length <= first + size

    def overlaps(self, offset: int, length: int) -> bool:
        """Whether any byte of `[offset, offset + length)` is inside a range."""
        at = bisect_right(self.ranges, (offset + length - 1, 1 << 63)) - 1
        return at >= 0 and sum(self.ranges[at]) > offset

    def overlapping(
        self, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """`overlaps` for columns of offsets and lengths (lengths at least 1, no wrap)."""
        if not self.ranges:
            return np.zeros(len(offsets), np.bool_)
        at = np.searchsorted(self._starts, offsets + lengths - np.uint64(1), "right") - 1
        return (at >= 0) & (self._ends[at] > offsets)

    def gaps(self, offset: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `[offset, end)` outside all ranges, as (offset, length)."""
        for first, length in self.ranges:
            if first >= end:
                break
            if first > offset:
                yield offset, first - offset
            offset = max(offset, first + length)
        if offset < end:
            yield offset, end - offset


def pieces_below(
    ranges: Iterable[tuple[int, int]] | None, limit: int, piece: int
) -> Iterator[tuple[int, int]]:
    """What of these ranges (first, end) lies below `limit`, or all that does, in pieces."""
    for begin, stop in [(0, limit)] if ranges is None else ranges:
        last = min(stop, limit)
        for first in range(begin, last, piece):
            yield first, min(first + piece, last)
