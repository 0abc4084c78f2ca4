"""How much memory a pool needs to hold so many objects, and not one more."""

from __future__ import annotations

from cenote.api.rows import UNIT_BYTES
from cenote.master.state_config import StateConfig
from cenote.store.device import BLOCK_BYTES
from cenote.store.dram import TABLE_BYTES_MIN, TABLE_SHARE
from cenote.store.slot_format import SLOT_BYTES
from cenote.store.ssd import plan_ssd

__all__ = ["dram_bytes_per_node", "ssd_bytes_per_node"]

_PAGE_BYTES = 4096


def dram_bytes_per_node(objects: int, object_bytes: int, nodes: int) -> int:
    """Memory of each of `nodes` equal nodes that together hold `objects` of `object_bytes` each.

    Counts what isn't there for objects: slot tables with their growth, and the master's reserve.
    """
    config = StateConfig()
    stored_bytes = -(-object_bytes // UNIT_BYTES) * UNIT_BYTES
    usable_bytes = objects * stored_bytes
    reserve_bytes = min(
        int(usable_bytes * config.reserve_share / (1 - config.reserve_share)),
        config.reserve_bytes_max,
    )
    per_node = -(-objects // nodes)
    data_bytes = -(-(usable_bytes + reserve_bytes) // nodes)
    data_bytes += _growth_bytes(per_node, data_bytes, config)
    table_bytes = max(TABLE_BYTES_MIN, data_bytes // (TABLE_SHARE - 1))
    return -(-(data_bytes + table_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def ssd_bytes_per_node(objects: int, object_bytes: int, nodes: int) -> int:
    """Size of the SSD of each of `nodes` equal nodes, that together hold `objects`."""
    stored_bytes = -(-object_bytes // BLOCK_BYTES) * BLOCK_BYTES
    usable_bytes = -(-objects // nodes) * stored_bytes
    # The plan of a segment rounds its table and its data; so it is asked for until they fit.
    total_bytes = usable_bytes + (4 << 20)
    while sum(plan.data_bytes for plan in plan_ssd(total_bytes, stored_bytes)) < usable_bytes:
        total_bytes += 1 << 20
    return total_bytes


def _growth_bytes(objects: int, data_bytes: int, config: StateConfig) -> int:
    """Data that a segment gives up for slots until it holds `objects`."""
    slots = max(TABLE_BYTES_MIN, data_bytes // (TABLE_SHARE - 1)) // SLOT_BYTES
    # It grows while fewer than 1024 slots are free, unless that is half of all, or than 1/8 of
    # those in use.
    wanted = max(objects + (objects >> 3), min(objects + 1024, 2 * objects))
    step, given = config.slots_grow_bytes_min, 0
    while slots + given // SLOT_BYTES < wanted:
        given += step
        step = min(step * 2, config.slots_grow_bytes_max)
    return given
