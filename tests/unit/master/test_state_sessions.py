"""Sessions that end well or badly, and what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable, SessionUnknown
from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import InstructionsWaiting
from cenote.master.state import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, FakeSegment, Kit, new_node, session_id

GRANTED = PutStatus.GRANTED


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1), new_node(2)).with_session(1).with_session(2)


def let_run_out(kit: Kit, session: int, *, but: int = 2) -> None:
    for _ in range(4):
        kit.apply(c.RenewSession(session_id(but)))
        for node in kit.nodes.values():
            kit.heartbeat(node, obey=False)
        kit.tick(3)
    assert session_id(session) not in kit.state._pool.sessions.by_id


def quarantined(kit: Kit) -> int:
    return kit.state.status(kit.now_s).quarantined_bytes


def test_orphans_wait_for_their_daemon_and_never_for_time_alone(kit: Kit) -> None:
    put = kit.start([1, 2, 3, 4], 20 * KIB)
    assert put.statuses == [GRANTED] * 3 + [PutStatus.QUOTA_EXCEEDED]
    kit.commit(put, [0])
    nodes = {segment for p in (1, 2) for segment, *_ in put.extents[p]}
    let_run_out(kit, 1)
    assert quarantined(kit) == 40 * KIB
    assert kit.new(InstructionsWaiting)
    check(kit.state)
    for _ in range(10):
        kit.apply(c.RenewSession(session_id(2)))
        for node in kit.nodes.values():
            kit.heartbeat(node, obey=False)
        kit.tick(5)
    assert quarantined(kit) == 40 * KIB
    told = [
        kit.heartbeat(node)[0].cut_sessions for node in kit.nodes.values() if node.number in nodes
    ]
    assert told == [[session_id(1)]] * len(nodes)
    kit.heartbeats()
    assert quarantined(kit) == 0
    assert all(not kit.heartbeat(node) for node in kit.nodes.values())
    check(kit.state)


def test_the_key_of_a_dead_writer_can_be_put_at_once(kit: Kit) -> None:
    kit.start([1])
    let_run_out(kit, 1)
    assert kit.put([1], session=2) == [GRANTED]
    assert kit.exists(1) == [1]


def test_a_commit_after_the_session_ran_out_is_refused(kit: Kit) -> None:
    put = kit.start([1])
    let_run_out(kit, 1)
    with pytest.raises(SessionUnknown):
        kit.commit(put)
    kit.with_session(1)
    assert kit.commit(put) == [CommitStatus.NOT_GRANTED]
    check(kit.state)


def test_orphans_end_with_their_segment(kit: Kit) -> None:
    put = kit.start([1], 20 * KIB)
    let_run_out(kit, 1)
    number = put.extents[0][0][0]
    node = kit.nodes[number]
    node.segments = [FakeSegment(b"new", 64 * KIB, 64 * KIB)]
    node.process_id += 1
    kit.attach(node)
    assert quarantined(kit) == 0
    check(kit.state)


def test_a_restarted_daemon_is_still_to_cut_off(kit: Kit) -> None:
    put = kit.start([1], 20 * KIB)
    let_run_out(kit, 1)
    node = kit.nodes[put.extents[0][0][0]]
    node.process_id += 1
    kit.attach(node)
    assert quarantined(kit) == 20 * KIB
    kit.heartbeat(node)
    kit.heartbeat(node)
    assert quarantined(kit) == 0


def test_an_unfenced_abort_is_an_orphan(kit: Kit) -> None:
    put = kit.start([1, 2], 4 * KIB)
    abort = c.PutAbort(session_id(1), put.reply.grant_id, np.array([0], np.uint32), unfenced=True)
    kit.apply(abort)
    assert quarantined(kit) == 4 * KIB
    assert kit.commit(put, [0, 1]) == [CommitStatus.NOT_GRANTED, CommitStatus.DECIDED]
    kit.heartbeats()
    kit.heartbeats()
    assert quarantined(kit) == 0
    check(kit.state)


def test_a_hold_of_a_dead_session_waits_for_all_its_daemons(kit: Kit) -> None:
    kit.put([1], replicas=2)
    kit.put([2])
    kit.acquire(1, 2, hold=True)
    kit.acquire(2, hold=False, ttl_ms=1000)
    kit.remove(1)
    let_run_out(kit, 1)
    assert kit.state.status(kit.now_s).leases == 1
    assert kit.state.status(kit.now_s).condemned_bytes == 2 * KIB
    first, second = kit.nodes.values()
    kit.heartbeat(first)
    kit.heartbeat(first)
    assert kit.state.status(kit.now_s).condemned_bytes == 2 * KIB
    kit.heartbeat(second)
    kit.heartbeat(second)
    status = kit.state.status(kit.now_s)
    assert status.condemned_bytes == status.leases == 0
    check(kit.state)


def test_timed_leases_of_a_dead_session_run_their_time() -> None:
    config = StateConfig(session_ttl_s=2.0)
    kit = Kit(config).with_nodes(new_node(1)).with_session()
    kit.put([1])
    kit.acquire(1, ttl_ms=9000)
    kit.tick(3)
    status = kit.state.status(kit.now_s)
    assert (status.sessions, status.leases) == (0, 1)
    kit.heartbeats()
    kit.tick(7)
    assert kit.state.status(kit.now_s).leases == 0
    check(kit.state)


def test_a_clean_goodbye_frees_at_once(kit: Kit) -> None:
    kit.put([1, 2])
    kit.start([3, 4])
    kit.acquire(1, hold=True)
    kit.acquire(2)
    kit.apply(c.CloseSession(session_id(1)))
    kit.apply(c.CloseSession(session_id(1)))
    status = kit.state.status(kit.now_s)
    assert (status.leases, status.grants, status.quarantined_bytes, status.sessions) == (0, 0, 0, 1)
    check(kit.state)


def test_any_request_keeps_a_session(kit: Kit) -> None:
    for _ in range(5):
        kit.heartbeats()
        kit.acquire(1)
        kit.apply(c.RenewSession(session_id(2)))
        kit.tick(4)
    assert kit.state.status(kit.now_s).sessions == 2


def test_sessions_are_checked_and_bounded() -> None:
    kit = Kit(StateConfig(sessions_max=2)).with_session(1).with_session(2).with_session(1)
    with pytest.raises(InvalidArgument):
        kit.apply(c.OpenSession(b"short"))
    with pytest.raises(ResourceUnavailable):
        kit.with_session(3)
    kit.apply(c.CloseSession(session_id(2)))
    kit.with_session(3)
    for number in range(100, 400):
        kit.apply(c.CloseSession(session_id(number - 1)))
        kit.apply(c.CloseSession(session_id(3)))
        kit.apply(c.OpenSession(session_id(number)))
    assert len(kit.state._pool.sessions._heap) < 100
