"""What lies on an SSD where bytes in memory were wrong, or the journal has lost its end."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import EXTENT, OBJECT, PutStatus
from cenote.master import commands as c
from unit.master.dedup_kit import put_bytes
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, restarted, session_id
from unit.master.tiers_kit import DRAM_ID, SSD_ID, kit_with_ssd, settle, where

GRANTED = PutStatus.GRANTED


@pytest.mark.parametrize(("bad", "good"), [(DRAM_ID, SSD_ID), (SSD_ID, DRAM_ID)])
def test_what_a_reader_misread_on_one_tier_stays_on_the_other(bad: int, good: int) -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    assert where(kit, 0) == where(kit, 1) == {DRAM_ID, SSD_ID}
    stats = kit.state.stat_objects(*kit.place, kit.digests(0), kit.now_s)
    extents = np.frombuffer(stats.extents, EXTENT)
    objects = np.frombuffer(kit.acquire(0, lease=False).objects, OBJECT)
    place = extents[extents["segment"] == bad]
    elsewhere = place.copy()
    elsewhere["offset"] += 64
    for at in (elsewhere, place):
        assert where(kit, 0) == {DRAM_ID, SSD_ID}
        report = c.ReportFailure(1, session_id(1), "wrong bytes", kit.digests(0), objects, at)
        kit.apply(report)
    assert where(kit, 0) == {good}
    assert where(kit, 1) == {DRAM_ID, SSD_ID}
    check(kit.state)
    kit.apply(c.ReportFailure(1, session_id(1), "of an earlier client", kit.digests(1), objects))
    assert where(kit, 1) == {DRAM_ID, SSD_ID}  # of another version
    objects = np.frombuffer(kit.acquire(1, lease=False).objects, OBJECT)
    kit.apply(c.ReportFailure(1, session_id(1), "of an earlier client", kit.digests(1), objects))
    assert not where(kit, 1)


@pytest.mark.parametrize("same_bytes", [False, True])
def test_what_a_journal_lost_has_whole_blocks_on_the_ssd(same_bytes: bool) -> None:
    """Slots have the length of their bytes. What is copied next begins with a block of its own."""
    kit = kit_with_ssd()
    journal = kit.durable()
    put_bytes(kit, list(range(60)), [7] * 10 + list(range(1000, 1050)))
    if same_bytes:
        put_bytes(kit, list(range(60, 90)), [1000] * 30)
    settle(kit)
    slots = list(kit.segments[SSD_ID].table.values())
    used = pool_of(kit.state).segments.by_id[SSD_ID].used_units
    assert {int(slot["length"]) for slot in slots} == {KIB}
    after = restarted(kit, journal=journal)
    after.restart_node(kit.nodes[1])
    after.with_session()
    check(after.state)
    segment = pool_of(after.state).segments.by_id[SSD_ID]
    assert segment.used_units == used == len({int(slot["offset"]) for slot in slots}) * 64
    for key in range(100, 130):
        assert after.put([key]) == [GRANTED]
    settle(after)
    offsets = [int(slot["offset"]) for slot in kit.segments[SSD_ID].table.values()]
    assert len(offsets) > len(slots)
    assert not any(offset % 4096 for offset in offsets)
