"""What tasks copy from memory, and whose that was: of copies that a lease is to prove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cenote.api.rows import UNIT_BYTES
from sim.loop import Violation

if TYPE_CHECKING:
    from sim.oracle import Oracle
    from sim.stores import SegmentFile

__all__ = ["Readings"]


class Readings:
    """A part of the oracle."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._reading: dict[Any, list[tuple[SegmentFile, slice, Any]]] = {}
        """What each task has copied last, and whose it was when that began."""

    def begun(self, places: Sequence[tuple[SegmentFile, int, int] | None]) -> None:
        """The running task is about to copy from there."""
        owned = []
        for place in places:
            if place is not None:
                file, offset, length = place
                units = slice(offset // UNIT_BYTES, -(-(offset + length) // UNIT_BYTES))
                owned.append((file, units, file.owner[units].copy()))
        self._reading[self._oracle._world.loop.task] = owned

    def proven(self, lease_id: int) -> None:
        """What the running task has just read counts, as far as the tenure of its lease goes."""
        for file, units, before in self._reading.pop(self._oracle._world.loop.task, []):
            for number in set(file.owner[units][file.owner[units] != before].tolist()):
                epoch = self._oracle.grant_epochs[number]
                if epoch > lease_id >> 40:
                    raise Violation(
                        f"a read of units {units.start} to {units.stop} of {file.name} under a"
                        f" lease of epoch {lease_id >> 40} counts, though a grant of epoch"
                        f" {epoch} has them since"
                    )
