"""Which part of the staging memory is in use. Decides only."""

from __future__ import annotations

from bisect import bisect_left
from typing import final

__all__ = ["Slots", "is_run"]


def is_run(slots: list[int]) -> bool:
    """Whether they follow each other."""
    return slots[-1] - slots[0] == len(slots) - 1 and slots == list(range(slots[0], slots[-1] + 1))


@final
class Slots:
    """Slots of equal size, given in runs that are contiguous where they can be.

    Saves may use half of them: loads, which somebody waits for, find room.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._starts = [0] if count else []
        """Of runs of free slots, in order; no two of them touch. There are few, however many slots
        there are."""
        self._ends = [count] if count else []
        self._save_share = max(1, count // 2)
        self._saving = 0

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` slots for a load: as many as there are."""
        taken: list[int] = []
        wanted = min(wanted, self.free)
        while len(taken) < wanted:
            left = wanted - len(taken)
            lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
            at = next((i for i, length in enumerate(lengths) if length >= left), None)
            at = lengths.index(max(lengths)) if at is None else at
            start = self._starts[at]
            count = min(left, lengths[at])
            taken += range(start, start + count)
            if count == lengths[at]:
                del self._starts[at], self._ends[at]
            else:
                self._starts[at] += count
        self.free -= wanted
        return taken

    def give(self, slots: list[int]) -> None:
        """They are not used any more."""
        at = 0
        while at < len(slots):
            end = at + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            self._give_run(slots[at], slots[end - 1] + 1)
            at = end
        self.free += len(slots)

    def _give_run(self, start: int, end: int) -> None:
        at = bisect_left(self._starts, start)
        joins_next = at < len(self._starts) and self._starts[at] == end
        joins_last = at > 0 and self._ends[at - 1] == start
        if joins_next and joins_last:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_next:
            self._starts[at] = start
        elif joins_last:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def take_for_save(self, wanted: int) -> list[int]:
        """Up to `wanted` slots for a save, within the share of saves."""
        taken = self.take(min(wanted, self._save_share - self._saving))
        self._saving += len(taken)
        return taken

    def give_from_save(self, slots: list[int]) -> None:
        self._saving -= len(slots)
        self.give(slots)
