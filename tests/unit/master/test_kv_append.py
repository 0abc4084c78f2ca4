"""Appending through answers that are lost, late, doubled or refused; and after the lead is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cenote.api.errors import InternalError, NotLeader, ResourceUnavailable
from cenote.kv.service import Delete, KvRefused, Put
from cenote.master import kv_append, kv_backend
from cenote.master.journal import RECORD_BYTES_MAX
from cenote.master.kv_keys import Keys
from kv_kit import PREFIX, TIMEOUT_S, Masters, follow_all, numbers, records
from waiting import wait_until

KEYS = Keys(PREFIX)


@pytest.fixture
def masters() -> Iterator[Masters]:
    made = Masters()
    yield made
    made.close()


def journal(masters: Masters) -> list[int]:
    """What a reader finds."""
    return numbers(follow_all(masters.join("reader")))


@pytest.mark.parametrize("fault", ["lost", "unknown", "twice"])
def test_an_append_whose_answer_is_lost_is_there_once(masters: Masters, fault: str) -> None:
    leader = masters.lead("a")
    leader.append(records(1, 3))
    leader.sync(3).result(TIMEOUT_S)
    with masters.lock:  # the next transactions may be heartbeats
        masters.kv(leader).fail_next("txn", fault, 3)
        leader.append(records(4, 3, each=True))
    future = leader.sync(6)
    future.result(TIMEOUT_S)
    leader.append(records(7, 1))
    leader.sync(7).result(TIMEOUT_S)
    assert journal(masters) == [1, 2, 3, 4, 5, 6, 7]
    assert leader.lost is None


def test_an_append_that_is_carried_out_late_changes_nothing(masters: Masters) -> None:
    leader = masters.lead("a")
    late: list[str] = []

    def hold_appends(call: str) -> str:
        if call == "txn" and not late and leader.backlog.entries:
            late.append(call)
            return "late"
        return ""

    masters.kv(leader).fault = hold_appends
    leader.append(records(1, 2))
    leader.sync(2).result(TIMEOUT_S)
    leader.append(records(3, 1))
    leader.sync(3).result(TIMEOUT_S)
    with masters.lock:
        assert masters.service.held_back
        masters.service.deliver()
    assert journal(masters) == [1, 2, 3]


def test_what_is_appended_while_nothing_answers_goes_out_in_order(masters: Masters) -> None:
    leader = masters.lead("a")
    masters.cut_off(leader)
    for number in range(1, 200):
        leader.append(records(number, 1))
    future = leader.sync(199)
    assert leader.durable_entry == 0
    assert leader.backlog.entries == 199
    assert leader.backlog.size_bytes > 199 * 50
    masters.reconnect(leader)
    future.result(TIMEOUT_S)
    assert leader.backlog.entries == 0
    assert journal(masters) == list(range(1, 200))


def test_many_records_share_a_key_and_none_is_larger_than_a_record(masters: Masters) -> None:
    leader = masters.lead("a")
    masters.cut_off(leader)
    leader.append(records(1, 5000, each=True))
    masters.reconnect(leader)
    leader.sync(5000).result(TIMEOUT_S)
    keys = masters.paths("journal/")
    assert len(keys) < 20
    assert max(len(masters.value(key) or b"") for key in keys) <= RECORD_BYTES_MAX
    assert journal(masters) == list(range(1, 5001))


def test_an_old_leader_appends_nothing_more(masters: Masters) -> None:
    old = masters.lead("old")
    old.append(records(1, 1))
    old.sync(1).result(TIMEOUT_S)
    masters.cut_off(old)
    old.append(records(2, 1))
    waiting = old.sync(2)
    new = masters.lead("new")
    new.append(records(2, 1, epoch=2))
    new.sync(2).result(TIMEOUT_S)
    masters.reconnect(old)
    with pytest.raises(NotLeader) as caught:
        waiting.result(TIMEOUT_S)
    assert "epoch 1 is over" in str(caught.value)
    assert old.lost is not None
    assert old.refusal is not None
    assert old.tenure_end_s == float("-inf")
    with pytest.raises(NotLeader):
        old.append(records(3, 1))
    with pytest.raises(NotLeader):
        old.sync(2).result(TIMEOUT_S)
    with pytest.raises(NotLeader):
        old.close()
    assert journal(masters) == [1, 2]


def test_a_write_of_the_old_leader_that_arrives_late_is_refused(masters: Masters) -> None:
    old = masters.lead("old")
    masters.kv(old).fault = lambda call: "late" if call == "txn" else ""
    old.append(records(1, 1))
    wait_until(lambda: masters.service.held_back, what="an append under way")
    new = masters.lead("new")
    with masters.lock:
        while masters.service.held_back:
            masters.service.deliver()
    new.append(records(1, 1, epoch=2))
    new.sync(1).result(TIMEOUT_S)
    assert journal(masters) == [1]
    reader = masters.join("reader2")
    (record,) = [r for r in follow_all(reader) if numbers([r]) == [1]]
    assert bytes(record) == records(1, 1, epoch=2)[0]


def test_a_backlog_is_refused_and_bounded(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_append, "BACKLOG_BYTES_MAX", 2000)
    monkeypatch.setattr(kv_append, "APPEND_BYTES_MAX", 5000)
    masters.tenure_s = 60.0
    leader = masters.lead("a")
    masters.cut_off(leader)
    last = 0
    while leader.refusal is None:
        last = leader.append(records(last + 1, 1))
    assert 2000 < leader.backlog.size_bytes < 3000
    while leader.backlog.size_bytes < 4900:
        last = leader.append(records(last + 1, 1))
    with pytest.raises(ResourceUnavailable, match="behind"):
        leader.append(records(last + 1, 2, each=True))
    assert leader.last_entry == last
    masters.reconnect(leader)
    wait_until(lambda: leader.refusal is None, what="the backlog to be written")
    leader.append(records(last + 1, 1))
    leader.sync(last + 1).result(TIMEOUT_S)
    assert journal(masters) == list(range(1, last + 2))


def test_a_backlog_that_is_old_is_refused(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_append, "BACKLOG_AGE_S_MAX", 0.05)
    masters.tenure_s = 60.0
    leader = masters.lead("a")
    masters.cut_off(leader)
    leader.append(records(1, 1))
    refusal = wait_until(lambda: leader.refusal, what="a refusal")
    assert refusal is not None
    assert "behind" in refusal.message
    assert refusal.remedy


def test_whoever_waits_for_too_long_is_told(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_append, "SYNC_TIMEOUT_S", 0.1)
    leader = masters.lead("a")
    masters.cut_off(leader)
    leader.append(records(1, 1))
    with pytest.raises(ResourceUnavailable):
        leader.sync(1).result(TIMEOUT_S)
    masters.reconnect(leader)
    wait_until(lambda: leader.durable_entry == 1, what="it nevertheless")


def test_a_full_database_is_waited_out(masters: Masters, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = masters.lead("a")
    kv = masters.kv(leader)
    is_full, txn = threading.Event(), kv.txn
    is_full.set()

    def refuse(conditions: Any, then: Any, otherwise: Any = (), *, timeout_s: float) -> Any:
        if is_full.is_set():
            raise KvRefused("etcdserver: mvcc: database space exceeded")
        return txn(conditions, then, otherwise, timeout_s=timeout_s)

    monkeypatch.setattr(kv, "txn", refuse)
    leader.append(records(1, 1))
    future = leader.sync(1)
    wait_until(lambda: leader.refusal, what="writes to be refused")
    is_full.clear()
    future.result(TIMEOUT_S)


def test_another_entry_in_our_place_ends_it(masters: Masters) -> None:
    """It can't be; if it is, nothing is acknowledged on top of it."""
    leader = masters.lead("a")
    with masters.lock:
        masters.service.txn((), (Put(KEYS.journal(1), records(1, 1, epoch=9)[0]),), ())
    leader.append(records(1, 1))
    with pytest.raises(InternalError, match="is not what was decided"):
        leader.sync(1).result(TIMEOUT_S)
    with pytest.raises(InternalError):
        leader.append(records(2, 1))


def test_closing_writes_what_is_left(masters: Masters) -> None:
    leader = masters.lead("a")
    leader.append(records(1, 100, each=True))
    leader.close()
    assert leader.durable_entry == 100
    assert journal(masters) == list(range(1, 101))


def test_closing_ends_where_nothing_answers(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_backend, "CLOSE_TIMEOUT_S", 0.2)
    leader = masters.lead("a")
    masters.cut_off(leader)
    leader.append(records(1, 1))
    with pytest.raises(ResourceUnavailable):
        leader.close()


def test_nothing_is_appended_to_a_journal_that_vanished(masters: Masters) -> None:
    """Somebody deleted all keys: the fence is gone, too."""
    leader = masters.lead("a")
    with masters.lock:
        masters.service.txn((), (Delete(b"/p/", b"/p0"),), ())
    leader.append(records(1, 1))
    with pytest.raises(NotLeader):
        leader.sync(1).result(TIMEOUT_S)
