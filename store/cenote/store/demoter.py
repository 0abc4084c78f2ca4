"""Copies from memory to the SSD: one thread has payloads written, another one makes slots of them.

    writes   found -> under way, several requests at a time -> proven by checksum
    places   flush -> slots, written -> the next flush -> reported

While some become slots the next ones are being written. Whatever was written by the time the other
thread is free again is flushed together, and with it the slots of those before: the slower flushes
are, the more of them share one. A device that is flushed does little else: as long as more is on
its way the first copies wait a few milliseconds for others (`FLUSH_BYTES`, `FLUSH_WAIT_S`).

Neither thread has a lower priority: one that waits for a processor while it holds the interpreter's
lock keeps all others of this daemon waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, final

from cenote.api.rows import CopyStatus
from cenote.runtime.log import get_logger

from .copy_jobs import Copy, find, has_twin
from .copy_outcomes import Outcomes
from .copy_queue import CopyQueue
from .copy_writer import PayloadWriter
from .disk_io import DiskIo
from .segments import LocalSegments
from .ssd import SsdSegment

__all__ = ["Demoter"]

PLACED_MAX: Final = 1024
"""Copies that become slots between two flushes, at most."""
FLUSH_BYTES: Final = 32 << 20
FLUSH_WAIT_S: Final = 0.01
"""What is flushed together: a flush waits until there is so much, for so long at most."""
PAUSE_S_MIN: Final = 0.02
TAKEN_MAX: Final = 32
"""Copies that are taken from the queue with one lock."""
_JOIN_S: Final = 1.0

_log = get_logger(__name__)


@final
class Demoter:
    """Everything but `start` and `stop` may be called from any thread."""

    def __init__(
        self,
        segments: LocalSegments,
        outcomes: Outcomes,
        write_limit: int,
        wait: Callable[[float], bool] | None,
    ) -> None:
        """As `Copier`."""
        self._segments = segments
        self._outcomes = outcomes
        self._write_limit = write_limit
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self.queue = CopyQueue()
        self._written: list[Copy] = []
        self._placing = threading.RLock()
        self._to_place = threading.Condition(self._placing)
        self._next_write_s = 0.0
        self._threads = [
            threading.Thread(target=self._write_all, name="cenote-demote", daemon=True),
            threading.Thread(target=self._place_all, name="cenote-place", daemon=True),
        ]

    def start(self) -> None:
        """Begin to take copies."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End with what is under way; the rest is forgotten."""
        self._stopping.set()
        self.queue.end()
        with self._placing:
            self._to_place.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_S)

    # ---- writes -------------------------------------------------------------------------------

    def _write_all(self) -> None:
        writer: PayloadWriter | None = None
        disk: DiskIo | None = None
        while not self._stopping.is_set():
            some = self.queue.take(TAKEN_MAX, wait=writer is None or not writer.is_busy)
            if self._segments.disk is not disk or writer is None:
                disk = self._segments.disk
                writer = None if disk is None else PayloadWriter(disk, self._segments)
            if writer is not None and not some:
                self._await_one(writer)
            for one in some:
                if self._stopping.is_set():
                    return
                try:
                    self._begin(one, writer, disk)
                except Exception:  # a bug here must cost this copy alone
                    _log.exception("a copy failed")
                    if one.status == CopyStatus.DONE:
                        one.status = CopyStatus.FAILED
                        self._hand_over([one])
                if writer is not None:
                    self._hand_over(writer.take_ended())

    def _await_one(self, writer: PayloadWriter) -> None:
        try:
            writer.send()
            writer.await_first()
        except Exception:  # a bug there must cost these copies alone
            _log.exception("copies failed")
        self._hand_over(writer.take_ended())

    def _begin(self, one: Copy, writer: PayloadWriter | None, disk: DiskIo | None) -> None:
        # Of an earlier leader, where that is known by now; `_place` makes sure, under its lock.
        if writer is None or disk is None or one.epoch < self._outcomes.epoch:
            one.status = CopyStatus.FAILED
        elif isinstance(self._segments.by_id(one.segment_id), SsdSegment):
            find(self._segments, one, disk.device.memory_align)
        else:
            one.status = CopyStatus.FAILED
        if writer is None or one.status != CopyStatus.DONE or one.twin is not None:
            self._hand_over([one])
            return
        if self._write_limit:
            self._pace(one.size_bytes, writer)
        writer.add(one)

    def _pace(self, size_bytes: int, writer: PayloadWriter) -> None:
        """Wait for as long as the limit on writes wants."""
        now_s = time.monotonic()
        ahead_s = self._next_write_s - now_s
        if ahead_s > PAUSE_S_MIN:
            while writer.is_busy:
                writer.send()
                writer.await_first()
            self._hand_over(writer.take_ended())
            self._wait(ahead_s)
        self._next_write_s = max(self._next_write_s, now_s) + size_bytes / self._write_limit

    # ---- slots --------------------------------------------------------------------------------

    def _hand_over(self, copies: list[Copy]) -> None:
        if copies:
            with self._placing:
                self._written += copies
                self._to_place.notify()

    def _place_all(self) -> None:
        placed: list[Copy] = []
        while not self._stopping.is_set():
            with self._placing:
                if not self._written and not placed:
                    self._to_place.wait(1.0)
                self._await_company(len(placed))
                some, self._written = self._written[:PLACED_MAX], self._written[PLACED_MAX:]
            if not some and not placed:
                continue
            try:
                self._flush(some, placed)
                self._place(some)
            except Exception:  # as above
                _log.exception("copies failed", copies=len(some) + len(placed))
                for one in [*some, *placed]:
                    one.status = CopyStatus.FAILED
            self._end(placed)
            placed = [one for one in some if one.status == CopyStatus.DONE]
            self._end([one for one in some if one.status != CopyStatus.DONE])

    def _await_company(self, placed: int) -> None:
        """Wait a moment for copies whose payloads are being written, to be flushed with those that
        were. `placed`: copies that wait for the flush as well."""
        until_s = time.monotonic() + FLUSH_WAIT_S
        while (self._written or placed) and not self._stopping.is_set():
            under_way = self.queue.taken - len(self._written) - placed
            left_s = until_s - time.monotonic()
            if under_way <= 0 or left_s <= 0:
                return
            if sum(one.size_bytes for one in self._written) >= FLUSH_BYTES:
                return
            self._to_place.wait(left_s)

    def _flush(self, written: list[Copy], placed: list[Copy]) -> None:
        """One flush for the payloads of some copies and the slots of those before them."""
        disk = self._segments.disk
        try:
            if disk is None:
                raise OSError("the SSD was given up")
            disk.flush()
        except OSError:
            with self._outcomes.placing:
                for segment, some in self._by_segment(placed):
                    segment.take_back([one.record for one in some])
            for one in [*written, *placed]:
                one.status = CopyStatus.FAILED

    def _place(self, written: list[Copy]) -> None:
        """Make slots of those whose payloads were flushed."""
        placed: list[tuple[SsdSegment, list[Copy], list[int]]] = []
        with self._outcomes.placing:
            for one in written:
                if one.epoch < self._outcomes.epoch:
                    one.status = CopyStatus.FAILED
            for segment, several in self._by_segment(written):
                for one in several:
                    if one.twin is not None and not has_twin(segment, one):
                        one.status = CopyStatus.NO_SOURCE
                some = [one for one in several if one.status == CopyStatus.DONE]
                placed.append((segment, some, segment.place([one.record for one in some])))
        # The next leader does not wait for the device: it is told of these slots, or clears them.
        for segment, some, pages in placed:
            try:
                segment.write_pages(pages)
            except OSError:
                segment.take_back([one.record for one in some])
                for one in some:
                    one.status = CopyStatus.FAILED

    def _by_segment(self, copies: list[Copy]) -> list[tuple[SsdSegment, list[Copy]]]:
        """Those that have not failed, by the segment that they go to, if it is still there."""
        found: dict[int, tuple[SsdSegment, list[Copy]]] = {}
        for one in copies:
            segment = self._segments.by_id(one.segment_id)
            if not isinstance(segment, SsdSegment):
                one.status = CopyStatus.FAILED
            elif one.status == CopyStatus.DONE:
                found.setdefault(one.segment_id, (segment, []))[1].append(one)
        return list(found.values())

    def _end(self, copies: list[Copy]) -> None:
        """Count and report these."""
        counters = self._outcomes.counters
        for one in copies:
            if one.status == CopyStatus.DONE:
                counters.demoted += 1
                counters.demoted_bytes += one.size_bytes if one.twin is None else 0
        if copies:
            self._outcomes.report(copies)
            self.queue.ended(len(copies))
