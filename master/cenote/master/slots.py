"""Which numbers of a segment's slot table are free, low ones first: tables stay short."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

__all__ = ["SlotNumbers"]

Numbers = NDArray[np.uint32]


class SlotNumbers:
    """Numbers 0 .. total - 1. Those at or above `high` were never given (or all came back)."""

    __slots__ = ("_free", "high", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.high = 0
        self._free = array("I")

    @property
    def free(self) -> int:
        return len(self._free) + self.total - self.high

    @property
    def used(self) -> int:
        return self.high - len(self._free)

    def take_one(self) -> int:
        """A free number; -1 when there is none."""
        if self._free:
            return self._free.pop()
        if self.high < self.total:
            self.high += 1
            return self.high - 1
        return -1

    def take(self, count: int) -> Numbers | None:
        """`count` free numbers, or None when there are fewer."""
        free = self._free
        have = len(free)
        if have == 0:
            first = self.high
            if first + count > self.total:
                return None
            self.high = first + count
            return np.arange(first, first + count, dtype=np.uint32)
        if have >= count:
            taken = np.array(free[have - count :], np.uint32)
            del free[have - count :]
            return taken
        rest = count - have
        if self.high + rest > self.total:
            return None
        taken = np.empty(count, np.uint32)
        taken[:have] = free
        taken[have:] = np.arange(self.high, self.high + rest, dtype=np.uint32)
        self.high += rest
        del free[:]
        return taken

    def give_one(self, number: int) -> None:
        self._free.append(number)

    def give(self, numbers: Numbers) -> None:
        """Numbers (distinct, in use) are free again."""
        if len(numbers) > 1:
            # Highest first, so that the lowest is handed out next.
            numbers = np.sort(numbers)[::-1]
        self._free.frombytes(numbers.astype(np.uint32).tobytes())
        if len(self._free) == self.high:
            self.high = 0
            del self._free[:]

    def claim(self, numbers: Numbers) -> None:
        """Mark numbers as used, whatever they were."""
        if not len(numbers):
            return
        high = max(self.high, int(numbers.max()) + 1)
        is_free = np.zeros(high, np.bool_)
        is_free[np.array(self._free, np.uint32)] = True
        is_free[self.high :] = True
        is_free[numbers] = False
        self.high = high
        self.total = max(self.total, high)
        free = np.flatnonzero(is_free)[::-1]
        self._free = array("I", free.astype(np.uint32).tobytes())
