"""Draining: everything goes elsewhere, and nothing that the others have room for is lost."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.api.rows import CopyStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, NodeDrains
from cenote.master.move_tables import Cause
from cenote.master.nodes import NodeState
from cenote.master.object_columns import UNSEALED
from cenote.master.state import StateConfig
from cenote.master.task_commands import Drain
from unit.master.moves_kit import drain, nodes_of, pass_time, pull_all, settle, used_on
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, FakeNode, Kit, new_node, restarted
from unit.master.tiers_kit import copy_all, ssd_node, where

GRANTED = PutStatus.GRANTED


def pool(*nodes: FakeNode, keys: int = 0, replicas: int = 1, **config: float) -> Kit:
    """Three nodes of 64 KiB if none are given, and as many objects of 1 KiB as said."""
    config.setdefault("session_granted_share_max", 1.0)
    kit = Kit(StateConfig(**config))  # type: ignore[arg-type]
    kit.with_nodes(*(nodes or (new_node(1), new_node(2), new_node(3)))).with_session()
    for key in range(keys):
        assert kit.put([key], replicas=replicas) == [GRANTED]
    return kit


def state_of(kit: Kit, number: int) -> NodeState:
    return pool_of(kit.state).nodes.by_id[kit.nodes[number].node_id].state


def is_drained(kit: Kit, number: int) -> bool:
    return pool_of(kit.state).nodes.by_id[kit.nodes[number].node_id].drained


def test_all_of_it_goes_elsewhere_and_nothing_is_lost() -> None:
    kit = pool(keys=60)
    there = [key for key in range(60) if 2 in nodes_of(kit, key)]
    assert len(there) > 10
    assert drain(kit, 2) == len(there) * KIB
    assert state_of(kit, 2) == NodeState.DRAINING
    assert settle(kit) == len(there)
    assert kit.exists(*range(60)) == [1] * 60
    assert used_on(kit, 2) == 0
    assert is_drained(kit, 2)
    assert all(nodes_of(kit, key) <= {1, 3} for key in range(60))
    assert drain(kit, 2) == 0
    assert not kit.new(Gone)
    assert kit.state.status(kit.now_s).capacity_bytes == 128 * KIB


def test_nothing_new_is_placed_there() -> None:
    kit = pool(keys=6)
    drain(kit, 2)
    for key in range(100, 140):
        assert kit.put([key]) == [GRANTED]
        assert 2 not in nodes_of(kit, key)
    settle(kit)
    assert used_on(kit, 2) == 0


def test_replicas_stay_as_many_where_there_are_nodes_for_them() -> None:
    kit = pool(keys=20, replicas=2)
    drain(kit, 1)
    settle(kit)
    assert all(nodes_of(kit, key) == {2, 3} for key in range(20))
    drain(kit, 3)
    settle(kit)
    assert all(nodes_of(kit, key) == {2} for key in range(20))
    assert used_on(kit, 1) == used_on(kit, 3) == 0
    assert not kit.new(Gone)


def test_what_was_granted_before_is_refused_once_it_is_drained() -> None:
    kit = pool(new_node(1), keys=1)
    put = kit.start([50])
    kit.with_nodes(new_node(2))
    drain(kit, 1)
    settle(kit)
    assert is_drained(kit, 1)
    kit.commit(put, seal=False)
    assert kit.exists(50) == [0]
    check(kit.state)
    assert used_on(kit, 1) == 0
    assert kit.put([50]) == [GRANTED]
    assert nodes_of(kit, 50) == {2}


def test_what_was_put_there_meanwhile_moves_too() -> None:
    kit = pool(new_node(1), keys=5)
    put = kit.start([50])
    kit.with_nodes(new_node(2))
    drain(kit, 1)
    kit.commit(put)
    settle(kit)
    assert kit.exists(*range(5), 50) == [1] * 6
    assert nodes_of(kit, 50) == {2}


def test_what_is_read_under_a_lease_stays_until_that_ends() -> None:
    kit = pool(keys=30)
    key = next(key for key in range(30) if 2 in nodes_of(kit, key))
    lease = kit.acquire(key, lease=True, ttl_ms=60_000)
    drain(kit, 2)
    settle(kit)
    assert nodes_of(kit, key) > {2}
    assert len(nodes_of(kit, key)) == 2
    assert not is_drained(kit, 2)
    task = pool_of(kit.state).moves.tasks[Cause.DRAIN, kit.nodes[2].node_id]
    assert task.waiting == 1
    assert "leases" in task.note
    kit.release(lease)
    assert settle(kit) == 0
    assert len(nodes_of(kit, key)) == 1
    assert is_drained(kit, 2)


def test_a_full_rest_keeps_what_is_hottest() -> None:
    kit = pool(keys=0, reserve_share=0.0)
    for key in range(180):
        assert kit.put([key]) == [GRANTED]
    before = [key for key, there in enumerate(kit.exists(*range(180))) if there]
    drain(kit, 2)
    settle(kit)
    assert is_drained(kit, 2)
    assert used_on(kit, 2) == 0
    after = {key for key, there in enumerate(kit.exists(*range(180))) if there}
    assert len(after) >= 120
    coldest_kept = min(after)
    # The oldest ones went, but for a few that had to give way for room in one piece.
    lost = [key for key in before if key not in after]
    assert sum(key > coldest_kept for key in lost) <= 8


@pytest.mark.parametrize("has_room", [True, False])
def test_what_is_pinned_stays_in_memory_where_another_nodes_ssd_has_it(has_room: bool) -> None:
    kit = pool(ssd_node(1), keys=60, pinned_share_max=1.0)
    for _ in range(10):
        kit.tick(0.1)
        kit.heartbeat(kit.nodes[1])
        copy_all(kit, kit.nodes[1])
    kit.with_nodes(new_node(2))
    drain(kit, 1)
    apart: list[int] = []
    for _ in range(50):
        pass_time(kit, 0.1)
        apart = [key for key in range(60) if where(kit, key) == {2, 3}]
        if apart:
            break
    assert apart, "some are in the memory of one node, and on the SSD of another"
    key = apart[0]
    drain(kit, 1, cancel=True)
    kit.apply(c.Pin(*kit.place, kit.digests(key), 0))
    if not has_room:
        for other in range(100, 300):
            kit.put([other], avoid_node_ids=np.array([2], np.uint32))
            pinned = [k for k in (*range(60), other) if 1 in where(kit, k)]
            kit.apply(c.Pin(*kit.place, kit.digests(*pinned), 0))
    drain(kit, 2)
    pass_time(kit, 5.0)
    assert where(kit, key) == ({1, 2} if has_room else {2, 3})
    assert is_drained(kit, 2) == has_room


def test_what_is_pinned_is_kept() -> None:
    kit = pool(keys=0, reserve_share=0.0, pinned_share_max=1.0)
    for key in range(180):
        kit.put([key])
    pinned = [key for key in range(60) if kit.exists(key) == [1] and 2 in nodes_of(kit, key)][:20]
    kit.apply(c.Pin(*kit.place, kit.digests(*pinned), 0))
    drain(kit, 2)
    settle(kit)
    assert kit.exists(*pinned) == [1] * len(pinned)
    assert used_on(kit, 2) == 0


def test_it_can_be_taken_up_again_at_any_time() -> None:
    kit = pool(keys=30)
    drain(kit, 2)
    kit.tick(0.1)
    kit.heartbeat(kit.nodes[1])
    drain(kit, 2, cancel=True)
    assert state_of(kit, 2) == NodeState.ALIVE
    settle(kit)
    assert kit.exists(*range(30)) == [1] * 30
    drain(kit, 2)
    settle(kit)
    assert is_drained(kit, 2)
    drain(kit, 2, cancel=True)
    for key in range(100, 150):
        assert kit.put([key]) == [GRANTED]
    assert any(2 in nodes_of(kit, key) for key in range(100, 150))
    assert kit.new(NodeDrains)[-1] == NodeDrains(kit.nodes[2].node_id, False, 0)


def test_the_next_master_goes_on_with_it() -> None:
    kit = pool(keys=30)
    drain(kit, 2)
    kit.tick(0.1)
    for number in (1, 3):
        kit.heartbeat(kit.nodes[number])
    pull_all(kit, kit.nodes[1])
    kit.heartbeat(kit.nodes[1])
    for journal in (None, list(kit.state.snapshot())):
        new = restarted(kit, journal=journal)
        new.with_session()
        for node in kit.nodes.values():
            new.attach(node)
        assert contents(new.state) == contents(kit.state)
        assert state_of(new, 2) == NodeState.DRAINING
        if journal is not None:
            settle(new)
            assert is_drained(new, 2)
            assert new.exists(*range(30)) == [1] * 30


def test_a_daemon_that_restarts_is_still_drained() -> None:
    kit = pool(keys=30)
    drain(kit, 2)
    settle(kit)
    kit.apply(c.Detach(kit.nodes[2].node_id, True))
    kit.restart_node(kit.nodes[2])
    assert state_of(kit, 2) == NodeState.DRAINING
    assert settle(kit) == 0
    assert is_drained(kit, 2)


def test_a_source_that_dies_holds_the_drain_up_and_nothing_is_dropped() -> None:
    kit = pool(keys=30)
    there = [key for key in range(30) if nodes_of(kit, key) == {2}]
    drain(kit, 2)
    kit.tick(0.1)
    pass_time(kit, 6.0, CopyStatus.UNREACHABLE, silent=(2,))
    assert state_of(kit, 2) == NodeState.DEAD
    assert not is_drained(kit, 2)
    kit.heartbeat(kit.nodes[2])
    assert state_of(kit, 2) == NodeState.DRAINING
    settle(kit)
    assert kit.exists(*there) == [1] * len(there)
    assert is_drained(kit, 2)


def test_a_target_that_dies_is_replaced() -> None:
    kit = pool(keys=30)
    drain(kit, 2)
    for _ in range(3):
        kit.tick(0.1)
        for node in kit.nodes.values():
            kit.heartbeat(node)
    ordered = len(kit.nodes[1].pulls)
    assert ordered
    pass_time(kit, 6.0, silent=(1,))
    settle(kit, silent=(1,))
    assert state_of(kit, 1) == NodeState.DEAD
    assert is_drained(kit, 2)
    # It comes back, and says what it did: that is too late, and its space is free again.
    assert pull_all(kit, kit.nodes[1]) == ordered
    kit.heartbeat(kit.nodes[1])
    check(kit.state)
    assert kit.exists(*range(30)) == [1] * 30
    assert not pool_of(kit.state).copies.by_id


def test_what_may_be_sealed_on_the_node_alone_stays_there_for_a_while() -> None:
    """Nobody has said that its other replica is."""
    kit = pool(new_node(1), new_node(2))
    assert kit.put([1, 2], replicas=2) == [GRANTED] * 2
    unsealed, sealed = pool_of(kit.state).objects.lookup(kit.digests(1, 2)).tolist()
    pool_of(kit.state).state[[unsealed, sealed]] &= ~np.uint8(UNSEALED)
    pool_of(kit.state).state[unsealed] |= np.uint8(UNSEALED)
    drain(kit, 2)
    pass_time(kit, 5.0)
    assert (nodes_of(kit, 1), nodes_of(kit, 2)) == ({1, 2}, {1})
    assert not is_drained(kit, 2)
    pass_time(kit, 8.0)
    assert nodes_of(kit, 1) == {1}
    assert is_drained(kit, 2)


def test_what_was_never_sealed_is_given_up_in_the_end() -> None:
    kit = pool(keys=30)
    key = next(key for key in range(30) if 2 in nodes_of(kit, key))
    kit.nodes[2].segments[0].table = {
        slot: row for slot, row in kit.nodes[2].segments[0].table.items() if row["seq"] != key + 1
    }
    drain(kit, 2)
    settle(kit)
    assert kit.exists(key) == [0]
    assert is_drained(kit, 2)
    assert kit.exists(*range(30)) == [int(other != key) for other in range(30)]


def test_what_is_damaged_is_given_up() -> None:
    kit = pool(keys=12)
    drain(kit, 2)
    settle(kit, CopyStatus.SOURCE_CHANGED)
    assert is_drained(kit, 2)
    assert kit.state.status(kit.now_s).counters.damaged > 0


def test_a_bandwidth_is_kept() -> None:
    kit = pool(keys=60)
    there = sum(2 in nodes_of(kit, key) for key in range(60))
    drain(kit, 2, bandwidth=4 * KIB)
    ordered = []
    for _ in range(40):
        kit.tick(0.1)
        for node in kit.nodes.values():
            kit.heartbeat(node)
        ordered.append(sum(pull_all(kit, node) for node in kit.nodes.values()))
    assert 12 <= sum(ordered) <= 18
    assert there > 18
    drain(kit, 2)
    settle(kit)
    assert is_drained(kit, 2)


def test_what_lies_on_its_ssd_alone_goes_elsewhere_too() -> None:
    kit = pool(ssd_node(1, size_bytes=64 * KIB), ssd_node(2, size_bytes=64 * KIB))
    for key in range(160):
        assert kit.put([key]) == [GRANTED]
        kit.tick(0.1)
        for node in kit.nodes.values():
            kit.heartbeat(node)
            copy_all(kit, node)
            kit.heartbeat(node)
    there = kit.exists(*range(160))
    assert sum(there) == 160
    drain(kit, 2)
    for _ in range(400):
        kit.tick(0.1)
        for node in kit.nodes.values():
            kit.heartbeat(node)
            copy_all(kit, node)
            pull_all(kit, node)
            kit.heartbeat(node)
        check(kit.state)
        if is_drained(kit, 2):
            break
    assert is_drained(kit, 2)
    assert kit.exists(*range(160)) == there


def test_a_drain_needs_somebody_to_take_what_is_there() -> None:
    kit = pool(new_node(1), keys=3)
    with pytest.raises(ResourceUnavailable, match="no other node"):
        drain(kit, 1)
    with pytest.raises(InvalidArgument, match="no node 99"):
        kit.apply(Drain(99))
    assert kit.put([5]) == [GRANTED]


def test_more_replicas_than_are_left_are_refused_and_not_waited_for() -> None:
    kit = pool(new_node(1), new_node(2))
    drain(kit, 2)
    assert kit.put([1], replicas=2, min_replicas=2) == [PutStatus.REPLICAS_UNAVAILABLE]
    assert kit.put([1], replicas=2) == [GRANTED]


def test_a_silent_node_is_replaced_by_another_one() -> None:
    kit = pool(keys=20, replicas=2, repair_after_s=8.0)
    with_two = {key: nodes_of(kit, key) for key in range(20)}
    pass_time(kit, 12.0, silent=(2,))
    settle(kit, silent=(2,))
    assert state_of(kit, 2) == NodeState.DEAD
    assert all(nodes_of(kit, key) == {1, 3} for key in range(20)), with_two
    # It was only away: what it has is not needed any more.
    kit.heartbeat(kit.nodes[2])
    settle(kit)
    check(kit.state)
    assert kit.exists(*range(20)) == [1] * 20


def test_what_a_silent_node_has_alone_waits_for_it() -> None:
    kit = pool(keys=20, repair_after_s=8.0)
    before = {key: nodes_of(kit, key) for key in range(20)}
    pass_time(kit, 12.0, silent=(2,))
    kit.heartbeat(kit.nodes[2])
    assert {key: nodes_of(kit, key) for key in range(20)} == before
    assert kit.exists(*range(20)) == [1] * 20


def test_what_was_lost_with_a_node_s_memory_gets_another_replica() -> None:
    kit = pool(keys=20, replicas=2)
    before = {key: nodes_of(kit, key) for key in range(20)}
    kit.nodes[2].segments[0] = new_node(9).segments[0]  # it comes back empty
    kit.restart_node(kit.nodes[2])
    assert any(len(nodes_of(kit, key)) == 1 for key in range(20))
    settle(kit)
    assert all(len(nodes_of(kit, key)) == 2 for key in range(20)), before
    task = pool_of(kit.state).moves.tasks[Cause.REPAIR, 0]
    assert task.done
    assert task.moved == sum(2 in there for there in before.values())


def test_a_lost_replica_is_tried_again_and_not_for_ever() -> None:
    kit = pool(keys=20, replicas=2)
    kit.nodes[2].segments[0] = new_node(9).segments[0]
    kit.restart_node(kit.nodes[2])
    settle(kit, CopyStatus.UNREACHABLE)
    assert pool_of(kit.state).moves.tasks[Cause.REPAIR, 0].done
    assert not pool_of(kit.state).moves.short
    check(kit.state)
    assert kit.exists(*range(20)) == [1] * 20
