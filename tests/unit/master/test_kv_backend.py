"""Several masters over one service: who leads, who learns of it, and what people can read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from cenote.api.errors import InternalError, NotLeader
from cenote.kv.service import Put
from cenote.master import kv_upkeep
from cenote.master.kv_backend import KvBackend
from cenote.master.metadata import MasterRow
from kv_kit import TENURE_S, TIMEOUT_S, Masters, follow_all, numbers, records
from promptness import ends_within
from waiting import wait_until


@pytest.fixture
def masters() -> Iterator[Masters]:
    made = Masters()
    yield made
    made.close()


def wait_vacant(backend: KvBackend) -> float:
    """How long until nobody leads."""
    began_s = time.monotonic()
    wait_until(lambda: backend.vacant, what="a vacancy")
    return time.monotonic() - began_s


# ---- who leads --------------------------------------------------------------------------------


def test_the_first_one_leads_at_once(masters: Masters) -> None:
    a = masters.join("a")
    assert a.leader is None
    assert a.tenure_end_s == float("-inf")
    before_s = time.monotonic()
    assert a.campaign(TIMEOUT_S)
    assert before_s + 0.9 * TENURE_S < a.tenure_end_s + 0.1
    assert a.tenure_end_s < time.monotonic() + TENURE_S
    assert a.leader is not None
    assert (a.leader.epoch, a.leader.row.name) == (1, "a")
    opened = a.open()
    assert opened.epoch == 1
    assert a.lost is None
    assert not a.vacant


def test_a_tenure_grows_while_the_service_answers_and_no_longer(masters: Masters) -> None:
    a = masters.lead("a")
    first_s = a.tenure_end_s
    wait_until(lambda: a.tenure_end_s > first_s + TENURE_S, what="the tenure to grow")
    masters.cut_off(a)
    wait_until(lambda: time.monotonic() > a.tenure_end_s, what="its end")
    last_s = a.tenure_end_s
    refusal = wait_until(lambda: a.refusal, what="a refusal")
    assert refusal is not None
    assert "does not confirm" in refusal.message
    assert a.lost is None, "the service has not elected anybody else"
    masters.reconnect(a)
    wait_until(lambda: a.tenure_end_s > last_s, what="the tenure to grow again")
    assert a.refusal is None


def test_a_standby_knows_the_leader_and_waits_for_its_tenure(masters: Masters) -> None:
    a, b = masters.lead("a"), masters.join("b")
    assert wait_until(lambda: b.leader, what="a leader").row.addresses == ("a:5110",)  # type: ignore[union-attr]
    assert not b.campaign(0.05)
    masters.cut_off(a)
    assert wait_vacant(b) > 0.3 * TENURE_S
    assert b.leader is None
    assert time.monotonic() > a.tenure_end_s
    assert b.campaign(TIMEOUT_S)
    opened = b.open()
    assert opened.epoch == 2
    masters.reconnect(a)
    lost = wait_until(lambda: a.lost, what="the old leader to learn of it")
    assert isinstance(lost, NotLeader)
    assert lost.addresses == ("b:5110",)
    assert lost.epoch == 2


def test_an_orderly_end_hands_over_at_once(masters: Masters) -> None:
    masters.tenure_s = 30.0
    a, b = masters.lead("a"), masters.join("b")
    wait_until(lambda: b.leader, what="a leader")
    follow_all(b)
    a.close()
    with ends_within(3):
        while not b.vacant:
            b.follow(20.0)
    assert b.campaign(TIMEOUT_S)
    assert b.open().epoch == 2


def test_a_vacancy_ends_a_wait(masters: Masters) -> None:
    a, b = masters.lead("a"), masters.join("b")
    follow_all(b)
    wait_until(lambda: b.leader, what="a leader")
    masters.cut_off(a)
    with ends_within(10):
        while not b.vacant:
            b.follow(20.0)


def test_of_many_candidates_one_is_elected(masters: Masters) -> None:
    many = [masters.join(f"m{n}") for n in range(5)]
    for backend in many:
        wait_vacant(backend)
    elected = [backend for backend in many if backend.campaign(0.0)]
    assert len(elected) == 1
    wait_until(lambda: all(b.leader == elected[0].leader for b in many), what="all to know")


@pytest.mark.parametrize("fault", ["unknown", "twice"])
def test_an_election_whose_answer_is_lost_is_won_once(masters: Masters, fault: str) -> None:
    a = masters.join("a")
    wait_vacant(a)
    with masters.lock:
        masters.kv(a).fault = lambda call: fault if call == "txn" else ""
        masters.kv(a).calls.clear()
    won = a.campaign(0.3)
    masters.reconnect(a)
    assert won or a.campaign(TIMEOUT_S)
    list(a.open().records)
    a.append(records(1, 1))
    a.sync(1).result(TIMEOUT_S)


def test_an_election_that_is_carried_out_late_binds_nobody(masters: Masters) -> None:
    a, b = masters.join("a"), masters.join("b")
    wait_vacant(a)
    masters.kv(a).fault = lambda call: "late" if call == "txn" else ""
    assert not a.campaign(0.05)
    masters.reconnect(a)
    with masters.lock:
        while masters.service.held_back:
            masters.service.deliver()
    assert masters.value("leader") is not None
    assert a.tenure_end_s == float("-inf")
    wait_until(lambda: b.leader, what="the election to be seen")
    assert b.campaign(TIMEOUT_S)
    assert b.open().epoch == 2


def test_a_service_that_refuses_elections_is_asked_again(masters: Masters) -> None:
    """Its database is full, say. A standby that followed stays warm, and asks not all the time."""
    leader, standby = masters.lead("a"), masters.join("b")
    leader.append(records(1, 3))
    found = follow_all(standby, through=3)
    leader.close()
    wait_vacant(standby)
    kv = masters.kv(standby)
    kv.fault = lambda call: "refused" if call == "txn" else ""
    before = kv.calls.count("txn")
    assert not standby.campaign(0.5)
    assert kv.calls.count("txn") - before < 12
    wait_until(lambda: standby.refusal is not None, what="the refusal to show")
    assert "refused" in str(standby.refusal)
    kv.fault = lambda _call: ""
    assert standby.campaign(TIMEOUT_S)
    opened = standby.open()
    assert not opened.anew
    assert numbers([*found, *opened.records]) == [1, 2, 3]


def test_an_outage_of_the_service_does_not_unseat_the_leader(masters: Masters) -> None:
    a, b = masters.lead("a"), masters.join("b")
    follow_all(b)
    masters.service.reachable = False
    wait_until(lambda: time.monotonic() > a.tenure_end_s + TENURE_S, what="more than a tenure")
    assert not b.vacant
    masters.service.reachable = True
    last_s = a.tenure_end_s
    wait_until(lambda: a.tenure_end_s > last_s, what="the leader to go on")
    assert not b.vacant
    assert a.lost is None


def test_an_epoch_that_somebody_raised_fences_the_leader(masters: Masters) -> None:
    a = masters.lead("a")
    with masters.lock:
        masters.service.txn((), (Put(b"/p/epoch", b"41"),), ())
    wait_until(lambda: a.lost, what="the leader to learn of it")
    b = masters.join("b")
    assert b.campaign(TIMEOUT_S)
    assert b.open().epoch == 42


# ---- use ---------------------------------------------------------------------------------------


def test_a_backend_is_used_in_order(masters: Masters) -> None:
    a = masters.join("a")
    with pytest.raises(InternalError):
        a.open()
    with pytest.raises(InternalError):
        a.append(records(1, 1))
    assert a.campaign(TIMEOUT_S)
    with pytest.raises(InternalError):
        a.campaign(TIMEOUT_S)
    with pytest.raises(InternalError):
        a.follow(0.0)
    list(a.open().records)
    with pytest.raises(InternalError):
        a.open()
    a.close()
    with pytest.raises(InternalError):
        a.campaign(TIMEOUT_S)


def test_a_standby_closes_without_a_trace(masters: Masters) -> None:
    a, b = masters.lead("a"), masters.join("b")
    follow_all(b)
    wait_until(lambda: "masters/b" in masters.paths("masters/"), what="its row")
    b.close()
    assert masters.paths("masters/") == ["masters/a"]
    a.append(records(1, 1))
    a.sync(1).result(TIMEOUT_S)


def test_a_lead_may_change_hands_again_and_again(masters: Masters) -> None:
    last = 0
    for epoch in range(1, 8):
        backend = masters.join(f"m{epoch}")
        found = follow_all(backend)
        assert backend.campaign(TIMEOUT_S)
        opened = backend.open()
        assert opened.epoch == epoch
        assert numbers([*found, *opened.records]) == list(range(1, last + 1))
        last = backend.append(records(last + 1, 3, each=True, epoch=epoch))
        if epoch % 2:
            backend.close()
        else:
            backend.sync(last).result(TIMEOUT_S)
            masters.cut_off(backend)


# ---- what people can read ----------------------------------------------------------------------


def test_rows_are_there_for_people(masters: Masters) -> None:
    a, b = masters.lead("a"), masters.join("b")
    a.publish({"nodes/1": "one", "nodes/2": "two", "config": "c"})
    a.publish({"nodes/2": None, "nodes/1": "uno"})
    wait_until(lambda: masters.paths("pool/nodes/") == ["pool/nodes/1"], what="rows")
    assert masters.value("pool/nodes/1") == b"uno"
    assert masters.value("pool/config") == b"c"
    assert json.loads(masters.value("leader") or b"")["name"] == "a"
    assert json.loads(masters.value("tenure") or b"")["tenure_ms"] == int(TENURE_S * 1000)
    assert masters.value("epoch") == b"1"
    b.publish({"nodes/9": "of the next leader"})
    assert masters.paths("pool/nodes/") == ["pool/nodes/1"]
    a.close()
    assert b.campaign(TIMEOUT_S)
    list(b.open().records)
    wait_until(lambda: masters.paths("pool/") == ["pool/nodes/9"], what="rows of the new epoch")


def test_the_masters_are_known(masters: Masters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_upkeep, "MASTERS_S", 0.05)
    monkeypatch.setattr(kv_upkeep, "STEP_S", 0.02)
    monkeypatch.setattr(kv_upkeep, "MASTER_KEEP_S", 0.05)
    a, b = masters.lead("a"), masters.join("b")

    def roles() -> dict[str, object]:
        return {row.name: row.details.get("role") for row in b.masters}

    wait_until(lambda: roles() == {"a": "leader", "b": "standby"}, what="both to be known")
    b.join(MasterRow("b", ("b:1",), "b:2", {"version": "9"}))
    wait_until(
        lambda: any(row.name == "b" and row.details.get("version") == "9" for row in a.masters),
        what="the new row",
    )


def test_a_dead_masters_row_goes_with_its_lease(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_upkeep, "MASTER_KEEP_S", 0.1)
    monkeypatch.setattr(kv_upkeep, "STEP_S", 0.05)
    a, b = masters.lead("a"), masters.join("b")
    wait_until(lambda: len(masters.paths("masters/")) == 2, what="rows")
    masters.cut_off(b)
    with masters.lock:
        lease = masters.service.rows[b"/p/masters/b"].lease
        masters.service.revoke(lease)
    assert masters.paths("masters/") == ["masters/a"]
    masters.reconnect(b)
    wait_until(lambda: len(masters.paths("masters/")) == 2, what="it to be known again")
    assert a.lost is None


def test_a_leader_whose_requests_arrive_and_that_hears_no_answer_is_replaced(
    masters: Masters,
) -> None:
    """It can't prove its tenure, so it must not prolong it for the others, either."""
    a, b = masters.lead("a"), masters.join("b")
    wait_until(lambda: b.leader is not None, what="the leader to be known")
    masters.kv(a).fault = lambda _call: "unknown"
    assert b.campaign(TIMEOUT_S), b.refusal
    masters.reconnect(a)
    wait_until(lambda: a.lost is not None, what="the old leader to hear of it")


def test_a_leader_past_its_tenure_leads_on_where_nobody_took_over(masters: Masters) -> None:
    a = masters.lead("a")
    masters.cut_off(a)
    wait_until(lambda: time.monotonic() > a.tenure_end_s, what="its tenure to end")
    masters.reconnect(a)
    wait_until(lambda: time.monotonic() < a.tenure_end_s, what="it to be confirmed")
    assert a.lost is None


def test_how_long_a_master_has_been_silent(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed until its lease ends, and others can tell that it may be dead."""
    monkeypatch.setattr(kv_upkeep, "MASTERS_S", 0.02)
    monkeypatch.setattr(kv_upkeep, "STEP_S", 0.02)
    monkeypatch.setattr(kv_upkeep, "MASTER_KEEP_S", 0.02)
    a, b = masters.lead("a"), masters.join("b")

    def silent_s(name: str) -> float:
        return next((r.silent_s(time.monotonic()) for r in a.masters if r.name == name), -1.0)

    wait_until(lambda: silent_s("b") >= 0, what="it to be known")
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() > began_s + 0.6, what="some time")
    wait_until(lambda: 0 <= silent_s("b") < 0.5, what="signs of life")
    masters.cut_off(b)
    wait_until(lambda: silent_s("b") > 0.7, what="it to be missed")
    assert silent_s("a") == 0
    masters.reconnect(b)
    wait_until(lambda: 0 <= silent_s("b") < 0.5, what="it to be seen again")


def test_old_revisions_are_forgotten(masters: Masters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_upkeep, "STEP_S", 0.02)
    monkeypatch.setattr(kv_upkeep, "COMPACT_S", 0.1)
    a = masters.lead("a")
    wait_until(lambda: masters.service.compacted > 1, what="compaction")
    first = masters.service.compacted
    wait_until(lambda: masters.service.compacted > first, what="more of it")
    assert len(masters.service.history) < 100
    assert a.lost is None
