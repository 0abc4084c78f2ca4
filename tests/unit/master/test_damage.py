"""Replicas that are not what was sealed: no lease before they were looked at, then dropped."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cenote.api.rows import OBJECT, SLOT, ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master.nodes import NodeState
from unit.master.state_checks import check
from unit.master.state_kit import FakeNode, Kit, new_node, restarted, session_id
from unit.master.state_replies import read_hits

LEASED, UNLEASED = ObjectStatus.LEASED, ObjectStatus.UNLEASED


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1), new_node(2)).with_session()


def statuses(kit: Kit, *keys: int) -> list[int | None]:
    reply = kit.acquire(*keys, lease=True)
    if reply.lease_id:
        kit.release(reply)
    return [None if hit is None else hit.status for hit in read_hits(reply)]


def slots_of(kit: Kit, node: FakeNode, *keys: int) -> NDArray[np.void]:
    """The node's slots of these keys."""
    wanted = {kit.digests(key).tobytes() for key in keys}
    rows = node.inventory()
    return rows[[row["digest"].tobytes() in wanted for row in rows]]


def restart(kit: Kit, number: int, *, unverified: bool) -> None:
    node = kit.nodes[number]
    node.process_id += 1
    node.segments[0].unverified = unverified
    kit.attach(node)


def test_nobody_gets_a_lease_on_what_was_not_looked_at(kit: Kit) -> None:
    assert kit.put([1, 2], replicas=2) == [PutStatus.GRANTED] * 2
    kit.put([3], avoid_node_ids=np.array([1], np.uint32))
    kit.put([4], avoid_node_ids=np.array([2], np.uint32))
    assert statuses(kit, 1, 2, 3, 4) == [LEASED] * 4
    restart(kit, 1, unverified=True)
    assert statuses(kit, 1, 2, 3, 4) == [UNLEASED, UNLEASED, LEASED, UNLEASED]
    assert statuses(kit, 4) == [UNLEASED]
    assert statuses(kit, 3) == [LEASED]
    assert statuses(kit, 1, 1, 9) == [UNLEASED, UNLEASED, None]
    assert kit.exists(1, 2, 3, 4) == [1] * 4
    kit.nodes[1].segments[0].unverified = False
    kit.heartbeat(kit.nodes[1])
    assert statuses(kit, 1, 2, 3, 4) == [LEASED] * 4
    assert statuses(kit, 4) == [LEASED]
    check(kit.state)


def test_nobody_gets_a_lease_on_what_a_new_leaders_daemons_have_not_brought_yet(kit: Kit) -> None:
    """Whether they have looked at it they tell when they attach."""
    kit.put([1], avoid_node_ids=np.array([2], np.uint32))
    kit.put([2], avoid_node_ids=np.array([1], np.uint32))
    kit.put([3], replicas=2)
    after = restarted(kit)
    after.restart_node(kit.nodes[1])
    after.with_session()
    assert statuses(after, 1, 2, 3) == [LEASED, UNLEASED, UNLEASED]
    assert statuses(after, 2) == [UNLEASED]
    kit.nodes[2].segments[0].unverified = True
    after.restart_node(kit.nodes[2])
    assert statuses(after, 1, 2, 3) == [LEASED, UNLEASED, UNLEASED]
    kit.nodes[2].segments[0].unverified = False
    after.heartbeat(kit.nodes[2])
    assert statuses(after, 1, 2, 3) == [LEASED] * 3


def test_a_damaged_replica_is_dropped(kit: Kit) -> None:
    kit.put([1, 2], replicas=2)
    kit.put([3], avoid_node_ids=np.array([2], np.uint32))
    damaged = slots_of(kit, kit.nodes[1], 1, 3)
    assert len(damaged) == 2
    for _ in range(2):  # told twice
        kit.heartbeat(kit.nodes[1], damaged=damaged)
        assert kit.exists(1, 2, 3) == [1, 1, 0]
        (hit,) = kit.get(1)
        assert hit is not None
        assert (hit.replicas, hit.extents[0][0]) == (1, 2)
        assert kit.state.counters.damaged == 2
    assert kit.put([3]) == [PutStatus.GRANTED]
    check(kit.state)


def test_stale_slots_say_nothing(kit: Kit) -> None:
    kit.put([1], avoid_node_ids=np.array([2], np.uint32))
    stale = slots_of(kit, kit.nodes[1], 1)
    kit.remove(1)
    kit.put([1], avoid_node_ids=np.array([2], np.uint32))
    other = stale.copy()
    other["slot"] += 7
    other["seq"] = slots_of(kit, kit.nodes[1], 1)["seq"].max()
    for rows in (stale, other, np.zeros(3, SLOT)):
        kit.heartbeat(kit.nodes[1], damaged=rows)
    assert kit.exists(1) == [1]
    assert kit.state.counters.damaged == 0


def test_a_damaged_object_under_lease_goes_as_a_whole(kit: Kit) -> None:
    kit.put([1], replicas=2)
    lease = kit.acquire(1, lease=True)
    assert lease.lease_id
    kit.heartbeat(kit.nodes[1], damaged=slots_of(kit, kit.nodes[1], 1))
    assert kit.exists(1) == [0]
    assert kit.state.status(kit.now_s).condemned_bytes > 0
    kit.release(lease)
    assert kit.state.status(kit.now_s).condemned_bytes == 0
    check(kit.state)


def misread(kit: Kit, node_id: int, *keys: int) -> None:
    objects = np.frombuffer(kit.acquire(*keys, lease=False).objects, OBJECT)
    kit.apply(c.ReportFailure(node_id, session_id(1), "wrong bytes", kit.digests(*keys), objects))


def test_what_a_reader_misread_is_dropped_and_its_node_is_no_suspect(kit: Kit) -> None:
    kit.put([1, 2], replicas=2)
    misread(kit, 1, 1)
    assert kit.exists(1, 2) == [1, 1]
    (one, two) = kit.get(1, 2)
    assert one is not None
    assert two is not None
    assert (one.replicas, two.replicas) == (1, 2)
    misread(kit, 2, 1)
    assert kit.exists(1, 2) == [0, 1]
    assert kit.state.counters.damaged == 2
    assert [node.state for node in kit.state.nodes(kit.now_s)] == [NodeState.ALIVE] * 2
    check(kit.state)


def test_a_misread_of_another_version_says_nothing(kit: Kit) -> None:
    kit.put([1])
    objects = np.frombuffer(kit.acquire(1, lease=False).objects, OBJECT).copy()
    objects["seq"] += 1
    for node_id in (1, 2):
        kit.apply(c.ReportFailure(node_id, session_id(1), "?", kit.digests(1), objects))
    assert kit.exists(1) == [1]


def test_what_was_decided_and_not_sealed_is_taken_back(kit: Kit) -> None:
    kit.commit(kit.start([1, 2, 3]), seal=False)
    hits = kit.get(1, 2, 3)
    seqs = [hit.seq for hit in hits if hit is not None]
    abort = c.PutAbort(
        session_id(1),
        0,
        unsealed=kit.digests(1, 2, 9),
        unsealed_seqs=np.array([seqs[0], seqs[1] + 100, 5], np.uint64),
        unsealed_epoch=1,
    )
    for _ in range(2):
        kit.apply(abort)
        assert kit.exists(1, 2, 3) == [0, 1, 1]
    assert kit.state.counters.unsealed == 1
    assert kit.put([1, 2]) == [PutStatus.GRANTED, PutStatus.UNSEALED]
    kit.apply(abort)  # another version stands there by now
    assert kit.exists(1) == [1]
    check(kit.state)
