"""Masters over one model of etcd, and entries that say their own number."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

from cenote.api.errors import CenoteError
from cenote.master.effects import SegmentGone
from cenote.master.journal import Record, RecordWriter, read_entries, snapshot_records
from cenote.master.kv_backend import KvBackend
from cenote.master.metadata import MasterRow, MetadataBackend
from kv_model import KvModel, ModelKv

__all__ = ["PREFIX", "TIMEOUT_S", "Masters", "follow_all", "numbers", "records", "snapshot"]

PREFIX = "/p"
TENURE_S = 0.4
TIMEOUT_S = 10.0


class Masters:
    """Makes backends, each with a connection of its own to one model."""

    def __init__(self, *, tenure_s: float = TENURE_S) -> None:
        self.service = KvModel()
        self.lock = threading.Condition(threading.RLock())
        self.tenure_s = tenure_s
        self.made: list[KvBackend] = []
        self.kvs: dict[int, ModelKv] = {}

    def join(self, name: str) -> KvBackend:
        """A master that stands by."""
        kv = ModelKv(self.service, self.lock)
        backend = KvBackend(kv, name="model:", prefix=PREFIX, tenure_s=self.tenure_s)
        self.made.append(backend)
        self.kvs[id(backend)] = kv
        backend.join(MasterRow(name, (f"{name}:5110",)))
        return backend

    def lead(self, name: str) -> KvBackend:
        """A master that leads, and has read all there is."""
        backend = self.join(name)
        assert backend.campaign(TIMEOUT_S)
        list(backend.open().records)
        return backend

    def kv(self, backend: KvBackend) -> ModelKv:
        return self.kvs[id(backend)]

    def cut_off(self, backend: KvBackend) -> None:
        """Nothing that it asks for arrives any more."""
        self.kv(backend).fault = lambda _call: "lost"

    def reconnect(self, backend: KvBackend) -> None:
        self.kv(backend).fault = lambda _call: ""

    def value(self, path: str) -> bytes | None:
        """Of a row, as it is now."""
        with self.lock:
            row = self.service.rows.get(f"{PREFIX}/{path}".encode())
            return None if row is None else row.value

    def paths(self, under: str = "") -> list[str]:
        with self.lock:
            prefix = f"{PREFIX}/{under}"
            keys = sorted(key.decode() for key in self.service.rows)
            return [key.removeprefix(PREFIX + "/") for key in keys if key.startswith(prefix)]

    def close(self) -> None:
        for backend in self.made:
            self.reconnect(backend)
            with contextlib.suppress(CenoteError):
                backend.close()


def records(first: int, count: int, *, each: bool = False, epoch: int = 1) -> list[bytes]:
    """Entries `first` ... , each of which says its own number; a record for `each`."""
    writer, made = RecordWriter(epoch, first), []
    for number in range(first, first + count):
        writer.add(SegmentGone(number))
        if each:
            made += writer.take()
    return made + writer.take()


def snapshot(covers: int) -> list[bytes]:
    """Of entries 1 ... `covers`."""
    effects = [SegmentGone(number) for number in range(1, covers + 1)]
    return list(snapshot_records(effects, covers=covers, epoch=1))


def numbers(found: Iterable[Record]) -> list[int]:
    """What the entries of records say."""
    return [e.segment_id for e in read_entries(found) if isinstance(e, SegmentGone)]


def follow_all(
    backend: MetadataBackend, found: list[Record] | None = None, through: int = 0
) -> list[Record]:
    """What a standby has, once it caught up and has entry `through`."""
    found = [] if found is None else found
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        step = backend.follow(0.2)
        if step.anew:
            found.clear()
        found += step.records
        if step.caught_up and backend.last_entry >= through:
            return found
    raise AssertionError(f"stuck at entry {backend.last_entry}: {backend.refusal}")
