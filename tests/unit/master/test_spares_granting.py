"""Spare extents: how many are given, and when there are none."""

from __future__ import annotations

import itertools

import pytest

from cenote.api.rows import UNIT_BYTES, CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.spares import SPARE_BYTES_MAX, SPARES_MAX
from unit.master.spares_kit import (
    abort,
    free_units,
    granted_bytes,
    grants,
    make_kit,
)
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import (
    KIB,
    MIB,
    Kit,
    new_node,
    session_id,
)

DECIDED, NOT_GRANTED = CommitStatus.DECIDED, CommitStatus.NOT_GRANTED
SAME, DIFFERENT = CommitStatus.EXISTS_SAME, CommitStatus.EXISTS_DIFFERENT


@pytest.fixture
def kit() -> Kit:
    return make_kit()


def test_spares_are_a_grant_of_their_own(kit: Kit) -> None:
    free = free_units(kit)
    put, spares = kit.start_spares(10, 1000)
    assert put.statuses == [PutStatus.GRANTED]
    assert spares.reply.grant_id not in (0, put.reply.grant_id)
    extents = [spares.extents[i][0] for i in range(10)]
    assert {length for *_, length in extents} == {1000}
    offsets = [offset for _, _, offset, _ in extents]
    assert [b - a for a, b in itertools.pairwise(offsets)] == [KIB] * 9
    assert len({slot for _, slot, *_ in extents}) == 10
    assert free_units(kit) == free - 11 * KIB // UNIT_BYTES
    assert granted_bytes(kit) == 11 * KIB
    assert grants(kit) == 2
    check(kit.state)


@pytest.mark.parametrize(
    ("spare_bytes", "given"),
    [(0, 0), (1, 1), (64, 1), (65, 2), (SPARE_BYTES_MAX, 4096), (SPARE_BYTES_MAX + 1, 0)],
)
def test_only_small_extents_are_spared(spare_bytes: int, given: int) -> None:
    kit = make_kit(64 * MIB)
    put = kit.start([1], spare_count=1, spare_bytes=spare_bytes)
    assert granted_bytes(kit) == KIB + given * UNIT_BYTES
    assert (put.reply.spare_grant_id > 0) == (given > 0)
    check(kit.state)


@pytest.mark.parametrize("asked", [1, SPARES_MAX, SPARES_MAX + 1, (1 << 32) - 1])
def test_so_many_at_most_are_in_one_grant(asked: int) -> None:
    kit = make_kit(64 * MIB, nodes=1)
    segment = pool_of(kit.state).segments.by_id[1]
    segment.slots.total = 100_000
    kit.nodes[1].segments[0].slots = 100_000
    _, spares = kit.start_spares(asked, 64)
    assert len(spares.keys) == min(asked, SPARES_MAX)
    check(kit.state)


def test_a_request_for_none_gets_none(kit: Kit) -> None:
    assert kit.start([1], spare_bytes=100).reply.spare_grant_id == 0
    assert grants(kit) == 1


def test_they_are_a_small_part_of_the_smallest_segment() -> None:
    kit = make_kit(4 * MIB)
    kit.with_nodes(new_node(2, 1 * MIB))
    for _ in range(6):  # wherever they lie
        _, spares = kit.start_spares(1000, 64, keys=[kit.requests + 100])
        most = pool_of(kit.state).segments.by_id[2].capacity_units // 64
        assert most - 16 < len(spares.keys) <= 256  # some of it became slots meanwhile
    check(kit.state)


def test_they_are_a_small_part_of_what_is_free() -> None:
    kit = make_kit(1 * MIB, session_granted_share_max=1.0)
    used = MIB - 16 * KIB
    assert kit.start([1], used).statuses == [PutStatus.GRANTED]
    _, spares = kit.start_spares(1000, 64)
    assert len(spares.keys) == (16 * KIB - 64) // UNIT_BYTES // 8
    check(kit.state)


def test_they_never_cost_an_object() -> None:
    """In a pool that is full nothing is evicted for them."""
    kit = make_kit(1 * MIB)
    for first in range(0, 2000, 100):
        kit.put(list(range(first, first + 100)), KIB)
    assert kit.state.counters.evicted > 0
    kit.remove(*range(1900, 1950))
    for i in range(50):  # of keys that exist: whatever is evicted is evicted for spares
        evicted = kit.state.counters.evicted
        put, spares = kit.start_spares(1000, 64, keys=[1999], session=1 + i % 2)
        assert put.statuses == [PutStatus.EXISTS]
        assert kit.state.counters.evicted == evicted
        if not spares.keys:
            break
    assert i > 2
    check(kit.state)


def test_a_segment_of_large_units_gives_no_more_bytes() -> None:
    """An extent takes whole units of its segment, and it is these that count."""
    node = new_node(1, 4 * MIB, slots=4096)
    node.segments[0].unit_bytes = 4096
    kit = Kit().with_nodes(node).with_session()
    put, spares = kit.start_spares(1000, 64)
    assert 0 < granted_bytes(kit) - 4096 <= 4 * MIB // 64
    assert len(spares.keys) == 16
    assert kit.commit_spares(spares, [0], [1], 64) == [DECIDED]
    assert kit.commit_spares(spares, [1, 2], [2, 3], 50) == [DECIDED] * 2
    abort(kit, spares)
    kit.commit(put)
    assert granted_bytes(kit) == 0
    assert [hit and hit.size for hit in kit.get(1, 2, 3)] == [64, 50, 50]
    check(kit.state)


def test_they_leave_slots_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot numbers are for objects that are there."""
    monkeypatch.setattr("cenote.master.segments.Segment.grow_slots", lambda *_: None)
    kit = make_kit(64 * MIB)
    segment = pool_of(kit.state).segments.by_id[1]
    for i in range(20):
        free = max(0, segment.slots.free - 1)
        _, spares = kit.start_spares(4096, 64, keys=[i], session=1 + i % 2)
        assert len(spares.keys) <= free // 2
    assert kit.state.counters.slots_grown == 0
    check(kit.state)


def test_a_sessions_quota_holds_for_spares_too() -> None:
    kit = make_kit(1 * MIB, session_granted_share_max=0.02)
    cap = int(MIB // UNIT_BYTES * 0.02)
    for i in range(30):
        kit.start_spares(1000, 64, keys=[i])
        assert granted_bytes(kit) <= cap * UNIT_BYTES
    assert kit.start_spares(1000, 64, keys=[99], session=2)[1].keys
    check(kit.state)


def test_a_session_without_room_for_another_grant_gets_none() -> None:
    kit = make_kit(session_grants_max=3)
    _, first = kit.start_spares(5, keys=[1])
    put, none = kit.start_spares(5, keys=[2])
    assert len(first.keys) == 5
    assert put.statuses == [PutStatus.GRANTED]
    assert none.keys == []
    kit.commit(put)
    assert len(kit.start_spares(5, keys=[2])[1].keys) == 5  # the key exists: no grant for it
    check(kit.state)


def test_while_a_node_is_suspected_there_are_none() -> None:
    kit = make_kit(nodes=2)
    kit.apply(c.ReportFailure(kit.nodes[1].node_id, session_id(1), "timeout"))
    put, spares = kit.start_spares(5)
    assert put.statuses == [PutStatus.GRANTED]
    assert spares.keys == []


def test_a_table_that_is_nearly_full_gives_few() -> None:
    kit = make_kit(64 * MIB, objects_max=100)
    kit.put(list(range(49)), 64)
    put, spares = kit.start_spares(1000, 64)
    assert len(spares.keys) == 25  # half of what is left
    kit.commit(put)
    assert kit.commit_spares(spares, range(25), range(100, 125), 64) == [DECIDED] * 25
    kit.put(list(range(200, 300)), 64)
    assert kit.state.status(kit.now_s).objects <= 100
    for i in range(20):
        kit.start_spares(1000, 64, keys=[400 + i])
        assert pool_of(kit.state).objects.used_rows + pool_of(kit.state).grants.keys <= 100
    check(kit.state)


def test_without_a_node_there_are_none() -> None:
    kit = Kit().with_session()
    put, spares = kit.start_spares(5)
    assert put.statuses == [PutStatus.REPLICAS_UNAVAILABLE]
    assert spares.keys == []


def test_an_object_of_nearly_the_whole_share_is_let_through_beside_spares() -> None:
    """What one session may have under way holds for objects; where there is none the first one is
    let through, however large, and what was granted ahead is none."""
    kit = make_kit(1 * MIB, session_granted_share_max=0.5)
    assert kit.start([1], 700 * KIB).statuses == [PutStatus.GRANTED]
    kit = make_kit(1 * MIB, session_granted_share_max=0.5)
    put, spares = kit.start_spares(16)
    kit.commit(put)
    assert spares.keys
    assert kit.start([1], 700 * KIB).statuses == [PutStatus.GRANTED]
    assert kit.start([2], 700 * KIB).statuses == [PutStatus.QUOTA_EXCEEDED]
    check(kit.state)
