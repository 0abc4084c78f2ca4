"""What was decided exists for other writers once it is known to be sealed, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import SEAL, SLOT, CommitStatus, PutStatus
from cenote.master import commands as c
from unit.master.state_checks import check
from unit.master.state_kit import KIB, Kit, checksum_of, new_node, session_id

EXISTS, UNSEALED, GRANTED = PutStatus.EXISTS, PutStatus.UNSEALED, PutStatus.GRANTED


@pytest.fixture
def kit() -> Kit:
    made = Kit().with_session().with_session(2, "host-2")
    for number in (1, 2):
        made.attach(new_node(number))
    return made


def commit(kit: Kit, keys: list[int], request_id: int, through: int = 0, session: int = 1) -> None:
    """Decided, and not a word of what became of it."""
    put = kit.start(keys, session=session)
    sums = np.array([checksum_of(key) for key in keys], np.uint64)
    grant = session_id(session), request_id, put.reply.grant_id
    kit.apply(c.PutCommit(*grant, None, sums, sealed_through=through))


def statuses(kit: Kit, *keys: int, session: int = 2) -> list[int]:
    """What another writer is told."""
    put = kit.start(list(keys), session=session)
    kit.apply(c.PutAbort(session_id(session), put.reply.grant_id))
    check(kit.state)
    return put.statuses


@pytest.mark.parametrize("keys", [[1], [1, 2, 3]])
def test_what_is_decided_exists_once_its_writer_has_said_that_it_is_sealed(
    kit: Kit, keys: list[int]
) -> None:
    commit(kit, keys, 1001)
    assert statuses(kit, *keys) == [UNSEALED] * len(keys)
    assert kit.exists(*keys) == [1] * len(keys)
    commit(kit, [9], 1002, through=1000)
    assert statuses(kit, *keys) == [UNSEALED] * len(keys)
    commit(kit, [10], 1003, through=1001)
    assert statuses(kit, *keys, 9) == [EXISTS] * len(keys) + [UNSEALED]


@pytest.mark.parametrize("last", ["renew", "close"])
def test_the_last_commit_is_told_of_when_the_session_is_renewed_or_closed(
    kit: Kit, last: str
) -> None:
    commit(kit, [1], 1001)
    news = c.RenewSession if last == "renew" else c.CloseSession
    kit.apply(news(session_id(1), sealed_through=1001))
    assert statuses(kit, 1) == [EXISTS]


def test_what_was_cancelled_or_comes_too_late_stays_unsealed(kit: Kit) -> None:
    commit(kit, [1], 1001)
    cancelled = np.array([1001], np.uint64)
    kit.apply(c.RenewSession(session_id(1), cancelled_request_ids=cancelled, sealed_through=1005))
    commit(kit, [2], 1004)
    kit.apply(c.RenewSession(session_id(1), sealed_through=1006))
    assert statuses(kit, 1, 2) == [UNSEALED] * 2


def test_nobody_speaks_for_a_session_that_ended(kit: Kit) -> None:
    commit(kit, [1], 1001)
    kit.apply(c.RenewSession(session_id(2), sealed_through=2000))
    kit.apply(c.CloseSession(session_id(1)))
    assert statuses(kit, 1) == [UNSEALED]


def test_of_many_commits_the_oldest_stay_unsealed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.master.sealing.COMMITS_MAX", 2)
    for number in range(4):
        commit(kit, [number], 1001 + number)
    kit.apply(c.RenewSession(session_id(1), sealed_through=1004))
    assert statuses(kit, 0, 1, 2, 3) == [UNSEALED, UNSEALED, EXISTS, EXISTS]


def test_a_row_that_is_anothers_by_now_is_left_alone(kit: Kit) -> None:
    commit(kit, [1], 1001)
    kit.remove(1)
    commit(kit, [2], 1002, session=2)
    kit.apply(c.RenewSession(session_id(1), sealed_through=1001))
    assert statuses(kit, 2, session=1) == [UNSEALED]


@pytest.mark.parametrize(("replicas", "pieces"), [(1, 1), (2, 1), (1, 2)])
def test_the_next_writer_gets_what_it_takes_to_seal(kit: Kit, replicas: int, pieces: int) -> None:
    """Just what the first one had sealed, though that went by what it was granted."""
    size = 28 * KIB + 7 if pieces == 1 else 90 * KIB + 7
    keys = [1] if pieces > 1 else [1, 2]
    tails = np.array([70, 0][: len(keys)], np.uint16)
    assert set(kit.put(keys, size, replicas=replicas, tail_lengths=tails)) == {GRANTED}
    sealed = np.concatenate([node.inventory() for node in kit.nodes.values()])
    not_known(kit, keys)
    put = kit.start(keys, session=2)
    assert put.statuses == [UNSEALED] * len(keys)
    told = np.frombuffer(put.reply.unsealed, SEAL)
    assert len(told) >= len(keys) * replicas * pieces
    same = sorted(set(SEAL.names or ()) & set(SLOT.names or ()) - {"key_length"})
    found = {tuple(row[name].tobytes() for name in same) for row in sealed}
    assert {tuple(row[name].tobytes() for name in same) for row in told} <= found


def not_known(kit: Kit, keys: list[int]) -> None:
    """As if nobody had said so."""
    pool = kit.state._pool
    pool.state[pool.objects.lookup(kit.digests(*keys))] |= np.uint8(0x20)


def confirm(kit: Kit, keys: list[int], seqs: list[int], epoch: int = 1) -> list[int]:
    numbers = np.array(seqs, np.uint64)
    return kit.start(keys, session=2, sealed_seqs=numbers, sealed_epoch=epoch).statuses


def test_what_the_next_writer_had_sealed_exists(kit: Kit) -> None:
    commit(kit, [1, 2, 3], 1001)
    seqs = [hit.seq for hit in kit.get(1, 2, 3) if hit is not None]
    assert confirm(kit, [1, 2, 3], seqs, epoch=2) == [UNSEALED] * 3
    assert confirm(kit, [1, 2, 3], [seqs[0], 0, seqs[2] + 1]) == [EXISTS, UNSEALED, UNSEALED]
    assert confirm(kit, [1, 7], [seqs[0], seqs[1]]) == [EXISTS, GRANTED]
    check(kit.state)


def test_what_the_next_writer_had_sealed_is_not_taken_back(kit: Kit) -> None:
    commit(kit, [1, 2], 1001)
    seqs = [hit.seq for hit in kit.get(1, 2) if hit is not None]
    assert confirm(kit, [1], seqs[:1]) == [EXISTS]
    abort = c.PutAbort(
        session_id(1),
        0,
        unsealed=kit.digests(1, 2),
        unsealed_seqs=np.array(seqs, np.uint64),
        unsealed_epoch=1,
    )
    kit.apply(abort)
    assert kit.exists(1, 2) == [1, 0]


def test_who_loses_a_race_is_told_whether_the_winner_is_sealed(kit: Kit) -> None:
    puts = [kit.start([1], session=session) for session in (1, 2, 2)]
    one = np.array([checksum_of(1)], np.uint64)
    told = []
    for number, (put, sums) in enumerate(zip(puts, (one, one, one + np.uint64(1)), strict=True)):
        session = session_id(1 if number == 0 else 2)
        reply = kit.apply(c.PutCommit(session, 1001 + number, put.reply.grant_id, None, sums))
        told += list(reply.statuses)
    unsealed = [CommitStatus.UNSEALED_SAME, CommitStatus.UNSEALED_DIFFERENT]
    assert told == [CommitStatus.DECIDED, *unsealed]
    check(kit.state)


def test_after_a_restart_of_the_daemon_only_what_is_sealed_is_left(kit: Kit) -> None:
    commit(kit, [1], 1001)
    kit.put([2])
    for node in list(kit.nodes.values()):
        kit.restart_node(node)
    assert statuses(kit, 1, 2) == [GRANTED, EXISTS]
