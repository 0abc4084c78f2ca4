"""A restarted master's first moments: what it does not know yet, and what it says meanwhile."""

from __future__ import annotations

import pytest

from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import commands as c
from unit.master.state_checks import check
from unit.master.state_kit import KIB, MIB, Kit, new_node, restarted, session_id
from unit.master.state_replies import read_hits


@pytest.fixture
def kit() -> Kit:
    made = Kit().with_nodes(new_node(1), new_node(2, slots=4)).with_session(1)
    made.put(list(range(8)), 2 * KIB)
    made.heartbeats()
    made.heartbeats()
    return made


def test_the_status_can_be_told_before_any_daemon_attached(kit: Kit) -> None:
    """The capacity was negative then: slot tables had grown, of space that was not known of yet."""
    assert any(s.retired_bytes for s in kit.state.segments(kit.now_s)), "no slot table has grown"
    fresh = restarted(kit)
    status = fresh.state.status(fresh.now_s)
    assert status.capacity_bytes == 0
    assert status.objects == 8
    assert all(node.capacity_bytes == node.used_bytes == 0 for node in fresh.state.nodes(1000.0))
    for node in kit.nodes.values():
        fresh.attach(node)
    after = fresh.state.status(fresh.now_s)
    assert after.capacity_bytes == kit.state.status(kit.now_s).capacity_bytes


def test_there_is_no_space_yet_rather_than_too_few_nodes(kit: Kit) -> None:
    """`min_replicas` can be met, and will be in a moment: an error that says try again."""
    fresh = restarted(kit).with_session(1)
    assert fresh.put([100], KIB) == [PutStatus.NOT_YET]
    assert fresh.put([100], KIB, replicas=2, min_replicas=2) == [PutStatus.NOT_YET]
    assert fresh.put([100], KIB, replicas=3, min_replicas=3) == [PutStatus.REPLICAS_UNAVAILABLE]
    for node in kit.nodes.values():
        fresh.attach(node)
    assert fresh.put([100], KIB, replicas=2, min_replicas=2) == [PutStatus.GRANTED]


def test_what_only_the_journal_tells_is_not_acknowledged(kit: Kit) -> None:
    """It may have been decided and not sealed: then it is dropped when its daemon attaches. A
    writer that was told EXISTS before that took it for stored."""
    fresh = restarted(kit).with_session(1)
    assert fresh.put([0, 100], KIB)[0] == PutStatus.NOT_YET
    assert fresh.put([0], KIB) == [PutStatus.NOT_YET]
    assert fresh.state.status(fresh.now_s).objects == 8, "lookups know it"
    for node in kit.nodes.values():
        fresh.attach(node)
    assert fresh.put([0], KIB) == [PutStatus.EXISTS]


def test_for_a_moment_puts_wait_for_as_many_nodes_as_they_want(kit: Kit) -> None:
    """Else what is put just after a failover has one copy, since one daemon was faster."""
    fresh = restarted(kit).with_session(1)
    fresh.attach(kit.nodes[1])
    assert fresh.put([100], KIB, replicas=2) == [PutStatus.NOT_YET]
    assert fresh.put([101], KIB) == [PutStatus.GRANTED]
    assert fresh.put([102], KIB, replicas=3) == [PutStatus.NOT_YET]
    fresh.attach(kit.nodes[2])
    assert fresh.put([100], KIB, replicas=2) == [PutStatus.GRANTED]
    assert fresh.put([102], KIB, replicas=3) == [PutStatus.GRANTED], "there are no more"
    again = restarted(kit).with_session(1)
    again.attach(kit.nodes[1])
    again.tick(1.0)
    assert again.put([103], KIB, replicas=2) == [PutStatus.GRANTED], "it does not come"


def test_a_remove_that_comes_again_removes_nothing_more(kit: Kit) -> None:
    command = c.Remove(*kit.place, kit.digests(1, 99), session_id(1), 777)
    assert kit.apply(command).tolist() == [1, 0]
    kit.put([1], KIB)
    assert kit.apply(command).tolist() == [1, 0]
    assert kit.exists(1) == [1]
    command.request_id = 778
    assert kit.apply(command).tolist() == [1, 0]
    assert kit.exists(1) == [0]


def test_what_a_slot_table_has_grown_over_is_gone() -> None:
    """The journal lost its end: that an object was removed, and that its place was then given up
    for slots. Its old slot still says that it is there."""
    kit = Kit().with_nodes(new_node(1, 64 * KIB)).with_session(1)
    kit.put(list(range(6)), 2 * KIB)
    kit.heartbeats()
    (segment,) = kit.nodes[1].segments
    offsets = [hit.extents[0][2] for hit in read_hits(kit.acquire(*range(6))) if hit]
    page = offsets[2] // 4096 * 4096
    segment.retired.append((page, 4096))
    segment.slots += 1
    fresh = restarted(kit)
    fresh.attach(kit.nodes[1])
    covered = [page - 2 * KIB < offset < page + 4096 for offset in offsets]
    assert any(covered)
    assert not all(covered)
    assert fresh.exists(*range(6)) == [int(not over) for over in covered]
    check(fresh.state)


@pytest.mark.parametrize("many", [False, True])
def test_a_commit_acknowledges_nothing_that_only_the_journal_tells(many: bool) -> None:
    """Spare space is granted without keys: commit is the first that sees whose place is taken."""
    kit = Kit().with_nodes(new_node(1, 4 * MIB), new_node(2, 4 * MIB)).with_session(1)
    kit.put(list(range(8)), 64)
    kit.heartbeats()
    fresh = restarted(kit).with_session(1)
    fresh.attach(kit.nodes[2])
    keys = [key for key in range(8) if fresh.put([key], 64) == [PutStatus.NOT_YET]]
    assert keys, "some are on the node that has not attached"
    _, spares = fresh.start_spares(4, 64)
    assert len(spares.keys) == 4
    status = fresh.commit_spares(spares, [0], keys[:1], 64, many=many)
    assert status == [CommitStatus.NOT_GRANTED]
    check(fresh.state)
    fresh.attach(kit.nodes[1])
    assert fresh.put(keys[:1], 64) == [PutStatus.EXISTS]
    _, spares = fresh.start_spares(4, 64)
    status = fresh.commit_spares(spares, [0], keys[:1], 64, many=many)
    assert status == [CommitStatus.EXISTS_SAME]
    check(fresh.state)
