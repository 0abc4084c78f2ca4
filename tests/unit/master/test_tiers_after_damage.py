"""What lies on an SSD where bytes in memory were wrong, or the journal has lost its end."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import EXTENT, OBJECT, PutStatus
from cenote.master import commands as c
from cenote.master.effects import DurableEffect
from cenote.master.state import StateConfig
from unit.master.dedup_kit import put_bytes
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, Kit, new_node, restarted, session_id
from unit.master.tiers_kit import DRAM_ID, SSD_ID, kit_with_ssd, settle, ssd_node, where

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


def copied_kit() -> tuple[Kit, list[DurableEffect]]:
    """Keys 0 to 59 were put, the coldest half of them copied: and the journal of before that."""
    kit = kit_with_ssd(60)
    journal = kit.durable()
    settle(kit)
    assert [where(kit, key) for key in (0, 59)] == [{DRAM_ID, SSD_ID}, {DRAM_ID}]
    return kit, journal


def attached_again(kit: Kit, journal: list[DurableEffect]) -> Kit:
    after = restarted(kit, journal=journal)
    after.restart_node(kit.nodes[1])
    after.with_session()
    check(after.state)
    again = restarted(after)
    again.restart_node(kit.nodes[1])
    assert contents(again.state) == contents(after.state), "and so says its journal"
    check(again.state)
    return after


@pytest.mark.parametrize("other_slots", [False, True])
def test_what_had_left_memory_is_found_on_the_ssd(other_slots: bool) -> None:
    """The journal lost that keys were copied, and who was given their places in memory since: these
    have their slots, or others, so that the old ones tell of what is not there any more."""
    kit, journal = copied_kit()
    table = kit.segments[DRAM_ID].table
    before = {slot: row.copy() for slot, row in table.items()}
    for key in range(100, 120):
        assert kit.put([key]) == [GRANTED]
    moved = [key for key in range(60) if where(kit, key) == {SSD_ID}]
    copied = [key for key in range(60) if where(kit, key) == {DRAM_ID, SSD_ID}]
    assert len(moved) > 10
    assert len(copied) > 5
    fresh = [slot for slot, row in table.items() if slot in before and row != before[slot]]
    assert len(fresh) > 10
    for slot in fresh if other_slots else ():
        row, table[slot] = table[slot], before[slot]
        row["slot"] = max(table) + 1
        table[max(table) + 1] = row
    after = attached_again(kit, journal)
    assert {tuple(where(after, key)) for key in moved} == {(SSD_ID,)}
    assert {tuple(where(after, key)) for key in copied} == {(DRAM_ID,)}
    assert all(where(after, key) == {DRAM_ID} for key in range(100, 120))
    assert len(kit.segments[SSD_ID].table) == len(moved), "other slots are cleared"


def test_what_was_copied_outlives_memory() -> None:
    """A machine that fails takes its memory, and the end of its master's journal."""
    kit, journal = copied_kit()
    copied = [key for key in range(60) if where(kit, key) == {DRAM_ID, SSD_ID}]
    kit.nodes[1].segments[0] = new_node(1).segments[0]
    kit.nodes[1].segments[0].incarnation = b"after a reboot"
    after = attached_again(kit, journal)
    assert [key for key in range(60) if after.exists(key) == [1]] == copied


def test_references_to_the_same_bytes_share_their_place_when_they_are_found() -> None:
    kit = kit_with_ssd()
    for key in range(20):
        put_bytes(kit, [key], [1])
    put_bytes(kit, list(range(20, 75)), list(range(1000, 1055)))
    journal = kit.durable()
    settle(kit)
    copied = [key for key in range(75) if SSD_ID in where(kit, key)]
    alike = len([key for key in copied if key < 20])
    assert 5 < alike < len(copied)
    used = pool_of(kit.state).segments.by_id[SSD_ID].used_units
    assert used == (len(copied) - alike + 1) * 64
    kit.nodes[1].segments[0] = new_node(1).segments[0]
    kit.nodes[1].segments[0].incarnation = b"after a reboot"
    after = attached_again(kit, journal)
    assert [key for key in range(75) if where(after, key) == {SSD_ID}] == copied
    assert pool_of(after.state).segments.by_id[SSD_ID].used_units == used


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("other_lost", [False, True])
def test_what_another_node_has_counts_once_it_has_said_so(
    other_first: bool, other_lost: bool
) -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0)).with_nodes(ssd_node(1), new_node(2))
    kit.with_session()
    assert kit.put([0], replicas=2, local_first=True) == [GRANTED]
    journal = kit.durable()
    elsewhere = np.array([kit.nodes[2].node_id], np.uint32)
    for key in range(100, 156):
        assert kit.put([key], avoid_node_ids=elsewhere) == [GRANTED]
    settle(kit)
    other = 3
    assert where(kit, 0) == {DRAM_ID, SSD_ID, other}
    digest = kit.digests(0).tobytes()
    for segment_id in (DRAM_ID, other) if other_lost else (DRAM_ID,):
        table = kit.segments[segment_id].table
        for slot in [n for n, row in table.items() if row["digest"].tobytes() == digest]:
            del table[slot]
    after = restarted(kit, journal=journal)
    for number in (2, 1) if other_first else (1, 2):
        after.restart_node(kit.nodes[number])
        check(after.state)
    after.with_session()
    expected = {SSD_ID} if other_lost else {other} if other_first else {SSD_ID, other}
    assert where(after, 0) == expected


def test_what_was_overwritten_on_one_node_stays_on_another() -> None:
    """The journal lost that a place was given to others: only what lay just there goes."""
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    assert kit.put([0], replicas=2, local_first=True) == [GRANTED]
    journal = kit.durable()
    (row,) = kit.segments[1].table.values()
    later = row.copy()
    later["slot"], later["seq"], later["digest"] = 9, 10, kit.digests(1).tobytes()
    later["checksum"] += 1
    kit.segments[1].table[9] = later
    after = restarted(kit, journal=journal)
    for number in (1, 2):
        after.restart_node(kit.nodes[number])
        check(after.state)
    after.with_session()
    assert where(after, 0) == {2}
    assert where(after, 1) == {1}


@pytest.mark.parametrize("what", ["other bytes", "the same bytes", "another place", "contradicted"])
def test_a_slot_is_not_believed_where_another_says_otherwise(what: str) -> None:
    """Whichever was written last: what the journal may not know of keeps its place."""
    kit, journal = copied_kit()
    memory, ssd = (kit.segments[i].table for i in (DRAM_ID, SSD_ID))
    digest = kit.digests(0).tobytes()
    number, old = next((n, row) for n, row in ssd.items() if row["digest"].tobytes() == digest)
    del memory[next(n for n, row in memory.items() if row["digest"].tobytes() == digest)]
    later = old.copy()
    later["slot"], later["seq"] = 500, 10_000
    later["digest"] = kit.digests(1000).tobytes()
    if what == "other bytes":
        later["checksum"] += 1
    elif what == "another place":
        later["offset"] = max(int(row["offset"]) for row in ssd.values()) + 4096
    elif what == "contradicted":
        later = old
        later["checksum"] += 1
    ssd[int(later["slot"])] = later
    after = attached_again(kit, journal)
    is_good = what in ("the same bytes", "another place")
    assert where(after, 0) == ({SSD_ID} if is_good else set())
    assert where(after, 1000) == (set() if what == "contradicted" else {SSD_ID})
    assert (number in ssd) == is_good
