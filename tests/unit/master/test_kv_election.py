"""No two masters may act at the same time: the rules of the election, without a service."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.kv.service import KvRow, Put, TxnReply
from cenote.master.journal_layout import JournalCorrupt
from cenote.master.kv_election import Candidacy, Observer, Seen, Tenure, read_seen, seen_from
from cenote.master.kv_keys import Keys, LeaderRow, TenureRow
from cenote.master.metadata import MasterRow
from kv_model import KvModel

KEYS = Keys("/p")
TENURE_S = 2.0


def seen_in(model: KvModel) -> Seen:
    return seen_from(model.txn((), read_seen(KEYS), ()))


def stand(model: KvModel, seen: Seen, name: str) -> tuple[Candidacy, TxnReply]:
    candidacy = Candidacy(
        KEYS, seen, MasterRow(name), tenure_s=TENURE_S, entry=0, nonce=f"nonce of {name}"
    )
    return candidacy, model.txn(candidacy.conditions, candidacy.then, read_seen(KEYS))


def beat(model: KvModel, epoch: int) -> None:
    row = TenureRow(epoch, int(TENURE_S * 1000), 7)
    model.txn((), (Put(KEYS.tenure, row.to_bytes()),), ())


def test_a_place_that_nobody_had_is_vacant_once_the_service_has_answered() -> None:
    observer = Observer()
    assert observer.vacant_at_s == float("inf")
    observer.saw(seen_in(KvModel()), 100.0)
    assert observer.vacant_at_s == 100.0
    assert observer.leader is None


def test_a_tenure_is_waited_out_from_its_last_sign() -> None:
    model, observer = KvModel(), Observer()
    stand(model, seen_in(model), "a")
    observer.saw(seen_in(model), 100.0)
    assert observer.leader is not None
    assert observer.leader.row.name == "a"
    assert observer.vacant_at_s == 102.0
    observer.saw(seen_in(model), 101.0)
    assert observer.vacant_at_s == 102.0, "nothing had changed"
    beat(model, 1)
    observer.saw(seen_in(model), 101.5)
    assert observer.vacant_at_s == 103.5
    assert observer.entry == 7


def test_after_an_outage_the_leader_is_given_the_first_word() -> None:
    model, observer = KvModel(), Observer()
    stand(model, seen_in(model), "a")
    observer.saw(seen_in(model), 100.0)
    observer.failed()
    assert observer.vacant_at_s == float("inf")
    observer.saw(seen_in(model), 110.0)
    assert 110.5 < observer.vacant_at_s < 110.0 + TENURE_S


def test_of_two_candidates_one_is_elected() -> None:
    model = KvModel()
    seen = seen_in(model)
    first, won = stand(model, seen, "a")
    second, lost = stand(model, seen, "b")
    assert won.succeeded
    assert not lost.succeeded
    after = seen_from(lost)
    assert first.won(after) == won.revision
    assert second.won(after) == 0
    assert (first.epoch, second.epoch, after.epoch_number) == (1, 1, 1)
    third, won = stand(model, seen_in(model), "c")
    assert won.succeeded
    assert third.epoch == 2
    assert first.won(seen_in(model)) == 0


def test_one_who_proved_the_tenure_meanwhile_stays() -> None:
    model = KvModel()
    stand(model, seen_in(model), "a")
    seen = seen_in(model)
    beat(model, 1)
    assert not stand(model, seen, "b")[1].succeeded


def test_rows_of_somebody_else_are_named() -> None:
    for key in (KEYS.epoch, KEYS.leader, KEYS.tenure):
        model = KvModel()
        model.txn((), (Put(key, b"?"),), ())
        with pytest.raises(JournalCorrupt, match="in etcd"):
            Observer().saw(seen_in(model), 0.0)


def test_rows_come_back_as_they_were() -> None:
    row = LeaderRow(3, "n", MasterRow("a", ("h:1", "i:2"), "h:3", {"pid": 7}))
    assert LeaderRow.parse(row.to_bytes()) == row
    tenure = TenureRow(3, 1500, 9)
    assert TenureRow.parse(tenure.to_bytes()) == tenure


# ---- the property -----------------------------------------------------------------------------


class _Clock:
    """A monotonic clock of another zero and a pace of its own."""

    def __init__(self, dice: random.Random) -> None:
        self.rate = 1 + dice.uniform(-0.02, 0.02)
        self.zero = dice.uniform(-1000, 1000)

    def at(self, true_s: float) -> float:
        return true_s * self.rate + self.zero

    def true(self, local_s: float) -> float:
        return (local_s - self.zero) / self.rate


def _row(value: bytes, revision: int) -> KvRow:
    return KvRow(b"", value, revision, revision)


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_no_tenure_reaches_into_the_next(seed: int) -> None:
    """Beats that are slow, lost or answered late, a standby that looks when it can: at the moment
    of its election the old tenure is over, on whatever clock."""
    dice = random.Random(seed)
    leader, standby = _Clock(dice), _Clock(dice)
    beats: list[tuple[float, float, bool]] = []  # true times: sent, carried out; whether answered
    now_s = 0.0
    for _ in range(dice.randrange(1, 12)):
        carried_out_s = now_s + dice.expovariate(1 / dice.choice((0.01, 0.5)))
        beats.append((now_s, carried_out_s, dice.random() < 0.7))
        now_s = carried_out_s + dice.expovariate(1 / 0.3)

    def revision_at(true_s: float) -> int:
        return 1 + sum(carried_out_s <= true_s for _, carried_out_s, _ in beats)

    observer = Observer()
    row = TenureRow(1, int(TENURE_S * 1000), 0).to_bytes()
    head = _row(LeaderRow(1, "n", MasterRow("a")).to_bytes(), 1)
    looked_s = dice.uniform(0, now_s)
    while True:
        seen_revision = revision_at(looked_s)
        looked_s += dice.expovariate(1 / 0.05)  # the answer travels
        if dice.random() < 0.1:
            observer.failed()
        else:
            seen = Seen(_row(b"1", 1), head, _row(row, seen_revision))
            observer.saw(seen, standby.at(looked_s))
        looked_s += dice.choice((0.0, dice.uniform(0.01, 0.5)))
        is_vacant = standby.at(looked_s) >= observer.vacant_at_s
        if is_vacant and revision_at(looked_s) == seen_revision:
            break  # elected: what the old leader sends from now on is refused
    tenure = Tenure(TENURE_S)
    for sent_s, carried_out_s, is_answered in beats:
        if is_answered and carried_out_s <= looked_s:
            tenure.proven(leader.at(sent_s))
    assert leader.true(tenure.end_s) <= looked_s
