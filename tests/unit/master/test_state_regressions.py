"""Bugs that the simulator found in the master's state, each in its smallest form."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import NodeNameTaken, NodeSuperseded
from cenote.api.rows import CommitStatus
from cenote.master import commands as c
from cenote.master.effects import NodeServes
from cenote.master.node_counters import NodeCounters
from cenote.master.nodes import NodeState
from cenote.master.state import MasterState
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
    kit.restart_node(node)
    late = c.Heartbeat(node.node_id, 1, [(0, old.size_bytes)], 0, [], [], NodeCounters(), 0)
    with pytest.raises(NodeSuperseded):
        kit.apply(late)
    (segment,) = kit.state.segments(kit.now_s)
    assert segment.ready_bytes == old.size_bytes // 2


def test_an_attach_of_a_process_that_is_gone_changes_nothing() -> None:
    """What was sealed since is not in it, and would be dropped."""
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    late = kit.attach_command(node)
    kit.restart_node(node)
    kit.put([1])
    with pytest.raises(NodeSuperseded, match="start 0 of node"):
        kit.apply(late)
    assert kit.exists(1) == [1]
    check(kit.state)


def test_a_detach_of_a_process_that_is_gone_changes_nothing() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    kit.put([1])
    kit.restart_node(node)
    with pytest.raises(NodeSuperseded):
        kit.apply(c.Detach(node.node_id, contents_survive=False, start_number=0))
    assert kit.exists(1) == [1]


def test_an_attach_that_is_read_after_its_processs_farewell_is_refused() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    kit.restart_node(node)
    late = kit.attach_command(node)
    kit.apply(c.Detach(node.node_id, contents_survive=True, start_number=node.start_number))
    with pytest.raises(NodeSuperseded):
        kit.apply(late)
    kit.restart_node(node)
    assert kit.state.nodes(kit.now_s)[0].state == NodeState.ALIVE


def test_a_restarted_daemon_learns_what_it_must_not_seal_and_whom_it_must_not_let_in() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    node = kit.nodes[1]
    put = kit.start([1, 2])
    kit.commit(put, seal=False)
    granted = kit.start([3])
    reply = kit.restart_node(node)
    assert reply.dropped == 2
    assert reply.last_seq == kit.state.last_seq == 2
    assert reply.first_grant_id > granted.reply.grant_id
    # The same process attaches again: nothing of what it is about to seal was dropped.
    later = kit.start([4])
    assert later.reply.grant_id == reply.first_grant_id
    kit.commit(later, seal=False)
    again = kit.attach(node)
    assert (again.dropped, again.last_seq) == (0, reply.last_seq)
    assert again.first_grant_id == reply.first_grant_id


def test_a_second_daemon_of_a_name_is_told_of_the_first() -> None:
    kit = Kit().with_nodes(new_node(1))
    first, second = kit.nodes[1], new_node(2, boot_id="elsewhere")
    second.name = first.name = "rack-7"
    kit.restart_node(first)
    with pytest.raises(NodeNameTaken, match=r"node 1, called 'rack-7', is alive: process 2"):
        kit.attach(second)
    copy = kit.attach_command(first)
    copy.process_id = 99
    with pytest.raises(NodeNameTaken, match="has the same files, or a copy"):
        kit.apply(copy)
    kit.tick(kit.state.config.node_dead_s)
    kit.attach(second)
    assert [node.name for node in kit.state.nodes(kit.now_s)] == ["rack-7", "rack-7"]


def test_where_a_node_serves_is_known_before_it_attaches_again() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put([1])
    (before,) = kit.state.nodes(kit.now_s)
    moved = kit.attach_command(kit.nodes[1])
    moved.endpoints = [c.EndpointInfo(1, "127.0.0.1:9", b"nic")]
    kit.apply(moved)
    kit.attach(kit.nodes[1])
    kit.attach(kit.nodes[1])
    assert len(kit.new(NodeServes)) == 3, "told when it changes, and only then"
    for effects in (kit.durable(), list(kit.state.snapshot())):
        after = MasterState(kit.state.config, 2)
        for effect in effects:
            after.replay(effect)
        after.start(kit.now_s)
        (node,) = after.nodes(kit.now_s)
        assert node.endpoints == before.endpoints
        assert not node.attached
