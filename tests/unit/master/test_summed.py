"""An attach by sums comes to the same as one by the whole inventory, whatever the slots hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.api.rows import BLOCK, SLOT, SLOT_REF, SLOT_SUM
from cenote.api.slot_sums import slot_hashes
from cenote.master import commands as c
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, FakeNode, Kit, new_node
from unit.master.tiers_kit import copy_all, ssd_node

PER_BLOCK = 4
CHANGES = ("missing", "older", "moved", "newer", "stale", "another replica")


def sums_of(table: dict[int, np.void], slots: int) -> NDArray[np.void]:
    """One slot after the other."""
    sums = np.zeros(-(-slots // PER_BLOCK), SLOT_SUM)
    for slot, row in table.items():
        names = ("slot", "epoch", "seq", "offset", "replica")
        (one,) = slot_hashes(*(np.array([row[name]], np.uint64) for name in names))
        block = slot // PER_BLOCK
        sums["sum"][block] = (int(sums["sum"][block]) + int(one)) % (1 << 64)
        sums["count"][block] += 1
    return sums


def summed(command: c.Attach, node: FakeNode, told: NDArray[np.void]) -> c.Attach:
    """The same attach by sums, with the inventory of these blocks."""
    reports = [
        replace(report, slot_sums=sums_of(segment.table, segment.slots))
        for report, segment in zip(command.segments, node.segments, strict=True)
    ]
    blocks = {tuple(block) for block in told.tolist()}
    rows = [
        row
        for row in command.inventory
        if (int(row["segment_index"]), int(row["slot"]) // PER_BLOCK) in blocks
    ]
    return replace(
        command,
        segments=reports,
        inventory=np.array(rows, SLOT) if rows else np.zeros(0, SLOT),
        slots_per_block=PER_BLOCK,
        told_blocks=told,
    )


def attach_by_sums(
    state: MasterState, command: c.Attach, node: FakeNode
) -> tuple[c.AttachReply, int]:
    """The reply, and of how many blocks the inventory was wanted."""
    reply, effects = state.apply(summed(command, node, np.zeros(0, BLOCK)), 1000.0)
    if not reply.wanted_blocks:
        return reply, 0
    assert not effects
    told = np.frombuffer(reply.wanted_blocks, BLOCK)
    reply, _ = state.apply(summed(command, node, told), 1000.0)
    assert not reply.wanted_blocks
    return reply, len(told)


def successors(kit: Kit, count: int = 2) -> list[MasterState]:
    """What several new leaders would have replayed."""
    states = [MasterState(StateConfig(), 2) for _ in range(count)]
    for state in states:
        for effect in kit.durable():
            state.replay(effect)
        state.start(1000.0)
    return states


def change(node: FakeNode, slot: int, what: str) -> None:
    table = node.segments[0].table
    row = table.get(slot)
    if row is None:
        return
    row = row.copy()
    if what == "missing":
        del table[slot]
        return
    if what == "older":
        row["seq"] -= 1
    elif what == "moved":
        row["offset"] += 64
    elif what == "newer":
        row["seq"] += 1000
        row["digest"] = np.void(slot.to_bytes(16, "big"))
    elif what == "stale":
        row["slot"] = slot = slot + 200
        row["seq"] = 1
    else:
        row["replica"] += 1
    table[slot] = row


def contents(state: MasterState) -> list[str]:
    return [repr(effect) for effect in state.snapshot()]


@settings(max_examples=40)
@given(st.data())
def test_sums_and_inventory_come_to_the_same(data: st.DataObject) -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    kit.put(list(range(20)), replicas=1)
    kit.put(list(range(100, 106)), size=3 * KIB, replicas=2)
    removed = data.draw(st.lists(st.integers(0, 19), max_size=4))
    kit.remove(*removed)
    node = kit.nodes[1]
    changes = st.tuples(st.integers(0, 40), st.sampled_from(CHANGES))
    changed = data.draw(st.lists(changes, max_size=4))
    for slot, what in changed:
        change(node, slot, what)
    by_inventory, by_sums = successors(kit)
    node.process_id = 7
    command = kit.attach_command(node)
    expected, _ = by_inventory.apply(command, 1000.0)
    reply, wanted = attach_by_sums(by_sums, command, node)
    cleared = sorted(reply.clear_slots[i : i + 20] for i in range(0, len(reply.clear_slots), 20))
    expected_cleared = expected.clear_slots
    assert cleared == sorted(expected_cleared[i : i + 20] for i in range(0, len(cleared) * 20, 20))
    assert replace(reply, clear_slots=b"") == replace(expected, clear_slots=b"")
    assert contents(by_sums) == contents(by_inventory)
    check(by_sums)
    if not removed and not changed:
        assert not wanted


def test_where_both_agree_nothing_else_is_wanted() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put(list(range(20)))
    (state,) = successors(kit, 1)
    node = kit.nodes[1]
    reply, wanted = attach_by_sums(state, kit.attach_command(node), node)
    assert (wanted, reply.dropped, reply.adopted) == (0, 0, 0)
    check(state)


def tiered_kit() -> Kit:
    """Objects in memory, in both tiers, and on the SSD alone."""
    kit = Kit(StateConfig(session_granted_share_max=1.0)).with_nodes(ssd_node(1)).with_session()
    node = kit.nodes[1]
    for key in range(80):
        kit.put([key])
        kit.tick(0.1)
        kit.heartbeat(node)
        copy_all(kit, node)
        kit.heartbeat(node)
    return kit


def test_sums_cover_ssds() -> None:
    kit = tiered_kit()
    node = kit.nodes[1]
    disk = node.segments[1]
    assert len(disk.table) > 30
    by_inventory, by_sums = successors(kit)
    command = kit.attach_command(node)
    first, _ = by_sums.apply(summed(command, node, np.zeros(0, BLOCK)), 1000.0)
    wanted = np.frombuffer(first.wanted_blocks, BLOCK)
    assert not len(wanted) or set(wanted["segment_index"].tolist()) == {0}  # of what was evicted
    expected, _ = by_inventory.apply(command, 1000.0)
    reply, _ = attach_by_sums(by_sums, command, node)
    assert (reply.dropped, expected.dropped) == (0, 0)
    assert contents(by_sums) == contents(by_inventory)
    check(by_sums)


@settings(max_examples=20)
@given(
    lost=st.lists(st.integers(0, 40), max_size=3),
    back=st.lists(st.integers(300, 340), max_size=3, unique=True),
    older=st.lists(st.integers(0, 40), max_size=3),
)
def test_sums_and_inventory_of_an_ssd_come_to_the_same(
    lost: list[int], back: list[int], older: list[int]
) -> None:
    """Slots that could not be read, cleared ones that came back, and ones that hold another
    version."""
    kit = tiered_kit()
    node = kit.nodes[1]
    table = node.segments[1].table
    some = next(iter(table.values()))
    for slot in older:
        if slot in table:
            table[slot] = table[slot].copy()
            table[slot]["seq"] -= 1
    for slot in lost:
        table.pop(slot, None)
    for slot in back:
        table[slot] = some.copy()
        table[slot]["slot"] = slot
    by_inventory, by_sums = successors(kit)
    node.process_id = 7
    command = kit.attach_command(node)
    expected, _ = by_inventory.apply(command, 1000.0)
    reply, _ = attach_by_sums(by_sums, command, node)
    assert reply.dropped == expected.dropped
    assert sorted(np.frombuffer(reply.clear_slots, SLOT_REF).tolist()) == sorted(
        np.frombuffer(expected.clear_slots, SLOT_REF).tolist()
    )
    assert contents(by_sums) == contents(by_inventory)
    check(by_sums)


def test_what_changes_between_sums_and_inventory_is_wanted_too() -> None:
    """A daemon that was restarted; meanwhile a commit is decided, which it must not be taken to
    have sealed."""
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put(list(range(20)))
    put = kit.start([50])
    node = kit.nodes[1]
    node.process_id, node.start_number = 2, 1
    first = summed(kit.attach_command(node), node, np.zeros(0, BLOCK))
    del node.segments[0].table[0]
    told = np.array([(0, 0)], BLOCK)
    second = summed(kit.attach_command(node), node, told)
    assert kit.apply(first).wanted_blocks == b""  # attached, with what was so then
    kit.commit(put, seal=False)
    node.process_id, node.start_number = 3, 2
    second = replace(second, process_id=3, start_number=2)
    ((_, block),) = np.frombuffer(kit.apply(second).wanted_blocks, BLOCK).tolist()
    assert block == put.extents[0][0][1] // PER_BLOCK
    assert kit.exists(50) == [1]
    third = summed(kit.attach_command(node), node, np.array([(0, 0), (0, block)], BLOCK))
    reply = kit.apply(third)
    assert (reply.wanted_blocks, reply.dropped) == (b"", 2)
    assert kit.exists(0, 1, 50) == [0, 1, 0]
    check(kit.state)


def test_two_extents_in_one_slot_never_agree() -> None:
    """Whatever may have gone wrong before: one of them is not there."""
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put([1, 2])
    (state,) = successors(kit, 1)
    node = kit.nodes[1]
    objects = pool_of(state).objects
    row = int(np.flatnonzero(objects.slot == 1)[0])
    objects._extent_rows["slot"][row] = 0
    reply, _ = state.apply(summed(kit.attach_command(node), node, np.zeros(0, BLOCK)), 1000.0)
    assert np.frombuffer(reply.wanted_blocks, BLOCK).tolist() == [(0, 0)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots_per_block": 1 << 20},
        {"slots_per_block": -1},
        {"told_blocks": np.array([(9, 0)], BLOCK)},
        {"told_blocks": np.zeros(0, BLOCK)},
        {"told_blocks": np.array([(0, 0)] * 1000, BLOCK)},
    ],
)
def test_sums_that_cannot_be_right(wrong: dict[str, object]) -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put([1, 2])
    node = kit.nodes[1]
    good = summed(kit.attach_command(node), node, np.array([(0, 0)], BLOCK))
    with pytest.raises(InvalidArgument):
        kit.apply(replace(good, **wrong))  # type: ignore[arg-type]
    report = replace(good.segments[0], slot_sums=np.zeros(1000, SLOT_SUM))
    with pytest.raises(InvalidArgument, match="sums"):
        kit.apply(replace(good, segments=[report]))
    assert not kit.apply(good).wanted_blocks
