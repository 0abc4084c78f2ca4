"""Bugs that the simulator found in the master's state, each in its smallest form."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import SessionUnknown
from cenote.api.rows import CommitStatus
from cenote.master import commands as c
from cenote.master.state_config import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, FakeSegment, Kit, new_node, session_id


def test_a_batch_with_a_present_and_a_hidden_key_replaces_the_hidden_one() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put([1, 2])
    kit.apply(c.Detach(kit.nodes[1].node_id, contents_survive=True))
    kit.with_nodes(new_node(2))
    kit.put([3])
    put = kit.start([3, 1])
    assert put.granted == [1]
    assert kit.commit(put) == [CommitStatus.DECIDED]
    check(kit.state)
    kit.attach(kit.nodes[1])
    assert kit.exists(1, 2, 3) == [1, 1, 1]
    check(kit.state)


def test_an_extent_that_holds_only_the_keys_tail_is_not_located() -> None:
    kit = Kit(StateConfig(pinned_share_max=1.0, reserve_share=0.0))
    kit.with_nodes(new_node(1, 64 * KIB)).with_session()
    for key in range(8):
        kit.put([key], 8 * KIB)
    assert kit.exists(*range(8)) == [1] * 8
    kit.remove(1, 3, 5)
    kit.apply(c.Pin(*kit.place, kit.digests(0, 2, 4, 6, 7), 0))
    tails = np.array([90], np.uint16)
    put = kit.start([20], 16 * KIB, tail_lengths=tails)
    assert [length for *_, length in put.extents[0]] == [8 * KIB, 8 * KIB, 90]
    kit.commit(put)
    (hit,) = kit.get(20)
    assert hit is not None
    assert [length for *_, length in hit.extents] == [8 * KIB, 8 * KIB]


def test_a_leased_object_survives_the_loss_of_one_of_its_replicas() -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    kit.put([1], replicas=2)
    lease = kit.acquire(1)
    kit.apply(c.Detach(kit.nodes[1].node_id, contents_survive=False))
    check(kit.state)
    (hit,) = kit.get(1)
    assert hit is not None
    assert [segment for segment, *_ in hit.extents] == [kit.nodes[2].segments[0].segment_id]
    kit.release(lease)
    check(kit.state)
    assert kit.exists(1) == [1]


def test_a_restarted_daemon_is_told_again_whom_to_cut_off() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    put = kit.start([1])
    kit.apply(c.PutAbort(session_id(1), put.reply.grant_id, unfenced=True))
    assert [i.cut_sessions for i in kit.heartbeat(node)] == [[session_id(1)]]
    node.cut.clear()  # the session could not be cut off yet ...
    kit.heartbeat(node)
    assert kit.state.status(kit.now_s).quarantined_bytes > 0
    node.process_id += 1  # ... and the process that knew of it is gone
    node.done_instruction = 0
    kit.attach(node)
    assert [i.cut_sessions for i in kit.heartbeat(node)] == [[session_id(1)]]
    kit.heartbeat(node)
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    check(kit.state)


@pytest.mark.parametrize("reset", [False, True])
def test_what_a_loser_failed_to_write_is_not_free(reset: bool) -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session(1).with_session(2, "host-2")
    put = kit.start([1], replicas=2)
    if reset:
        kit.apply(c.ResetNamespace("a", 7))
    else:
        kit.put([1], session=2)
    failed = np.array([[0, 0]], np.uint32)
    (status,) = kit.commit(put, failed_replicas=failed)
    assert status == (CommitStatus.NOT_GRANTED if reset else CommitStatus.EXISTS_SAME)
    check(kit.state)
    assert kit.state.status(kit.now_s).quarantined_bytes == KIB
    kit.heartbeats()
    kit.heartbeats()
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    check(kit.state)


def test_a_leased_object_survives_a_replica_that_was_never_sealed() -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    kit.put([1], replicas=2)
    node = kit.nodes[1]
    node.segments[0].table.clear()
    lease = kit.acquire(1)
    node.process_id += 1
    assert kit.attach(node).dropped == 0
    check(kit.state)
    assert kit.exists(1) == [1]
    kit.release(lease)
    node.process_id += 1
    kit.attach(node)
    check(kit.state)
    (hit,) = kit.get(1)
    assert hit is not None
    assert [segment for segment, *_ in hit.extents] == [kit.nodes[2].segments[0].segment_id]


def test_a_heartbeat_of_a_process_that_is_gone_is_not_believed() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    old = node.segments[0]
    node.segments = [FakeSegment(b"fresh", old.size_bytes, old.size_bytes // 2)]
    node.process_id += 1
    kit.attach(node)
    late = c.Heartbeat(
        node.node_id, 1, [(0, old.size_bytes)], 0, [], [], c.NodeCounters(), [old.incarnation]
    )
    with pytest.raises(SessionUnknown):
        kit.apply(late)
    (segment,) = kit.state.segments(kit.now_s)
    assert segment.ready_bytes == old.size_bytes // 2
