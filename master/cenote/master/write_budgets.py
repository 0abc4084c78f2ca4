"""What is worth a write to a device whose writes have a budget (endurance mode)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES
from cenote.policy.endurance import is_admitted, is_spared

from .object_columns import TOUCHED
from .pool import Pool, Rows
from .spans import SEGMENT_MASK

__all__ = ["is_declined", "is_worth_it", "note_allowances"]

_BLOCK_BYTES = 4_096
"""Of an SSD."""


def note_allowances(pool: Pool, disks: Iterable[int]) -> None:
    """What devices whose writes have a budget may be written in this tick."""
    allowances = {}
    for node_id in disks:
        counters = pool.nodes.by_id[node_id].counters
        if counters.ssd_write_budget_bytes:
            # Copies under way may be charged there already, or not.
            under_way = pool.copies.units_by_node.get(node_id, 0) * UNIT_BYTES
            allowances[node_id] = counters.ssd_write_allowance_bytes - under_way
    pool.tiers.allowances = allowances
    pool.tiers.has_budgets = bool(allowances)


def is_worth_it(pool: Pool, node_id: int, units: int, *, was_reused: bool) -> bool:
    """Whether a copy of so many units may be written to a node's device, for the sake of its
    budget; it is taken off this tick's allowance."""
    allowance = pool.tiers.allowances.get(node_id)
    if allowance is None:
        return True
    budget = pool.nodes.by_id[node_id].counters.ssd_write_budget_bytes
    # Its last block is filled up, and a page of slots is written with it.
    size = (-(-units * UNIT_BYTES // _BLOCK_BYTES) + 1) * _BLOCK_BYTES
    if not is_admitted(size, budget, allowance, was_reused=was_reused):
        return False
    pool.tiers.allowances[node_id] = allowance - size
    return True


def is_declined(pool: Pool, rows: Rows) -> NDArray[np.bool_]:
    """Which of them are not worth a write now: on a node that spares its device, and not asked for
    since they were put."""
    spared = np.zeros(len(pool.segments.readable), np.bool_)
    for node_id, allowance in pool.tiers.allowances.items():
        node = pool.nodes.by_id[node_id]
        spared[node.segment_ids] = is_spared(node.counters.ssd_write_budget_bytes, allowance)
    declined: NDArray[np.bool_] = spared[pool.extent_words.take(rows * 4) & SEGMENT_MASK]
    declined &= (pool.state.take(rows) & TOUCHED) == 0
    return declined
