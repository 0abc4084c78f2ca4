"""What administrators ask of the state: explanations, evictions, deletions, changed limits."""

from __future__ import annotations

import math

import pytest

from cenote.api.errors import InvalidArgument, NamespaceNotFound, NamespaceReset
from cenote.api.rows import PutStatus
from cenote.master import commands as c
from cenote.master.admin_commands import Configure, DeleteNamespace, Evict, EvictReply
from cenote.master.decisions import Fate, Why
from cenote.master.effects import NamespaceGone
from cenote.master.explaining import Explanation
from cenote.master.nodes import NodeState
from cenote.master.state import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, Kit, new_node, restarted


def kit_of(**config: float) -> Kit:
    config = {"session_ttl_s": 1e4, "node_dead_s": 1e3, "adoption_window_s": 0.1} | config
    kit = Kit(StateConfig(**config)).with_nodes(new_node(1)).with_session()  # type: ignore[arg-type]
    kit.tick(0.1)
    return kit


def explain(kit: Kit, key: int) -> Explanation:
    return kit.state.explain(*kit.place, kit.digests(key)[0], kit.now_s)


def evict(kit: Kit, *keys: int, **what: float) -> EvictReply:
    command = Evict(*kit.place, **what)  # type: ignore[arg-type]
    if keys:
        command.digests = kit.digests(*keys)
    reply: EvictReply = kit.apply(command)
    check(kit.state)
    return reply


# ---- explain --------------------------------------------------------------------------------


def test_what_is_there_is_described() -> None:
    kit = kit_of()
    kit.put([1], KIB)
    kit.tick(5.0)
    kit.acquire(1)
    found = explain(kit, 1)
    assert (found.state, found.size_bytes, found.leases, found.decisions) == ("present", KIB, 1, [])
    (place,) = found.places
    assert (place.node_name, place.node_state) == ("node-1", NodeState.ALIVE)


def test_what_was_evicted_says_why_and_how_long_it_was_not_used() -> None:
    kit = kit_of()
    kit.put([1], KIB)
    kit.tick(30.0)
    for key in range(100, 170):
        kit.put([key], KIB)
    kit.tick(10.0)
    found = explain(kit, 1)
    assert found.state == "absent"
    ((decision, idle_s),) = found.decisions
    assert decision.fate is Fate.EVICTED
    assert decision.why in (Why.ON_DEMAND, Why.AHEAD)
    assert kit.now_s - decision.at_s >= 10.0
    assert idle_s == pytest.approx(30.0, abs=2.0)
    assert found.log_keys > 0
    assert explain(kit, 99).decisions == []


def test_removed_expired_and_pinned_are_told_apart() -> None:
    kit = kit_of()
    kit.put([1, 2], KIB)
    kit.put([3], KIB, ttl_ms=1000)
    kit.remove(1)
    kit.tick(2.0)
    assert explain(kit, 1).decisions[0][0].fate is Fate.REMOVED
    assert explain(kit, 3).decisions[0][0].fate is Fate.EXPIRED
    kit.apply(c.Pin(*kit.place, kit.digests(2), 0))
    assert math.isinf(explain(kit, 2).pinned_s)


def test_a_put_that_found_no_room_is_remembered() -> None:
    kit = kit_of(session_granted_share_max=1.0).with_session(2)
    kit.start(list(range(100, 164)), KIB)  # granted, so that it can't be evicted
    statuses = kit.put([1], KIB, session=2)
    assert statuses == [PutStatus.NO_SPACE]
    assert explain(kit, 1).decisions[0][0].fate is Fate.REFUSED
    assert explain(kit, 100).state == "being put"


def test_a_dead_node_makes_objects_unreachable_and_not_absent() -> None:
    kit = kit_of(node_dead_s=5.0)
    kit.put([1], KIB)
    kit.tick(6.0)
    found = explain(kit, 1)
    assert (found.state, found.places[0].node_state) == ("unreachable", NodeState.DEAD)


# ---- who holds what -------------------------------------------------------------------------


def test_sessions_are_listed_by_what_they_hold() -> None:
    kit = kit_of().with_session(2)
    kit.put([1, 2, 3], KIB)
    kit.acquire(1, session=1)
    kit.acquire(1, 2, 3, session=2)
    kit.acquire(2, session=2, hold=True, request_id=900)
    first, second, *_ = kit.state.holders(kit.now_s)
    assert (first.leases, first.holds, first.leased_objects, first.leased_bytes) == (
        *(2, 1, 4),
        4 * KIB,
    )
    assert (second.leases, second.holds, second.leased_bytes) == (1, 0, KIB)
    assert 0 < first.ends_s <= 5.0


# ---- evict ----------------------------------------------------------------------------------


def test_named_objects_go_but_for_those_that_are_pinned_or_read() -> None:
    kit = kit_of()
    kit.put([1, 2, 3], KIB)
    kit.apply(c.Pin(*kit.place, kit.digests(2), 0))
    kit.acquire(3)
    reply = evict(kit, 1, 2, 3, 4)
    assert (reply.objects, reply.pinned, reply.leased, reply.absent) == (1, 1, 1, 1)
    assert reply.size_bytes == KIB
    assert kit.exists(1, 2, 3) == [0, 1, 1]
    assert explain(kit, 1).decisions[0][0].why is Why.ASKED


def test_the_coldest_go_until_there_is_as_much_room_as_was_asked_for() -> None:
    kit = kit_of()
    for key in range(8):
        kit.put([key], KIB)
        kit.tick(10.0)
    assert evict(kit, size_bytes=2 * KIB).objects == 2
    assert kit.exists(*range(8)) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert evict(kit, idle_s=45.0).objects == 2
    assert kit.exists(*range(8)) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert evict(kit, rows_max=3).objects == 3
    assert evict(kit).objects == 1
    assert evict(kit).objects == 0


# ---- namespaces -----------------------------------------------------------------------------


def test_a_deleted_namespace_is_gone_with_its_objects_over_restarts_and_snapshots() -> None:
    kit = kit_of()
    kit.apply(c.SetQuota("a", dram_bytes=8 * KIB))
    kit.put([1, 2], KIB)
    before = kit.place
    assert kit.apply(DeleteNamespace("a", 77)) == 2
    with pytest.raises(NamespaceReset):
        kit.exists(1)
    with pytest.raises(NamespaceNotFound):
        kit.apply(DeleteNamespace("a", 78))
    kit.tick(0.1)
    assert kit.state.object_count == 0
    check(kit.state)
    assert [e.namespace_id for e in kit.new(NamespaceGone)] == [before[0]]

    snapshot = restarted(kit, journal=list(kit.state.snapshot()))
    for again in (restarted(kit), snapshot, kit):
        assert again.state.namespaces() == []
        made = again.apply(c.OpenNamespace("a", b"", True, 1, 5))
        assert (made.created, made.generation) == (True, 1)
        assert made.namespace_id > before[0]
        assert again.state.namespaces()[0].dram_quota_bytes == 0


# ---- limits ---------------------------------------------------------------------------------


def test_a_changed_limit_holds_over_restarts_until_it_is_unset() -> None:
    kit = kit_of()
    kit.apply(Configure({"pinned_share_max": 0.5, "hot_bytes_per_s": 1024.0}, []))
    assert kit.state.limits.pinned_share_max == 0.5
    assert kit.state.limits.hot_bytes_per_s == 1024
    snapshot = restarted(kit, journal=list(kit.state.snapshot()), pinned_share_max=0.1)
    for again in (restarted(kit, pinned_share_max=0.1), snapshot):
        assert again.state.limits.pinned_share_max == 0.5
        again.apply(Configure({}, ["pinned_share_max"]))
        assert again.state.limits.pinned_share_max == 0.1
        assert again.state.overrides == {"hot_bytes_per_s": 1024.0}


@pytest.mark.parametrize("values", [{"policy": 1.0}, {"pinned_share_max": 1.5}, {"nonsense": 0.0}])
def test_what_may_not_be_changed_changes_nothing(values: dict[str, float]) -> None:
    kit = kit_of()
    with pytest.raises(InvalidArgument):
        kit.apply(Configure({"leased_share_max": 0.1} | values, []))
    assert kit.state.overrides == {}
    assert kit.state.limits.leased_share_max == 0.5
