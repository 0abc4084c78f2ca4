"""Leases, holds, touches, pins, and what removal and eviction make of them."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import QuotaExceeded, SessionUnknown
from cenote.api.rows import ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, GoneReason
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, Kit, new_node, session_id
from unit.master.state_replies import read_hits

LEASED, UNLEASED, GRANTED = ObjectStatus.LEASED, ObjectStatus.UNLEASED, PutStatus.GRANTED


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1)).with_session(1).with_session(2)


def statuses(reply: c.AcquireReply) -> list[int]:
    return [0 if hit is None else hit.status for hit in read_hits(reply)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_lease_holds_what_was_removed(kit: Kit, count: int) -> None:
    keys = list(range(count))
    kit.put(keys)
    lease = kit.acquire(*keys)
    assert statuses(lease) == [LEASED] * count
    assert lease.ttl_ms == 1000
    assert kit.remove(*keys) == [1] * count
    assert kit.exists(*keys) == [0] * count
    status = kit.state.status(kit.now_s)
    assert status.condemned_bytes == count * KIB
    assert status.leased_bytes == count * KIB
    check(kit.state)
    kit.release(lease)
    kit.release(lease)
    status = kit.state.status(kit.now_s)
    assert status.condemned_bytes == status.leased_bytes == status.leases == 0
    check(kit.state)


def test_a_key_removed_under_a_lease_can_be_put_again(kit: Kit) -> None:
    kit.put([1], 100)
    lease = kit.acquire(1)
    kit.remove(1)
    assert kit.put([1], 200) == [GRANTED]
    (hit,) = kit.get(1)
    assert hit is not None
    assert hit.size == 200
    assert hit.extents[0][2] != read_hits(lease)[0].extents[0][2]  # type: ignore[union-attr]
    check(kit.state)


def test_leases_end_by_time_and_are_renewed(kit: Kit) -> None:
    kit.put([1, 2, 3])
    short, long = kit.acquire(1, 2, ttl_ms=1000), kit.acquire(2, 3, ttl_ms=1000)
    kit.tick(0.9)
    ids = np.array([long.lease_id, 12345], np.uint64)
    renewed: c.RenewSessionReply = kit.apply(c.RenewSession(session_id(1), ids, 2000))
    assert renewed.lost_lease_ids.tolist() == [12345]
    kit.tick(0.5)
    assert kit.state.status(kit.now_s).leases == 1
    renewed = kit.apply(c.RenewSession(session_id(1), np.array([short.lease_id], np.uint64), 2000))
    assert renewed.lost_lease_ids.tolist() == [short.lease_id]
    kit.tick(1.6)
    assert kit.state.status(kit.now_s).leases == 0
    check(kit.state)


def test_a_key_twice_in_a_lease_counts_once(kit: Kit) -> None:
    kit.put([1, 2])
    lease = kit.acquire(1, 2, 1, 1)
    assert statuses(lease) == [LEASED] * 4
    assert kit.state.status(kit.now_s).leased_bytes == 2 * KIB
    kit.release(lease)
    check(kit.state)


def test_leases_are_capped_to_a_share_of_the_capacity() -> None:
    config = StateConfig(leased_share_max=0.25)
    kit = Kit(config).with_nodes(new_node(1)).with_session()
    keys = list(range(20))
    kit.put(keys)
    first = kit.acquire(*keys)
    assert statuses(first) == [LEASED] * 16 + [UNLEASED] * 4
    # What is leased already costs nothing more.
    again = kit.acquire(*keys)
    assert statuses(again) == [LEASED] * 16 + [UNLEASED] * 4
    assert statuses(kit.acquire(19)) == [UNLEASED]
    assert statuses(kit.acquire(3)) == [LEASED]
    assert statuses(kit.acquire(19, 19)) == [UNLEASED] * 2
    check(kit.state)
    assert kit.state.counters.unleased_hits == 4 + 4 + 1 + 2
    kit.release(first)
    kit.tick(2)
    assert statuses(kit.acquire(19)) == [LEASED]
    check(kit.state)


def test_no_lease_when_none_is_asked_for(kit: Kit) -> None:
    kit.put([1, 2])
    assert statuses(kit.acquire(1, 2, lease=False)) == [UNLEASED] * 2
    assert statuses(kit.acquire(1, lease=False)) == [UNLEASED]
    assert statuses(kit.acquire(8, 9)) == [0, 0]
    assert kit.acquire(8, 9).lease_id == kit.acquire(8).lease_id == 0
    assert kit.state.status(kit.now_s).leases == 0


def test_a_chain_stops_at_its_first_miss(kit: Kit) -> None:
    kit.put([1, 2, 4])
    reply = kit.acquire(1, 2, 3, 4, chain=True)
    assert statuses(reply) == [LEASED, LEASED, 0, 0]
    assert statuses(kit.acquire(3, 4, chain=True)) == [0, 0]
    assert statuses(kit.acquire(1, 2, 3, 4)) == [LEASED, LEASED, 0, LEASED]


def test_ttls_are_clamped(kit: Kit) -> None:
    kit.put([1])
    assert kit.acquire(1, ttl_ms=3_600_000).ttl_ms == 10_000
    assert kit.acquire(1, ttl_ms=0).ttl_ms == 5_000


@pytest.mark.parametrize("keys", [[1], [1, 2]])
def test_a_hold_ends_with_its_release_or_session(kit: Kit, keys: list[int]) -> None:
    kit.put(keys)
    hold = kit.acquire(*keys, hold=True)
    other = kit.acquire(*keys, hold=True, session=2)
    assert statuses(hold) == [LEASED] * len(keys)
    assert hold.lease_id
    for _ in range(5):
        kit.heartbeats()
        kit.apply(c.RenewSession(session_id(1)))
        kit.apply(c.RenewSession(session_id(2)))
        kit.tick(4)
    assert kit.state.status(kit.now_s).leases == 2
    kit.release(hold)
    kit.apply(c.CloseSession(session_id(2)))
    assert kit.state.status(kit.now_s).leases == 0
    assert other.lease_id != hold.lease_id
    check(kit.state)


def test_looking_neither_leases_nor_touches(kit: Kit) -> None:
    kit.put([1, 2])
    before = pool_of(kit.state).stamp[:4].copy()
    assert kit.exists(1, 2) == [1, 1]
    assert kit.exists(1) == [1]
    assert (pool_of(kit.state).stamp[:4] == before).all()
    assert kit.state.status(kit.now_s).leases == 0


def test_pins_are_budgeted_and_end_by_time() -> None:
    kit = Kit(StateConfig(pinned_share_max=0.25)).with_nodes(new_node(1)).with_session()
    keys = list(range(30))
    kit.put(keys)

    def pin(some: list[int], ttl_ms: int = 0) -> list[int]:
        pinned = kit.apply(c.Pin(*kit.place, kit.digests(*some), ttl_ms))
        return list(pinned.tolist())

    assert pin([*keys[:10], 99]) == [1] * 10 + [0]
    with pytest.raises(QuotaExceeded, match="pinned"):
        pin(keys)
    assert kit.state.status(kit.now_s).pinned_objects == 10
    assert pin(keys[10:16], 1000) == [1] * 6
    assert pin(keys[10:12]) == [1] * 2  # for good, whatever was said before
    kit.tick(2)
    assert kit.state.status(kit.now_s).pinned_objects == 12
    unpinned = kit.apply(c.Unpin(*kit.place, kit.digests(*keys[:11], 99)))
    assert unpinned.tolist() == [1] * 11 + [0]
    assert kit.state.status(kit.now_s).pinned_objects == 1
    kit.remove(11)
    assert kit.state.status(kit.now_s).pinned_bytes == 0
    check(kit.state)


def test_leased_pinned_and_held_objects_are_never_evicted() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session().with_session(2)
    kit.put([1, 2, 3, 4], 4 * KIB)
    kit.acquire(1, ttl_ms=10_000)
    kit.acquire(2, hold=True)
    kit.apply(c.Pin(*kit.place, kit.digests(3), 0))
    for start in range(100, 200, 5):
        assert kit.put(list(range(start, start + 5)), 4 * KIB) == [GRANTED] * 5
    assert kit.exists(1, 2, 3, 4) == [1, 1, 1, 0]
    check(kit.state)


def test_no_space_when_nothing_may_go() -> None:
    config = StateConfig(leased_share_max=1.0, session_granted_share_max=1.0)
    kit = Kit(config).with_nodes(new_node(1)).with_session()
    keys = list(range(15))
    kit.put(keys, 4 * KIB)
    lease = kit.acquire(*keys, ttl_ms=5000)
    assert set(kit.put([50, 51], 4 * KIB)) <= {GRANTED, PutStatus.NO_SPACE}
    assert kit.put([60], 8 * KIB) == [PutStatus.NO_SPACE]
    kit.release(lease)
    assert kit.put([60], 8 * KIB) == [GRANTED]
    check(kit.state)


def test_removing_what_is_not_there_is_told_to_the_journal(kit: Kit) -> None:
    kit.put([1])
    assert kit.remove(1, 2, 2) == [1, 0, 0]
    gone = kit.new(Gone)
    assert all(effect.reason == GoneReason.REMOVED for effect in gone)
    seqs = {d.tobytes(): int(s) for e in gone for d, s in zip(e.digests, e.seqs, strict=True)}
    assert seqs[kit.digests(1).tobytes()] == 1
    assert seqs[kit.digests(2).tobytes()] == 0


def test_an_unknown_session_gets_no_lease(kit: Kit) -> None:
    with pytest.raises(SessionUnknown, match="hello"):
        kit.acquire(1, session=7)


def test_news_rides_along(kit: Kit) -> None:
    kit.put([1, 2])
    lease = kit.acquire(1)
    stamps = pool_of(kit.state).stamp
    rows = pool_of(kit.state).objects.lookup(kit.digests(1, 2))
    before = stamps[rows].copy()
    kit.apply(
        c.Piggyback(
            *kit.place,
            released_lease_ids=np.array([lease.lease_id], np.uint64),
            touched_chain=kit.digests(1, 2, 77),
        )
    )
    assert kit.state.status(kit.now_s).leases == 0
    after = stamps[rows]
    assert (after > before).all()
    assert after[0] > after[1]  # the root is newest
    kit.apply(c.Piggyback(kit.place[0], 99, touched=kit.digests(1)))
    assert (stamps[rows] == after).all()
    kit.apply(c.Piggyback(*kit.place, touched=kit.digests(1, 2)))
    assert stamps[rows[0]] < stamps[rows[1]]
