"""Whatever a daemon finds in its slot tables: the master takes in whole objects that do not
overlap, and of two that would the higher version."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.rows import SLOT, UNIT_BYTES
from unit.master.state_checks import check, contents
from unit.master.state_kit import KIB, FakeNode, Kit, digests_of, new_node, restarted

DRAM, SSD = 1, 2
SIZES = [1, 64, 128, 300]
ODD: dict[str, list[int]] = {
    "offset": [0, 65_536 - 64, 65_536, 1 << 38, 100],
    "length": [0, 1, 1 << 40, (1 << 64) - 1],
    "seq": [1, 2, 3],
    "epoch": [0, 2],
    "object_size": [0, 301, 1 << 45],
    "namespace_id": [9],
    "generation": [1],
    "extent_index": [1, 2],
    "extent_count": [0, 2, 3],
    "replica": [1, 7],
    "shard_count": [2],
    "checksum": [77],
    "key": [1, 2, 3],
}


@st.composite
def found_rows(draw: st.DrawFn) -> list[dict[str, int]]:
    """The slots of one version, as they were sealed, but for a field here and there."""
    size = draw(st.sampled_from(SIZES))
    version = {"seq": draw(st.integers(4, 12)), "epoch": 1, "key": draw(st.integers(4, 9))}
    count = draw(st.integers(1, 2))
    made = []
    for replica in range(draw(st.integers(1, 2))):
        for index in range(count):
            row = version | {
                "segment_index": draw(st.integers(0, 1)),
                "slot": draw(st.integers(0, 12)),
                "offset": draw(st.integers(0, 12)) * 64,
                "length": size if count == 1 else draw(st.sampled_from([64, 192])),
                "object_size": size,
                "checksum": version["key"],
                "namespace_id": 0,
                "generation": 0,
                "extent_index": index,
                "extent_count": count,
                "replica": replica,
                "shard_count": draw(st.integers(0, 1)),
                "key_length": draw(st.sampled_from([3, 64, 65, 512])),
            }
            if draw(st.integers(0, 9)) < 2:
                name = draw(st.sampled_from(sorted(ODD)))
                row[name] = draw(st.sampled_from(ODD[name]))
            made.append(row)
    return made


def slot_row(kit: Kit, fields: dict[str, int]) -> np.void:
    row: np.void = np.zeros(1, SLOT)[0]
    for name, value in fields.items():
        if name != "key":
            row[name] = value
    row["digest"] = digests_of(fields["key"]).tobytes()
    row["namespace_id"] = kit.place[0] + fields["namespace_id"]
    row["generation"] = kit.place[1] + fields["generation"]
    return row


def two_segments(number: int, tier: int) -> FakeNode:
    node, other = new_node(number), new_node(number + 100)
    other.segments[0].tier = tier
    node.segments += other.segments
    return node


def check_all_sealed(daemons: Kit, kit: Kit) -> None:
    """Each object that can be read is one whose every extent lies in a slot of its version."""
    sealed = {
        (segment.segment_id, slot): row
        for node in daemons.nodes.values()
        for segment in node.segments
        for slot, row in segment.table.items()
    }
    pool = kit.state._pool
    rows = np.flatnonzero(pool.objects.state & 1)
    for row in rows.tolist():
        size, _, seq, epoch, *_ = pool.record_of(row)
        held: dict[int, int] = {}
        for word, slot, offset, units in pool.spans_of(np.array([row]))[1].tolist():
            mine = sealed[word & 0xFFFF, slot]
            assert (int(mine["epoch"]), int(mine["seq"])) == (epoch, seq)
            assert mine["digest"].tobytes() == pool.digests_of(np.array([row])).tobytes()
            assert int(mine["offset"]) == offset * UNIT_BYTES
            replica = word >> 16 & 0xFF
            assert int(mine["replica"]) == replica
            held[replica] = held.get(replica, 0) + units * UNIT_BYTES
        assert held
        assert min(held.values()) >= size


@given(
    found=st.lists(found_rows(), max_size=8),
    again=st.booleans(),
    tier=st.sampled_from([DRAM, SSD]),
)
def test_any_slots_leave_a_sound_master(
    found: list[list[dict[str, int]]], again: bool, tier: int
) -> None:
    """`tier`: of the second segment of each node."""
    before = Kit().with_nodes(two_segments(1, tier), two_segments(2, tier)).with_session(1)
    before.put([1, 2], 64)
    before.put([3], 64, replicas=2)
    kit = restarted(before).with_session(1)
    for number, node in before.nodes.items():
        for fields in itertools.chain(*found):
            segment = node.segments[fields["segment_index"]]
            if fields["slot"] % 2 == number % 2 and fields["slot"] not in segment.table:
                segment.table[fields["slot"]] = slot_row(before, fields)
        kit.attach(node)
        check(kit.state)
    known = contents(kit.state)
    check_all_sealed(before, kit)
    # What the master did not take is cleared: nothing is left that a later attach could meet.
    if again:
        for node in before.nodes.values():
            kit.attach(node)
        check(kit.state)
        assert contents(kit.state) == known
    assert kit.put([7], KIB)


SEALED = {
    "seq": 4,
    "epoch": 1,
    "key": 4,
    "slot": 0,
    "offset": 0,
    "length": 64,
    "object_size": 64,
    "checksum": 4,
    "namespace_id": 0,
    "generation": 0,
    "extent_index": 0,
    "extent_count": 1,
    "shard_count": 0,
    "key_length": 3,
}


def adopted(*places: tuple[int, int, int]) -> list[tuple[int, int]]:
    """What enters the table of one version that lies in these (node, segment index, replica):
    (segment id, replica) of each extent."""
    before = Kit().with_nodes(two_segments(1, SSD), two_segments(2, SSD)).with_session(1)
    kit = restarted(before).with_session(1)
    for number, index, replica in places:
        fields = SEALED | {"segment_index": index, "replica": replica, "slot": replica}
        segment = before.nodes[number].segments[index]
        segment.table[replica] = slot_row(before, fields)
    for node in before.nodes.values():
        kit.attach(node)
        check(kit.state)
    pool = kit.state._pool
    (row,) = np.flatnonzero(pool.objects.state & 1)
    words = pool.spans_of(np.array([row]))[1][:, 0].tolist()
    return [(word & 0xFFFF, word >> 16 & 0xFF) for word in words]


def test_of_two_replicas_with_one_number_the_first_is_adopted() -> None:
    """One of them was evicted, and its number given to a copy on another node's SSD since."""
    assert adopted((1, 1, 1), (2, 0, 1)) == [(2, 1)]


def test_what_is_adopted_in_memory_comes_before_what_is_on_an_ssd() -> None:
    assert adopted((1, 1, 1), (1, 0, 2)) == [(1, 2), (2, 1)]
    assert adopted((1, 1, 1), (2, 0, 2)) == [(3, 2), (2, 1)]
