"""Appending to the shared journal: a queue that is bounded, and the thread that empties it.

Entries go in order, one transaction at a time, each conditioned on the fence (this master was
elected last) and on the absence of its first key. An answer that was lost leaves open whether the
transaction happened: the very same one is sent again. Where it had happened, the key is there now
and holds these bytes, which is as good as having been answered the first time. Where it happens
later, its condition fails. Hence no entry twice, none missing, none of another leader's between.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, final

from cenote.api.errors import CenoteError, InternalError, NotLeader, ResourceUnavailable
from cenote.kv.service import Condition, Created, Get, Kv, KvRow, Modified, Put
from cenote.runtime.clock import Clock
from cenote.runtime.log import get_logger

from .journal import RECORD_BYTES_MAX, entry_range
from .kv_keys import Keys
from .metadata import Backlog
from .workers import Worker, Workers

__all__ = ["Appender", "Fence"]

TXN_VALUES_MAX: Final = 4
"""Of 64 KiB each: etcd keeps some thousands of transactions in memory."""
TXN_TIMEOUT_S: Final = 2.0
LINGER_S: Final = 0.02
"""How long entries wait for company, where nobody waits for them."""
RETRY_S: Final = 0.1
SYNC_TIMEOUT_S: Final = 5.0
WAITERS_MAX: Final = 65_536
BACKLOG_BYTES_MAX: Final = 32 << 20
"""Then nothing new is decided."""
BACKLOG_AGE_S_MAX: Final = 5.0
APPEND_BYTES_MAX: Final = 96 << 20
"""Then nothing is taken at all, decided or not."""
_log = get_logger("cenote.master.journal")


class Fence(NamedTuple):
    """What conditions a leader's writes."""

    epoch: int
    revision: int
    """Of the row `epoch`, which every election changes."""


class _Pending(NamedTuple):
    record: bytes
    first: int
    last: int
    added_s: float


class _Value(NamedTuple):
    """Records that become one key."""

    first: int
    last: int
    data: bytes
    records: int


@final
class Appender:
    """`append` and `sync` in the master's thread, `run` in one of its own."""

    def __init__(
        self,
        kv: Kv,
        keys: Keys,
        clock: Clock,
        workers: Workers,
        on_lost: Callable[[str], NotLeader],
    ) -> None:
        """`on_lost` is told that another master was elected, and returns the error for it."""
        self._kv = kv
        self._keys = keys
        self._clock = clock
        self._workers = workers
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._waker = workers.waker()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._waiters: deque[tuple[int, Future[None], float]] = deque()
        self._fence = Fence(0, 0)
        self._worker: Worker | None = None
        self._closing_until_s: float | None = None
        self._failure: CenoteError | None = None
        self._trouble: CenoteError | None = None
        self.last = 0
        """The newest entry that was appended."""
        self.durable = 0
        self.revision = 0
        """Of the newest write."""
        self.bytes_written = 0
        self.values_written = 0

    def start(self, fence: Fence, last: int) -> None:
        """Begin behind entry `last`."""
        self._fence = fence
        self.last = self.durable = last
        self._worker = self._workers.spawn("cenote-journal", self._run)

    # ---- the master's thread ----------------------------------------------------------------

    def append(self, records: Sequence[bytes]) -> int:
        """See `MetadataBackend.append`."""
        if self._failure is not None:
            raise self._failure
        if self._closing_until_s is not None:
            raise InternalError("append to a journal that is closed")
        if not records:
            return self.last
        now_s, last = self._clock.monotonic_s(), self.last
        added, size_bytes = [], 0
        for record in records:
            first, end = entry_range(record)
            if first != last + 1 or len(record) > RECORD_BYTES_MAX:
                raise InternalError(f"entry {first} was appended after {last}")
            last, size_bytes = end, size_bytes + len(record)
            added.append(_Pending(record, first, end, now_s))
        with self._lock:
            if self._pending and self._pending_bytes + size_bytes > APPEND_BYTES_MAX:
                raise self._behind()
            was_empty = not self._pending
            self._pending.extend(added)
            self._pending_bytes += size_bytes
            self.last = last
        if was_empty:
            self._waker.wake()
        return last

    def sync(self, entry: int) -> Future[None]:
        """See `MetadataBackend.sync`."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # who gives up waiting must not cancel it
        failure: CenoteError | None = None
        with self._lock:
            if self._failure is not None:
                failure = self._failure
            elif entry > self.last:
                failure = InternalError(f"entry {entry} was not appended yet")
            elif entry > self.durable:
                if len(self._waiters) < WAITERS_MAX:
                    until_s = self._clock.monotonic_s() + SYNC_TIMEOUT_S
                    self._waiters.append((entry, future, until_s))
                    self._waker.wake()
                    return future
                failure = ResourceUnavailable("too many wait for the journal")
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(None)
        return future

    @property
    def backlog(self) -> Backlog:
        with self._lock:
            if not self._pending:
                return Backlog()
            age_s = self._clock.monotonic_s() - self._pending[0].added_s
            return Backlog(self.last - self.durable, self._pending_bytes, age_s)

    @property
    def refusal(self) -> CenoteError | None:
        """Why nothing new should be decided now."""
        if self._failure is not None:
            return self._failure
        backlog = self.backlog
        if backlog.size_bytes > BACKLOG_BYTES_MAX or backlog.age_s > BACKLOG_AGE_S_MAX:
            return self._behind()
        return None

    def _behind(self) -> ResourceUnavailable:
        trouble, remedy = self._trouble, "check etcd's disks and network: `etcdctl endpoint status`"
        return ResourceUnavailable(
            f"the journal in etcd is {self._pending_bytes >> 10} KiB behind"
            + (f": {trouble.message}" if trouble is not None else ""),
            remedy=remedy if trouble is None else trouble.remedy,
        )

    def fail(self, error: CenoteError) -> None:
        """Nothing is appended any more."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            waiters, self._waiters = self._waiters, deque()
        for _, future, _ in waiters:
            future.set_exception(error)
        self._waker.wake()

    def end(self, timeout_s: float) -> None:
        """Take nothing more, and empty the queue as far as that goes in time."""
        if self._worker is None:
            return
        self._closing_until_s = self._clock.monotonic_s() + timeout_s
        self._waker.wake()
        self._worker.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """After `end`, once the connection is closed."""
        if self._worker is not None:
            self._worker.join(timeout_s)

    def raise_unless_empty(self) -> None:
        """Raises ResourceUnavailable where something that was appended is not durable."""
        if self._failure is not None:
            raise self._failure
        if self._pending:
            error = self._behind()
            self.fail(error)
            raise error

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._failure is None:
                wait_s = self._wait_s()
                if wait_s > 0:
                    self._waker.wait(wait_s)
                    self._expire()
                    continue
                with self._lock:
                    values = self._next_values()
                if values:
                    self._write(values)
                self._expire()
                if self._closing_until_s is not None and (
                    not self._pending or self._clock.monotonic_s() >= self._closing_until_s
                ):
                    return
        except Exception as error:  # whatever the bug is: a thread that ends unheard hangs the pool
            self._broken(f"the journal's thread failed: {error!r}")
            raise

    def _wait_s(self) -> float:
        """How long there is nothing to do."""
        with self._lock:
            if self._closing_until_s is not None:
                return 0.0
            if not self._pending:
                return 1.0
            if self._waiters or self._pending_bytes >= RECORD_BYTES_MAX:
                return 0.0
            return self._pending[0].added_s + LINGER_S - self._clock.monotonic_s()

    def _next_values(self) -> list[_Value]:
        """What the next transaction writes; it stays in the queue until that is known to be done.

        While an answer is open this must give the same again: it does, since what is added goes to
        the end, so only the last value could grow. Hence `_write` repeats its own.
        """
        values: list[_Value] = []
        parts: list[_Pending] = []
        size_bytes = 0
        for pending in self._pending:
            if parts and size_bytes + len(pending.record) > RECORD_BYTES_MAX:
                values.append(_value(parts))
                parts, size_bytes = [], 0
                if len(values) == TXN_VALUES_MAX:
                    return values
            parts.append(pending)
            size_bytes += len(pending.record)
        if parts:
            values.append(_value(parts))
        return values

    def _write(self, values: list[_Value]) -> None:
        """One transaction, again and again until it is known what became of it."""
        keys, fence = self._keys, self._fence
        first_key = keys.journal(values[0].first)
        conditions: list[Condition] = [Modified(keys.epoch, fence.revision), Created(first_key, 0)]
        puts = [Put(keys.journal(value.first), value.data) for value in values]
        reads = [Get(keys.epoch), Get(first_key)]
        while self._failure is None:
            try:
                reply = self._kv.txn(conditions, puts, reads, timeout_s=TXN_TIMEOUT_S)
            except ResourceUnavailable as error:  # no answer, or no room: it may be had later
                self._note_trouble(error)
            else:
                self._note_trouble(None)
                if not reply.succeeded and not self._was_done(values[0], reply.rows):
                    return
                self._done(values, reply.revision)
                return
            self._expire()
            closing = self._closing_until_s
            if closing is not None and self._clock.monotonic_s() >= closing:
                return
            self._waker.wait(RETRY_S)

    def _was_done(self, value: _Value, rows: Sequence[KvRow | None]) -> bool:
        """Whether the conditions failed because an earlier attempt had succeeded."""
        epoch, found = rows
        if epoch is None or epoch.mod_revision != self._fence.revision:
            self.fail(self._on_lost("its journal is appended to by another master"))
            return False
        if found is None or found.value != value.data:
            self._broken(f"entry {value.first} is in the journal, and is not what was decided")
            return False
        return True

    def _done(self, values: list[_Value], revision: int) -> None:
        records = sum(value.records for value in values)
        done: list[Future[None]] = []
        with self._lock:
            for _ in range(records):
                self._pending_bytes -= len(self._pending.popleft().record)
            self.durable = values[-1].last
            self.revision = max(self.revision, revision)
            self.bytes_written += sum(len(value.data) for value in values)
            self.values_written += len(values)
            while self._waiters and self._waiters[0][0] <= self.durable:
                done.append(self._waiters.popleft()[1])
        for future in done:
            future.set_result(None)

    def _expire(self) -> None:
        """Whoever has waited for too long is told."""
        now_s = self._clock.monotonic_s()
        expired: list[Future[None]] = []
        with self._lock:
            while self._waiters and self._waiters[0][2] <= now_s:
                expired.append(self._waiters.popleft()[1])
        for future in expired:
            future.set_exception(self._behind())

    def _note_trouble(self, error: CenoteError | None) -> None:
        if error is not None and self._trouble is None:
            _log.warning("the journal can't be written to etcd", why=error.message)
        elif error is None and self._trouble is not None:
            _log.info("the journal is written to etcd again")
        self._trouble = error

    def _broken(self, what: str) -> None:
        error = InternalError(what, remedy="restart this master; please report it")
        _log.error("the journal takes no writes any more", why=what)
        self.fail(error)


def _value(parts: list[_Pending]) -> _Value:
    data = parts[0].record if len(parts) == 1 else b"".join(part.record for part in parts)
    return _Value(parts[0].first, parts[-1].last, data, len(parts))
