"""Giving data ranges up for slots."""

from __future__ import annotations

from cenote.api.rows import UNIT_BYTES

from .effects import SlotsGrown
from .instructions import Instruction
from .pool import Pool
from .segments import Segment

__all__ = ["ensure_slots", "grow_slots", "instruct_growth"]

_STEPS_MAX = 64


def grow_slots(pool: Pool, segment: Segment) -> bool:
    """One step more of slots, if there is room for it; the daemon is told."""
    config = pool.config
    grown = segment.grow_slots(config.slots_grow_bytes_max, config.slot_bytes)
    if grown is None:
        return False
    pool.counters.slots_grown += 1
    pool.effects.append(grown)
    instruct_growth(pool, segment, grown)
    pool.placement_dirty = True
    return True


def ensure_slots(pool: Pool, segment: Segment, count: int) -> bool:
    """Grow the slot table until `count` numbers are free; False when there is no room for that."""
    for _ in range(_STEPS_MAX):
        if segment.slots.free >= count:
            return True
        if not grow_slots(pool, segment):
            return False
    return False


def instruct_growth(pool: Pool, segment: Segment, grown: SlotsGrown) -> None:
    what = (
        grown.segment_id,
        grown.offset_units * UNIT_BYTES,
        grown.length_units * UNIT_BYTES,
        grown.slots,
    )
    pool.instruct(segment.node, Instruction(0, grow_slots=what))
