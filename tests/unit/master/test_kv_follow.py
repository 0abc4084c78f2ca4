"""Following: watches with gaps, compaction, truncation under way, snapshots that are replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cenote.kv.service import Delete, KvUnavailable, Put, RangeReply
from cenote.master import kv_follow, kv_snapshot
from cenote.master.effects import SegmentGone
from cenote.master.journal import FLAG_SNAPSHOT, Record, RecordWriter, SnapshotEnd, read_entries
from cenote.master.journal_layout import JournalCorrupt
from cenote.master.kv_backend import KvBackend
from cenote.master.kv_keys import Keys
from kv_kit import PREFIX, TIMEOUT_S, Masters, follow_all, numbers, records, snapshot
from waiting import wait_until

KEYS = Keys(PREFIX)


@pytest.fixture
def masters() -> Iterator[Masters]:
    made = Masters()
    yield made
    made.close()


def append(leader: KvBackend, count: int) -> int:
    """Each entry under a key of its own."""
    for _ in range(count):
        last = leader.append(records(leader.last_entry + 1, 1))
        leader.sync(last).result(TIMEOUT_S)
    return leader.last_entry


def truncate(masters: Masters, leader: KvBackend, covers: int) -> None:
    """A snapshot, and what it covers is deleted and forgotten."""
    leader.install_snapshot(snapshot(covers), covers)
    wait_until(
        lambda: all(int(path[-20:]) > covers for path in masters.paths("journal/")),
        what="the journal to be truncated",
    )


def test_a_standby_is_given_what_is_appended(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    found = follow_all(standby)
    assert numbers(found) == [1, 2, 3]
    for last in range(4, 10):
        append(leader, 1)
        follow_all(standby, found, through=last)
    assert numbers(found) == list(range(1, 10))
    assert standby.last_entry == 9
    assert len(masters.kv(standby).watches) == 1


def test_following_begins_with_a_snapshot(masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 5)
    truncate(masters, leader, 4)
    standby = masters.join("b")
    first = standby.follow(0.0)
    assert first.anew
    found = follow_all(standby)
    assert numbers(found) == [1, 2, 3, 4, 5]
    assert SnapshotEnd(4, 1) in list(read_entries(found))


def test_a_watch_that_skips_an_entry_is_not_believed(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 2)
    found = follow_all(standby)
    (watch,) = masters.kv(standby).watches
    true_poll = watch.poll
    monkeypatch.setattr(
        watch, "poll", lambda timeout_s: [e for e in true_poll(timeout_s) if b"03" not in e.key]
    )
    append(leader, 3)
    follow_all(standby, found, through=5)
    assert numbers(found) == [1, 2, 3, 4, 5]
    assert len(masters.kv(standby).watches) > 1


def test_a_watch_that_says_nothing_is_noticed(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follow, "SILENCE_S", 0.1)
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 2)
    found = follow_all(standby)
    masters.kv(standby).watches[0].silent = True
    append(leader, 3)
    follow_all(standby, found, through=5)
    assert numbers(found) == [1, 2, 3, 4, 5]


def test_a_watch_that_was_cut_is_begun_again(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 2)
    found = follow_all(standby)
    masters.cut_off(standby)
    masters.service.reachable = False
    assert not standby.follow(0.1).caught_up
    assert standby.refusal is not None
    masters.service.reachable = True
    append(leader, 2)
    assert not standby.follow(0.1).caught_up
    masters.reconnect(standby)
    follow_all(standby, found, through=4)
    assert numbers(found) == [1, 2, 3, 4]
    wait_until(lambda: standby.refusal is None, what="the trouble to be over")


def test_a_standby_that_was_away_for_too_long_begins_anew(masters: Masters) -> None:
    """What it had is void: the journal was truncated and compacted beyond it."""
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    found = follow_all(standby)
    append(leader, 5)
    truncate(masters, leader, 7)
    with masters.lock:
        masters.service.compact(masters.service.revision)
    follow_all(standby, found, through=8)
    assert numbers(found) == list(range(1, 9))
    assert SnapshotEnd(7, 1) in list(read_entries(found))


def test_what_was_read_is_not_lost_when_the_next_answer_is(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    assert standby.follow(0.0).anew
    reads: list[str] = []

    def second_read_fails(call: str) -> str:
        if call != "range":
            return ""
        reads.append(call)
        return "lost" if len(reads) == 2 else ""

    with masters.lock:
        masters.kv(standby).fault = second_read_fails
    found: list[Record] = list(standby.follow(0.0).records)
    masters.reconnect(standby)
    found = follow_all(standby, found, through=3)
    assert numbers(found) == [1, 2, 3]


def test_a_snapshot_of_all_there_is_is_noticed_without_a_later_entry(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    found = follow_all(standby)
    append(leader, 2)
    truncate(masters, leader, 5)
    with masters.lock:
        masters.service.compact(masters.service.revision)
    follow_all(standby, found, through=5)
    assert numbers(found) == [1, 2, 3, 4, 5]


def test_compaction_beneath_a_watch_costs_nothing_else(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    found = follow_all(standby)
    append(leader, 3)
    with masters.lock:
        masters.service.compact(masters.service.revision)
    steps = [standby.follow(0.2)]
    found += steps[0].records
    follow_all(standby, found, through=6)
    assert numbers(found) == [1, 2, 3, 4, 5, 6]
    assert not steps[0].anew


def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_anew(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follow, "CHUNKS_PER_READ_MAX", 1)
    leader = masters.lead("a")
    append(leader, 6)
    write_chunks(leader, 4, monkeypatch)
    wait_until(lambda: len(masters.paths("journal/")) == 2, what="truncation")
    standby = masters.join("b")
    found: list[Record] = []
    for _ in range(3):
        found += standby.follow(0.1).records
    assert numbers(found)
    assert standby.last_entry == 0, "in the middle of the snapshot"
    write_chunks(leader, 6, monkeypatch)
    wait_until(lambda: not masters.paths("journal/"), what="truncation")
    follow_all(standby, found, through=6)
    assert numbers(found) == [1, 2, 3, 4, 5, 6]


def write_chunks(leader: KvBackend, covers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a chunk for each record."""
    monkeypatch.setattr(kv_snapshot, "RECORD_BYTES_MAX", 1)
    writer, made = RecordWriter(1, 1, flags=FLAG_SNAPSHOT), []
    for number in range(1, covers + 1):
        writer.add(SegmentGone(number))
        made += writer.take()
    writer.add(SnapshotEnd(covers, 1))
    leader.install_snapshot(made + writer.take(), covers)


def test_many_small_keys_are_read_in_larger_steps(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follow, "ROWS_PER_READ_MIN", 2)
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 60)
    reads = masters.kv(standby).calls
    assert numbers(follow_all(standby)) == list(range(1, 61))
    assert reads.count("range") < 20


def limit_rows(masters: Masters, backend: KvBackend, rows_max: int) -> list[int]:
    """More rows do not arrive in time; returns how many each range gave."""
    kv, given = masters.kv(backend), []
    true_range = kv.range

    def slow_range(
        key: bytes, end: bytes = b"", *, limit: int = 0, keys_only: bool = False, timeout_s: float
    ) -> RangeReply:
        reply = true_range(key, end, limit=limit, keys_only=keys_only, timeout_s=timeout_s)
        if len(reply.rows) > rows_max:
            raise KvUnavailable("too much to read in time")
        given.append(len(reply.rows))
        return reply

    kv.range = slow_range  # type: ignore[method-assign]
    return given


def test_what_does_not_arrive_in_time_is_read_in_smaller_steps(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 60)
    given = limit_rows(masters, standby, 5)
    assert numbers(follow_all(standby)) == list(range(1, 61))
    assert max(given) > 2
    write_chunks(leader, 50, monkeypatch)
    wait_until(lambda: len(masters.paths("journal/")) == 10, what="truncation")
    late = masters.join("c")
    limit_rows(masters, late, 5)
    assert numbers(follow_all(late)) == list(range(1, 61))


def test_a_leader_reads_what_is_left_in_smaller_steps_too(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 60)
    leader.close()
    limit_rows(masters, standby, 5)
    assert standby.campaign(TIMEOUT_S)
    assert numbers(standby.open().records) == list(range(1, 61))


def test_who_is_too_slow_for_the_journal_is_not_told_that_it_is_damaged(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follow, "RESTARTS_MAX", 1)
    monkeypatch.setattr(kv_follow, "CHUNKS_PER_READ_MAX", 1)
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 9)
    found: list[Record] = []
    refusals = set()
    for covers in (4, 5, 6, 7):
        write_chunks(leader, covers, monkeypatch)
        wait_until(lambda n=covers: len(masters.paths("journal/")) == 9 - n, what="truncation")  # type: ignore[misc]
        for _ in range(4):  # to the middle of the snapshot, and no further
            step = standby.follow(0.1)
            found = list(step.records) if step.anew else [*found, *step.records]
            refusals.add(str(standby.refusal))
    assert standby.last_entry < 4
    assert any("truncated before it was read" in refusal for refusal in refusals)
    follow_all(standby, found, through=9)
    assert numbers(found) == list(range(1, 10))
    assert standby.refusal is None


def test_a_snapshot_of_a_long_journal_reads_few_of_its_keys(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_snapshot, "ENTRIES_PER_RECORD_MAX", 4)
    leader = masters.lead("a")
    append(leader, 50)
    given = limit_rows(masters, leader, 5)
    leader.install_snapshot(snapshot(40), 40)
    assert max(given) == 5
    assert numbers(follow_all(masters.join("b"))) == list(range(1, 51))


# ---- damage -----------------------------------------------------------------------------------


def test_a_missing_entry_is_named(masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 5)
    with masters.lock:
        masters.service.txn((), (Delete(KEYS.journal(3)),), ())
    with pytest.raises(JournalCorrupt, match="entry 3"):
        follow_all(masters.join("b"))
    with masters.lock:
        masters.service.txn((), (Delete(*KEYS.journal_before(3)),), ())
    with pytest.raises(JournalCorrupt, match="entry 1"):
        follow_all(masters.join("c"))


def test_a_damaged_value_is_named(masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 2)
    with masters.lock:
        damaged = bytearray(masters.service.rows[KEYS.journal(2)].value)
        damaged[-1] ^= 1
        masters.service.txn((), (Put(KEYS.journal(2), bytes(damaged)),), ())
    with pytest.raises(JournalCorrupt):
        follow_all(masters.join("b"))


def test_a_snapshot_with_a_missing_part_is_named(masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 5)
    truncate(masters, leader, 5)
    with masters.lock:
        masters.service.txn((), (Delete(b"/p/snapshots/", b"/p/snapshots0"),), ())
    with pytest.raises(JournalCorrupt, match="snapshot of entry 5"):
        follow_all(masters.join("b"))


# ---- from standby to leader -------------------------------------------------------------------


def test_a_standby_reads_what_is_left_and_no_more(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    found = follow_all(standby)
    append(leader, 3)
    leader.close()
    assert standby.campaign(TIMEOUT_S)
    opened = standby.open()
    assert not opened.anew
    assert numbers([*found, *opened.records]) == [1, 2, 3, 4, 5, 6]
    assert append(standby, 1) == 7


def test_a_standby_that_never_followed_reads_all(masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 5)
    truncate(masters, leader, 3)
    leader.close()
    new = masters.join("b")
    assert new.campaign(TIMEOUT_S)
    opened = new.open()
    assert opened.anew
    assert numbers(opened.records) == [1, 2, 3, 4, 5]


def test_a_standby_whose_past_is_void_is_told_when_it_leads(masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 3)
    follow_all(standby)
    append(leader, 3)
    truncate(masters, leader, 5)
    leader.close()
    assert standby.campaign(TIMEOUT_S)
    opened = standby.open()
    assert opened.anew
    assert numbers(opened.records) == [1, 2, 3, 4, 5, 6]
    assert append(standby, 1) == 7


@pytest.mark.parametrize("steps", range(6))
def test_a_standby_may_lead_in_the_middle_of_reading(
    masters: Masters, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(kv_follow, "CHUNKS_PER_READ_MAX", 1)
    monkeypatch.setattr(kv_follow, "ROWS_PER_READ_MIN", 1)
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 6)
    write_chunks(leader, 2, monkeypatch)
    leader.close()
    found: list[Record] = []
    for _ in range(steps):
        step = standby.follow(0.05)
        found = list(step.records) if step.anew else [*found, *step.records]
    assert standby.campaign(TIMEOUT_S)
    opened = standby.open()
    found = list(opened.records) if opened.anew else [*found, *opened.records]
    assert numbers(found) == [1, 2, 3, 4, 5, 6]
    assert standby.last_entry == 6
