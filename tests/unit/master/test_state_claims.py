"""What writers of an earlier tenure may still be writing into is not granted to others."""

from __future__ import annotations

import numpy as np

from cenote.api.rows import UNIT_BYTES, CommitStatus
from cenote.master import commands as c
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, Kit, new_node, session_id

OLD, OTHER = session_id(77), session_id(78)


def quarantined(kit: Kit) -> int:
    return kit.state.status(kit.now_s).quarantined_bytes


def granted(kit: Kit, keys: int) -> set[int]:
    """Units of all that can be granted now."""
    put = kit.start(list(range(100, 100 + keys)), size=KIB)
    units: set[int] = set()
    for extents in put.extents.values():
        for _, _, offset, length in extents:
            units |= set(range(offset // UNIT_BYTES, -(-(offset + length) // UNIT_BYTES)))
    return units


def successor(kit: Kit) -> Kit:
    """The next tenure, which replays what this one decided."""
    after = Kit(kit.state.config, kit.state.epoch + 1)
    for effect in kit.durable():
        after.state.replay(effect)
    return after


def test_claims_are_withheld_until_they_are_withdrawn() -> None:
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    before.put([1, 2])
    kit, node = successor(before), before.nodes[1]
    # Over what is free, over an object, and beyond the end.
    node.claims = [(OLD, 0, 8 * KIB + 10, 100), (OTHER, 0, 0, 2 * KIB), (OTHER, 0, 15 * KIB, KIB)]
    kit.attach(node)
    check(kit.state)
    kit.with_session(1)
    kit.namespace = before.namespace
    assert quarantined(kit) == 2 * UNIT_BYTES + KIB
    assert kit.exists(1, 2) == [1, 1]
    units = granted(kit, 12)
    assert units
    assert not units & {8 * 16, 8 * 16 + 1}
    assert not units & set(range(15 * 16, 16 * 16))
    node.withdrawn = [OLD]
    kit.heartbeat(node)
    assert quarantined(kit) == KIB
    check(kit.state)
    node.withdrawn = [OTHER]
    kit.heartbeat(node)
    assert quarantined(kit) == 0
    check(kit.state)
    assert len(pool_of(kit.state).orphans) == 0


def test_nobody_is_cut_off_for_a_claim() -> None:
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    kit, node = successor(before), before.nodes[1]
    node.claims = [(OLD, 0, 8 * KIB, KIB)]
    kit.attach(node)
    kit.restart_node(node)
    assert kit.heartbeat(node) == []
    assert quarantined(kit) == KIB
    check(kit.state)


def test_a_restarted_daemon_without_the_claim_says_that_it_is_over() -> None:
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    kit, node = successor(before), before.nodes[1]
    node.claims = [(OLD, 0, 8 * KIB, KIB), (OTHER, 0, 4 * KIB, KIB)]
    kit.attach(node)
    node.claims = node.claims[1:]
    kit.restart_node(node)
    assert quarantined(kit) == KIB
    kit.apply(c.Detach(node.node_id, contents_survive=False, start_number=node.start_number))
    assert quarantined(kit) == 0
    check(kit.state)


def test_claims_under_grants_of_this_tenure_are_known_anyway() -> None:
    kit = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    node = kit.nodes[1]
    put = kit.start([1])
    ((_, _, offset, length),) = put.extents[0]
    node.claims = [(session_id(1), 0, offset, length)]
    kit.restart_node(node)
    assert quarantined(kit) == 0
    assert kit.commit(put) == [CommitStatus.DECIDED]
    check(kit.state)


def test_free_parts_of_a_range_are_taken() -> None:
    kit = Kit().with_nodes(new_node(1, 16 * KIB))
    (segment,) = pool_of(kit.state).segments.by_id.values()
    assert segment.claim(10, 5)
    assert segment.claim(20, 5)
    pieces = segment.claim_free(8, 22)
    assert pieces == [(8, 2), (15, 5)]
    assert segment.claim_free(8, 22) == []
    segment.give(np.array([(segment.segment_id, (1 << 32) - 1, *p) for p in pieces], np.uint32))
    assert segment.claim_free(0, 30) == [(0, 10), (15, 5), (25, 5)]


def test_what_is_looked_at_stays_where_it_is_though_it_is_removed() -> None:
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    before.put([1, 2])
    kit, node = successor(before), before.nodes[1]
    # Over both objects, and a bit of what is free behind them.
    node.views = [(OLD, 0, 0, 2 * KIB + 64)]
    kit.attach(node)
    check(kit.state)
    kit.with_session(1)
    kit.namespace = before.namespace
    assert quarantined(kit) == UNIT_BYTES
    kit.remove(1)
    assert kit.exists(1, 2) == [0, 1]
    seen = set(range((2 * KIB) // UNIT_BYTES + 1))
    assert not granted(kit, 20) & seen
    check(kit.state)
    node.withdrawn = [OLD]
    kit.heartbeat(node)
    check(kit.state)
    assert quarantined(kit) == 0
    assert len(pool_of(kit.state).leases) == 0
    assert len(pool_of(kit.state).orphans) == 0
    (segment,) = pool_of(kit.state).segments.by_id.values()
    assert segment.claim(0, KIB // UNIT_BYTES), "the removed one's space is free"


def test_a_view_of_a_segment_that_is_lost_holds_nothing() -> None:
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    before.put([1])
    kit, node = successor(before), before.nodes[1]
    node.views = [(OLD, 0, 0, KIB)]
    kit.attach(node)
    kit.apply(c.Detach(node.node_id, contents_survive=False, start_number=node.start_number))
    check(kit.state)
    assert len(pool_of(kit.state).leases) == 0
    assert len(pool_of(kit.state).orphans) == 0


def test_a_claim_of_nothing_withholds_nothing() -> None:
    """Nor does a slot whose extent has no bytes."""
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    kit, node = successor(before), before.nodes[1]
    kit.attach(node)
    (segment,) = pool_of(kit.state).segments.by_id.values()
    assert segment.claim_free(2, 2) == []
    node.claims = [(OLD, 0, 2 * UNIT_BYTES, 0)]
    kit = successor(before)
    kit.attach(node)
    assert quarantined(kit) == 0
    check(kit.state)


def test_what_lives_where_somebody_still_writes_leaves_no_free_space_behind() -> None:
    """It was evicted before the metadata were lost, and is adopted from its slot: once it is found
    to be damaged, its space is the writer's still."""
    before = Kit().with_nodes(new_node(1, 16 * KIB)).with_session()
    before.put([1])
    kit, node = successor(before), before.nodes[1]
    node.claims = [(OLD, 0, 0, KIB)]
    kit.attach(node)
    kit.with_session(1)
    kit.namespace = before.namespace
    kit.remove(1)
    assert not granted(kit, 15) & set(range(KIB // UNIT_BYTES))
    check(kit.state)
    node.withdrawn = [OLD]
    kit.heartbeat(node)
    check(kit.state)
    (segment,) = pool_of(kit.state).segments.by_id.values()
    assert segment.claim(0, KIB // UNIT_BYTES)
