"""Daemons attach, fall silent, come back, lose their contents; replicas and suspicion."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, SessionUnknown, StaleEpoch
from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import (
    DurableEffect,
    Gone,
    GoneReason,
    NodeKnown,
    NodeServes,
    ProbeNode,
    ReplicasChanged,
    SegmentGone,
    SegmentKnown,
    SlotsGrown,
    ViewChanged,
)
from cenote.master.node_counters import NodeCounters
from cenote.master.nodes import NodeState
from cenote.master.state import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, FakeNode, FakeSegment, Kit, new_node, restarted, session_id

GRANTED = PutStatus.GRANTED


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1), new_node(2), new_node(3)).with_session(1)


def quiet(kit: Kit, *silent: int, seconds: float = 6.0) -> None:
    """Time passes; the nodes named say nothing."""
    for _ in range(int(seconds * 2)):
        for number, node in kit.nodes.items():
            if number not in silent:
                kit.heartbeat(node)
        kit.apply(c.RenewSession(session_id(1)))
        kit.tick(0.5)


def test_attaching_is_announced_once(kit: Kit) -> None:
    assert [known.node_id for known in kit.new(NodeKnown)] == [1, 2, 3]
    assert [known.segment_id for known in kit.new(SegmentKnown)] == [1, 2, 3]
    views = [view.view_version for view in kit.new(ViewChanged)]
    assert views == sorted(set(views))
    reply = kit.attach(kit.nodes[2])
    assert (reply.node_id, reply.segment_ids, reply.epoch) == (2, [2], 1)
    assert len(kit.new(NodeKnown)) == len(kit.new(SegmentKnown)) == 3


def test_a_heartbeat_tells_where_a_node_is_served_now(kit: Kit) -> None:
    """A NIC that came up: clients hear of it without an attach, and so does who leads next."""
    node = kit.nodes[2]
    where = [c.EndpointInfo(3, "10.0.0.2:7", b"a port")]
    known = len(kit.new(NodeServes))
    before = kit.state.view_version
    command = c.Heartbeat(node.node_id, 1, [], 0, [], [], NodeCounters(rdma_trouble="no pins"))
    command.endpoints = where
    kit.apply(command)
    [serves] = kit.new(NodeServes)[known:]
    assert (serves.node_id, serves.endpoints) == (2, where)
    assert kit.state.view_version > before
    before = kit.state.view_version
    kit.apply(command)
    assert len(kit.new(NodeServes)) == known + 1
    assert kit.state.view_version == before
    [status] = [n for n in kit.state.nodes(kit.now_s) if n.node_id == 2]
    assert (status.endpoints, status.rdma_trouble) == (where, "no pins")
    assert kit.state.status(kit.now_s).rdma_trouble.endswith(": no pins")


def test_replicas_lie_in_distinct_domains(kit: Kit) -> None:
    put = kit.start([1, 2], replicas=2)
    for position in put.granted:
        assert len({segment for segment, *_ in put.extents[position]}) == 2
    kit.commit(put)
    for hit in kit.get(1, 2):
        assert hit is not None
        assert hit.replicas == 2
        assert [replica for _, replica, *_ in hit.extents].count(0) == 1
    check(kit.state)


def test_fewer_domains_than_replicas() -> None:
    kit = Kit().with_session()
    assert kit.put([1]) == [PutStatus.REPLICAS_UNAVAILABLE]
    nodes = [new_node(1), new_node(2)]
    for node in nodes:
        node.domain = "rack"
    kit.with_nodes(*nodes)
    put = kit.start([1, 2], replicas=2)
    assert list(put.replicas.values()) == [1, 1]
    refused = kit.start([3, 4], replicas=2, min_replicas=2)
    assert refused.statuses == [PutStatus.REPLICAS_UNAVAILABLE] * 2
    check(kit.state)


def test_replicas_max_and_avoided_nodes(kit: Kit) -> None:
    kit.put([1], replicas=3)
    (hit,) = kit.get(1, replicas_max=1)
    assert hit is not None
    assert (hit.replicas, len(hit.extents)) == (1, 1)
    assert hit.extents[0][0] == 1  # the session's own host
    (hit,) = kit.get(1, replicas_max=1, avoid_node_ids=np.array([1], np.uint32))
    assert hit is not None
    assert hit.extents[0][0] != 1
    put = kit.start([5], avoid_node_ids=np.array([1, 2], np.uint32))
    assert put.extents[0][0][0] == 3
    put = kit.start([6, 7], avoid_node_ids=np.array([1, 2, 3], np.uint32))
    assert put.statuses == [PutStatus.REPLICAS_UNAVAILABLE] * 2


def test_local_first(kit: Kit) -> None:
    for key in range(0, 20, 2):
        put = kit.start([key, key + 1], local_first=True)
        assert {segment for extents in put.extents.values() for segment, *_ in extents} == {1}
    put = kit.start([100, 101], local_first=True, replicas=2)
    assert [extents[0][0] for extents in put.extents.values()] == [1, 1]


def test_a_silent_node_is_a_miss_until_it_comes_back(kit: Kit) -> None:
    kit.put([1], replicas=2)
    put = kit.start(list(range(10, 40)))
    kit.commit(put)
    on_two = [put.keys[p] for p, extents in put.extents.items() if extents[0][0] == 2]
    kit.put([50], local_first=False, avoid_node_ids=np.array([1, 3], np.uint32))
    quiet(kit, 2)
    assert kit.state.nodes(kit.now_s)[1].state == NodeState.DEAD
    assert kit.exists(50, 1) == [0, 1]
    assert kit.exists(50) == [0]
    assert kit.get(50) == [None]
    assert kit.get(50, 99) == [None, None]
    assert all(not present for present in kit.exists(*on_two, 99))
    (hit,) = kit.get(1)
    assert hit is not None
    assert all(segment != 2 for segment, *_ in hit.extents)
    assert all(
        segment != 2
        for extents in kit.start(list(range(60, 90)), 64).extents.values()
        for segment, *_ in extents
    )
    kit.heartbeat(kit.nodes[2])
    assert kit.exists(50) == [1]
    check(kit.state)


def test_a_hidden_object_can_be_put_again_and_stays_gone(kit: Kit) -> None:
    kit.put([1], 100, avoid_node_ids=np.array([1, 3], np.uint32))
    kit.put([2, 3], 100, avoid_node_ids=np.array([1, 3], np.uint32))
    quiet(kit, 2)
    assert kit.put([1], 200) == [GRANTED]
    assert kit.put([2, 3], 200) == [GRANTED] * 2
    check(kit.state)
    kit.nodes[2].process_id += 1
    kit.attach(kit.nodes[2])
    assert [hit and hit.size for hit in kit.get(1, 2, 3)] == [200] * 3
    check(kit.state)


def test_a_restart_keeps_what_is_sealed_and_drops_what_is_not(kit: Kit) -> None:
    here = np.array([2, 3], np.uint32)
    kit.put([1, 2], avoid_node_ids=here)
    kit.commit(kit.start([3], avoid_node_ids=here), seal=False)
    kit.put([4], replicas=3)
    node = kit.nodes[1]
    node.segments[0].table = {
        slot: row
        for slot, row in node.segments[0].table.items()
        if row["digest"].tobytes() != kit.digests(4).tobytes()
    }
    node.process_id += 1
    reply = kit.attach(node)
    assert (reply.adopted, reply.dropped) == (0, 1)
    assert kit.exists(1, 2, 3, 4) == [1, 1, 0, 1]
    (hit,) = kit.get(4)
    assert hit is not None
    assert hit.replicas == 2
    assert len(kit.new(ReplicasChanged)) == 1
    assert kit.new(Gone)[-1].reason == GoneReason.LOST
    check(kit.state)


def test_a_lost_heartbeat_costs_nothing_that_is_not_sealed_yet(kit: Kit) -> None:
    kit.commit(kit.start([3], avoid_node_ids=np.array([2, 3], np.uint32)), seal=False)
    quiet(kit, 1)
    assert kit.attach(kit.nodes[1]).dropped == 0
    assert kit.exists(3) == [1]
    check(kit.state)


def test_stale_slots_are_to_be_cleared(kit: Kit) -> None:
    kit.put([1, 2], avoid_node_ids=np.array([2, 3], np.uint32))
    kit.remove(1)
    table = kit.nodes[1].segments[0].table
    assert len(table) == 2
    reply = kit.attach(kit.nodes[1])
    assert len(reply.clear_slots) // 20 == 1
    assert len(table) == 1
    assert kit.exists(2) == [1]


def test_new_contents_are_a_new_segment(kit: Kit) -> None:
    kit.put([1], avoid_node_ids=np.array([2, 3], np.uint32))
    kit.put([2], replicas=3)
    pending = kit.start([5], avoid_node_ids=np.array([2, 3], np.uint32))
    both = kit.start([6, 7], replicas=2, avoid_node_ids=np.array([3], np.uint32))
    lease = kit.acquire(1, 2)
    node = kit.nodes[1]
    node.segments = [FakeSegment(b"fresh", 64 * KIB, 64 * KIB)]
    reply = kit.attach(node)
    assert reply.segment_ids == [4]
    assert [gone.segment_id for gone in kit.new(SegmentGone)] == [1]
    assert kit.exists(1) == [0]
    assert kit.commit(pending) == [CommitStatus.NOT_GRANTED]
    assert kit.commit(both) == [CommitStatus.DECIDED] * 2
    for hit in kit.get(6, 7):
        assert hit is not None
        assert (hit.replicas, hit.extents[0][0]) == (1, 2)
    check(kit.state)
    kit.release(lease)
    check(kit.state)


def test_a_replica_that_was_not_written_is_left_out(kit: Kit) -> None:
    put = kit.start([1, 2], replicas=2)
    failed = np.array([[0, 1], [1, 0], [1, 1], [7, 0]], np.uint32)
    assert kit.commit(put, failed_replicas=failed) == [
        CommitStatus.DECIDED,
        CommitStatus.NOT_GRANTED,
    ]
    (hit,) = kit.get(1)
    assert hit is not None
    assert hit.replicas == 1
    assert kit.state.status(kit.now_s).quarantined_bytes == 3 * KIB
    check(kit.state)
    kit.heartbeats()
    kit.heartbeats()
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    one = kit.start([3], replicas=2)
    kit.commit(one, failed_replicas=np.array([[0, 0]], np.uint32))
    (hit,) = kit.get(3)
    assert hit is not None
    assert (hit.replicas, hit.extents[0][1]) == (1, 1)
    check(kit.state)


def test_detaching(kit: Kit) -> None:
    kit.put([1], avoid_node_ids=np.array([2, 3], np.uint32))
    kit.put([2], avoid_node_ids=np.array([1, 3], np.uint32))
    kit.apply(c.Detach(1, True))
    kit.apply(c.Detach(2, False))
    kit.apply(c.Detach(99, False))
    assert kit.exists(1, 2) == [0, 0]
    with pytest.raises(SessionUnknown, match="attach"):
        kit.heartbeat(kit.nodes[1])
    kit.attach(kit.nodes[1])
    assert kit.exists(1, 2) == [1, 0]
    states = [node.state for node in kit.state.nodes(kit.now_s)]
    assert states == [NodeState.ALIVE, NodeState.DETACHED, NodeState.ALIVE]
    check(kit.state)


def test_heartbeats_of_strangers(kit: Kit) -> None:
    with pytest.raises(SessionUnknown):
        kit.heartbeat(FakeNode(9, [], node_id=9))
    kit.state.epoch = 2
    with pytest.raises(StaleEpoch):
        kit.heartbeat(kit.nodes[1])


def test_a_forgotten_node_is_lost() -> None:
    kit = Kit(StateConfig(node_forget_s=20)).with_nodes(new_node(1), new_node(2)).with_session()
    kit.put([1], avoid_node_ids=np.array([2], np.uint32))
    quiet(kit, 1, seconds=22)
    assert [gone.segment_id for gone in kit.new(SegmentGone)] == [1]
    assert kit.state.status(kit.now_s).objects == 0
    check(kit.state)


def test_a_suspect_is_avoided_by_the_host_that_reported_it(kit: Kit) -> None:
    kit.with_session(2, "host-2")
    kit.put([1], replicas=3)
    state = kit.apply(c.ReportFailure(1, session_id(1), "refused"))
    assert state == NodeState.SUSPECT
    assert kit.new(ProbeNode)[-1].node_id == 1
    assert kit.apply(c.ReportFailure(99, session_id(1), "?")) == NodeState.DETACHED
    (mine,) = kit.get(1)
    (theirs,) = kit.get(1, session=2)
    assert mine is not None
    assert theirs is not None
    assert mine.extents[-1][0] == 1
    assert theirs.extents[0][0] == 2
    for key in range(10, 30):
        assert kit.start([key], 64).extents[0][0][0] != 1
    assert any(kit.start([key], 64, 2).extents[0][0][0] == 1 for key in range(30, 40))
    assert kit.state.nodes(kit.now_s)[0].state == NodeState.SUSPECT
    quiet(kit, seconds=6)
    assert any(kit.start([key], 64).extents[0][0][0] == 1 for key in range(40, 50))
    assert kit.state.nodes(kit.now_s)[0].state == NodeState.ALIVE


def test_reports_that_cannot_be_right(kit: Kit) -> None:
    node = new_node(7)
    for change in (
        {"unit_bytes": 100},
        {"ready_bytes": 1 << 30},
        {"slots": 0},
        {"incarnation": b""},
        {"incarnation": b"inc-1-1"},
    ):
        segment = FakeSegment(b"x", 64 * KIB, 64 * KIB)
        for name, value in change.items():
            setattr(segment, name, value)
        node.segments = [segment]
        with pytest.raises(InvalidArgument):
            kit.attach(node)
    kit.put([1])
    later = next(node for node in kit.nodes.values() if node.segments[0].table)
    for row in later.segments[0].table.values():
        row["epoch"] = 9
    with pytest.raises(StaleEpoch, match="epoch 9"):
        kit.attach(later)
    check(kit.state)


def test_space_grows_as_it_is_backed() -> None:
    node = new_node(1)
    node.segments[0].ready_bytes = 16 * KIB
    kit = Kit(StateConfig(session_granted_share_max=1.0)).with_nodes(node).with_session()
    assert kit.put([1], 32 * KIB) == [PutStatus.NO_SPACE]  # it may fit soon
    node.segments[0].ready_bytes = 64 * KIB
    kit.heartbeat(node)
    assert kit.put([1], 32 * KIB) == [GRANTED]
    assert kit.state.segments(kit.now_s)[0].ready_bytes == 64 * KIB
    check(kit.state)


def test_slots_grow_when_they_run_short() -> None:
    node = new_node(1, 1 << 20, slots=64)
    kit = Kit().with_nodes(node).with_session()
    for start in range(0, 3000, 100):
        assert kit.put(list(range(start, start + 100)), 64) == [GRANTED] * 100
        kit.heartbeat(node)
    assert kit.state.status(kit.now_s).objects == 3000
    grown = kit.new(SlotsGrown)
    assert 2 <= len(grown) < 20
    segment = kit.state.segments(kit.now_s)[0]
    assert segment.slots_used == 3000
    assert segment.slots == grown[-1].slots == node.segments[0].slots
    assert segment.retired_bytes == sum(n for _, n in node.segments[0].retired)
    check(kit.state)
    # A daemon that never heard of the last step is told again.
    node.segments[0].retired.pop()
    node.segments[0].slots = 500
    node.process_id += 1
    kit.attach(node)
    kit.heartbeat(node)
    assert node.segments[0].slots == segment.slots
    check(kit.state)
    # A master that never heard of it learns of it.
    journal: list[DurableEffect] = [e for e in kit.durable() if not isinstance(e, SlotsGrown)]
    fresh = restarted(kit, journal=journal)
    fresh.attach(node)
    assert fresh.state.segments(0)[0].retired_bytes == segment.retired_bytes
    check(fresh.state)


def test_slots_and_space_are_reused_when_neither_is_left() -> None:
    node = new_node(1, 64 * KIB, slots=16)
    kit = Kit().with_nodes(node).with_session()
    for start in range(0, 4000, 50):
        assert kit.put(list(range(start, start + 50)), 64) == [GRANTED] * 50
        kit.heartbeat(node)
    check(kit.state)
