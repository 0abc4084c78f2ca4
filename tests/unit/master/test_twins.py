"""Objects of the same bytes that go to another tier or node share their place there, too."""

from __future__ import annotations

import random

import numpy as np

from cenote.api.rows import CopyStatus
from cenote.master import commands as c
from cenote.master.tiers import want
from unit.master import moves_kit
from unit.master.dedup_kit import put_bytes
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, Kit, new_node, restarted, session_id
from unit.master.test_state_drain import pool as pool_with
from unit.master.tiers_kit import DRAM_ID, SSD_ID, copy_all, kit_with_ssd, settle, ssd_node, where

SAME = list(range(10))
BLOCK_UNITS = 64
"""Of an SSD."""


def with_same_bytes() -> Kit:
    """Ten keys of the same bytes, the coldest of what fills memory."""
    kit = kit_with_ssd(0)
    for key in SAME:
        put_bytes(kit, [key], [7])
    put_bytes(kit, list(range(100, 160)), list(range(1000, 1060)))
    return kit


def units_in(kit: Kit, segment_id: int) -> int:
    return pool_of(kit.state).segments.by_id[segment_id].used_units


def ssd_units(kit: Kit) -> int:
    return units_in(kit, SSD_ID)


def slots_on_ssd(kit: Kit, *keys: int) -> list[tuple[int, int]]:
    """(slot, offset) of each of these keys there."""
    found = []
    for key in keys:
        row = int(pool_of(kit.state).objects.lookup(kit.digests(key))[0])
        extents = pool_of(kit.state).objects.extents_of_one(row)
        found += [(extent[3], extent[4]) for extent in extents if extent[0] == SSD_ID]
    return found


def test_ten_keys_of_the_same_bytes_are_copied_once() -> None:
    kit = with_same_bytes()
    settle(kit)
    assert all(where(kit, key) == {DRAM_ID, SSD_ID} for key in SAME)
    places = slots_on_ssd(kit, *SAME)
    assert len({slot for slot, _ in places}) == len(SAME)
    assert len({offset for _, offset in places}) == 1
    others = [key for key in range(100, 160) if SSD_ID in where(kit, key)]
    assert ssd_units(kit) == (1 + len(others)) * BLOCK_UNITS
    status = kit.state.status(kit.now_s)
    assert status.ssd_used_bytes == (1 + len(others)) * 4 * KIB
    assert status.logical_bytes == 70 * KIB
    assert status.used_bytes == 61 * KIB


def test_they_are_read_from_the_ssd_and_the_last_one_frees_the_space() -> None:
    kit = with_same_bytes()
    settle(kit)
    put_bytes(kit, list(range(200, 240)), list(range(2000, 2040)))
    settle(kit)
    assert all(where(kit, key) == {SSD_ID} for key in SAME)
    before = ssd_units(kit)
    for key in SAME[1:]:
        assert kit.remove(key) == [1]
        check(kit.state)
    assert ssd_units(kit) == before
    assert where(kit, 0) == {SSD_ID}
    kit.remove(0)
    check(kit.state)
    assert ssd_units(kit) == before - BLOCK_UNITS


def test_what_comes_back_shares_memory_again() -> None:
    kit = with_same_bytes()
    settle(kit)
    put_bytes(kit, list(range(200, 240)), list(range(2000, 2040)))
    settle(kit)
    for key in range(100, 160):  # so that there is room
        kit.remove(key)
    used = units_in(kit, DRAM_ID)
    want(pool_of(kit.state), pool_of(kit.state).objects.lookup(kit.digests(*SAME)))
    settle(kit)
    assert all(where(kit, key) == {DRAM_ID, SSD_ID} for key in SAME)
    assert units_in(kit, DRAM_ID) == used + KIB // 64
    check(kit.state)


def test_a_reference_to_what_has_a_copy_already_shares_it() -> None:
    kit = kit_with_ssd(0)
    put_bytes(kit, [0], [7])
    put_bytes(kit, list(range(100, 160)), list(range(1000, 1060)))
    settle(kit)
    assert where(kit, 0) == {DRAM_ID, SSD_ID}
    assert put_bytes(kit, [1], [7]) == 1
    kit.get(*range(100, 160))
    put_bytes(kit, [200], [2000])
    settle(kit)
    kit.tick(1.0)
    settle(kit)
    assert where(kit, 1) == {DRAM_ID, SSD_ID}
    ((_, one),), ((_, other),) = slots_on_ssd(kit, 0), slots_on_ssd(kit, 1)
    assert one == other


def test_a_daemon_that_does_not_find_the_bytes_gets_them_the_next_time() -> None:
    kit = with_same_bytes()
    refused: list[int] = []
    for _ in range(60):
        kit.tick(0.1)
        kit.heartbeat(kit.nodes[1])
        for rows in kit.nodes[1].copies:
            if (rows["source_segment"] == rows["target_segment"]).any() and len(refused) < 3:
                refused.append(int(rows["source_slot"][-1]))
                kit.segments[SSD_ID].table.pop(refused[-1], None)  # as if it had been torn
        copy_all(kit, kit.nodes[1])
        kit.heartbeat(kit.nodes[1])
        check(kit.state)
    assert refused
    assert [key for key in SAME if SSD_ID in where(kit, key)] == SAME
    assert 1 < len({offset for _, offset in slots_on_ssd(kit, *SAME)}) <= 1 + len(refused)


def test_another_leader_knows_who_shares_on_the_ssd() -> None:
    kit = with_same_bytes()
    settle(kit)
    before, units = contents(kit.state), ssd_units(kit)
    after = restarted(kit, journal=kit.durable())
    for node in kit.nodes.values():
        after.restart_node(node)
    assert contents(after.state) == before
    check(after.state)
    assert ssd_units(after) == units
    after.apply(c.OpenSession(session_id(1), boot_id="host-1"))
    for key in SAME[:9]:
        assert after.remove(key) == [1]
    check(after.state)
    assert ssd_units(after) == units
    assert where(after, 9) == {DRAM_ID, SSD_ID}


def test_another_leader_has_the_rest_share_what_is_there() -> None:
    """Some were copied before it led, and the others hold the same bytes."""
    kit = with_same_bytes()
    kit.tick(0.1)
    kit.heartbeat(kit.nodes[1])
    kit.nodes[1].copies = kit.nodes[1].copies[:1]  # the first of them, and no more
    copy_all(kit, kit.nodes[1])
    kit.heartbeat(kit.nodes[1])
    assert [key for key in SAME if SSD_ID in where(kit, key)] == [0]
    after = restarted(kit, journal=kit.durable())
    for node in kit.nodes.values():
        node.copies = []
        after.restart_node(node)
    settle(after)
    assert len({offset for _, offset in slots_on_ssd(after, *SAME)}) == 1
    assert len(slots_on_ssd(after, *SAME)) == len(SAME)


def test_place_that_was_freed_is_nobodys_twin() -> None:
    """Bytes of another object lie in memory where some lay that were copied."""
    kit = with_same_bytes()
    settle(kit)
    assert pool_of(kit.state).segments.by_id[DRAM_ID].copied
    put_bytes(kit, list(range(200, 260)), list(range(2000, 2060)))
    assert all(where(kit, key) == {SSD_ID} for key in SAME)
    assert not pool_of(kit.state).segments.by_id[DRAM_ID].copied


def test_a_drained_node_takes_references_along() -> None:
    kit = pool_with(new_node(1))
    for key in SAME:
        put_bytes(kit, [key], [7])
    kit.with_nodes(new_node(2))
    moves_kit.drain(kit, 1)
    moves_kit.settle(kit)
    assert all(moves_kit.nodes_of(kit, key) == {2} for key in SAME)
    assert moves_kit.used_on(kit, 2) == KIB
    assert moves_kit.used_on(kit, 1) == 0
    for key in SAME[1:]:
        kit.remove(key)
    assert moves_kit.used_on(kit, 2) == KIB
    assert kit.exists(0) == [1]
    kit.remove(0)
    assert moves_kit.used_on(kit, 2) == 0
    check(kit.state)


def test_what_a_dead_node_had_is_replicated_once() -> None:
    kit = pool_with(new_node(1), new_node(2), repair_after_s=2.0)
    for key in SAME:
        put_bytes(kit, [key], [7], replicas=2)
    kit.with_nodes(new_node(3))
    moves_kit.pass_time(kit, 6.0, silent=(1,))
    assert all({2, 3} <= moves_kit.nodes_of(kit, key) for key in SAME)
    assert moves_kit.used_on(kit, 3) == KIB
    check(kit.state)


def test_whatever_happens_bytes_stay_whose_they_are() -> None:
    """Puts, removals, reads, copies that fail and leaders that change: a key's slots are of its own
    bytes, and the counts agree."""
    dice = random.Random(3)
    kit = kit_with_ssd(0, ssd_bytes=64 * KIB)
    held: dict[int, int] = {}
    shared = 0
    for step in range(400):
        key = dice.randrange(40)
        if dice.random() < 0.6:
            if key not in held:
                held[key] = dice.randrange(1, 8)
                put_bytes(kit, [key], [held[key]])
        elif dice.random() < 0.5:
            kit.remove(key)
            held.pop(key, None)
        else:
            kit.get(key)
        filler = 1000 + step
        put_bytes(kit, [filler], [filler])
        kit.tick(0.1)
        kit.heartbeat(kit.nodes[1])
        copy_all(kit, kit.nodes[1], dice.choice((CopyStatus.DONE,) * 4 + (CopyStatus.FAILED,)))
        kit.heartbeat(kit.nodes[1])
        check(kit.state)
        shared = max(
            shared, max(pool_of(kit.state).segments.by_id[SSD_ID].shared.values(), default=0)
        )
        if step % 100 == 99:
            kit = _next_leader(kit)
        _check_slots(kit, held)
    assert shared


def _next_leader(kit: Kit) -> Kit:
    after = restarted(kit, journal=kit.durable())
    for node in kit.nodes.values():
        node.copies = []
        after.restart_node(node)
    after.apply(c.OpenSession(session_id(1), boot_id="host-1"))
    check(after.state)
    return after


def _check_slots(kit: Kit, held: dict[int, int]) -> None:
    state = pool_of(kit.state)
    rows = state.objects.lookup(kit.digests(*held)) if held else np.zeros(0, np.int64)
    for row in rows[rows > 0].tolist():
        record = state.record_of(row)
        for segment_id, _, _, slot, offset, _ in state.objects.extents_of_one(row):
            sealed = kit.segments[segment_id].table[slot]
            assert (sealed["seq"], sealed["epoch"]) == (record[2], record[3])
            assert int(sealed["offset"]) == offset * 64
            assert int(sealed["checksum"]) == record[1]


def test_a_node_with_an_ssd_that_is_drained_leaves_nothing_double() -> None:
    kit = pool_with(ssd_node(1))
    for key in SAME:
        put_bytes(kit, [key], [7])
    put_bytes(kit, list(range(100, 140)), list(range(1000, 1040)))
    for _ in range(10):
        kit.tick(0.1)
        kit.heartbeat(kit.nodes[1])
        copy_all(kit, kit.nodes[1])
        kit.heartbeat(kit.nodes[1])
    assert all(SSD_ID in where(kit, key) for key in SAME)
    kit.with_nodes(new_node(2))
    moves_kit.drain(kit, 1)
    moves_kit.settle(kit)
    assert all(moves_kit.nodes_of(kit, key) == {2} for key in SAME)
    assert moves_kit.used_on(kit, 2) == 41 * KIB
    check(kit.state)
