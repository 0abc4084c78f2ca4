"""Reading the shared journal: the newest snapshot, what follows it, and what comes.

Entries are numbered without gaps, so whoever reads them knows what is due. That makes reading
robust: a watch that was cut, has a gap or says nothing although the leader has written more is
dropped, and what is due is read by its key. Where that is not there any more, a newer snapshot has
taken its place, and reading begins anew with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.kv.service import Kv, KvCompacted, KvEvent, KvUnavailable, Watch
from cenote.runtime.clock import Clock
from cenote.runtime.log import get_logger

from .journal import (
    FLAG_SNAPSHOT,
    JournalCorrupt,
    Record,
    parse_header,
    snapshot_end,
    verify_record,
)
from .kv_keys import Keys, SnapshotRow
from .metadata import Followed
from .workers import Workers

__all__ = ["Follower", "last_entry_of", "split_records"]

CHUNKS_PER_READ_MAX: Final = 64
ROWS_PER_READ_MIN: Final = 64
ROWS_PER_READ_MAX: Final = 4096
READ_BYTES: Final = 4 << 20
READ_TIMEOUT_S: Final = 2.0
SILENCE_S: Final = 1.0
"""How long a watch may lag behind what the leader has said."""
RESTARTS_MAX: Final = 8
"""In a row, without having come to the journal's end."""
_log = get_logger("cenote.master.journal")


class _At(Enum):
    BEGIN = auto()
    SNAPSHOT = auto()
    JOURNAL = auto()
    WATCH = auto()


@dataclass(slots=True)
class _Snapshot:
    """One that is being read."""

    row: SnapshotRow
    next_chunk: int = 0
    next_entry: int = 1
    ended: bool = False


@final
class Follower:
    """Called by one thread, but for `wake` and `heard`."""

    def __init__(self, kv: Kv, keys: Keys, clock: Clock, workers: Workers) -> None:
        self._kv = kv
        self._keys = keys
        self._clock = clock
        self._waker = workers.waker()
        self._at = _At.BEGIN
        self._snapshot: _Snapshot | None = None
        self._watch: Watch | None = None
        self._rows_per_read = ROWS_PER_READ_MIN
        self._chunks_per_read = CHUNKS_PER_READ_MAX
        self._restarts = 0
        self._resume = 1
        """First entry of the key in which reading goes on."""
        self._heard_entry = 0
        self._behind_since_s: float | None = None
        self.last = 0
        """The newest entry that was given."""
        self.covers = 0
        """Of the snapshot that was read last."""
        self.snapshot_bytes = 0
        self.journal_bytes = 0
        """Read behind that snapshot."""
        self.journal_values = 0
        self.on_leader: Callable[[], None] = lambda: None
        """Called when the row of the leader changed."""
        self.trouble: ResourceUnavailable | None = None
        """Why the service could not be read, the last time."""

    # ---- for others -------------------------------------------------------------------------

    def wake(self) -> None:
        """End a `follow` that waits. From any thread."""
        self._waker.wake()
        watch = self._watch
        if watch is not None:
            watch.wake()

    def heard(self, entry: int) -> None:
        """The leader has said that everything up to `entry` is durable. From any thread."""
        self._heard_entry = max(self._heard_entry, entry)

    # ---- following --------------------------------------------------------------------------

    def follow(self, timeout_s: float) -> Followed:
        """See `MetadataBackend.follow`; ends early only when woken."""
        try:
            followed = self._step(timeout_s)
        except ResourceUnavailable as error:
            if isinstance(error, JournalCorrupt):
                raise
            self.trouble = error
            self._drop_watch()
            if not isinstance(error, KvCompacted):
                self._waker.wait(min(timeout_s, 0.2))
            return Followed()
        self.trouble = None
        return followed

    def rest(self, patience_s: float) -> Iterator[Record]:
        """All that is left, for a leader: nobody appends or truncates meanwhile.

        Raises ResourceUnavailable where the service does not answer for so long, JournalCorrupt.
        """
        self._drop_watch()
        began = self._at is not _At.BEGIN
        answered_s = self._clock.monotonic_s()
        while True:
            try:
                followed = self._step(0.0)
            except ResourceUnavailable as error:
                silent_s = self._clock.monotonic_s() - answered_s
                if isinstance(error, JournalCorrupt) or silent_s >= patience_s:
                    raise
                self._waker.wait(0.1)
                continue
            answered_s = self._clock.monotonic_s()
            if followed.anew and began:
                raise ResourceUnavailable(
                    "the journal was truncated while its leader read it",
                    remedy="restart this master; please report it",
                )
            began = True
            yield from followed.records
            if self._at is _At.WATCH:
                self._drop_watch()
                return

    def is_void(self) -> bool:
        """Whether reading must begin anew, and will. Raises ResourceUnavailable."""
        if self._at is _At.BEGIN:
            return True
        row = self._newest_snapshot()
        if self._at is _At.SNAPSHOT:
            assert self._snapshot is not None
            void = row != self._snapshot.row
        else:
            void = row is not None and row.covers > self.last
        if void:
            self._begin_anew()
        return void

    def close(self) -> None:
        self._drop_watch()

    # ---- steps ------------------------------------------------------------------------------

    def _step(self, timeout_s: float) -> Followed:
        """What is found next. Where it raises nothing has been given, hence nothing was taken."""
        position = self.last, self._resume, self.journal_bytes, self.journal_values
        try:
            return self._step_from_here(timeout_s)
        except ResourceUnavailable as error:
            self.last, self._resume, self.journal_bytes, self.journal_values = position
            if isinstance(error, KvUnavailable) and self._at is not _At.WATCH:
                # Where network or service are slow, less fits into the time of a call.
                self._rows_per_read = max(self._rows_per_read // 2, 1)
                self._chunks_per_read = max(self._chunks_per_read // 2, 1)
            raise

    def _step_from_here(self, timeout_s: float) -> Followed:
        if self._at is _At.BEGIN:
            return self._begin()
        if self._at is _At.SNAPSHOT:
            return self._read_snapshot()
        if self._at is _At.JOURNAL:
            return self._read_journal()
        return self._read_watch(timeout_s)

    def _newest_snapshot(self) -> SnapshotRow | None:
        rows = self._kv.range(self._keys.snapshot, timeout_s=READ_TIMEOUT_S).rows
        return SnapshotRow.parse(rows[0].value) if rows else None

    def _begin(self) -> Followed:
        row = self._newest_snapshot()
        self.last = self.covers = self.journal_bytes = self.journal_values = 0
        self.snapshot_bytes = 0
        self._resume = 1
        if row is None:
            self._at, self._snapshot = _At.JOURNAL, None
        else:
            self._at, self._snapshot = _At.SNAPSHOT, _Snapshot(row)
        return Followed(anew=True)

    def _begin_anew(self) -> None:
        self._drop_watch()
        self._at = _At.BEGIN

    def _lost(self, what: str) -> Followed:
        """What is due is not there. Either a newer snapshot has replaced it, or it is gone."""
        row = self._newest_snapshot()
        at = self._snapshot.row if self._at is _At.SNAPSHOT and self._snapshot else None
        replaced = row is not None and (row.covers > self.last if at is None else row != at)
        self._restarts += 1
        if not replaced:
            raise JournalCorrupt(
                f"{what} is missing in etcd, under {self._keys.snapshot.decode()}",
                remedy="restore etcd from a backup, or delete all keys under the prefix but for "
                "`epoch`, and the pool starts empty",
            )
        self._begin_anew()
        if self._restarts > RESTARTS_MAX:
            raise ResourceUnavailable(
                f"{what} was truncated before it was read, {self._restarts} times in a row",
                remedy="give this master a faster way to etcd; it goes on trying",
            )
        return Followed()

    def _read_snapshot(self) -> Followed:
        snapshot = self._snapshot
        assert snapshot is not None
        row, first = snapshot.row, snapshot.next_chunk
        count = min(self._chunks_per_read, row.chunks - first)
        rows = self._kv.range(*self._keys.chunks(row, first, count), timeout_s=READ_TIMEOUT_S).rows
        if len(rows) != count:
            return self._lost(f"a part of the snapshot of entry {row.covers}")
        records: list[Record] = []
        for kv_row in rows:
            for record in split_records(kv_row.value):
                header = verify_record(record)
                end = snapshot_end(record)
                if (
                    header.first != snapshot.next_entry
                    or not header.flags & FLAG_SNAPSHOT
                    or snapshot.ended
                    or (end is not None and end.covers != row.covers)
                ):
                    raise JournalCorrupt(f"the snapshot {kv_row.key.decode()} in etcd is damaged")
                snapshot.next_entry = header.last + 1
                snapshot.ended = end is not None
                records.append(record)
        self._chunks_per_read = min(2 * self._chunks_per_read, CHUNKS_PER_READ_MAX)
        snapshot.next_chunk += count
        if snapshot.next_chunk == row.chunks:
            if not snapshot.ended:
                raise JournalCorrupt(f"the snapshot of entry {row.covers} in etcd has no end")
            self.last = self.covers = row.covers
            self._resume = row.resume
            self.snapshot_bytes = row.size_bytes
            self._at, self._snapshot = _At.JOURNAL, None
        return Followed(records)

    def _read_journal(self) -> Followed:
        reply = self._kv.range(
            *self._keys.journal_from(self._resume),
            limit=self._rows_per_read,
            timeout_s=READ_TIMEOUT_S,
        )
        records: list[Record] = []
        size_bytes = 0
        for row in reply.rows:
            if not self._take(row.key, row.value, records):
                return self._lost(f"entry {self.last + 1} of the journal")
            size_bytes += len(row.value)
        if reply.more:
            self._adapt(len(reply.rows), size_bytes)
            return Followed(records)
        row_in_force = self._newest_snapshot()
        if row_in_force is not None and row_in_force.covers > self.last:
            # Truncated up to its end: no later key says that something is missing.
            return self._lost(f"entry {self.last + 1} of the journal")
        self._restarts = 0
        self._behind_since_s = None
        self._watch = self._kv.watch(*self._keys.watched, revision=reply.revision + 1)
        self._at = _At.WATCH
        return Followed(records, caught_up=True)

    def _adapt(self, rows: int, size_bytes: int) -> None:
        """How many rows a read asks for, so that it is of a few MiB: each read costs the service
        the counting of all that follow, so that many small ones take long."""
        fit = READ_BYTES * rows // max(size_bytes, 1)
        self._rows_per_read = min(max(fit, ROWS_PER_READ_MIN), ROWS_PER_READ_MAX, 2 * rows)

    def _read_watch(self, timeout_s: float) -> Followed:
        assert self._watch is not None
        events = self._watch.poll(timeout_s)
        records: list[Record] = []
        for event in events:
            if event.key == self._keys.leader:
                self.on_leader()
            elif event.value is not None and not self._take_event(event, records):
                self._drop_watch()  # a gap: what is due is read by its key
                return Followed(records)
        if self.last >= self._heard_entry:
            self._behind_since_s = None
            return Followed(records, caught_up=True)
        now_s = self._clock.monotonic_s()
        if records or self._behind_since_s is None:
            self._behind_since_s = now_s
        elif now_s - self._behind_since_s >= SILENCE_S:
            _log.warning("a watch of etcd says nothing; reading instead", entry=self.last)
            self._drop_watch()
            self._kv.distrust()
        return Followed(records)

    def _drop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._at is _At.WATCH:
            self._at = _At.JOURNAL

    # ---- records ----------------------------------------------------------------------------

    def _take_event(self, event: KvEvent, records: list[Record]) -> bool:
        assert event.value is not None
        first = self._keys.first_entry(event.key)
        if first is None or first <= self.last:
            return True
        return self._take(event.key, event.value, records)

    def _take(self, key: bytes, value: bytes, records: list[Record]) -> bool:
        """Add the records of a key of the journal; False where it is not the one that is due."""
        if self._keys.first_entry(key) != self._resume:
            return False
        for record in split_records(value):
            header = verify_record(record)
            if header.last <= self.last:  # of the snapshot, which ended within this key
                continue
            if header.first != self.last + 1 or header.flags & FLAG_SNAPSHOT:
                raise JournalCorrupt(f"{key.decode()} in etcd is no part of this journal")
            self.last = header.last
            records.append(record)
        self._resume = self.last + 1
        self.journal_bytes += len(value)
        self.journal_values += 1
        return True


def last_entry_of(value: bytes) -> int:
    """Of the records in a value of the journal. Raises JournalCorrupt."""
    return max(verify_record(record).last for record in split_records(value))


def split_records(value: bytes) -> Iterator[Record]:
    """The records of one value. Raises JournalCorrupt."""
    header = parse_header(value)
    if header is not None and header.length == len(value):
        yield value
        return
    view, position = memoryview(value), 0
    while position < len(view):
        header = parse_header(view, position)
        if header is None or position + header.length > len(view):
            raise JournalCorrupt("a value of the journal in etcd is damaged")
        yield view[position : position + header.length]
        position += header.length
