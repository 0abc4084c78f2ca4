"""A model of etcd in this process: revisions, transactions, leases, watches, compaction, faults.

`KvModel` is the service: plain data, no thread, no clock of its own (`now_s` moves when told to, or
follows a given clock), the same answers to the same calls. `ModelKv` is a connection to it for
threads; the simulator has its own. Faults are ordered beforehand, one by one (`ModelKv.fail_next`),
or decided by a function (`ModelKv.fault`):

    "lost"      the request does not arrive
    "unknown"   it is carried out, the answer is lost
    "late"      the answer is lost, and it is carried out when `KvModel.deliver` says so
    "refused"   it arrives, and is not carried out: no room, no permission
    "twice"     the first answer is lost, and the adapter asks again
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cenote.kv.service import (
    Condition,
    Created,
    Delete,
    KvCompacted,
    KvEvent,
    KvRefused,
    KvRow,
    KvUnavailable,
    Operation,
    Put,
    RangeReply,
    TxnReply,
)

__all__ = ["KvModel", "ModelKv", "ModelWatch"]

T = TypeVar("T")
TXN_OPERATIONS_MAX = 128
TXN_BYTES_MAX = 1_500_000


@dataclass
class _Row:
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass
class _Lease:
    ttl_s: float
    end_s: float
    keys: set[bytes] = field(default_factory=set)


class KvModel:
    """The service. Not for several threads without the lock of `ModelKv`."""

    def __init__(self, *, lease_lateness_s: float = 0.0) -> None:
        """`lease_lateness_s`: how long after its end a lease is ended, as etcd's is by polling."""
        self.revision = 1
        self.compacted = 0
        self.now_s = 0.0
        self.lease_lateness_s = lease_lateness_s
        self.reachable = True
        """False: no quorum; every call is lost."""
        self.history: list[KvEvent] = []
        self.rows: dict[bytes, _Row] = {}
        self.held_back: list[Callable[[], object]] = []
        self.changed: Callable[[], None] = lambda: None
        """Called after each revision."""
        self._keys: list[bytes] = []
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 1000

    # ---- time, and what happens behind everybody's back -----------------------------------------

    def advance_to(self, now_s: float) -> None:
        """Time goes on; leases end."""
        self.now_s = max(self.now_s, now_s)
        for number, lease in list(self._leases.items()):
            if lease.end_s + self.lease_lateness_s <= self.now_s:
                self.revoke(number)

    def elect(self) -> None:
        """The service has a new leader of its own: leases begin anew, as in etcd."""
        for lease in self._leases.values():
            lease.end_s = self.now_s + lease.ttl_s

    def deliver(self, index: int = 0) -> None:
        """Carry out a request that was held back."""
        self.held_back.pop(index)()

    # ---- requests -------------------------------------------------------------------------------

    def range(self, key: bytes, end: bytes, limit: int, keys_only: bool) -> RangeReply:
        low = bisect_left(self._keys, key)
        high = bisect_left(self._keys, end or key + b"\0")
        found = self._keys[low:high]
        more = bool(limit) and len(found) > limit
        rows = [self._shown(k, keys_only) for k in (found[:limit] if limit else found)]
        return RangeReply(rows, self.revision, more)

    def _shown(self, key: bytes, keys_only: bool = False) -> KvRow:
        row = self.rows[key]
        value = b"" if keys_only else row.value
        return KvRow(key, value, row.create_revision, row.mod_revision)

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
    ) -> TxnReply:
        _check(then)
        _check(otherwise)
        succeeded = all(map(self._holds, conditions))
        operations = then if succeeded else otherwise
        for operation in operations:
            if isinstance(operation, Put) and operation.lease not in (0, *self._leases):
                raise KvRefused("requested lease not found")
        rows: list[KvRow | None] = []
        revision, before = self.revision + 1, len(self.history)
        for operation in operations:
            if isinstance(operation, Put):
                self._put(operation, revision)
            elif isinstance(operation, Delete):
                self._delete(operation.key, operation.end, revision)
            else:
                known = operation.key in self.rows
                rows.append(self._shown(operation.key) if known else None)
        if len(self.history) > before:
            self.revision = revision
            self.changed()
        return TxnReply(succeeded, self.revision, rows)

    def _holds(self, condition: Condition) -> bool:
        row = self.rows.get(condition.key)
        if row is None:
            return condition.revision == 0
        is_created = isinstance(condition, Created)
        return condition.revision == (row.create_revision if is_created else row.mod_revision)

    def _put(self, put: Put, revision: int) -> None:
        row = self.rows.get(put.key)
        if row is None:
            insort(self._keys, put.key)
            row = self.rows[put.key] = _Row(b"", revision, revision, 0)
        elif row.lease:
            self._leases[row.lease].keys.discard(put.key)
        row.value, row.mod_revision, row.lease = put.value, revision, put.lease
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self.history.append(KvEvent(put.key, put.value, revision))

    def _delete(self, key: bytes, end: bytes, revision: int) -> None:
        low, high = bisect_left(self._keys, key), bisect_left(self._keys, end or key + b"\0")
        for gone in self._keys[low:high]:
            row = self.rows.pop(gone)
            if row.lease:
                self._leases[row.lease].keys.discard(gone)
            self.history.append(KvEvent(gone, None, revision))
        del self._keys[low:high]

    def grant(self, ttl_s: float) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, self.now_s + ttl_s)
        return self._last_lease

    def keep_alive(self, lease: int) -> bool:
        found = self._leases.get(lease)
        if found is None or found.end_s <= self.now_s:
            return False
        found.end_s = self.now_s + found.ttl_s
        return True

    def revoke(self, lease: int) -> None:
        found = self._leases.pop(lease, None)
        if found is None or not found.keys:
            return
        self.revision += 1
        for key in sorted(found.keys):
            self.rows.pop(key)
            self._keys.remove(key)
            self.history.append(KvEvent(key, None, self.revision))
        self.changed()

    def compact(self, revision: int) -> None:
        if revision > self.revision:
            raise KvRefused("required revision is a future revision")
        self.compacted = max(self.compacted, revision)
        self.history = [event for event in self.history if event.revision >= self.compacted]

    def events(self, key: bytes, end: bytes, revision: int) -> list[KvEvent]:
        """Of the range, from `revision` on. Raises KvCompacted."""
        if revision < self.compacted:
            raise KvCompacted("required revision has been compacted")
        first = bisect_left(self.history, revision, key=lambda event: event.revision)
        return [event for event in self.history[first:] if key <= event.key < end]

    def size_bytes(self) -> int:
        return sum(len(key) + len(row.value) for key, row in self.rows.items())


def _check(operations: Sequence[Operation]) -> None:
    size_bytes = sum(len(o.key) + len(o.value) for o in operations if isinstance(o, Put))
    if len(operations) > TXN_OPERATIONS_MAX or size_bytes > TXN_BYTES_MAX:
        raise KvRefused("too many operations in txn request, or request is too large")
    keys = [o.key for o in operations if isinstance(o, Put)]
    if len(set(keys)) < len(keys):
        raise KvRefused("duplicate key given in txn request")


class ModelWatch:
    """See `cenote.kv.service.Watch`."""

    def __init__(self, kv: ModelKv, key: bytes, end: bytes, revision: int) -> None:
        self._kv, self._key, self._end, self._next = kv, key, end, revision
        self._woken = False
        self.silent = False
        """True: like a connection that is cut without anybody being told."""

    def poll(self, timeout_s: float) -> list[KvEvent]:
        end_s = time.monotonic() + timeout_s
        with self._kv.lock:
            while True:
                self._kv.tick()
                if self._kv.closed or not self._kv.service.reachable:
                    raise KvUnavailable("the watch was cut")
                if not self.silent:
                    found = self._kv.service.events(self._key, self._end, self._next)
                    if found:
                        self._next = found[-1].revision + 1
                        return found
                rest_s = end_s - time.monotonic()
                if self._woken or rest_s <= 0:
                    self._woken = False
                    return []
                self._kv.lock.wait(min(rest_s, 0.05))

    def wake(self) -> None:
        with self._kv.lock:
            self._woken = True
            self._kv.lock.notify_all()

    def close(self) -> None:
        pass


class ModelKv:
    """See `cenote.kv.service.Kv`: one process's connection to a model that threads share."""

    def __init__(
        self,
        service: KvModel,
        lock: threading.Condition | None = None,
        *,
        clock_s: Callable[[], float] | None = time.monotonic,
    ) -> None:
        """`lock`: one for all connections of a model. `clock_s` moves the model's time; None: the
        test does."""
        self.service = service
        self.lock = lock if lock is not None else threading.Condition(threading.RLock())
        self.closed = False
        self.fault: Callable[[str], str] = lambda _call: ""
        """Called with the name of each call; returns what goes wrong with it, or "" for nothing."""
        self.calls: list[str] = []
        self.watches: list[ModelWatch] = []
        self._next: deque[tuple[str, str]] = deque()
        self._clock_s = clock_s
        service.changed = self._notify

    def _notify(self) -> None:
        with self.lock:
            self.lock.notify_all()

    def tick(self) -> None:
        """Time went on."""
        if self._clock_s is not None:
            self.service.advance_to(self._clock_s())

    def fail_next(self, call: str, fault: str, times: int = 1) -> None:
        """Something goes wrong with the next call of that name."""
        self._next.extend([(call, fault)] * times)

    def _fault(self, call: str) -> str:
        for index, (name, fault) in enumerate(self._next):
            if name == call:
                del self._next[index]
                return fault
        return self.fault(call)

    def _call(self, name: str, run: Callable[[], T]) -> T:
        with self.lock:
            self.calls.append(name)
            self.tick()
            if self.closed:
                raise KvUnavailable("the connection is closed")
            fault = self._fault(name)
            if fault == "lost" or not self.service.reachable:
                raise KvUnavailable(f"no answer to {name}")
            if fault == "refused":
                raise KvRefused(f"{name} is refused")
            if fault == "late":
                self.service.held_back.append(run)
                raise KvUnavailable(f"no answer to {name} yet")
            answer = run()
            if fault == "twice":
                answer = run()
            if fault == "unknown":
                raise KvUnavailable(f"the answer to {name} was lost")
            return answer

    def range(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        limit: int = 0,
        keys_only: bool = False,
        timeout_s: float,
    ) -> RangeReply:
        return self._call("range", lambda: self.service.range(key, end, limit, keys_only))

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float,
    ) -> TxnReply:
        return self._call("txn", lambda: self.service.txn(conditions, then, otherwise))

    def grant(self, ttl_s: int, *, timeout_s: float) -> int:
        return self._call("grant", lambda: self.service.grant(ttl_s))

    def keep_alive(self, lease: int, *, timeout_s: float) -> bool:
        return self._call("keep_alive", lambda: self.service.keep_alive(lease))

    def revoke(self, lease: int, *, timeout_s: float) -> None:
        self._call("revoke", lambda: self.service.revoke(lease))

    def watch(self, key: bytes, end: bytes, *, revision: int) -> ModelWatch:
        watch = ModelWatch(self, key, end, revision)
        self.watches.append(watch)
        return watch

    def compact(self, revision: int, *, timeout_s: float) -> None:
        self._call("compact", lambda: self.service.compact(revision))

    def size_bytes(self, *, timeout_s: float) -> int:
        return self._call("size_bytes", self.service.size_bytes)

    def distrust(self) -> None:
        pass

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.lock.notify_all()
