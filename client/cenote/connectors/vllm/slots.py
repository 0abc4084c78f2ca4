"""Which part of the staging memory is in use. Decides only."""

from __future__ import annotations

from typing import final

__all__ = ["Slots", "is_run"]


def is_run(slots: list[int]) -> bool:
    """Whether they follow each other."""
    return slots == list(range(slots[0], slots[0] + len(slots)))


@final
class Slots:
    """Slots of equal size, given in runs that are contiguous where they can be.

    Saves may use half of them: loads, which somebody waits for, find room.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._save_share = max(1, count // 2)
        self._saving = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` slots for a load: as many as there are."""
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def give(self, slots: list[int]) -> None:
        """They are not used any more."""
        self._free = sorted(self._free + slots)

    def take_for_save(self, wanted: int) -> list[int]:
        """Up to `wanted` slots for a save, within the share of saves."""
        taken = self.take(min(wanted, self._save_share - self._saving))
        self._saving += len(taken)
        return taken

    def give_from_save(self, slots: list[int]) -> None:
        self._saving -= len(slots)
        self.give(slots)
