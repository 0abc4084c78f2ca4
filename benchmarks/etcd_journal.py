"""The journal in etcd, without a pool: how fast it takes records, how far it lags, how large etcd
becomes, how long a cold start reads.

    PYTHONPATH=tests python benchmarks/etcd_journal.py [--members 3] [--seconds 60] [--rate 50000]

Starts etcd servers on loopback (see tests/etcd.py), appends records of commits of one extent each,
then puts a snapshot of --objects objects in force and loads it into an empty state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from cenote.kv.etcd import EtcdKv
from cenote.master.effects import PLACED, DurableEffect, NamespaceOpened, SegmentGone, Stored
from cenote.master.journal import RecordWriter, SnapshotEnd, read_entries, snapshot_records
from cenote.master.kv_backend import KvBackend
from cenote.master.metadata import MasterRow
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from etcd import EtcdCluster

BATCH: Final = 128
SNAPSHOT_ROWS: Final = 8000
WAIT_S: Final = 30.0
SOAK_SNAPSHOT_BYTES: Final = 32 << 20


def commits(first: int, count: int, dice: np.random.Generator) -> Stored:
    """Objects of 4 KiB with one extent each."""
    numbers = np.arange(first, first + count)
    placed = np.zeros(count, PLACED)
    placed["segment"], placed["slot"] = 1, numbers
    placed["offset_units"], placed["length_units"] = numbers * 64, 64
    return Stored(
        1,
        1,
        1,
        dice.integers(0, 2**63, (count, 2), dtype=np.uint64),
        np.full(count, 4096, np.uint64),
        np.zeros(count, np.uint64),
        (numbers + 1).astype(np.uint64),
        np.zeros(count, np.uint16),
        np.ones(count, np.uint16),
        np.ones(count, np.uint8),
        placed,
    )


def wait_for(condition: Any, what: str) -> float:
    """Seconds until it was so."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > WAIT_S:
            raise TimeoutError(what)
        time.sleep(0.02)
    return time.monotonic() - began_s


def megabytes(size_bytes: float) -> float:
    return round(size_bytes / 1e6, 1)


class Run:
    """One run: a leader, and what it reports."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self._etcd = etcd
        self.leader = self._join("leader")
        assert self.leader.campaign(WAIT_S), self.leader.refusal
        list(self.leader.open().records)
        self.writer = RecordWriter(1, 1)
        self.dice = np.random.default_rng(1)
        self.objects = 0
        self.report: dict[str, Any] = {}

    def _join(self, name: str) -> KvBackend:
        backend = KvBackend(
            EtcdKv(self._etcd.options()), name=self._etcd.url, prefix="/cenote", tenure_s=3.0
        )
        backend.join(MasterRow(name))
        return backend

    def _etcd_sizes(self) -> dict[str, Any]:
        kv = EtcdKv(self._etcd.options())
        with contextlib.closing(kv):
            database = kv.size_bytes(timeout_s=5.0)
        rss = [
            int(line.split()[1]) * 1024
            for member in self._etcd.members
            for line in Path(f"/proc/{member.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        ]
        return {"database_mb": megabytes(database), "rss_mb": [megabytes(size) for size in rss]}

    def _add(self, count: int) -> None:
        self.writer.add(commits(self.objects, count, self.dice))
        self.objects += count

    def large_records(self, count: int = 400) -> None:
        made: list[bytes] = []
        for _ in range(count):
            self._add(800)
            made += self.writer.take()
        began_s = time.monotonic()
        for record in made:
            self.leader.append([record])
        self.leader.sync(self.leader.last_entry).result()
        took_s = time.monotonic() - began_s
        self.report["large_records"] = {
            "bytes_each": sum(map(len, made)) // len(made),
            "per_s": round(len(made) / took_s),
            "mb_per_s": megabytes(sum(map(len, made)) / took_s),
        }

    def small_records(self, count: int = 500, queued: int = 20_000) -> None:
        waits_s = []
        for _ in range(count):
            self.writer.add(SegmentGone(5))
            began_s = time.monotonic()
            self.leader.append(self.writer.take())
            self.leader.sync(self.leader.last_entry).result()
            waits_s.append(time.monotonic() - began_s)
        waits_s.sort()
        began_s = time.monotonic()
        for _ in range(queued):
            self.writer.add(SegmentGone(5))
            self.leader.append(self.writer.take())
        self.leader.sync(self.leader.last_entry).result()
        self.report["small_records"] = {
            "synced_one_by_one_per_s": round(count / sum(waits_s)),
            "sync_p50_ms": round(waits_s[count // 2] * 1e3, 2),
            "sync_p99_ms": round(waits_s[count * 99 // 100] * 1e3, 2),
            "queued_per_s": round(queued / (time.monotonic() - began_s)),
        }

    def steady(self, rate: int, seconds: float) -> None:
        """Commits at a rate, in batches as a client's; how far the journal is behind."""
        began_s, done, ages_s = time.monotonic(), 0, []
        cpu_s = time.process_time()
        while (now_s := time.monotonic() - began_s) < seconds:
            due = int(now_s * rate / BATCH)
            if done >= due:
                time.sleep(0.001)
            while done < due:
                self._add(BATCH)
                self.leader.append(self.writer.take(self.leader.durable_entry))
                done += 1
            ages_s.append(self.leader.backlog.age_s)
        self.leader.sync(self.leader.last_entry).result()
        ages_s.sort()
        self.report["steady"] = {
            "commits_per_s": round(done * BATCH / seconds),
            "seconds": seconds,
            "behind_p50_ms": round(ages_s[len(ages_s) // 2] * 1e3, 1),
            "behind_p99_ms": round(ages_s[len(ages_s) * 99 // 100] * 1e3, 1),
            "behind_max_ms": round(ages_s[-1] * 1e3, 1),
            "cpu_share": round((time.process_time() - cpu_s) / seconds, 3),
            "objects": self.objects,
            **self._etcd_sizes(),
        }

    def snapshot(self, objects: int) -> None:
        dice = np.random.default_rng(2)

        def effects() -> Iterator[DurableEffect]:
            yield NamespaceOpened("n", 1, 1, b"f", 1, 1)
            for first in range(0, objects, SNAPSHOT_ROWS):
                yield commits(first, min(SNAPSHOT_ROWS, objects - first), dice)

        covers = self.leader.last_entry
        records = list(snapshot_records(effects(), covers=covers, epoch=1))
        began_s = time.monotonic()
        self.leader.install_snapshot(records, covers)
        install_s = time.monotonic() - began_s
        upkeep = self.leader._upkeep
        wait_for(lambda: upkeep.truncated_through >= covers, "the journal to be truncated")
        wait_for(lambda: upkeep._compact_at_s - time.monotonic() > 10, "etcd to be compacted")
        self.report["snapshot"] = {
            "objects": objects,
            "mb": megabytes(sum(map(len, records))),
            "install_s": round(install_s, 2),
            **self._etcd_sizes(),
        }
        self.report["cold_load_s"] = round(self._cold_load(objects), 2)

    def soak(self, rate: int, minutes: float, objects: int) -> None:
        """Commits at a rate, and a snapshot of so many objects whenever 32 MiB were appended, as a
        standby would write it; what etcd has come to, minute by minute."""
        dice = np.random.default_rng(3)
        stop, standby = threading.Event(), self._join("standby")

        def follow() -> None:
            size_bytes = 0
            while not stop.is_set():
                size_bytes += sum(map(len, standby.follow(0.3).records))
                if size_bytes < SOAK_SNAPSHOT_BYTES:
                    continue
                parts = (
                    commits(first, SNAPSHOT_ROWS, dice)
                    for first in range(0, objects, SNAPSHOT_ROWS)
                )
                covers = standby.last_entry
                records = snapshot_records(parts, covers=covers, epoch=1)
                standby.install_snapshot(records, covers)
                size_bytes = 0
                self.report["soak_snapshots"] = self.report.get("soak_snapshots", 0) + 1

        follower = threading.Thread(target=follow)
        follower.start()
        self.report["soak"] = []
        try:
            for _ in range(round(minutes)):
                self.steady(rate, 60.0)
                self.report["soak"].append(self.report.pop("steady"))
                print(json.dumps(self.report["soak"][-1]), flush=True)
        finally:
            stop.set()
            follower.join()
            standby.close()

    def _cold_load(self, objects: int) -> float:
        reader = self._join("reader")
        began_s = time.monotonic()
        state = MasterState(StateConfig(), epoch=0)
        with contextlib.closing(reader):
            while not (step := reader.follow(0.2)).caught_up or step.records:
                for entry in read_entries(step.records, verified=True):
                    if not isinstance(entry, SnapshotEnd):
                        state.replay(entry)
        assert state.object_count == objects
        return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=int, default=50_000, help="commits a second")
    parser.add_argument("--objects", type=int, default=1_000_000, help="in the snapshot")
    parser.add_argument("--soak-minutes", type=float, default=0, help="nothing else, for so long")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="cenote-etcd-") as directory,
        EtcdCluster(Path(directory), members=options.members) as etcd,
    ):
        run = Run(etcd)
        with contextlib.closing(run.leader):
            if options.soak_minutes:
                run.soak(options.rate, options.soak_minutes, options.objects)
                return
            run.large_records()
            run.small_records()
            run.steady(options.rate, options.seconds)
            run.snapshot(options.objects)
            print(json.dumps(run.report, indent=2))


if __name__ == "__main__":
    main()
