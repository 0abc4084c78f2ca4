"""Spare extents: retries, how they come back, and what a restart knows of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.errors import (
    GrantRevoked,
    InvalidArgument,
    SessionUnknown,
)
from cenote.api.rows import UNIT_BYTES, CommitStatus
from cenote.master import commands as c
from cenote.master.state import MasterState, StateConfig
from unit.master.spares_kit import (
    abort,
    cancel,
    facts,
    free_units,
    granted_bytes,
    grants,
    make_kit,
    pending,
    twenty_spares,
)
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, MIB, Kit, checksum_of, restarted, session_id
from unit.master.state_replies import Put

DECIDED, NOT_GRANTED = CommitStatus.DECIDED, CommitStatus.NOT_GRANTED
SAME, DIFFERENT = CommitStatus.EXISTS_SAME, CommitStatus.EXISTS_DIFFERENT


@pytest.fixture
def kit() -> Kit:
    return make_kit()


@pytest.fixture
def spares(kit: Kit) -> Put:
    return twenty_spares(kit)


@pytest.mark.parametrize("count", [1, 3])
def test_a_retried_commit_is_no_second_decision(kit: Kit, spares: Put, count: int) -> None:
    positions, keys = list(range(count)), list(range(1, count + 1))
    first = kit.commit_spares(spares, positions, keys, request_id=70)
    seq = kit.state.last_seq
    assert kit.commit_spares(spares, positions, keys, request_id=70) == first
    assert kit.commit_spares(spares, positions, keys, request_id=71) == [NOT_GRANTED] * count
    assert kit.state.last_seq == seq
    assert kit.exists(*keys) == [1] * count
    # Also after the whole grant is over.
    abort(kit, spares)
    assert kit.commit_spares(spares, positions, keys, request_id=70) == first
    check(kit.state)


@pytest.mark.parametrize("count", [1, 3])
def test_requests_without_an_id_are_not_remembered(kit: Kit, spares: Put, count: int) -> None:
    positions, keys = list(range(count)), list(range(1, count + 1))
    replies = len(pool_of(kit.state).sessions.get(session_id(1)).replies)
    assert kit.commit_spares(spares, positions, keys, request_id=0) == [DECIDED] * count
    assert kit.commit_spares(spares, positions, keys, request_id=0) == [NOT_GRANTED] * count
    assert len(pool_of(kit.state).sessions.get(session_id(1)).replies) == replies


def test_a_retried_start_gets_the_same_spares(kit: Kit) -> None:
    put, spares = kit.start_spares(10, request_id=70)
    again, same = kit.start_spares(10, request_id=70)
    assert again.reply == put.reply
    assert same.extents == spares.extents
    assert grants(kit) == 2
    check(kit.state)


def test_kept_replies_are_counted_with_their_spares(kit: Kit) -> None:
    kit.start_spares(100, 64, request_id=70)
    session = pool_of(kit.state).sessions.get(session_id(1))
    assert session.reply_bytes > 100 * 24
    assert session.reply_bytes == sum(size for _, size in session.replies.values())


def test_a_cancelled_start_frees_both_grants(kit: Kit) -> None:
    free = free_units(kit)
    put, spares = kit.start_spares(10, request_id=70)
    kit.start([3], request_id=71)
    cancel(kit, 70)
    assert free_units(kit) == free - KIB // UNIT_BYTES
    assert grants(kit) == 1
    assert kit.commit(put) == [NOT_GRANTED]
    assert kit.commit_spares(spares, [0], [1]) == [NOT_GRANTED]
    assert kit.state.status(kit.now_s).quarantined_bytes == 0


def test_a_start_is_cancelled_however_much_came_after_it(kit: Kit) -> None:
    """The reply is forgotten by then; what it gave is not."""
    free = free_units(kit)
    kit.start_spares(10, request_id=70)
    kit.requests = 70  # a session's requests are numbered as they are made
    for i in range(100):
        kit.put([100 + i])
    with pytest.raises(GrantRevoked, match="not kept any more"):  # and nothing is given twice
        kit.start_spares(10, request_id=70)
    cancel(kit, 70)
    assert (grants(kit), granted_bytes(kit)) == (0, 0)
    assert free_units(kit) == free - 100 * KIB // UNIT_BYTES


def test_a_cancelled_start_keeps_what_was_committed(kit: Kit) -> None:
    _, spares = kit.start_spares(10, request_id=70)
    kit.commit_spares(spares, [0], [1])
    cancel(kit, 70)
    assert kit.exists(1) == [1]
    assert grants(kit) == 0


def test_an_abort_of_some_frees_just_these(kit: Kit, spares: Put) -> None:
    free = free_units(kit)
    kit.commit_spares(spares, [3], [1])
    abort(kit, spares, 0, 2, 3, 19, 20, 16_000, 2)
    assert free_units(kit) == free + 3 * KIB // UNIT_BYTES
    assert pending(kit, spares) == [1, *range(4, 19)]
    assert kit.exists(1) == [1]
    assert kit.commit_spares(spares, [0], [2]) == [NOT_GRANTED]
    assert kit.commit_spares(spares, [4], [2]) == [DECIDED]
    abort(kit, spares)
    assert (grants(kit), granted_bytes(kit)) == (0, 0)
    abort(kit, spares)


def test_an_unfenced_abort_waits_for_the_daemon(kit: Kit, spares: Put) -> None:
    abort(kit, spares, 0, 1, unfenced=True)
    assert kit.state.status(kit.now_s).quarantined_bytes == 2 * KIB
    kit.heartbeats()
    kit.heartbeats()
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    assert pending(kit, spares) == list(range(2, 20))
    check(kit.state)


def test_a_goodbye_frees_them_at_once(kit: Kit, spares: Put) -> None:
    kit.commit_spares(spares, [0, 1], [1, 2])
    kit.apply(c.CloseSession(session_id(1)))
    status = kit.state.status(kit.now_s)
    assert (status.grants, status.granted_bytes, status.quarantined_bytes) == (0, 0, 0)
    assert kit.exists(1, 2) == [1, 1]
    assert free_units(kit) * UNIT_BYTES == 4 * MIB - 3 * KIB
    check(kit.state)


def test_a_silent_sessions_spares_wait_until_it_is_cut_off(kit: Kit, spares: Put) -> None:
    kit.commit_spares(spares, [0], [1])
    for _ in range(4):
        kit.apply(c.RenewSession(session_id(2)))
        kit.heartbeat(kit.nodes[1], obey=False)
        kit.tick(3)
    assert kit.state.status(kit.now_s).quarantined_bytes == 19 * KIB
    assert granted_bytes(kit) == 0
    check(kit.state)
    with pytest.raises(SessionUnknown):
        kit.commit_spares(spares, [1], [2])
    kit.with_session(1)
    assert kit.commit_spares(spares, [1], [2]) == [NOT_GRANTED]
    kit.tick(60)
    assert kit.state.status(kit.now_s).quarantined_bytes == 19 * KIB  # never by time alone
    kit.heartbeats()
    kit.heartbeats()
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    assert free_units(kit) * UNIT_BYTES == 4 * MIB - 2 * KIB
    assert kit.exists(1) == [1]
    check(kit.state)


def test_commits_keep_a_session(kit: Kit, spares: Put) -> None:
    for i in range(5):
        kit.heartbeat(kit.nodes[1])
        kit.tick(4)
        assert kit.commit_spares(spares, [i], [100 + i]) == [DECIDED]


# ---- afterwards ------------------------------------------------------------------------------


def test_a_restarted_master_knows_what_was_committed(kit: Kit, spares: Put) -> None:
    kit.commit_spares(spares, [3], [1], 1000, tails=[20])
    kit.commit_spares(spares, [5, 6, 7], [2, 3, 4])
    kit.commit_spares(spares, [9, 8, 10, 11], [5, 6, 5, 7])
    for journal in (kit.durable(), list(kit.state.snapshot())):
        copy = MasterState(StateConfig(), 2)
        for effect in journal:
            copy.replay(effect)
        assert contents(copy) == contents(kit.state)
        check(copy)
    again = restarted(kit)
    again.attach(kit.nodes[1])
    again.with_session(1)
    assert again.exists(*range(1, 8)) == [1] * 7
    assert free_units(again) * UNIT_BYTES == 4 * MIB - 8 * KIB
    # Its grants ended with the master that gave them.
    assert again.commit_spares(spares, [0], [8]) == [NOT_GRANTED]
    assert again.commit_spares(spares, [0, 1], [8, 9]) == [NOT_GRANTED] * 2
    assert again.start_spares(5)[1].reply.grant_id > spares.reply.grant_id
    check(again.state)


def test_what_was_sealed_comes_back_without_the_journal(kit: Kit, spares: Put) -> None:
    journal = kit.durable()
    kit.commit_spares(spares, [3], [1], 1000)
    kit.commit_spares(spares, [5, 6], [2, 3])
    again = restarted(kit, journal=journal)
    again.attach(kit.nodes[1])
    assert again.exists(1, 2, 3) == [1, 1, 1]
    assert facts(again.with_session(1), 1) == [(1000, checksum_of(1))]
    check(again.state)


def test_they_are_evicted_and_removed_like_others() -> None:
    kit = make_kit(256 * KIB)
    number = 0
    for i in range(200):
        put, spares = kit.start_spares(50, keys=[10_000 + i])
        kit.commit(put)
        keys = [number + i for i in range(len(spares.keys))]
        number += len(keys)
        for position, key in enumerate(keys):
            kit.commit_spares(spares, [position], [key])
    check(kit.state)
    assert kit.state.counters.evicted > 0
    there = kit.exists(*range(number))
    assert 0 < sum(there) < number
    assert kit.remove(*range(number)) == there
    assert sum(kit.exists(*range(number))) == 0
    check(kit.state)


sizes_of = st.sampled_from([1, 64, 65, 700, KIB])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=sizes_of, count=st.integers(1, 12))
def test_any_commits_add_up(data: st.DataObject, size: int, count: int) -> None:
    """Whatever is named: each is decided, known or refused, and all is counted."""
    kit = make_kit()
    kit.put([0, 1], size)
    put, spares = kit.start_spares(count, size)
    kit.commit(put)
    stored = {0: size, 1: size}
    left = set(range(len(spares.keys)))
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 6))
        positions = data.draw(st.lists(st.integers(0, count + 1), min_size=n, max_size=n))
        keys = data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
        sizes = data.draw(
            st.lists(st.sampled_from([size, size, max(1, size - 1), size + 1]), min_size=n,
                     max_size=n)
        )  # fmt: skip
        before = contents(kit.state)
        try:
            statuses = kit.commit_spares(spares, positions, keys, sizes)
        except InvalidArgument:
            assert any(-(-n // UNIT_BYTES) != -(-size // UNIT_BYTES) for n in sizes)
            assert contents(kit.state) == before
            continue
        known = set(stored)
        for position, key, wanted, status in zip(positions, keys, sizes, statuses, strict=True):
            if position not in left:
                assert status == NOT_GRANTED
                continue
            left.discard(position)
            if key in stored:
                unsealed = 0 if key in known else CommitStatus.UNSEALED_SAME - SAME  # of this batch
                assert status == unsealed + (SAME if stored[key] == wanted else DIFFERENT)
            else:
                assert status == DECIDED
                stored[key] = wanted
        assert set(pending(kit, spares)) == left
        check(kit.state)
    assert facts(kit, *stored) == [(n, checksum_of(key)) for key, n in stored.items()]
