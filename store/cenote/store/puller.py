"""Copies of what other daemons have, as the master plans them: fetched, proven, sealed here.

    fetch     records of the source's slots, then their bytes, into a buffer of this daemon's
    prove     the checksum of what came is the one in the record
    land      into the place in memory that the master has taken for it, the slot last
    report    with the next heartbeat

A source is held by nothing: its object may go, and its bytes become another's, while they are on
their way. So what came is believed only by its checksum. A copy takes over its source's record,
version and all, as copies between tiers do (`copier`).

`fence` ends what an earlier leader planned: nothing of it lands when that returns. Therefore bytes
come into a buffer first, and land in short steps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.rows import (
    COPIED,
    EXTENT,
    KEY_INLINE_BYTES,
    PULL_SOURCE,
    PULL_TARGET,
    PULL_TWIN,
    SLOT_WANTED,
    CopyStatus,
)
from cenote.runtime.log import get_logger
from cenote.runtime.memory import address_of
from cenote.security.tls import Tls
from cenote.transport.base import SessionIdentity
from cenote.transport.memory_access import MEMORY, copy
from cenote.transport.replica_source import RECORDS_MAX, ReplicaSource
from cenote.v1 import master_pb2 as pb

from .copy_jobs import has_bytes
from .dram import DramSegment
from .segments import LocalSegments
from .slot_format import SLOT_RECORD
from .slot_records import moved_record

__all__ = ["Puller", "PullerCounters"]

BUFFER_BYTES: Final = 16 << 20
BATCH_COPIES: Final = 512
QUEUE_MAX: Final = 65_536
TOLD_MAX: Final = 512
"""Copies that one heartbeat reports."""
CALL_S: Final = 5.0
"""A source that takes longer for a buffer full of bytes counts as gone."""
SOURCES_MAX: Final = 64
_LAND_STEP_BYTES: Final = 1 << 20
_JOIN_S: Final = 1.0
_NICENESS: Final = 10

_log = get_logger(__name__)


@dataclass(slots=True)
class PullerCounters:
    """Since the start."""

    pulled: int = 0
    pulled_bytes: int = 0
    failed: int = 0
    """Copies that came to nothing, for whatever reason."""


@dataclass(slots=True)
class _Part:
    """An extent of the source."""

    address: str
    """Of its daemon."""
    segment: int
    wanted: tuple[int, ...]
    """Its SLOT_WANTED row."""
    offset: int = 0
    length: int = 0


@dataclass(slots=True, eq=False)
class _Pull:
    copy_id: int
    epoch: int
    """Of the leader that planned it."""
    parts: list[_Part]
    target: tuple[int, ...]
    """Segment, slot, offset, length, replica."""
    twin: tuple[int, int, int] | None = None
    """As `copy_jobs.Copy.twin`."""
    status: int = CopyStatus.UNREACHABLE
    record: bytes = b""
    """Of the target, once the source was found."""
    size_bytes: int = 0
    """Payload, and a long key behind it."""
    payload_bytes: int = 0
    checksum: int = 0
    namespace: tuple[int, int] = (0, 0)
    """Its id and generation."""
    place: int = 0
    """Address in memory."""

    @property
    def addresses(self) -> list[str]:
        return list(dict.fromkeys(part.address for part in self.parts))


@final
class Puller:
    """See the module. Everything but `start` and `stop` may be called from any thread."""

    def __init__(
        self, segments: LocalSegments, identity: SessionIdentity, tls: Tls | None = None
    ) -> None:
        self._tls = tls
        self._segments = segments
        self._identity = identity
        self.counters = PullerCounters()
        self._stopping = threading.Event()
        self._queue: deque[_Pull] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._landing = threading.Lock()
        """Held while bytes land where others may be given space, or a copy becomes visible."""
        self._epoch = 0
        self._under_way = 0
        self._results: deque[tuple[int, int]] = deque()
        self._connections: dict[str, ReplicaSource] = {}
        self._buffer = np.empty(BUFFER_BYTES, np.uint8)
        self._address = address_of(self._buffer)
        self._thread = threading.Thread(target=self._run, name="cenote-pull", daemon=True)

    def start(self) -> None:
        """Begin to take copies."""
        self._thread.start()

    def stop(self) -> None:
        """End, in the middle of a copy where need be."""
        self._stopping.set()
        with self._lock:
            self._queue.clear()
            self._changed.notify_all()
        for connection in list(self._connections.values()):
            connection.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether the master will soon hear of copies."""
        return bool(self._queue or self._under_way or self._results)

    # ---- the agent's side ---------------------------------------------------------------------

    def enqueue(self, message: pb.PullReplicas, rows: NDArray[np.void], epoch: int) -> None:
        """Take copies (`rows`: PULL rows of the message) of a leader's plan."""
        addresses = {
            segment_id: source.address
            for source in message.sources
            for segment_id in source.segment_ids
        }
        starts = np.flatnonzero(np.r_[True, rows["copy_id"][1:] != rows["copy_id"][:-1]])
        with self._lock:
            for part in np.split(rows, starts[1:]) if len(rows) else []:
                one = _pull_of(part, epoch, addresses)
                if one is None or len(self._queue) >= QUEUE_MAX:
                    self._results.append((int(part["copy_id"][0]), CopyStatus.FAILED))
                else:
                    self._queue.append(one)
            self._changed.notify_all()

    def fence(self, epoch: int) -> None:
        """Nothing that leaders of earlier epochs planned lands or becomes visible after this."""
        with self._landing:
            self._epoch = max(self._epoch, epoch)
        with self._lock:
            self._queue = deque(one for one in self._queue if one.epoch >= epoch)

    def tell(self) -> bytes:
        """For the next heartbeat: packed COPIED rows. `told` once that was answered."""
        results = [self._results[i] for i in range(min(len(self._results), TOLD_MAX))]
        rows = np.zeros(len(results), COPIED)
        for i, result in enumerate(results):
            rows[i] = (*result, 0)
        return rows.tobytes()

    def told(self, packed: bytes) -> None:
        """The master knows of these."""
        for _ in range(len(packed) // COPIED.itemsize):
            self._results.popleft()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError as error:  # already lower, and raising it is not for everybody
            _log.debug("can't lower a thread's priority", error=error.strerror)
        while not self._stopping.is_set():
            with self._lock:
                if not self._queue:
                    self._changed.wait(1.0)
                batch = self._take()
            if not batch:
                continue
            try:
                self._carry_out(batch)
            except CenoteError as error:
                if not self._stopping.is_set():
                    _log.warning("can't copy from another daemon", why=error)
                self._disconnect(batch[0].addresses)
                self._give_up_queued(batch[0].addresses)
            except Exception:  # a bug here must cost these copies alone
                _log.exception("copies failed", copies=len(batch))
                for one in batch:
                    one.status = CopyStatus.FAILED
            self._report(batch)

    def _take(self) -> list[_Pull]:
        """Copies from the same source that follow each other."""
        batch: list[_Pull] = []
        parts = 0
        while self._queue and len(batch) < BATCH_COPIES:
            one = self._queue[0]
            parts += len(one.parts)
            if batch and (one.addresses != batch[0].addresses or parts > RECORDS_MAX):
                break
            batch.append(self._queue.popleft())
        self._under_way = len(batch)
        return batch

    def _give_up_queued(self, addresses: Sequence[str]) -> None:
        """What else is to come from there: other sources are not to wait for each of it in vain."""
        lost = set(addresses)
        with self._lock:
            kept: deque[_Pull] = deque()
            for one in self._queue:
                if lost.isdisjoint(one.addresses):
                    kept.append(one)
                else:
                    self.counters.failed += 1
                    self._results.append((one.copy_id, CopyStatus.UNREACHABLE))
            self._queue = kept

    def _report(self, batch: Sequence[_Pull]) -> None:
        for one in batch:
            self.counters.failed += one.status != CopyStatus.DONE
            if one.epoch >= self._epoch:
                self._results.append((one.copy_id, int(one.status)))
        self._under_way = 0

    def _carry_out(self, batch: Sequence[_Pull]) -> None:
        """Raises CenoteError where a source can't be read; what is not done then is UNREACHABLE."""
        self._look_up(batch)
        window: list[_Pull] = []
        used = 0
        for one in batch:
            if not one.record:
                continue
            if one.twin is not None:
                self._seal(one)
                continue
            if used + one.size_bytes > BUFFER_BYTES:
                self._fetch(window)
                window, used = [], 0
            if one.size_bytes > BUFFER_BYTES:
                self._fetch_in_pieces(one)
                continue
            window.append(one)
            used += one.size_bytes
        self._fetch(window)

    # ---- what the source says -----------------------------------------------------------------

    def _source(self, address: str) -> ReplicaSource:
        source = self._connections.get(address)
        if source is None:
            if len(self._connections) >= SOURCES_MAX:
                self._disconnect([next(iter(self._connections))])
            source = ReplicaSource(address, f"the daemon at {address}", self._identity, self._tls)
            self._connections[address] = source
            if self._stopping.is_set():  # `stop` may have looked for it just before
                source.close()
        return source

    def _disconnect(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            source = self._connections.pop(address, None)
            if source is not None:
                source.close()

    def _look_up(self, batch: Sequence[_Pull]) -> None:
        """Have the sources' slots told, and make the target's record of each."""
        found: dict[int, bytes | None] = {}
        parts = [part for one in batch for part in one.parts]
        for address in dict.fromkeys(part.address for part in parts):
            here = [part for part in parts if part.address == address]
            for first in range(0, len(here), RECORDS_MAX):
                some = here[first : first + RECORDS_MAX]
                wanted = np.array([part.wanted for part in some], SLOT_WANTED)
                records = self._source(address).records(wanted, CALL_S)
                found.update(zip(map(id, some), records, strict=True))
        for one in batch:
            records = [found[id(part)] for part in one.parts]
            whole = [record for record in records if record is not None]
            if len(whole) < len(records):
                one.status = CopyStatus.NO_SOURCE
            elif not self._prepare(one, whole):
                one.status = CopyStatus.FAILED

    def _prepare(self, one: _Pull, records: Sequence[bytes]) -> bool:
        """Whether the target has room for what these records name."""
        found = np.frombuffer(b"".join(records), SLOT_RECORD)
        segment_id, slot, offset, length, replica = one.target
        target = self._segments.by_id(segment_id)
        size, payload = int(found["length"].sum()), int(found["object_size"][0])
        whole = (found["extent_index"] == np.arange(len(found))).all() and (
            found["extent_count"] == len(found)
        ).all()
        if not isinstance(target, DramSegment) or not whole or size < payload:
            return False
        # What was granted may be more than what is in it: units, and a key that is not long.
        tail = int(found["key_length"][0]) if int(found["key_length"][0]) > KEY_INLINE_BYTES else 0
        size = min(size, payload + tail)
        if size > length or offset + length > target.ready_bytes:
            return False
        left = size
        for part, at, room in zip(
            one.parts, found["offset"].tolist(), found["length"].tolist(), strict=True
        ):
            part.offset, part.length = at, min(room, left)
            left -= part.length
        one.parts = [part for part in one.parts if part.length]
        one.size_bytes, one.payload_bytes = size, payload
        one.checksum, one.place = int(found["checksum"][0]), target.address + offset
        one.namespace = int(found["namespace_id"][0]), int(found["generation"][0])
        one.record = moved_record(records[0], slot, offset, size, replica)
        return True

    # ---- bytes --------------------------------------------------------------------------------

    def _read(self, pieces: Sequence[tuple[_Part, int, int, int]]) -> set[int]:
        """Fetch (part, from its offset on, length, to an address); ids of parts that are not there
        any more."""
        gone: set[int] = set()
        for address in dict.fromkeys(piece[0].address for piece in pieces):
            here = [piece for piece in pieces if piece[0].address == address]
            rows = [(part.segment, 0, part.offset + at, length) for part, at, length, _ in here]
            to = np.array([piece[3] for piece in here], np.uint64)
            statuses = self._source(address).read(np.array(rows, EXTENT), to, CALL_S)
            gone.update(id(here[i][0]) for i in np.flatnonzero(statuses).tolist())
        return gone

    def _fetch(self, window: Sequence[_Pull]) -> None:
        """Those that fit into the buffer together."""
        pieces: list[tuple[_Part, int, int, int]] = []
        at = self._address
        for one in window:
            for part in one.parts:
                pieces.append((part, 0, part.length, at))
                at += part.length
        gone = self._read(pieces) if pieces else set()
        at = self._address
        for one in window:
            if any(id(part) in gone for part in one.parts):
                one.status = CopyStatus.NO_SOURCE
            elif xxhash.xxh3_64_intdigest(MEMORY[at : at + one.payload_bytes]) != one.checksum:
                one.status = CopyStatus.SOURCE_CHANGED
            elif self._land(one, at, 0, one.size_bytes):
                self._seal(one)
            at += one.size_bytes

    def _fetch_in_pieces(self, one: _Pull) -> None:
        """One that is larger than the buffer."""
        hasher = xxhash.xxh3_64()
        left, landed = one.payload_bytes, 0
        for part in one.parts:
            for at in range(0, part.length, BUFFER_BYTES):
                step = min(BUFFER_BYTES, part.length - at)
                if self._read([(part, at, step, self._address)]):
                    one.status = CopyStatus.NO_SOURCE
                    return
                hashed = min(step, left)
                hasher.update(MEMORY[self._address : self._address + hashed])
                left -= hashed
                if not self._land(one, self._address, landed, step):
                    return
                landed += step
        if hasher.intdigest() != one.checksum:
            one.status = CopyStatus.SOURCE_CHANGED
            return
        self._seal(one)

    def _land(self, one: _Pull, source: int, at: int, length: int) -> bool:
        """Copy to memory, unless its space may be another's by now."""
        for start in range(0, length, _LAND_STEP_BYTES):
            with self._landing:
                if one.epoch < self._epoch or self._stopping.is_set():
                    one.status = CopyStatus.FAILED
                    return False
                step = min(_LAND_STEP_BYTES, length - start)
                copy(one.place + at + start, source + start, step)
        return True

    def _seal(self, one: _Pull) -> None:
        target = self._segments.by_id(one.target[0])
        with self._landing:
            # What a master that lost its metadata could not learn of here comes later.
            known = self._segments.knows(*one.namespace)
            if one.epoch < self._epoch or not known or not isinstance(target, DramSegment):
                one.status = CopyStatus.FAILED
                return
            if one.twin is not None and not has_bytes(
                target, one.twin, one.target[2], one.payload_bytes, one.checksum
            ):
                # The source may be there all the same; its bytes are fetched the next time.
                one.status = CopyStatus.FAILED
                return
            target.table.place(one.record)
        one.status = CopyStatus.DONE
        self.counters.pulled += 1
        self.counters.pulled_bytes += one.size_bytes if one.twin is None else 0


def _pull_of(rows: NDArray[np.void], epoch: int, addresses: dict[int, str]) -> _Pull | None:
    """None where the rows make no sense."""
    sources, targets, twins = (
        rows[rows["kind"] == kind] for kind in (PULL_SOURCE, PULL_TARGET, PULL_TWIN)
    )
    segments = sources["segment"].tolist()
    if not len(sources) or len(targets) != 1 or not all(addresses.get(s) for s in segments):
        return None
    (target,) = targets
    parts = [
        _Part(
            addresses[int(row["segment"])],
            int(row["segment"]),
            (row["segment"], row["slot"], row["source_epoch"], 0, row["source_seq"]),
        )
        for row in sources
    ]
    fields = ("segment", "slot", "offset", "length", "replica")
    one = _Pull(int(target["copy_id"]), epoch, parts, tuple(int(target[name]) for name in fields))
    if len(twins):
        twin = twins[0]
        one.twin = int(twin["slot"]), int(twin["source_epoch"]), int(twin["source_seq"])
    return one
