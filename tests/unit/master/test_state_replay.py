"""Rebuilding: journal, snapshot, and what daemons bring that the journal missed."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import InternalError, StaleEpoch
from cenote.api.rows import SLOT_REF, PutStatus
from cenote.master import commands as c
from cenote.master.adoption import AdoptionLog
from cenote.master.effects import (
    DurableEffect,
    EpochStarted,
    Gone,
    ReplicasChanged,
    SegmentKnown,
    Stored,
)
from cenote.master.journal import RecordWriter, SnapshotEnd, read_entries
from cenote.master.spans import to_placed
from cenote.master.state import MasterState, StateConfig
from unit.master.state_checks import check, contents
from unit.master.state_kit import KIB, Kit, new_node, restarted, session_id

GRANTED = PutStatus.GRANTED
ONLY_ONE = np.array([2, 3], np.uint32)


@pytest.fixture
def kit() -> Kit:
    kit = Kit().with_nodes(new_node(1), new_node(2), new_node(3)).with_session(1)
    kit.put([1, 2, 3], 500)
    kit.put([4], 100, replicas=2)
    kit.put([5], 90 * KIB)
    kit.apply(c.Pin(*kit.place, kit.digests(1), 0))
    kit.apply(c.Pin(*kit.place, kit.digests(2), 60_000))
    kit.remove(3, 77)
    return kit


def attached(kit: Kit, fresh: Kit, *numbers: int) -> Kit:
    for number in numbers or tuple(kit.nodes):
        fresh.attach(kit.nodes[number])
    return fresh.with_session(1)


@pytest.mark.parametrize("snapshot", [False, True])
def test_everything_durable_is_rebuilt(kit: Kit, snapshot: bool) -> None:
    journal = list(kit.state.snapshot()) if snapshot else kit.durable()
    fresh = restarted(kit, journal=journal)
    assert contents(fresh.state) == contents(kit.state)
    assert fresh.state.last_seq == kit.state.last_seq
    # Readable at once, whoever has attached.
    assert fresh.exists(1, 2, 3, 4, 5) == [1, 1, 0, 1, 1]
    check(fresh.state)
    attached(kit, fresh)
    assert fresh.exists(1, 2, 3, 4, 5) == [1, 1, 0, 1, 1]
    check(fresh.state)
    assert fresh.state.status(fresh.now_s).pinned_objects == 2
    for _ in range(30):
        fresh.heartbeats()
        fresh.tick(3)
    assert fresh.state.status(fresh.now_s).pinned_objects == 1
    fresh.with_session(1)
    fresh.put([10])
    (hit,) = fresh.get(10)
    assert hit is not None
    assert (hit.epoch, hit.seq) == (2, kit.state.last_seq + 1)


def test_replaying_twice_changes_nothing(kit: Kit) -> None:
    state = MasterState(StateConfig(), 2)
    for effect in [*kit.durable(), *kit.durable(), *kit.state.snapshot()]:
        state.replay(effect)
    assert contents(state) == contents(kit.state)
    check(state)


def test_of_changes_that_are_read_as_one_the_last_counts(kit: Kit) -> None:
    """Copied to another place, and gone from the first, with nothing between in the journal."""
    pool = kit.state._pool
    row = pool.objects.lookup(kit.digests(4))
    _, spans = pool.spans_of(row)
    assert len(spans) == 2
    kit.put([6], 100, replicas=2)
    journal = kit.durable()

    def changed(key: int, *kept: int) -> ReplicasChanged:
        row = pool.objects.lookup(kit.digests(key))
        placed = to_placed(pool.spans_of(row)[1][list(kept)])
        counts = np.array([len(kept)])
        return ReplicasChanged(
            pool.digests_of(row),
            pool.seqs_of(row),
            counts.astype(np.uint16),
            counts.astype(np.uint8),
            placed,
        )

    journal += [changed(4, 0, 1), changed(6, 1), changed(4, 0), changed(6, 0, 1), changed(4, 0, 1)]
    writer = RecordWriter(1, 1)
    for effect in journal:
        writer.add(effect)
    read = [e for e in read_entries(writer.take()) if not isinstance(e, SnapshotEnd)]
    assert len(read) < len(journal), "they were joined"
    state = MasterState(StateConfig(), 2)
    for effect in read:
        state.replay(effect)
    assert contents(state) == contents(kit.state)
    check(state)


def test_the_order_of_use_survives_a_snapshot(kit: Kit) -> None:
    kit = Kit().with_nodes(new_node(1, 32 * KIB)).with_session()
    for key in range(16):
        kit.put([key], 2 * KIB)
    kit.get(*range(8))
    fresh = attached(kit, restarted(kit, journal=list(kit.state.snapshot())))
    for key in range(100, 107):
        fresh.put([key], 2 * KIB)
    assert fresh.exists(*range(16))[:8] == [1] * 8


def test_snapshots_come_in_chunks_and_notice_changes(kit: Kit) -> None:
    kit = Kit().with_nodes(new_node(1, 1 << 20, slots=20_000)).with_session()
    for start in range(0, 9000, 500):
        kit.put(list(range(start, start + 500)), 1)
    effects = list(kit.state.snapshot())
    chunks = [len(e.digests) for e in effects if isinstance(e, Stored)]
    assert chunks == [8192, 808]
    running = kit.state.snapshot()
    next(running)
    kit.remove(1)
    with pytest.raises(InternalError):
        list(running)


def test_epochs_only_go_up(kit: Kit) -> None:
    state = MasterState(StateConfig(), 1)
    for effect in kit.durable():
        state.replay(effect)
    assert state.replayed_epoch == 1
    with pytest.raises(StaleEpoch):
        state.start(0.0)
    with pytest.raises(InternalError):
        kit.state.replay(EpochStarted(9, 9))


def test_leases_of_an_earlier_tenure_are_not_waited_for(kit: Kit) -> None:
    kit.acquire(1, ttl_ms=10_000)
    fresh = attached(kit, restarted(kit)).with_session(1)
    assert fresh.put([50]) == [GRANTED]


def test_a_node_that_does_not_come_back_is_hidden(kit: Kit) -> None:
    kit.put([20], avoid_node_ids=ONLY_ONE)
    fresh = attached(kit, restarted(kit), 2, 3)
    assert fresh.exists(20) == [1]
    for _ in range(6):
        fresh.heartbeat(kit.nodes[2])
        fresh.heartbeat(kit.nodes[3])
        fresh.tick(1)
    assert fresh.exists(20) == [0]
    attached(kit, fresh, 1)
    assert fresh.exists(20) == [1]
    check(fresh.state)


# ---- adoption -------------------------------------------------------------------------------


def crashed(kit: Kit, before: int, **changes: float) -> Kit:
    """The journal has only the first `before` durable effects."""
    return restarted(kit, journal=kit.durable()[:before], **changes)


def test_what_the_journal_missed_comes_back_with_its_daemon(kit: Kit) -> None:
    kit.remove(5)  # it fills two nodes
    journaled = len(kit.durable())
    kit.put([10, 11, 12], 700, avoid_node_ids=ONLY_ONE)
    kit.put([13], 700, replicas=3)
    kit.commit(kit.start([14], avoid_node_ids=ONLY_ONE), seal=False)
    fresh = crashed(kit, journaled)
    assert fresh.exists(10, 11, 12, 13, 14) == [0] * 5
    reply = fresh.attach(kit.nodes[1])
    assert (reply.adopted, reply.dropped) == (4, 0)
    attached(kit, fresh, 2, 3)
    assert fresh.exists(10, 11, 12, 13, 14) == [1, 1, 1, 1, 0]
    old, new = contents(kit.state), contents(fresh.state)
    for key in (10, 11, 12, 13):
        digest = kit.digests(key).tobytes()
        assert new[digest] == old[digest]
    assert len(fresh.new(ReplicasChanged)) == 2
    check(fresh.state)
    again = restarted(fresh)
    assert contents(again.state) == contents(fresh.state)


@pytest.mark.parametrize("snapshot", [False, True], ids=["journal", "snapshot"])
def test_what_one_daemon_brought_back_says_nothing_of_another(kit: Kit, snapshot: bool) -> None:
    """Adopting a later version is not knowing of the earlier ones: a third master takes those in,
    too, when their daemon attaches at last."""
    journaled = len(kit.durable())
    elsewhere = np.array([1, 3], np.uint32)
    kit.put([10], 700, avoid_node_ids=elsewhere)
    kit.put([11], 700, avoid_node_ids=ONLY_ONE)
    fresh = crashed(kit, journaled)
    attached(kit, fresh, 1)
    assert fresh.exists(10, 11) == [0, 1]
    again = restarted(fresh, journal=list(fresh.state.snapshot()) if snapshot else None)
    attached(kit, again, 1, 2)
    assert again.exists(10, 11) == [1, 1]
    check(again.state)


@pytest.mark.parametrize("snapshot", [False, True], ids=["journal", "snapshot"])
def test_what_was_adopted_and_evicted_is_not_adopted_again(snapshot: bool) -> None:
    """Its slot is still there, its space was given to a writer that died before it sealed anything:
    a third master must not take that slot for one that the journal missed."""
    kit = Kit().with_nodes(new_node(1, 32 * KIB)).with_session()
    journaled = len(kit.durable())
    kit.put([10], 700)
    fresh = crashed(kit, journaled)
    attached(kit, fresh, 1)
    assert fresh.exists(10) == [1]
    for key in range(100, 120):
        fresh.commit(fresh.start([key], 4 * KIB), seal=False)
    assert fresh.exists(10) == [0]
    again = restarted(fresh, journal=list(fresh.state.snapshot()) if snapshot else None)
    reply = again.attach(kit.nodes[1])
    assert (reply.adopted, len(reply.clear_slots)) == (0, SLOT_REF.itemsize)
    assert again.exists(10) == [0]
    check(again.state)


def test_who_compacts_takes_no_adopted_seq_for_one_of_the_last_epoch(kit: Kit) -> None:
    """What was adopted may have later seqs, of an epoch before, than the journal has of this one:
    what it missed of this one has not become known by that."""
    journaled = len(kit.durable())
    kit.put(list(range(10, 30)), 700)
    fresh = crashed(kit, journaled)
    attached(kit, fresh)
    assert all(fresh.exists(*range(10, 30)))
    durable = fresh.durable()
    fresh.put([50], 700)
    assert fresh.state.last_seq < kit.state.last_seq
    compactor = Kit(epoch=fresh.state.epoch)
    for effect in durable:
        compactor.state.replay(effect)
    again = restarted(fresh, journal=list(compactor.state.snapshot()))
    attached(kit, again)
    assert again.exists(50) == [1]
    check(again.state)


@pytest.mark.parametrize("snapshot", [False, True], ids=["journal", "snapshot"])
def test_what_was_put_since_the_last_attach_is_adopted(snapshot: bool) -> None:
    """That a daemon's slots were gone through before says nothing of those that came later."""
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    fresh = restarted(kit, journal=list(kit.state.snapshot()) if snapshot else None)
    attached(kit, fresh)
    journaled = len(fresh.durable())
    fresh.put([10], 700)
    again = restarted(fresh, journal=fresh.durable()[:journaled])
    attached(kit, again)
    assert again.exists(10) == [1]
    check(again.state)


def test_a_replica_is_adopted_whole_or_not_at_all(kit: Kit) -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    journaled = len(kit.durable())
    for start in range(0, 14, 7):
        kit.put(list(range(start, start + 7)), 4 * KIB)
    kit.remove(*range(0, 14, 2))
    kit.apply(c.Pin(*kit.place, kit.digests(1, 3), 0))
    put = kit.start([100], 24 * KIB)
    assert len(put.extents[0]) > 1
    kit.commit(put)
    whole = crashed(kit, journaled)
    whole.attach(kit.nodes[1])
    assert whole.exists(100) == [1]
    check(whole.state)
    table = kit.nodes[1].segments[0].table
    slot = put.extents[0][1][1]
    del table[slot]
    part = crashed(kit, journaled)
    reply = part.attach(kit.nodes[1])
    assert part.exists(100) == [0]
    assert len(reply.clear_slots) >= 20 * (len(put.extents[0]) - 1)
    check(part.state)


def test_of_overlapping_slots_the_newer_wins(kit: Kit) -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0)).with_nodes(new_node(1, 16 * KIB))
    kit.with_session()
    journaled = len(kit.durable())
    kit.put([1], 16 * KIB)
    old = dict(kit.nodes[1].segments[0].table)
    kit.remove(1)
    kit.put([2], 16 * KIB)
    table = kit.nodes[1].segments[0].table
    # The old slot is still there under another number.
    table[7] = next(iter(old.values())).copy()
    table[7]["slot"] = 7
    fresh = crashed(kit, journaled)
    fresh.attach(kit.nodes[1])
    assert fresh.exists(1, 2) == [0, 1]
    check(fresh.state)


def test_a_removed_key_never_comes_back(kit: Kit) -> None:
    journaled = len(kit.durable())
    kit.put([10, 11], avoid_node_ids=ONLY_ONE)
    fresh = crashed(kit, journaled).with_session(1)
    assert fresh.remove(10) == [0]
    # ... over another crash, too.
    again = restarted(fresh)
    attached(kit, again, 1)
    assert again.exists(10, 11) == [0, 1]
    from_snapshot = restarted(fresh, journal=list(fresh.state.snapshot()))
    attached(kit, from_snapshot, 1)
    assert from_snapshot.exists(10, 11) == [0, 1]


def test_adoption_ends_some_time(kit: Kit) -> None:
    journaled = len(kit.durable())
    kit.put([10], avoid_node_ids=ONLY_ONE)
    fresh = crashed(kit, journaled, adoption_window_s=5.0)
    fresh.tick(6)
    reply = fresh.attach(kit.nodes[1])
    assert reply.adopted == 0
    assert fresh.exists(10) == [0]


def test_slots_of_a_reset_namespace_are_cleared(kit: Kit) -> None:
    journaled = len(kit.durable())
    kit.put([10], avoid_node_ids=ONLY_ONE)
    reset = Kit()
    fresh = crashed(kit, journaled)
    fresh.namespace = fresh.apply(c.ResetNamespace("a", 5))
    reply = fresh.attach(kit.nodes[1])
    assert reply.adopted == 0
    assert len(reply.clear_slots) > 0
    check(fresh.state)
    check(reset.state)


def test_a_segment_that_the_journal_never_heard_of(kit: Kit) -> None:
    kit = Kit().with_session()
    journaled = len(kit.durable())
    kit.attach(new_node(1))
    kit.put([1, 2])
    fresh = crashed(kit, journaled)
    reply = fresh.attach(kit.nodes[1])
    assert reply.adopted == 2
    assert fresh.exists(1, 2) == [1, 1]
    check(fresh.state)


def test_extents_in_segments_unknown_are_dropped(kit: Kit) -> None:
    journal: list[DurableEffect] = [
        e for e in kit.durable() if not (isinstance(e, SegmentKnown) and e.segment_id == 1)
    ]
    fresh = restarted(kit, journal=journal)
    check(fresh.state)
    for facts in contents(fresh.state).values():
        assert all(extent[0] != 1 for extent in facts[7])  # type: ignore[attr-defined]
    assert any(isinstance(e, Gone) for e in fresh.effects[len(journal) :])


def test_tombstones_are_bounded() -> None:
    log = AdoptionLog(tombstones_max=3)
    log.start(1, 0)
    log.stored(1, 10)
    log.start(2, 10)
    assert log.may_adopt(1, 11, b"a")
    assert not log.may_adopt(1, 10, b"a")
    assert not log.may_adopt(7, 1, b"a")
    log.removed([b"a"], 2)
    assert not log.may_adopt(1, 11, b"a")
    assert log.may_adopt(2, 11, b"a")
    log.removed([b"b", b"c", b"d"], 2)
    assert not log.may_adopt(1, 11, b"x")
    assert log.may_adopt(2, 11, b"x")
    assert not log.tombstones
    for epoch in range(3, 100):
        log.start(epoch, 10)
    assert len(log.known) <= 64


def test_a_master_without_a_past_starts_at_once() -> None:
    state = MasterState(StateConfig(), 1)
    effects = state.start(5.0)
    assert isinstance(effects[0], EpochStarted)
    assert state.start(6.0) == []
    state.apply(c.OpenSession(session_id(1)), 7.0)
