"""The shared journal on real etcd servers: members that die or stop, masters that do, TLS."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.kv.etcd import EtcdKv
from cenote.kv.service import Put
from cenote.master.compactor import compact_shared
from cenote.master.effects import NamespaceOpened
from cenote.master.journal import Record, RecordWriter, SnapshotEnd, read_entries
from cenote.master.kv_backend import KvBackend
from cenote.master.kv_compaction import CompactorCommand, KvCompactionLimits
from cenote.master.metadata import MasterRow, MetadataOptions, open_backend
from etcd import EtcdCluster
from kv_kit import follow_all, numbers, records, snapshot
from promptness import ends_within
from waiting import stop_process, wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0
TENURE_S = 1.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture
def etcd3(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd", members=3) as cluster:
        yield cluster


class Masters:
    """Backends of one cluster."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self._etcd = etcd
        self._made: list[KvBackend] = []

    def join(self, name: str, **options: object) -> KvBackend:
        kv = EtcdKv(self._etcd.options())
        backend = KvBackend(
            kv,
            name=self._etcd.url,
            prefix="/cenote",
            tenure_s=TENURE_S,
            **options,  # type: ignore[arg-type]
        )
        self._made.append(backend)
        backend.join(MasterRow(name, (f"{name}:1",)))
        return backend

    def lead(self, name: str, **options: object) -> KvBackend:
        backend = self.join(name, **options)
        assert backend.campaign(TIMEOUT_S), backend.refusal
        list(backend.open().records)
        return backend

    def close(self) -> None:
        for backend in self._made:
            with contextlib.suppress(CenoteError):
                backend.close()


@pytest.fixture
def masters(etcd: EtcdCluster) -> Iterator[Masters]:
    made = Masters(etcd)
    yield made
    made.close()


@pytest.fixture
def masters3(etcd3: EtcdCluster) -> Iterator[Masters]:
    made = Masters(etcd3)
    yield made
    made.close()


def append(leader: KvBackend, count: int) -> int:
    """Each durable before the next."""
    for _ in range(count):
        last = leader.append(records(leader.last_entry + 1, 1))
        wait_durable(leader, last)
    return leader.last_entry


def wait_durable(leader: KvBackend, entry: int) -> None:
    """However often one has to ask."""

    def is_durable() -> bool:
        with contextlib.suppress(ResourceUnavailable):
            leader.sync(entry).result(TIMEOUT_S)
        return leader.durable_entry >= entry

    wait_until(is_durable, TIMEOUT_S, what=f"entry {entry} to be durable")


# ---- etcd's own troubles ------------------------------------------------------------------------


def test_etcd_may_be_killed_and_come_back(etcd: EtcdCluster, masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 20)
    found = follow_all(standby)
    (member,) = etcd.members
    member.kill()
    leader.append(records(21, 5, each=True))
    wait_until(lambda: leader.refusal, TIMEOUT_S, what="writes to be refused")
    assert leader.durable_entry == 20
    wait_until(lambda: not standby.follow(0.1).caught_up, TIMEOUT_S, what="the standby to notice")
    member.start()
    wait_durable(leader, 25)
    wait_until(lambda: leader.refusal is None, TIMEOUT_S, what="writes to be taken again")
    assert leader.lost is None
    follow_all(standby, found, through=25)
    assert numbers(found) == list(range(1, 26))


@pytest.mark.parametrize("victim", ["leading", "following"])
def test_one_of_three_members_may_be_killed(
    etcd3: EtcdCluster, masters3: Masters, victim: str
) -> None:
    leader, standby = masters3.lead("a"), masters3.join("b")
    append(leader, 20)
    found = follow_all(standby)
    first = etcd3.leading_member()
    member = first if victim == "leading" else next(m for m in etcd3.members if m is not first)
    member.kill()
    with ends_within(8):
        append(leader, 20)
    follow_all(standby, found, through=40)
    assert numbers(found) == list(range(1, 41))
    assert leader.lost is None
    member.start()
    append(leader, 20)


def test_etcds_leader_may_stop_and_go_on(etcd3: EtcdCluster, masters3: Masters) -> None:
    """Its connections stay open and say nothing: whoever uses it has to notice by himself."""
    leader, standby = masters3.lead("a"), masters3.join("b")
    append(leader, 20)
    found = follow_all(standby)
    member = etcd3.leading_member()
    member.pause()
    with ends_within(8):
        append(leader, 20)
    follow_all(standby, found, through=40)
    member.resume()
    append(leader, 20)
    follow_all(standby, found, through=60)
    assert numbers(found) == list(range(1, 61))
    assert leader.lost is None, "etcd was healthy again before anybody else was elected"


def test_a_watch_survives_compaction(etcd: EtcdCluster, masters: Masters) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 10)
    found = follow_all(standby)
    kv = EtcdKv(etcd.options())
    try:
        for through in (20, 30, 40):
            append(leader, 10)
            kv.compact(kv.range(b"x", timeout_s=5.0).revision, timeout_s=5.0)
            follow_all(standby, found, through=through)
    finally:
        kv.close()
    assert numbers(found) == list(range(1, 41))


def test_a_watch_that_catches_up_is_given_parts_and_waits_when_it_has_many(
    etcd: EtcdCluster,
) -> None:
    """Not 20 MiB at once, as etcd does by itself."""
    with contextlib.closing(EtcdKv(etcd.options())) as kv:
        revision = kv.range(b"k", timeout_s=TIMEOUT_S).revision
        keys = [b"k%03d" % i for i in range(320)]
        for first in range(0, len(keys), 4):
            puts = [Put(key, bytes(64 << 10)) for key in keys[first : first + 4]]
            kv.txn((), puts, timeout_s=TIMEOUT_S)
        watch = kv.watch(b"k", b"l", revision=revision + 1)
        wait_until(lambda: watch.queued_bytes > 8 << 20, what="the watch to have enough")
        largest_bytes = 0
        found: list[bytes] = []
        end_s = time.monotonic() + TIMEOUT_S
        while len(found) < len(keys) and time.monotonic() < end_s:
            largest_bytes = max(largest_bytes, watch.queued_bytes)
            found += [event.key for event in watch.poll(1.0)]
        assert found == keys
        assert largest_bytes < 11 << 20


def test_a_standby_that_was_cut_off_over_a_truncation_begins_anew(
    etcd: EtcdCluster, masters: Masters
) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 10)
    found = follow_all(standby)
    append(leader, 20)
    leader.install_snapshot(snapshot(25), 25)
    kv = EtcdKv(etcd.options())
    try:
        keys = b"/cenote/journal/", b"/cenote/journal0"
        wait_until(
            lambda: len(kv.range(*keys, keys_only=True, timeout_s=5.0).rows) == 5,
            TIMEOUT_S,
            what="the journal to be truncated",
        )
        kv.compact(kv.range(b"x", timeout_s=5.0).revision, timeout_s=5.0)
    finally:
        kv.close()
    found = follow_all(standby, found, through=30)
    assert numbers(found) == list(range(1, 31))


# ---- masters' ends ------------------------------------------------------------------------------

APPEND_FOREVER = """
import sys
from cenote.api.errors import NotLeader, ResourceUnavailable
from cenote.master.effects import SegmentGone
from cenote.master.journal import RecordWriter
from cenote.master.metadata import MasterRow, MetadataOptions, open_backend

backend = open_backend(sys.argv[1], MetadataOptions(tenure_s=float(sys.argv[2])))
backend.join(MasterRow("process"))
assert backend.campaign(20.0)
opened = backend.open()
for _ in opened.records:
    pass
writer = RecordWriter(opened.epoch, backend.last_entry + 1)
try:
    while True:
        writer.add(SegmentGone(writer.last_entry + 1))
        backend.append(writer.take(backend.durable_entry))
        backend.sync(writer.last_entry).result()
        print(writer.last_entry, flush=True)
except NotLeader as error:
    print("lost", flush=True)
"""


@contextlib.contextmanager
def leading_process(etcd: EtcdCluster) -> Iterator[subprocess.Popen[str]]:
    """A master that appends one entry after the other and says which are durable."""
    process = subprocess.Popen(
        [sys.executable, "-c", APPEND_FOREVER, etcd.url, str(TENURE_S)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def say_until(process: subprocess.Popen[str], entry: int) -> int:
    """Read what it says until it has come so far."""
    assert process.stdout is not None
    last = 0
    while last < entry:
        last = int(process.stdout.readline())
    return last


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_master_that_dies_or_stops_is_followed_by_another(
    etcd: EtcdCluster, masters: Masters, how: str
) -> None:
    standby = masters.join("b")
    with leading_process(etcd) as process:
        assert process.stdout is not None
        acknowledged = say_until(process, 50)
        wait_until(lambda: standby.leader, what="the standby to know who leads")
        known = standby.leader
        assert known is not None
        found = follow_all(standby, through=acknowledged)
        if how == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            stop_process(process.pid)
        with ends_within(TENURE_S + 2.0, at_least_s=0.5 * TENURE_S):
            while not standby.vacant:
                step = standby.follow(0.2)
                found += step.records
            assert standby.campaign(TIMEOUT_S)
            opened = standby.open()
        found += opened.records
        assert not opened.anew
        assert opened.epoch == known.epoch + 1
        first = standby.last_entry + 1
        standby.append(records(first, 1, epoch=opened.epoch))
        standby.sync(first).result(TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        said = process.stdout.read().split()
        if how == "stopped":
            assert said[-1] == "lost"
        last_said = max([acknowledged, *(int(word) for word in said if word.isdigit())])
        assert last_said < first, "whatever it acknowledged was read by its successor"
        assert numbers(found) == list(range(1, first))
    reader = masters.join("reader")
    assert numbers(follow_all(reader, through=first)) == list(range(1, first + 1))


def test_a_tenure_that_is_not_confirmed_ends(etcd: EtcdCluster, masters: Masters) -> None:
    leader = masters.lead("a")
    (member,) = etcd.members
    member.pause()
    wait_until(lambda: time.monotonic() > leader.tenure_end_s, TIMEOUT_S, what="its end")
    assert leader.refusal is not None
    assert leader.lost is None
    end_s = leader.tenure_end_s
    member.resume()
    wait_until(lambda: leader.tenure_end_s > end_s, TIMEOUT_S, what="the tenure to go on")


@pytest.mark.parametrize("trouble", ["none", "killed", "stopped"])
def test_closing_ends_soon_whatever_etcd_does(
    etcd: EtcdCluster, masters: Masters, trouble: str
) -> None:
    leader, standby = masters.lead("a"), masters.join("b")
    append(leader, 5)
    follow_all(standby)
    (member,) = etcd.members
    if trouble == "killed":
        member.kill()
    elif trouble == "stopped":
        member.pause()
    leader.append(records(6, 1))
    for backend in (leader, standby):
        with ends_within(2.0), contextlib.suppress(ResourceUnavailable):
            backend.close()
    assert leader.durable_entry == (6 if trouble == "none" else 5)


# ---- snapshots ----------------------------------------------------------------------------------


def test_a_leader_without_standbys_has_snapshots_made(etcd: EtcdCluster, masters: Masters) -> None:
    options = MetadataOptions(tenure_s=TENURE_S)
    limits = KvCompactionLimits(journal_bytes_min=20_000, standby_factor=1)
    leader = masters.lead(
        "a",
        compactor=CompactorCommand(
            etcd.url + "/cenote", json.dumps({"tenure_s": options.tenure_s})
        ),
        compaction=limits,
    )
    writer = RecordWriter(1, 1)
    for number in range(1, 2001):
        writer.add(NamespaceOpened(f"n{number % 7}", number % 7 + 1, 1, b"f", 1, 1))
        leader.append(writer.take())
    wait_durable(leader, 2000)
    kv = EtcdKv(etcd.options())
    try:
        wait_until(
            lambda: not kv.range(b"/cenote/journal/", b"/cenote/journal0", timeout_s=5.0).rows,
            30,
            what="the journal to be truncated",
        )
    finally:
        kv.close()
    assert leader.lost is None
    reader = masters.join("reader")
    found = list(read_entries(follow_all(reader, through=2000)))
    assert found[-1] == SnapshotEnd(2000, 0)
    names = {entry.name for entry in found if isinstance(entry, NamespaceOpened)}
    assert names == {f"n{number}" for number in range(7)}


def test_two_snapshots_at_once_leave_one_whole(etcd: EtcdCluster, masters: Masters) -> None:
    leader = masters.lead("a")
    append(leader, 50)
    one, other = (open_backend(etcd.url, MetadataOptions()) for _ in range(2))
    try:
        parts = iter(snapshot(40))

        def with_another_in_between() -> Iterator[Record]:
            yield next(parts)
            other.install_snapshot(snapshot(40), 40)
            yield from parts

        with pytest.raises(ResourceUnavailable, match="is there already"):
            one.install_snapshot(with_another_in_between(), 40)  # type: ignore[arg-type]
        with pytest.raises(ResourceUnavailable, match="not in the journal"):
            one.install_snapshot(snapshot(60), 60)
        compact_shared(one)
    finally:
        one.close()
        other.close()
    append(leader, 5)
    assert leader.last_entry == 55


# ---- what people see, and how etcd is reached ---------------------------------------------------


def test_rows_are_readable_with_etcdctl(etcd: EtcdCluster, masters: Masters) -> None:
    leader = masters.lead("a")
    leader.publish({"nodes/1": '{"name": "n"}'})

    def lines() -> list[str]:
        return etcd.ctl("get", "/cenote/pool/nodes/", "--prefix").split()

    wait_until(lines, what="the row")
    assert json.loads(etcd.ctl("get", "/cenote/leader", "--print-value-only"))["name"] == "a"
    assert etcd.ctl("get", "/cenote/epoch", "--print-value-only").strip() == "1"
    names = etcd.ctl("get", "/cenote/masters/", "--prefix", "--keys-only").split()
    assert names == ["/cenote/masters/a"]
    assert leader.bytes_used > 0 or wait_until(lambda: leader.bytes_used, what="the size")


def test_an_etcd_that_is_not_there_shows(tmp_path: Path) -> None:
    backend = open_backend("etcd://127.0.0.1:1", MetadataOptions(tenure_s=TENURE_S))
    try:
        backend.join(MasterRow("a"))
        with ends_within(5):
            assert not backend.campaign(0.5)
            assert not backend.follow(0.1).caught_up
        refusal = wait_until(lambda: backend.refusal, what="a refusal")
        assert refusal is not None
        assert "etcd" in refusal.message
        assert refusal.remedy
    finally:
        backend.close()
