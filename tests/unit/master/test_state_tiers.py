"""Copies between memory and SSD: what is planned, what comes of it, and what it never costs."""

from __future__ import annotations

import random

import pytest

from cenote.api.errors import InvalidArgument
from cenote.api.rows import CopyStatus, ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master import eviction
from cenote.master.decisions import Why
from cenote.master.effects import Gone, ReplicasChanged, SegmentGone
from cenote.master.pool import Pool, Rows
from cenote.master.state import StateConfig
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, Kit, new_node, restarted
from unit.master.state_replies import Hit
from unit.master.tiers_kit import (
    DRAM_ID,
    SSD_ID,
    copy_all,
    kit_with_ssd,
    settle,
    ssd_node,
    where,
)

GRANTED = PutStatus.GRANTED


def places(kit: Kit, key: int) -> list[int]:
    """Segments that a reader is told of."""
    (hit,) = kit.get(key)
    return [] if hit is None else [extent[0] for extent in hit.extents]


def hit_of(kit: Kit, key: int, **options: bool) -> Hit:
    (hit,) = kit.get(key, **options)
    assert hit is not None
    return hit


def test_the_coldest_half_of_memory_gets_copies() -> None:
    kit = kit_with_ssd(60)
    kit.get(*range(10))
    assert 25 <= settle(kit) <= 32
    copied = {int(row["seq"]) - 1 for row in kit.segments[SSD_ID].table.values()}
    assert copied == set(range(10, 10 + len(copied)))
    assert sum(len(e.digests) for e in kit.new(ReplicasChanged)) == len(copied)
    assert kit.state.status(kit.now_s).ssd_used_bytes == len(copied) * 4 * KIB
    assert settle(kit) == 0


@pytest.mark.parametrize("small_first", [True, False])
def test_half_of_memory_is_bytes_whatever_the_sizes_of_objects(small_first: bool) -> None:
    """The coldest half of the objects has few of the bytes where these are small, and most of them
    where they are large: what is copied is the coldest half of the bytes."""
    kit = kit_with_ssd()
    sizes = dict.fromkeys(range(24), KIB // 4) | dict.fromkeys(range(100, 108), 7 * KIB)
    for key in sorted(sizes, reverse=not small_first):
        assert kit.put([key], sizes[key]) == [GRANTED]
    settle(kit)
    copied = [key for key in sizes if SSD_ID in where(kit, key)]
    assert 29 * KIB <= sum(sizes[key] for key in copied) <= 38 * KIB
    assert set(copied) == set(sorted(sizes, reverse=not small_first)[: len(copied)])
    assert settle(kit) == 0


def test_memory_that_is_half_empty_is_not_copied() -> None:
    kit = kit_with_ssd(30)
    assert settle(kit) == 0


def test_what_has_a_copy_leaves_memory_and_is_read_from_the_ssd() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    assert where(kit, 0) == {DRAM_ID, SSD_ID}
    for key in range(100, 140):
        assert kit.put([key]) == [GRANTED]
        settle(kit)
    assert kit.exists(*range(60)) == [1] * 60
    assert not kit.new(Gone)
    assert where(kit, 0) == {SSD_ID}
    assert places(kit, 0) == [SSD_ID]
    assert kit.state.status(kit.now_s).counters.evicted_to_ssd > 0


def test_room_in_memory_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects have less in memory than the mean says, which counts their copies, too: half as much
    was evicted as was needed, and then the rest by itself."""
    kit = kit_with_ssd(60)
    settle(kit)
    asked = []

    def noted(pool: Pool, rows: Rows, tier: int = 0, why: Why = Why.NONE) -> int:
        asked.append(len(rows))
        return evict(pool, rows, tier, why)

    evict = eviction.evict
    monkeypatch.setattr(eviction, "evict", noted)
    free = pool_of(kit.state).segments.by_id[DRAM_ID].free_units // 16
    assert kit.put(list(range(100, 100 + free + 16))) == [GRANTED] * (free + 16)
    assert len(asked) == 1
    assert 16 <= asked[0] < 24


def test_only_what_is_in_memory_is_leased() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 130):
        kit.put([key])
    hits = kit.get(0, 100, lease=True)
    assert [h and h.status for h in hits] == [ObjectStatus.UNLEASED, ObjectStatus.LEASED]
    assert hit_of(kit, 0, lease=True).status == ObjectStatus.UNLEASED
    assert hit_of(kit, 129, lease=True).status == ObjectStatus.LEASED
    check(kit.state)


def test_a_put_never_waits_for_a_copy() -> None:
    kit = kit_with_ssd(60)
    for key in range(100, 300):  # copies are ordered, and none is ever reported
        assert kit.put([key]) == [GRANTED]
        kit.tick(0.01)
        kit.heartbeat(kit.nodes[1])
        check(kit.state)
    pool = pool_of(kit.state)
    assert 0 < pool.copies.units * 64 <= 32 * KIB
    assert kit.new(Gone)
    # What they were about is gone by now.
    copy_all(kit, kit.nodes[1])
    kit.heartbeat(kit.nodes[1])
    check(kit.state)


def test_the_second_touch_brings_it_back() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 130):
        kit.put([key])
    settle(kit)
    assert places(kit, 0) == [SSD_ID]
    settle(kit)
    assert places(kit, 0) == [SSD_ID]
    assert settle(kit) >= 1
    assert places(kit, 0) == [DRAM_ID]
    assert kit.state.status(kit.now_s).counters.promoted == 1
    # It has both: what leaves memory again costs nothing.
    assert where(kit, 0) == {DRAM_ID, SSD_ID}
    assert hit_of(kit, 0, lease=True).status == ObjectStatus.LEASED


def test_a_promotion_costs_no_object() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 140):
        kit.put([key])
        settle(kit)
    keys = [*range(60), *range(100, 140)]
    for _ in range(4):
        kit.get(*keys)
        settle(kit)
    assert kit.exists(*keys) == [1] * len(keys)


def test_a_full_ssd_evicts_what_is_coldest_there() -> None:
    kit = kit_with_ssd(60, ssd_bytes=256 * KIB)  # 64 objects
    settle(kit)
    for key in range(100, 200):
        kit.put([key])
        settle(kit)
    kit.get(100)
    there = [key for key in range(60) if kit.exists(key)[0]]
    assert not there
    assert kit.exists(*range(140, 200)) == [1] * 60
    assert kit.state.status(kit.now_s).ssd_used_bytes <= 256 * KIB


@pytest.mark.parametrize("status", [CopyStatus.FAILED, CopyStatus.SOURCE_CHANGED])
def test_a_copy_that_came_to_nothing_leaves_nothing(status: int) -> None:
    kit = kit_with_ssd(60)
    kit.tick(0.1)
    kit.heartbeat(kit.nodes[1])
    count = copy_all(kit, kit.nodes[1], status)
    kit.heartbeat(kit.nodes[1])
    check(kit.state)
    assert kit.state.status(kit.now_s).counters.copies_failed == count > 0
    # A device that fails rests for a second; bytes that are wrong are not copied again.
    if status == CopyStatus.SOURCE_CHANGED:
        settle(kit, status)
    kit.tick(0.1)
    assert not pool_of(kit.state).copies.units
    kit.tick(2.0)
    assert bool(pool_of(kit.state).copies.units) == (status == CopyStatus.FAILED)


def test_a_damaged_copy_is_dropped_when_it_is_to_be_promoted() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 130):
        kit.put([key])
    settle(kit)
    for _ in range(2):
        assert places(kit, 0) == [SSD_ID]
    settle(kit, CopyStatus.SOURCE_CHANGED)
    assert kit.exists(0) == [0]
    assert kit.state.status(kit.now_s).counters.damaged == 1


def test_removed_and_replaced_objects_do_not_come_back_with_their_copies() -> None:
    kit = kit_with_ssd(60)
    kit.tick(0.1)
    node = kit.nodes[1]
    kit.heartbeat(node)
    assert kit.remove(0, 1) == [1, 1]
    kit.put([1])
    copy_all(kit, node)
    kit.heartbeat(node)
    check(kit.state)
    assert kit.exists(0, 1) == [0, 1]
    assert places(kit, 1) == [DRAM_ID]


def test_another_process_of_the_daemon_frees_what_its_copies_held() -> None:
    kit = kit_with_ssd(60)
    node = kit.nodes[1]
    kit.tick(0.1)
    kit.heartbeat(node)
    copy_all(kit, node)  # some were carried out, and never reported
    node.copied.clear()
    assert pool_of(kit.state).copies.units
    kit.restart_node(node)
    check(kit.state)
    assert not pool_of(kit.state).copies.units
    assert not kit.segments[SSD_ID].table  # told to be cleared
    settle(kit)
    assert len(kit.segments[SSD_ID].table) > 20


def test_another_process_of_the_daemon_is_not_told_of_copies_whose_space_is_free() -> None:
    """It would write over whatever was given that space since."""
    kit = kit_with_ssd(60)
    node = kit.nodes[1]
    kit.tick(0.1)
    instructions = pool_of(kit.state).nodes.by_id[node.node_id].instructions
    assert any(one.copies is not None for one in instructions)
    kit.restart_node(node)
    assert not pool_of(kit.state).copies.units
    told = kit.heartbeat(node, obey=False)
    assert not [one for one in told if one.copies is not None or one.pulls is not None]


def test_an_ssd_that_is_not_brought_back_costs_what_was_on_it_alone() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 120):
        kit.put([key])
    node = kit.nodes[1]
    kit.tick(0.1)
    on_ssd = [key for key in range(60) if where(kit, key) == {SSD_ID}]
    assert on_ssd
    node.segments.pop()
    kit.attach(node)
    check(kit.state)
    assert [effect.segment_id for effect in kit.new(SegmentGone)] == [SSD_ID]
    left = [key for key in range(60) if kit.exists(key)[0]]
    assert set(left) == set(range(60)) - set(on_ssd)
    kit.tick(1.0)
    check(kit.state)


def test_a_new_leader_finds_the_copies() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 130):
        kit.put([key])
    kit.tick(0.1)
    kit.heartbeat(kit.nodes[1])  # copies are under way when it ends
    before = contents(kit.state)
    node = kit.nodes[1]
    node.copies, node.copied, node.done_instruction = [], [], 0
    new = restarted(kit, session_granted_share_max=1.0)
    new.attach(node)
    new.with_session()
    check(new.state)
    assert contents(new.state) == before
    assert places(new, 0) == [SSD_ID]
    settle(new)


def test_nobody_puts_to_an_ssd() -> None:
    kit = kit_with_ssd()
    with pytest.raises(InvalidArgument):
        kit.start([1], tier=2)
    with pytest.raises(InvalidArgument):
        kit.start([1, 2], tier=2)


def test_nodes_without_an_ssd_keep_to_themselves() -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(new_node(2), ssd_node(1)).with_session()
    for key in range(100):
        kit.put([key])
    settle(kit)
    rows = kit.segments[3].table.values()
    on_node = {int(row["seq"]) for row in kit.segments[2].table.values()}
    assert rows
    assert {int(row["seq"]) for row in rows} <= on_node


def test_an_object_in_two_replicas_gets_one_copy() -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(ssd_node(1), ssd_node(2)).with_session()
    for key in range(60):
        assert kit.put([key], replicas=2) == [GRANTED]
    kit.tick(0.1)
    for node in kit.nodes.values():
        kit.heartbeat(node)
        copy_all(kit, node)
        kit.heartbeat(node)
    check(kit.state)
    hit = hit_of(kit, 0)
    assert (hit.replicas, len(hit.extents)) == (2, 2)
    pool = pool_of(kit.state)
    assert int(pool.objects.replicas[1:].max()) == 3


@pytest.mark.parametrize("number", range(4))
def test_whatever_comes_space_adds_up_and_readers_find_what_was_sealed(number: int) -> None:
    dice = random.Random(number)
    kit = kit_with_ssd(ssd_bytes=(128 + 64 * number) * KIB)
    node = kit.nodes[1]
    for _ in range(250):
        key = dice.randrange(120)
        what = dice.random()
        if what < 0.4:
            kit.put([key], dice.choice([100, KIB, 3 * KIB, 9 * KIB]))
        elif what < 0.6:
            kit.get(*dice.sample(range(120), 8), lease=dice.random() < 0.5)
        elif what < 0.65:
            kit.remove(key)
        elif what < 0.7:
            kit.tick(dice.choice([0.0, 0.1, 2.0]))
        elif what < 0.8:
            copy_all(kit, node, dice.choice([0, 0, 0, 1, 2]))
        elif what < 0.95:
            kit.heartbeat(node)
        elif what < 0.97:
            node.copies, node.copied, node.done_instruction = [], [], 0
            kit.restart_node(node)
        elif what < 0.98:
            node.copies, node.copied, node.done_instruction = [], [], 0
            kit = restarted(kit, session_granted_share_max=1.0)
            kit.attach(node)
            kit.with_session()
        else:
            kit.apply(c.Touch(*kit.place, kit.digests(key), False))
        check(kit.state)
        for hit in kit.get(*range(0, 120, 7)):
            if hit is None:
                continue
            for segment_id, _, offset, length in hit.extents:
                slots = kit.segments[segment_id].table.values()
                found = [s for s in slots if s["offset"] == offset and s["seq"] == hit.seq]
                assert found
                assert all(int(s["length"]) >= length for s in found)


def test_what_has_no_copy_yet_goes_after_what_has_one() -> None:
    kit = kit_with_ssd(60)
    node = kit.nodes[1]
    kit.tick(0.1)
    kit.heartbeat(node)
    # The copies of the very coldest take their time; those of others are made.
    late, node.copies = node.copies[:2], node.copies[2:]
    copy_all(kit, node)
    kit.heartbeat(node)
    assert settle(kit) > 10
    for key in range(100, 112):
        assert kit.put([key]) == [GRANTED]
    assert not kit.new(Gone)
    assert [where(kit, key) for key in range(4)] == [{DRAM_ID}] * 2 + [{SSD_ID}] * 2
    node.copies = late
    copy_all(kit, node)
    kit.heartbeat(node)
    assert [where(kit, key) for key in range(2)] == [{DRAM_ID, SSD_ID}] * 2
    check(kit.state)


def test_what_is_used_does_not_go_since_it_has_a_copy() -> None:
    kit = kit_with_ssd(60)
    settle(kit)
    copied = [key for key in range(60) if SSD_ID in where(kit, key)]
    kit.get(*copied[:10])  # the newest now
    for key in range(100, 115):
        kit.put([key])
        settle(kit)
    assert all(DRAM_ID in where(kit, key) for key in copied[:10])


@pytest.mark.parametrize("apart", [False, True])
def test_a_partial_tail_is_not_copied(apart: bool) -> None:
    kit = kit_with_ssd()
    if apart:  # the blocks before it are there already
        kit.put([1, 2], [KIB, KIB], chain=True)
        kit.put([3], [KIB // 2], chain=True)
        news = c.Piggyback(*kit.place, chained=kit.digests(1, 2, 3))
        kit.state.piggyback(news, kit.now_s)
    else:
        kit.put([1, 2, 3], [KIB, KIB, KIB // 2], chain=True)
    kit.put([4, 5, 6], [KIB // 2, KIB, KIB], chain=True)  # a short one elsewhere is no tail
    kit.put([7, 8], [KIB, KIB // 2])  # these are no chain
    for key in range(100, 160):
        kit.put([key])
        settle(kit)
    assert [kit.exists(key) for key in range(1, 9)] == [[1]] * 2 + [[0]] + [[1]] * 5


def test_the_capacity_that_samples_are_of_is_that_of_memory() -> None:
    def objects_that_fit(kit: Kit) -> int:
        kit.tick(1.1)
        return pool_of(kit.state).advisor.capacity

    kit = kit_with_ssd(60)
    before = objects_that_fit(kit)
    settle(kit)
    for key in range(100, 300):
        kit.put([key])
        settle(kit)
    assert kit.state.status(kit.now_s).ssd_used_bytes > 200 * KIB
    assert objects_that_fit(kit) == pytest.approx(before, rel=0.1)
