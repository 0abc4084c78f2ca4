"""Copies between memory and SSD, as the master plans them: one thread, some copies at a time.

    demote    memory -> staging (hashed) -> device, flushed -> slots, flushed -> reported
    promote   device -> staging (hashed) -> memory -> slot -> reported

A source is held by nothing: its object may be evicted and its space given to others meanwhile, for
no put waits for a copy. So what was copied is believed only by its checksum, which is that of the
very bytes in the staging memory. A copy takes over its source's record, version and all.

`fence` ends what an earlier leader planned. Nothing of it lands in memory or becomes a slot when
that returns. Writes to the device may still be under way then: whoever reads there takes the
checksum anyway, and the next copies begin after them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cenote.api.rows import COPIED, CopyStatus
from cenote.runtime.log import get_logger
from cenote.transport.memory_access import MEMORY, copy

from .copy_writer import DEVICE_S, STEP_BYTES, Copy, PayloadWriter
from .device import BLOCK_BYTES
from .disk_io import BUFFER_BYTES, Request
from .dram import DramSegment
from .segments import LocalSegments
from .slot_format import SLOT_RECORD
from .slot_records import moved_record
from .ssd import DISK_ADDRESS, SsdSegment

__all__ = ["Copier", "CopierCounters"]

BATCH_BYTES: Final = 64 << 20
"""Of copies whose payloads are flushed together."""
BATCH_COPIES: Final = 1024
QUEUE_MAX: Final = 65_536
TOLD_MAX: Final = 512
"""Copies that one heartbeat reports."""
_JOIN_S: Final = 1.0
_NICENESS: Final = 10

_log = get_logger(__name__)


@dataclass(slots=True)
class CopierCounters:
    """Since the start."""

    demoted: int = 0
    demoted_bytes: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    failed: int = 0
    """Copies that came to nothing, for whatever reason."""


@final
class Copier:
    """See the module. Everything but `start` and `stop` may be called from any thread."""

    def __init__(
        self,
        segments: LocalSegments,
        *,
        write_limit: int = 0,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`write_limit`: bytes a second that go to the SSD, 0: as many as it takes. `wait(s)` is
        how time passes until then; it tells whether to stop."""
        self._segments = segments
        self._write_limit = write_limit
        self.counters = CopierCounters()
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._queue: deque[Copy] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._landing = threading.Lock()
        """Held while a copy becomes visible, or lands in memory that others can be given."""
        self._epoch = 0
        self._under_way = 0
        self._results: deque[tuple[int, int]] = deque()
        self._thread = threading.Thread(target=self._run, name="cenote-copy", daemon=True)

    def start(self) -> None:
        """Begin to take copies."""
        self._thread.start()

    def stop(self) -> None:
        """End after the copies under way."""
        self._stopping.set()
        with self._lock:
            self._queue.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether the master will soon hear of copies."""
        return bool(self._queue or self._under_way or self._results)

    # ---- the agent's side ---------------------------------------------------------------------

    def enqueue(self, rows: NDArray[np.void], epoch: int) -> None:
        """Take copies (COPY rows) of a leader's plan."""
        starts = np.flatnonzero(np.r_[True, rows["copy_id"][1:] != rows["copy_id"][:-1]])
        with self._lock:
            for part in np.split(rows, starts[1:]) if len(rows) else []:
                one = Copy(int(part["copy_id"][0]), epoch, part)
                if len(self._queue) >= QUEUE_MAX:
                    self._results.append((one.copy_id, CopyStatus.FAILED))
                else:
                    self._queue.append(one)
            self._changed.notify_all()

    def fence(self, epoch: int) -> None:
        """Nothing that leaders of earlier epochs planned becomes visible after this."""
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
            except Exception:  # a bug here must cost these copies alone
                _log.exception("copies failed", copies=len(batch))
                for one in batch:
                    one.status = CopyStatus.FAILED
            self._report(batch)

    def _take(self) -> list[Copy]:
        batch: list[Copy] = []
        size = 0
        while self._queue and len(batch) < BATCH_COPIES and size < BATCH_BYTES:
            one = self._queue.popleft()
            size += int(one.rows["target_length"][0])
            batch.append(one)
        self._under_way = len(batch)
        return batch

    def _report(self, batch: list[Copy]) -> None:
        for one in batch:
            self.counters.failed += one.status != CopyStatus.DONE
            if one.epoch >= self._epoch:
                self._results.append((one.copy_id, int(one.status)))
        self._under_way = 0

    def _carry_out(self, batch: list[Copy]) -> None:
        began_s = time.monotonic()
        demotions: list[Copy] = []
        for one in batch:
            target = self._segments.by_id(int(one.rows["target_segment"][0]))
            source = self._segments.by_id(int(one.rows["source_segment"][0]))
            if not self._find(one, source, target):
                continue
            if isinstance(target, SsdSegment):
                demotions.append(one)
            elif isinstance(source, SsdSegment) and isinstance(target, DramSegment):
                self._promote(one, source, target)
            else:
                one.status = CopyStatus.FAILED
        written = self._demote(demotions)
        if self._write_limit and written:
            spent_s = time.monotonic() - began_s
            self._wait(max(0.0, written / self._write_limit - spent_s))

    def _find(
        self,
        one: Copy,
        source: DramSegment | SsdSegment | None,
        target: DramSegment | SsdSegment | None,
    ) -> bool:
        """Look the source's slots up, and make the target's record."""
        rows = one.rows
        if source is None or target is None or target.failed:
            one.status = CopyStatus.FAILED
            return False
        records: list[bytes] = []
        for row in rows:
            segment = self._segments.by_id(int(row["source_segment"]))
            record = None
            if segment is not None:
                record = segment.table.record(
                    int(row["source_slot"]), int(row["source_epoch"]), int(row["source_seq"])
                )
            if segment is None or record is None:
                one.status = CopyStatus.SOURCE_CHANGED
                return False
            records.append(record)
            slot = np.frombuffer(record, SLOT_RECORD)[0]
            one.parts.append((segment.address + int(slot["offset"]), int(slot["length"])))
        found = np.frombuffer(b"".join(records), SLOT_RECORD)
        whole = (found["extent_index"] == np.arange(len(found))).all() and (
            found["extent_count"] == len(found)
        ).all()
        size = int(found["length"].sum())
        offset, length = int(rows["target_offset"][0]), int(rows["target_length"][0])
        fits = size <= length and offset + length <= target.ready_bytes
        if not whole or not fits or size < int(found["object_size"][0]):
            one.status = CopyStatus.FAILED
            return False
        one.size_bytes = size
        one.record = moved_record(
            records[0],
            int(rows["target_slot"][0]),
            offset,
            size,
            int(rows["target_replica"][0]),
        )
        return True

    # ---- demotion -----------------------------------------------------------------------------

    def _demote(self, copies: list[Copy]) -> int:
        """Write, flush, place. Returns the bytes that were written."""
        disk = self._segments.disk
        if disk is None or not copies:
            for one in copies:
                one.status = CopyStatus.FAILED
            return 0
        writer = PayloadWriter(disk, self._segments)
        for one in copies:
            writer.add(one)
        if not writer.finish():
            for one in copies:
                one.status = CopyStatus.FAILED
        good = [one for one in copies if one.status == CopyStatus.DONE]
        if not good:
            return writer.written_bytes
        try:
            disk.flush()
            with self._landing:
                self._place(good)
        except OSError:
            for one in good:
                one.status = CopyStatus.FAILED
        self.counters.demoted += sum(one.status == CopyStatus.DONE for one in good)
        self.counters.demoted_bytes += sum(
            one.size_bytes for one in good if one.status == CopyStatus.DONE
        )
        return writer.written_bytes

    def _place(self, copies: list[Copy]) -> None:
        """The copies of each segment become slots. Raises OSError."""
        by_segment: dict[int, list[Copy]] = {}
        for one in copies:
            if one.epoch < self._epoch:
                one.status = CopyStatus.FAILED
            else:
                by_segment.setdefault(int(one.rows["target_segment"][0]), []).append(one)
        for segment_id, some in by_segment.items():
            segment = self._segments.by_id(segment_id)
            if isinstance(segment, SsdSegment):
                segment.place([one.record for one in some])
            else:
                for one in some:
                    one.status = CopyStatus.FAILED

    # ---- promotion ----------------------------------------------------------------------------

    def _promote(self, one: Copy, source: SsdSegment, target: DramSegment) -> None:
        """Read, hash, and copy to memory piece by piece; the slot last."""
        record = np.frombuffer(one.record, SLOT_RECORD)[0]
        place = target.address + int(record["offset"])
        address, _ = one.parts[0]
        offset, left, payload = address - DISK_ADDRESS, one.size_bytes, int(record["object_size"])
        hasher = xxhash.xxh3_64()
        disk = source.disk
        buffer = disk.staging.take(DEVICE_S)
        if buffer is None:
            one.status = CopyStatus.FAILED
            return
        request = None
        try:
            while left:
                step = min(left, BUFFER_BYTES)
                whole = -(-step // BLOCK_BYTES) * BLOCK_BYTES
                request = Request(buffer, [(offset, whole, 0)])
                disk.start(request)
                if not disk.finish(request, DEVICE_S) or request.error is not None:
                    one.status = CopyStatus.FAILED
                    return
                hasher.update(MEMORY[buffer : buffer + min(step, payload)])
                payload -= min(step, payload)
                if not self._land(one, place, buffer, step):
                    return
                place, offset, left = place + step, offset + step, left - step
            if hasher.intdigest() != int(record["checksum"]):
                one.status = CopyStatus.SOURCE_CHANGED
                return
        finally:
            if request is None:
                disk.staging.give(buffer)
            else:
                disk.give_up(request)
        with self._landing:
            if one.epoch < self._epoch:
                one.status = CopyStatus.FAILED
                return
            target.table.place(one.record)
        self.counters.promoted += 1
        self.counters.promoted_bytes += one.size_bytes

    def _land(self, one: Copy, place: int, buffer: int, length: int) -> bool:
        """Copy to memory, unless its space may be another's by now."""
        for start in range(0, length, STEP_BYTES):
            with self._landing:
                if one.epoch < self._epoch:
                    one.status = CopyStatus.FAILED
                    return False
                step = min(STEP_BYTES, length - start)
                copy(place + start, buffer + start, step)
        return True
