"""Puts: what each key is told, how a grant ends, what is stored."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, NamespaceReset, SessionUnknown
from cenote.api.rows import CommitStatus, ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, GoneReason, Stored
from cenote.master.state import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, Kit, checksum_of, new_node, session_id
from unit.master.state_replies import read_hits

GRANTED, EXISTS = PutStatus.GRANTED, PutStatus.EXISTS


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1), new_node(2)).with_session(1).with_session(2, "host-2")


@pytest.mark.parametrize("count", [1, 2, 30])
def test_what_was_put_is_found_with_its_facts(kit: Kit, count: int) -> None:
    keys = list(range(count))
    assert kit.put(keys, 700) == [GRANTED] * count
    assert kit.exists(*keys, 999) == [1] * count + [0]
    for key, hit in zip(keys, kit.get(*keys), strict=True):
        assert hit is not None
        assert (hit.size, hit.checksum, hit.epoch) == (700, checksum_of(key), 1)
        assert sum(length for *_, length in hit.extents) == 700
        assert hit.status == ObjectStatus.UNLEASED
    stored = kit.new(Stored)
    assert np.concatenate([s.seqs for s in stored]).tolist() == list(range(1, count + 1))
    check(kit.state)


def test_a_key_that_exists_is_not_granted_again(kit: Kit) -> None:
    kit.put([1])
    assert kit.put([1]) == [EXISTS]
    assert kit.put([1, 2]) == [EXISTS, GRANTED]


def test_a_key_twice_in_a_batch_is_granted_once(kit: Kit) -> None:
    put = kit.start([5, 6, 5, 5])
    assert put.statuses == [GRANTED, GRANTED] + [PutStatus.DUPLICATE_IN_BATCH] * 2
    assert kit.commit(put) == [CommitStatus.DECIDED] * 2
    check(kit.state)


def test_sizes_that_cannot_be(kit: Kit) -> None:
    statuses = kit.put([1, 2, 3], [0, 10, 1 << 60])
    assert statuses == [PutStatus.INVALID, GRANTED, PutStatus.INVALID]
    assert kit.put([4], 0) == [PutStatus.INVALID]
    assert kit.put([5], 10 << 20) == [PutStatus.TOO_LARGE]
    check(kit.state)


def test_the_second_of_two_writers_is_told(kit: Kit) -> None:
    first, second = kit.start([1]), kit.start([1], session=2)
    third = kit.start([1], 2 * KIB, session=2)
    assert first.extents[0] != second.extents[0]
    assert kit.commit(second, session=2) == [CommitStatus.DECIDED]
    assert kit.commit(first) == [CommitStatus.EXISTS_SAME]
    assert kit.commit(third, session=2) == [CommitStatus.EXISTS_DIFFERENT]
    assert len(kit.state._pool.grants) == 0
    check(kit.state)


def test_part_of_a_grant_may_be_decided_first(kit: Kit) -> None:
    put = kit.start([1, 2, 3, 4])
    assert kit.commit(put, [2, 0]) == [CommitStatus.DECIDED] * 2
    assert kit.exists(1, 2, 3, 4) == [1, 0, 1, 0]
    assert kit.commit(put, [0, 1, 1, 77]) == [
        CommitStatus.NOT_GRANTED,
        CommitStatus.DECIDED,
        CommitStatus.NOT_GRANTED,
        CommitStatus.NOT_GRANTED,
    ]
    check(kit.state)
    assert kit.commit(put, [3]) == [CommitStatus.DECIDED]
    assert kit.commit(put, [3]) == [CommitStatus.NOT_GRANTED]
    hits = kit.get(1, 2, 3, 4)
    assert [hit and hit.checksum for hit in hits] == [checksum_of(k) for k in (1, 2, 3, 4)]
    check(kit.state)


def test_versions_follow_the_positions_of_the_request(kit: Kit) -> None:
    kit.put([2])
    put = kit.start([1, 2, 3])
    assert put.statuses == [GRANTED, EXISTS, GRANTED]
    first = kit.state.last_seq + 1
    kit.commit(put, [2, 0])
    hits = kit.get(3, 1)
    assert [hit and hit.seq for hit in hits] == [first, first + 1]


def test_a_retried_request_gets_the_same_reply(kit: Kit) -> None:
    put = kit.start([1, 2], request_id=77)
    again = kit.start([1, 2], request_id=77)
    assert again.reply == put.reply
    assert kit.commit(put, request_id=77) == [CommitStatus.DECIDED] * 2
    assert kit.commit(put, request_id=77) == [CommitStatus.DECIDED] * 2
    assert kit.state.last_seq == 2
    assert kit.start([1, 2], session=2, request_id=77).statuses == [EXISTS, EXISTS]


def test_replies_are_kept_up_to_a_bound() -> None:
    kit = Kit(StateConfig(replies_per_session_max=4)).with_nodes(new_node(1)).with_session()
    for request_id in range(1, 10):
        kit.start([request_id], request_id=request_id)
    session = kit.state._pool.sessions.get(session_id(1))
    assert len(session.replies) == 4
    assert session.reply_bytes == sum(size for _, size in session.replies.values())


@pytest.mark.parametrize("count", [1, 3])
def test_aborted_space_is_free_at_once(kit: Kit, count: int) -> None:
    free = kit.state.status(kit.now_s).granted_bytes
    put = kit.start(list(range(count)))
    kit.apply(c.PutAbort(session_id(1), put.reply.grant_id))
    assert kit.state.status(kit.now_s).granted_bytes == free == 0
    assert kit.commit(put) == [CommitStatus.NOT_GRANTED] * count
    kit.apply(c.PutAbort(session_id(1), put.reply.grant_id))
    check(kit.state)


def test_part_of_a_grant_may_be_aborted(kit: Kit) -> None:
    put = kit.start([1, 2, 3])
    kit.apply(c.PutAbort(session_id(1), put.reply.grant_id, np.array([1, 9], np.uint32)))
    assert kit.commit(put, [0, 1, 2]) == [1, CommitStatus.NOT_GRANTED, 1]
    check(kit.state)


def test_tails_are_reserved_and_clipped_from_locations(kit: Kit) -> None:
    tails = np.array([100, 0], np.uint16)
    put = kit.start([1, 2], 1000, tail_lengths=tails)
    assert [extents[0][3] for extents in put.extents.values()] == [1100, 1000]
    kit.commit(put)
    one = kit.start([3], 1000, tail_lengths=tails[:1])
    assert one.extents[0][0][3] == 1100
    kit.commit(one)
    assert [hit and hit.extents[0][3] for hit in kit.get(1, 2, 3)] == [1000] * 3
    check(kit.state)


def test_a_large_object_is_striped_over_nodes() -> None:
    kit = Kit().with_nodes(*(new_node(i, 64 * KIB) for i in (1, 2, 3))).with_session()
    size = 150 * KIB
    put = kit.start([1], size)
    assert put.statuses == [GRANTED]
    assert len({segment for segment, *_ in put.extents[0]}) == 3
    assert sum(length for *_, length in put.extents[0]) == size
    kit.commit(put)
    (hit,) = kit.get(1)
    assert hit is not None
    assert sum(length for *_, length in hit.extents) == size
    assert hit.replicas == 1
    check(kit.state)
    kit.remove(1)
    check(kit.state)
    assert kit.put([2], 193 * KIB) == [PutStatus.TOO_LARGE]


def test_an_object_in_pieces_where_space_is_in_holes() -> None:
    config = StateConfig(session_granted_share_max=1.0)
    kit = Kit(config).with_nodes(new_node(1, 128 * KIB)).with_session()
    keys = list(range(32))
    assert kit.put(keys, 4 * KIB) == [GRANTED] * 32
    kit.remove(*keys[::2])
    pinned = kit.apply(c.Pin(*kit.place, kit.digests(*keys[1:8:2]), 0))
    assert pinned.tolist() == [1] * 4
    put = kit.start([100], 30 * KIB)
    assert put.statuses == [GRANTED]
    assert len(put.extents[0]) > 1
    kit.commit(put)
    (hit,) = kit.get(100)
    assert hit is not None
    assert sum(length for *_, length in hit.extents) == 30 * KIB
    check(kit.state)


def test_requests_that_cannot_be_right(kit: Kit) -> None:
    digests, sizes = kit.digests(1, 2), np.array([1, 1], np.uint64)
    namespace_id, generation = kit.place

    def start(**changes: object) -> None:
        arguments: dict[str, object] = {
            "session_id": session_id(1),
            "request_id": 0,
            "namespace_id": namespace_id,
            "generation": generation,
            "digests": digests,
            "sizes": sizes,
        }
        kit.apply(c.PutStart(**(arguments | changes)))  # type: ignore[arg-type]

    with pytest.raises(SessionUnknown):
        start(session_id=session_id(9))
    with pytest.raises(NamespaceReset):
        start(namespace_id=99)
    with pytest.raises(NamespaceReset):
        start(generation=99)
    with pytest.raises(InvalidArgument):
        start(sizes=sizes[:1])
    with pytest.raises(InvalidArgument):
        start(min_replicas=2)
    with pytest.raises(InvalidArgument):
        start(shard_count=2)
    put = kit.start([1, 2])
    with pytest.raises(InvalidArgument):
        kit.apply(c.PutCommit(session_id(1), 0, put.reply.grant_id, None, np.zeros(1, np.uint64)))
    assert kit.commit(put) == [1, 1]
    check(kit.state)


def test_an_object_may_have_a_time_to_live(kit: Kit) -> None:
    kit.put([1, 2], ttl_ms=1000)
    kit.put([3], ttl_ms=3000)
    kit.put([4])
    kit.tick(0.5)
    assert kit.exists(1, 2, 3, 4) == [1, 1, 1, 1]
    kit.tick(1.0)
    assert kit.exists(1, 2, 3, 4) == [0, 0, 1, 1]
    kit.tick(3.0)
    assert kit.exists(3, 4) == [0, 1]
    assert {gone.reason for gone in kit.new(Gone)} == {GoneReason.EXPIRED}
    check(kit.state)


def test_one_session_cannot_have_everything_granted() -> None:
    config = StateConfig(session_granted_share_max=0.5)
    kit = Kit(config).with_nodes(new_node(1, 64 * KIB)).with_session()
    put = kit.start(list(range(40)), KIB)
    assert put.statuses == [GRANTED] * 32 + [PutStatus.QUOTA_EXCEEDED] * 8
    assert kit.start([99]).statuses == [PutStatus.QUOTA_EXCEEDED]
    kit.commit(put)
    assert kit.start([99]).statuses == [GRANTED]
    check(kit.state)


def test_spare_extents_do_not_keep_a_session_from_one_large_put() -> None:
    kit = Kit(StateConfig(spares_share_max=0.5, spares_free_share_max=0.5))
    kit.with_nodes(new_node(1, 64 * KIB)).with_session()
    put = kit.start([1], 64, spare_count=4, spare_bytes=64)
    kit.commit(put)
    assert put.reply.spare_grant_id
    large = kit.start([2], 40 * KIB)
    assert large.statuses == [GRANTED]
    assert kit.start([3], 40 * KIB).statuses == [PutStatus.QUOTA_EXCEEDED]


def test_a_full_table_evicts() -> None:
    kit = Kit(StateConfig(objects_max=100)).with_nodes(new_node(1, 1 << 20)).with_session()
    for start in range(0, 300, 30):
        assert kit.put(list(range(start, start + 30)), 64) == [GRANTED] * 30
    assert kit.put([1000], 64) == [GRANTED]
    assert kit.state.status(kit.now_s).objects <= 100
    assert kit.exists(1000, 299, 0) == [1, 1, 0]
    check(kit.state)


def test_a_reset_ends_grants(kit: Kit) -> None:
    put, one = kit.start([1, 2]), kit.start([3])
    kit.apply(c.ResetNamespace("a", 99))
    assert kit.commit(put) == [CommitStatus.NOT_GRANTED] * 2
    assert kit.commit(one) == [CommitStatus.NOT_GRANTED]
    check(kit.state)
    assert kit.state.status(kit.now_s).granted_bytes == 0


def test_commit_touches_nothing_of_a_lease_on_the_winner(kit: Kit) -> None:
    kit.put([1])
    lease = kit.acquire(1)
    loser = kit.start([1, 2])
    assert loser.statuses == [EXISTS, GRANTED]
    kit.commit(loser)
    assert [h and h.status for h in read_hits(lease)] == [ObjectStatus.LEASED]
    kit.release(lease)
    check(kit.state)
