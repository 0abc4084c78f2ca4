"""What daemons are told to do: carried out in order, and heartbeats say how far they are."""

from __future__ import annotations

from dataclasses import dataclass

from .commands import PoolCopy, Rows

__all__ = ["Instruction"]


@dataclass(slots=True)
class Instruction:
    number: int
    grow_slots: tuple[int, int, int, int] | None = None
    """(segment_id, offset, length, slots in all)."""
    cut_sessions: list[bytes] | None = None
    clear_slots: Rows | None = None
    """rows.SLOT_REF."""
    keep_pool: PoolCopy | None = None
    copies: Rows | None = None
    """rows.COPY."""
    pulls: tuple[list[tuple[str, list[int]]], Rows] | None = None
    """(address and segment ids of each source, rows.PULL)."""
