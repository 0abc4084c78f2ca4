"""`memory:`: a journal that ends with the process, for tests and for pools that may forget.

Given a `MemoryLog` it keeps what is appended there, so that a test or the simulator can restart a
master over it, or have others stand by. Without one it keeps nothing: a pool that may forget must
not grow for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cenote.api.errors import CenoteError, InternalError, InvalidArgument, NotLeader

from .journal import Record, entry_range, verify_record
from .metadata import ALONE, Backlog, Followed, Leader, MasterRow, Opened

__all__ = ["MemoryBackend", "MemoryLog"]

_FOLLOW_RECORDS_MAX = 64


@dataclass(slots=True)
class MemoryLog:
    """What outlives a MemoryBackend. Several may stand by over one, in one thread."""

    epoch: int = 0
    snapshot: list[bytes] = field(default_factory=list)
    covers: int = 0
    records: list[bytes] = field(default_factory=list)
    leader: MemoryBackend | None = None
    """Set to None by a test, it is as if the leader's lease had run out."""
    joined: dict[int, MasterRow] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)


class MemoryBackend:
    """See `MetadataBackend`. `refusal` and `tenure_end_s` may be set by a test.

    `epoch_before`: the epoch to begin after. Daemons outlive a master that forgets, and refuse one
    whose epoch is not above the last: hence the clock's seconds where a real process uses this.
    """

    name = "memory:"

    def __init__(self, log: MemoryLog | None = None, *, epoch_before: int = 0) -> None:
        self._log = MemoryLog(epoch=epoch_before) if log is None else log
        self._keeps = log is not None
        self._row = ALONE
        self._epoch = 0
        self._last_entry = 0
        self._followed = False
        self._giving: list[bytes] = []
        """What is left to give of the snapshot that is followed, if any, and what it covers."""
        self._giving_covers = 0
        self._ready = False
        self._closed = False
        self._refusal: CenoteError | None = None
        self._tenure_end_s = -math.inf

    # ---- standing by ------------------------------------------------------------------------

    def join(self, row: MasterRow) -> None:
        self._row = row
        self._log.joined[id(self)] = row

    @property
    def shared(self) -> bool:
        return self._keeps

    @property
    def leader(self) -> Leader | None:
        leader = self._log.leader
        return None if leader is None else Leader(leader._epoch, leader._row)

    @property
    def masters(self) -> Sequence[MasterRow]:
        return list(self._log.joined.values())

    def follow(self, timeout_s: float) -> Followed:
        anew = self._is_void()
        if anew:
            self._followed, self._last_entry = True, 0
            self._giving, self._giving_covers = list(self._log.snapshot), self._log.covers
        if self._giving:
            records = self._giving[:_FOLLOW_RECORDS_MAX]
            del self._giving[:_FOLLOW_RECORDS_MAX]
            if not self._giving:
                self._last_entry = self._giving_covers
        else:
            records = self._behind()[:_FOLLOW_RECORDS_MAX]
            if records:
                self._last_entry = entry_range(records[-1])[1]
        return Followed(records, anew, not self._giving and not self._behind())

    def _is_void(self) -> bool:
        """Whether what was given so far leads nowhere: the journal begins later now."""
        end = self._giving_covers if self._giving else self._last_entry
        return not self._followed or end < self._log.covers

    def _behind(self) -> list[bytes]:
        return [r for r in self._log.records if entry_range(r)[0] > self._last_entry]

    @property
    def vacant(self) -> bool:
        return self._log.leader is None

    def campaign(self, timeout_s: float) -> bool:
        log = self._log
        if self._epoch or self._closed:
            raise InternalError("a backend leads once")
        if log.leader is not None:
            return False
        log.leader = self
        log.epoch += 1
        self._epoch = log.epoch
        self._tenure_end_s = math.inf
        return True

    @property
    def tenure_end_s(self) -> float:
        return -math.inf if self.lost is not None else self._tenure_end_s

    @tenure_end_s.setter
    def tenure_end_s(self, end_s: float) -> None:
        self._tenure_end_s = end_s

    @property
    def lost(self) -> NotLeader | None:
        if not self._epoch or self._closed or self._log.leader is self:
            return None
        leader = self.leader
        return NotLeader(
            f"epoch {self._epoch} is over",
            addresses=leader.row.addresses if leader else (),
            epoch=leader.epoch if leader else 0,
        )

    # ---- leading ----------------------------------------------------------------------------

    def open(self) -> Opened:
        if not self._epoch or self._closed:
            raise InternalError("open without a campaign that succeeded")
        if (lost := self.lost) is not None:
            raise lost
        anew = self._is_void()
        return Opened(self._epoch, self._read(anew), anew)

    def raise_epoch(self, above: int) -> int:
        self._log.epoch = self._epoch = above + 1
        return above + 1

    def _read(self, anew: bool) -> Iterator[Record]:
        if anew:
            self._giving, self._giving_covers = self._log.snapshot, self._log.covers
            self._last_entry = 0
        if self._giving:
            yield from self._giving
            self._last_entry = self._giving_covers
        for record in self._behind():
            self._last_entry = verify_record(record).last
            yield record
        self._ready = True

    @property
    def last_entry(self) -> int:
        return self._last_entry

    @property
    def durable_entry(self) -> int:
        return self._last_entry

    @property
    def is_syncing(self) -> bool:
        return False

    @property
    def backlog(self) -> Backlog:
        return Backlog()

    @property
    def refusal(self) -> CenoteError | None:
        return self.lost or self._refusal

    @refusal.setter
    def refusal(self, why: CenoteError | None) -> None:
        self._refusal = why

    def append(self, records: Sequence[bytes]) -> int:
        if not self._ready or self._closed:
            raise InternalError("append to a journal that was not read to its end, or is closed")
        if (lost := self.lost) is not None:
            raise lost
        last = self._last_entry
        for record in records:
            first, end = entry_range(record)
            if first != last + 1:
                raise InternalError(f"entry {first} was appended after {last}")
            last = end
        if self._keeps:
            self._log.records.extend(records)
        self._last_entry = last
        return last

    def sync(self, entry: int) -> Future[None]:
        future: Future[None] = Future()
        if (lost := self.lost) is not None:
            future.set_exception(lost)
        elif entry > self._last_entry:
            future.set_exception(InternalError(f"entry {entry} was not appended yet"))
        else:
            future.set_result(None)
        return future

    def publish(self, rows: Mapping[str, str | None]) -> None:
        if self._keeps and self.lost is None:
            self._log.rows |= {path: text for path, text in rows.items() if text is not None}
            for path in [path for path, text in rows.items() if text is None]:
                self._log.rows.pop(path, None)

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        log = self._log
        log.snapshot = list(records)
        log.covers = covers
        log.records = [record for record in log.records if entry_range(record)[0] > covers]

    def request_snapshot(self) -> int:
        raise InvalidArgument(
            "this pool's metadata are kept in the master's memory alone",
            remedy="start the master with --metadata file:DIR or etcd://...",
        )

    @property
    def snapshot_entry(self) -> int:
        return self._log.covers

    @property
    def bytes_used(self) -> int:
        return sum(map(len, self._log.records)) + sum(map(len, self._log.snapshot))

    def close(self) -> None:
        if self._closed:
            return
        lost, self._closed = self.lost, True
        self._log.joined.pop(id(self), None)
        self._tenure_end_s = -math.inf
        if self._log.leader is self:
            self._log.leader = None
        if lost is not None:
            raise lost
