"""`memory:`: a journal that ends with the process, for tests and for pools that may forget.

Given a `MemoryLog` it keeps what is appended there, so that a test or the simulator can restart a
master over it. Without one it keeps nothing: a pool that may forget must not grow for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cenote.api.errors import CenoteError, InternalError, ResourceUnavailable

from .journal import Record, entry_range, verify_record
from .metadata import Opened

__all__ = ["MemoryBackend", "MemoryLog"]


@dataclass(slots=True)
class MemoryLog:
    """What outlives a MemoryBackend."""

    epoch: int = 0
    snapshot: list[bytes] = field(default_factory=list)
    covers: int = 0
    records: list[bytes] = field(default_factory=list)
    in_use: bool = False


class MemoryBackend:
    """See `MetadataBackend`. `refusal` may be set by a test.

    `epoch_before`: the epoch to begin after. Daemons outlive a master that forgets, and refuse one
    whose epoch is not above the last: hence the clock's seconds where a real process uses this.
    """

    name = "memory:"

    def __init__(self, log: MemoryLog | None = None, *, epoch_before: int = 0) -> None:
        self._log = MemoryLog(epoch=epoch_before) if log is None else log
        self._keeps = log is not None
        self._open = False
        self._last_entry = 0
        self._ready = False
        self.refusal: CenoteError | None = None

    def open(self) -> Opened:
        if self._log.in_use:
            raise ResourceUnavailable(
                "this log is in use by another master", remedy="close that one first"
            )
        self._log.in_use = self._open = True
        self._log.epoch += 1
        return Opened(self._log.epoch, self._read())

    def _read(self) -> Iterator[Record]:
        yield from self._log.snapshot
        self._last_entry = self._log.covers
        for record in self._log.records:
            self._last_entry = verify_record(record).last
            yield record
        self._ready = True

    @property
    def last_entry(self) -> int:
        return self._last_entry

    @property
    def durable_entry(self) -> int:
        return self._last_entry

    def append(self, records: Sequence[bytes]) -> int:
        if not self._ready or not self._open:
            raise InternalError("append to a journal that was not read to its end, or is closed")
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
        if entry > self._last_entry:
            future.set_exception(InternalError(f"entry {entry} was not appended yet"))
        else:
            future.set_result(None)
        return future

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        log = self._log
        log.snapshot = list(records)
        log.covers = covers
        log.records = [record for record in log.records if entry_range(record)[0] > covers]

    @property
    def bytes_used(self) -> int:
        return sum(map(len, self._log.records)) + sum(map(len, self._log.snapshot))

    def close(self) -> None:
        if self._open:
            self._open = self._log.in_use = False
