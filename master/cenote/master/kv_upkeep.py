"""What nobody waits for: the rows for people, the list of masters, and making room.

Room: a snapshot makes the journal before it superfluous, which the leader then deletes; the service
forgets old revisions some seconds later, and its database can use their pages again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.kv.service import Delete, Kv, KvRefused, KvUnavailable, Modified, Operation, Put
from cenote.runtime.clock import Clock
from cenote.runtime.log import get_logger

from .journal import JournalCorrupt
from .kv_append import Fence
from .kv_keys import Keys, SnapshotRow, master_bytes, parse_master
from .metadata import MasterRow
from .workers import Worker, Workers

__all__ = ["Upkeep"]

STEP_S: Final = 0.5
CALL_TIMEOUT_S: Final = 2.0
LEAVE_TIMEOUT_S: Final = 0.3
MASTER_TTL_S: Final = 10
MASTER_KEEP_S: Final = 1.0
"""Between two signs of life of a master."""
MASTERS_S: Final = 1.0
SNAPSHOT_S: Final = 2.0
ROWS_PER_TXN: Final = 100
ROWS_BYTES_PER_TXN: Final = 256 << 10
ROWS_MAX: Final = 100_000
COMPACT_S: Final = 30.0
"""Heartbeats and rows make revisions, too."""
COMPACT_AFTER_S: Final = 3.0
"""Between deleting and forgetting: a standby that watches may be as late as that."""
_log = get_logger("cenote.master.upkeep")


@final
class Upkeep:
    """`publish` and the properties from any thread, the rest in one of its own."""

    def __init__(self, kv: Kv, keys: Keys, clock: Clock, workers: Workers) -> None:
        self._kv = kv
        self._keys = keys
        self._clock = clock
        self._workers = workers
        self._waker = workers.waker()
        self._worker: Worker | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._rows: dict[str, str | None] = {}
        self._rows_are_ours = False
        """Whether those of earlier epochs are gone."""
        self._lease = 0
        self._master_at_s = self._masters_at_s = self._snapshot_at_s = float("-inf")
        self._signs: dict[bytes, tuple[int, float]] = {}
        """By key of other masters' rows: their last change, and when it was seen."""
        self._complaints: dict[str, str] = {}
        self._answered = False
        """Whether the service did, when it was asked last."""
        self._compact_at_s = float("inf")
        self._compact_revision = 0
        self.row = MasterRow("")
        self.fence: Fence | None = None
        """Set once this master leads and has read the journal to its end."""
        self.lost = False
        self.entry: Callable[[], int] = lambda: 0
        """The newest that this master has."""
        self.on_step: Callable[[], None] = lambda: None
        """Called in this thread, once in each round."""
        self.masters: Sequence[MasterRow] = ()
        self.snapshot: SnapshotRow | None = None
        """The newest."""
        self.truncated_through = 0
        self.database_bytes = 0

    def start(self) -> None:
        self._worker = self._workers.spawn("cenote-upkeep", self._run)

    def publish(self, rows: Mapping[str, str | None]) -> None:
        """See `MetadataBackend.publish`."""
        with self._lock:
            self._rows |= rows
            while len(self._rows) > ROWS_MAX:  # nobody reads so many
                del self._rows[next(iter(self._rows))]

    def change_row(self, row: MasterRow) -> None:
        self.row = row
        self._master_at_s = float("-inf")
        self._waker.wake()

    def hurry(self) -> None:
        """Do what is due now."""
        self._snapshot_at_s = float("-inf")
        self._waker.wake()

    def stop(self) -> None:
        """Begin nothing more."""
        self._closing = True
        self._waker.wake()

    def leave(self) -> None:
        """Take away this master's row; where that fails its lease will."""
        if self._lease and self._answered:
            try:
                self._kv.revoke(self._lease, timeout_s=LEAVE_TIMEOUT_S)
            except ResourceUnavailable as error:
                _log.debug("the row of this master stays for a while", why=error.message)

    def join(self, timeout_s: float) -> None:
        """After `stop`, once the connection is closed."""
        if self._worker is not None:
            self._worker.join(timeout_s)

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._step()
            self._waker.wait(STEP_S)

    def _step(self) -> None:
        """Each job by itself: one that is refused does not keep the others from being done."""
        now_s = self._clock.monotonic_s()
        jobs: list[Callable[[], None]] = [self.on_step]
        if now_s >= self._master_at_s:
            self._master_at_s = now_s + MASTER_KEEP_S
            jobs.append(self._keep_row)
        if now_s >= self._masters_at_s:
            self._masters_at_s = now_s + MASTERS_S
            jobs += [self._read_masters, self._read_size]
        if now_s >= self._snapshot_at_s:
            self._snapshot_at_s = now_s + SNAPSHOT_S
            jobs.append(self._look_at_snapshot)
        jobs += [self._write_rows, self._truncate, self._compact]
        for job in jobs:
            if self._closing:
                return
            try:
                job()
                self._answered = True
                self._complaints.pop(job.__name__, None)
            except KvUnavailable as error:
                self._answered = False
                _log.debug("upkeep has to wait", why=error.message)
                self._master_at_s = min(self._master_at_s, now_s + STEP_S)
                return  # nothing else would be answered either; the keeper says so, and louder
            except ResourceUnavailable as error:
                self._complain(job.__name__, error.message)
            except Exception as error:  # whatever the bug is: upkeep goes on with the next job
                self._complain(job.__name__, repr(error))

    def _complain(self, job: str, why: str) -> None:
        """Once each time that it says something else."""
        if self._complaints.get(job) != why:
            self._complaints[job] = why
            _log.warning("upkeep of etcd failed", job=job.strip("_"), why=why)

    def _keep_row(self) -> None:
        """This master's row, and the lease that takes it away when this process ends."""
        if self._lease and not self._kv.keep_alive(self._lease, timeout_s=CALL_TIMEOUT_S):
            self._lease = 0
        if not self._lease:
            self._lease = self._kv.grant(MASTER_TTL_S, timeout_s=CALL_TIMEOUT_S)
        role = "leader" if self.fence is not None and not self.lost else "standby"
        data = master_bytes(self.row, role, self.entry())
        # Also where it says nothing new: that it was written is the sign of life.
        put = Put(self._keys.master(self.row.name), data, self._lease)
        try:
            self._kv.txn((), (put,), timeout_s=CALL_TIMEOUT_S)
        except KvRefused:
            self._lease = 0  # most likely over: another one next time
            raise

    def _read_masters(self) -> None:
        rows = []
        signs: dict[bytes, tuple[int, float]] = {}
        asked_s = self._clock.monotonic_s()
        for row in self._kv.range(*self._keys.masters, timeout_s=CALL_TIMEOUT_S).rows:
            try:
                master = parse_master(row.value)
            except JournalCorrupt as error:
                _log.warning("a row of masters/ is not ours", why=error.message)
                continue
            if row.key != self._keys.master(self.row.name):
                sign = self._signs.get(row.key)
                if sign is None or sign[0] != row.mod_revision:
                    sign = (row.mod_revision, asked_s)
                signs[row.key] = sign
                master = dataclasses.replace(master, seen_s=sign[1])
            rows.append(master)
        self._signs = signs
        self.masters = tuple(rows)

    def _read_size(self) -> None:
        self.database_bytes = self._kv.size_bytes(timeout_s=CALL_TIMEOUT_S)

    def _look_at_snapshot(self) -> None:
        rows = self._kv.range(self._keys.snapshot, timeout_s=CALL_TIMEOUT_S).rows
        try:
            self.snapshot = SnapshotRow.parse(rows[0].value) if rows else None
        except JournalCorrupt as error:
            _log.warning("the row snapshot is not ours", why=error.message)

    # ---- the leader's part ------------------------------------------------------------------

    def _acting(self) -> Fence | None:
        """The fence, while this master leads."""
        return None if self.lost else self.fence

    def _fenced(self, fence: Fence, operations: list[Operation]) -> int | None:
        """The revision, or None where another master leads: the keeper will say so."""
        condition = Modified(self._keys.epoch, fence.revision)
        reply = self._kv.txn((condition,), operations, timeout_s=CALL_TIMEOUT_S)
        return reply.revision if reply.succeeded else None

    def _write_rows(self) -> None:
        fence = self._acting()
        if fence is None:
            return
        if self._rows and not self._rows_are_ours:
            if self._fenced(fence, [Delete(*self._keys.rows)]) is None:
                return
            self._rows_are_ours = True
        while self._rows and not self._closing:
            batch: dict[str, str | None] = {}
            size_bytes = 0
            with self._lock:
                for path, text in self._rows.items():
                    size_bytes += len(text or "")
                    if batch and (len(batch) == ROWS_PER_TXN or size_bytes > ROWS_BYTES_PER_TXN):
                        break
                    batch[path] = text
            operations: list[Operation] = [
                Delete(self._keys.row(path))
                if text is None
                else Put(self._keys.row(path), text.encode())
                for path, text in batch.items()
            ]
            if self._fenced(fence, operations) is None:
                return
            with self._lock:
                for path, text in batch.items():
                    if self._rows.get(path, "") == text:
                        del self._rows[path]

    def _truncate(self) -> None:
        """Delete what a snapshot in force stands for, and older ones."""
        fence, row = self._acting(), self.snapshot
        if fence is None or row is None or row.covers <= self.truncated_through:
            return
        operations: list[Operation] = [
            Delete(*self._keys.journal_before(row.resume)),
            Delete(*self._keys.snapshots_below(row.covers)),
        ]
        revision = self._fenced(fence, operations)
        if revision is not None:
            _log.info("the journal was truncated", through_entry=row.covers)
            self.truncated_through = row.covers
            self._compact_revision = revision
            self._compact_at_s = self._clock.monotonic_s() + COMPACT_AFTER_S

    def _compact(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._acting() is None:
            return
        if self._compact_at_s == float("inf"):
            self._note_revision()
        elif now_s >= self._compact_at_s:
            self._compact_at_s = now_s + COMPACT_S
            self._kv.compact(self._compact_revision, timeout_s=CALL_TIMEOUT_S)
            self._note_revision()

    def _note_revision(self) -> None:
        """What is old now is forgotten after a while."""
        reply = self._kv.range(self._keys.epoch, timeout_s=CALL_TIMEOUT_S)
        self._compact_revision = reply.revision
        self._compact_at_s = self._clock.monotonic_s() + COMPACT_S
