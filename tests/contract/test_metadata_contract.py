"""What every metadata backend promises (`cenote.master.metadata`), held against each of them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cenote.api.errors import InternalError, NotLeader, ResourceUnavailable
from cenote.kv.etcd import EtcdKv
from cenote.master.effects import SegmentGone
from cenote.master.file_backend import FileBackend
from cenote.master.journal import (
    Entry,
    Record,
    RecordWriter,
    SnapshotEnd,
    read_entries,
    snapshot_records,
)
from cenote.master.kv_backend import KvBackend
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.metadata import MasterRow, MetadataBackend, begin
from etcd import EtcdCluster
from kv_model import KvModel, ModelKv

Maker = Callable[[], MetadataBackend]
TIMEOUT_S = 10.0


TENURE_S = 0.4


class Factory:
    """Makes backends over one and the same log; those that a test leaves open are closed."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self.made: list[MetadataBackend] = []

    def __call__(self) -> MetadataBackend:
        backend = self._make()
        self.made.append(backend)
        return backend

    def close(self) -> None:
        for backend in self.made:
            with contextlib.suppress(NotLeader):
                backend.close()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def maker_of(kind: str, directory: Path, etcd: EtcdCluster | None) -> Maker:
    """All that it makes are of the same log."""
    if kind == "memory":
        log = MemoryLog()
        return lambda: MemoryBackend(log)
    if kind == "file":
        return lambda: FileBackend(directory / "journal", rotate_bytes=2000)
    if kind == "model":
        service, lock = KvModel(), threading.Condition(threading.RLock())
        return lambda: KvBackend(
            ModelKv(service, lock), name="model:", prefix="/p", tenure_s=TENURE_S
        )
    assert etcd is not None
    options = etcd.options(f"/{uuid.uuid4().hex}")
    return lambda: KvBackend(
        EtcdKv(options), name=options.url, prefix=options.prefix, tenure_s=TENURE_S
    )


@pytest.fixture(params=["memory", "file", "model", "etcd"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Factory]:
    etcd = request.getfixturevalue("etcd") if request.param == "etcd" else None
    factory = Factory(maker_of(request.param, tmp_path, etcd))
    yield factory
    factory.close()


def opened(make: Maker) -> tuple[MetadataBackend, int, list[Entry]]:
    """A backend that is ready for appends, its epoch, and what it gave back."""
    backend = make()
    found = begin(backend)
    return backend, found.epoch, list(read_entries(found.records))


def records(first: int, count: int, *, each: bool = False, epoch: int = 1) -> list[bytes]:
    """Entries `first` ... , each of which says its own number."""
    writer, made = RecordWriter(epoch, first), []
    for number in range(first, first + count):
        writer.add(SegmentGone(number))
        if each:
            made += writer.take()
    return made + writer.take()


def numbers(entries: list[Entry]) -> list[int]:
    return [entry.segment_id for entry in entries if isinstance(entry, SegmentGone)]


def test_a_new_log_is_empty_and_in_epoch_one(make: Maker) -> None:
    backend, epoch, entries = opened(make)
    assert (epoch, entries, backend.last_entry, backend.durable_entry) == (1, [], 0, 0)
    assert backend.refusal is None
    assert backend.name.split(":")[0] in ("memory", "file", "model", "etcd")


def test_epochs_rise_with_every_start(make: Maker) -> None:
    for expected in (1, 2, 3):
        backend, epoch, _ = opened(make)
        assert epoch == expected
        backend.close()


def test_what_was_appended_comes_back_in_order(make: Maker) -> None:
    backend, _, _ = opened(make)
    assert backend.append(records(1, 2)) == 2
    assert backend.append(records(3, 100, each=True)) == 102
    assert backend.last_entry == 102
    backend.close()
    backend, epoch, entries = opened(make)
    assert numbers(entries) == list(range(1, 103))
    assert (epoch, backend.last_entry) == (2, 102)
    assert backend.append(records(103, 1, epoch=2)) == 103
    backend.close()
    assert numbers(opened(make)[2]) == list(range(1, 104))


def test_what_was_appended_survives_without_close(make: Maker, tmp_path: Path) -> None:
    """For `file:` the process may die; its lock goes with it (here: with its descriptor)."""
    backend, _, _ = opened(make)
    backend.append(records(1, 5))
    if isinstance(backend, MemoryBackend):
        pytest.skip("memory: ends with the process")
    if backend.shared:
        backend.sync(5).result(TIMEOUT_S)
        standby = make()
        standby.join(MasterRow("standby"))
        assert numbers(list(read_entries(followed(standby)))) == [1, 2, 3, 4, 5]
        return
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in (tmp_path / "journal").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    other = FileBackend(copied)
    try:
        assert numbers(list(read_entries(begin(other).records))) == [1, 2, 3, 4, 5]
    finally:
        other.close()


def followed(backend: MetadataBackend) -> list[Record]:
    """All that a standby is given until it has caught up."""
    found: list[Record] = []
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        step = backend.follow(0.2)
        if step.anew:
            found = []
        found += step.records
        if step.caught_up:
            return found
    raise AssertionError(f"{backend.name} does not catch up: {backend.refusal}")


def test_only_the_next_entry_can_be_appended(make: Maker) -> None:
    backend, _, _ = opened(make)
    with pytest.raises(InternalError):
        backend.append(records(2, 1))
    backend.append(records(1, 1))
    with pytest.raises(InternalError):
        backend.append(records(1, 1))
    assert backend.append(records(2, 1)) == 2


def test_appending_needs_the_journal_read_to_its_end(make: Maker) -> None:
    backend = make()
    found = begin(backend)
    with pytest.raises(InternalError):
        backend.append(records(1, 1))
    assert list(found.records) == []
    assert backend.append(records(1, 1)) == 1


def test_appending_nothing_changes_nothing(make: Maker) -> None:
    backend, _, _ = opened(make)
    backend.append(records(1, 3))
    assert backend.append([]) == 3


def test_a_closed_backend_takes_nothing(make: Maker) -> None:
    backend, _, _ = opened(make)
    backend.append(records(1, 1))
    backend.close()
    backend.close()
    with pytest.raises(InternalError):
        backend.append(records(2, 1))


def test_only_one_master_at_a_time(make: Maker) -> None:
    first, _, _ = opened(make)
    second = make()
    with pytest.raises(ResourceUnavailable, match="in use") as caught:
        begin(second, timeout_s=2 * TENURE_S)
    assert caught.value.remedy
    first.close()
    assert begin(second).epoch == 2


def test_sync_means_durable(make: Maker) -> None:
    backend, _, _ = opened(make)
    for number in range(1, 4):
        backend.append(records(number, 1))
        backend.sync(number).result(TIMEOUT_S)
        assert backend.durable_entry >= number


def test_many_waiters_are_all_served(make: Maker) -> None:
    backend, _, _ = opened(make)
    futures = []
    for number in range(1, 301):
        backend.append(records(number, 1))
        futures.append(backend.sync(number))
    done, pending = wait(futures, TIMEOUT_S)
    assert not pending
    assert all(future.exception() is None for future in done)
    assert backend.durable_entry == 300


def test_sync_of_what_is_not_appended_fails(make: Maker) -> None:
    backend, _, _ = opened(make)
    backend.append(records(1, 1))
    with pytest.raises(InternalError):
        backend.sync(2).result(TIMEOUT_S)


def test_close_makes_durable(make: Maker) -> None:
    backend, _, _ = opened(make)
    backend.append(records(1, 1))
    backend.close()
    assert backend.durable_entry == 1


def test_a_snapshot_replaces_what_it_covers(make: Maker) -> None:
    backend, _, _ = opened(make)
    for number in range(1, 201):
        backend.append(records(number, 1))
    used = backend.bytes_used
    snapshot = snapshot_records([SegmentGone(1000)], covers=150, epoch=1)
    backend.install_snapshot(snapshot, 150)
    if not backend.shared:  # etcd's database does not shrink
        assert 0 < backend.bytes_used < used
    backend.append(records(201, 1))
    backend.close()
    backend, _, entries = opened(make)
    assert entries[:2] == [SegmentGone(1000), SnapshotEnd(150, 1)]
    assert numbers(entries[2:]) == list(range(151, 202))
    assert backend.append(records(202, 1)) == 202


def test_a_second_snapshot_replaces_the_first(make: Maker) -> None:
    backend, _, _ = opened(make)
    for number in range(1, 301):
        backend.append(records(number, 1))
    for covers in (100, 250):
        snapshot = snapshot_records([SegmentGone(covers)], covers=covers, epoch=1)
        backend.install_snapshot(snapshot, covers)
    backend.close()
    _, _, entries = opened(make)
    assert entries[:2] == [SegmentGone(250), SnapshotEnd(250, 1)]
    assert numbers(entries[2:]) == list(range(251, 301))


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.sampled_from(["one", "batch", "sync", "restart", "snapshot"]), min_size=1, max_size=15
    )
)
def test_any_sequence_keeps_the_log(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, steps: list[str]
) -> None:
    log = MemoryLog()
    directory = tmp_path_factory.mktemp("journal")
    makers: tuple[Maker, ...] = (
        lambda: MemoryBackend(log),
        lambda: FileBackend(directory, rotate_bytes=300),
        maker_of("model", directory, None),
    )
    for make in makers:
        backend, _, _ = opened(make)
        last = covers = 0
        try:
            for step in steps:
                if step == "one":
                    last = backend.append(records(last + 1, 1))
                elif step == "batch":
                    last = backend.append(records(last + 1, 5, each=True))
                elif step == "sync":
                    backend.sync(last).result(TIMEOUT_S)
                elif step == "snapshot" and last > covers:
                    covers = last
                    content = [SegmentGone(n) for n in range(1, covers + 1)]
                    backend.install_snapshot(
                        snapshot_records(content, covers=covers, epoch=1), covers
                    )
                elif step == "restart":
                    backend.close()
                    backend, _, entries = opened(make)
                    assert numbers(entries) == list(range(1, last + 1))
                    assert backend.last_entry == last
        finally:
            backend.close()
