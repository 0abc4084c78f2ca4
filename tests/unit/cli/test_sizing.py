"""How much memory so many objects need, against the rules of the daemons that will hold them."""

from __future__ import annotations

import pytest

from cenote.cli.sizing import dram_bytes_per_node
from cenote.master.state_config import StateConfig
from cenote.store.dram import plan_segments


@pytest.mark.parametrize("objects", [2_000, 10_000, 40_000])
@pytest.mark.parametrize("object_bytes", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_what_objects_can_use_is_within_a_percent(
    objects: int, object_bytes: int, nodes: int
) -> None:
    each = dram_bytes_per_node(objects, object_bytes, nodes)
    plans = plan_segments(each)
    data_bytes = nodes * sum(plan.data_bytes for plan in plans)
    config = StateConfig()
    usable = data_bytes - min(data_bytes * config.reserve_share, config.reserve_bytes_max)
    # Small objects give up data for slots.
    slots_bytes = objects * config.slot_bytes
    growth_bytes = max(0, data_bytes - objects * object_bytes / (1 - config.reserve_share))
    assert usable >= objects * object_bytes * 0.999
    assert growth_bytes <= 2 * slots_bytes + nodes * config.slots_grow_bytes_max
