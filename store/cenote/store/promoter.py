"""Copies from the SSD back to memory: read some requests ahead, hash, copy, and the slot last."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, final

import xxhash

from cenote.api.rows import CopyStatus
from cenote.runtime.log import get_logger
from cenote.transport.memory_access import MEMORY, copy

from .copy_jobs import Copy, find, has_twin
from .copy_outcomes import Outcomes
from .copy_queue import CopyQueue
from .copy_writer import DEVICE_S, STEP_BYTES
from .device import BLOCK_BYTES
from .disk_io import BUFFER_BYTES, DiskIo, Request
from .dram import DramSegment
from .segments import LocalSegments
from .ssd import DISK_ADDRESS

__all__ = ["Promoter"]

AHEAD: Final = 4
"""Requests of one copy that are under way at once."""
_JOIN_S: Final = 1.0

_log = get_logger(__name__)


@final
class Promoter:
    """Everything but `start` and `stop` may be called from any thread."""

    def __init__(self, segments: LocalSegments, outcomes: Outcomes) -> None:
        self._segments = segments
        self._outcomes = outcomes
        self._stopping = threading.Event()
        self.queue = CopyQueue()
        self._thread = threading.Thread(target=self._run, name="cenote-promote", daemon=True)

    def start(self) -> None:
        """Begin to take copies."""
        self._thread.start()

    def stop(self) -> None:
        """End after the copy under way."""
        self._stopping.set()
        self.queue.end()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for one in self.queue.take(wait=True):
                try:
                    self._promote(one)
                except Exception:  # a bug here must cost this copy alone
                    _log.exception("a copy failed")
                    one.status = CopyStatus.FAILED
                self._outcomes.report([one])
                self.queue.ended(1)

    def _promote(self, one: Copy) -> None:
        disk, target = self._segments.disk, self._segments.by_id(one.segment_id)
        if disk is None or not isinstance(target, DramSegment):
            one.status = CopyStatus.FAILED
            return
        if not find(self._segments, one, BLOCK_BYTES):
            return
        address, _ = one.parts[0]
        if len(one.parts) != 1 or address < DISK_ADDRESS:
            one.status = CopyStatus.FAILED
            return
        if one.twin is None:
            under_way: deque[tuple[Request, int]] = deque()
            try:
                done = self._move(one, disk, address - DISK_ADDRESS, target.address, under_way)
            finally:
                for request, _ in under_way:
                    disk.give_up(request)
            if not done:
                return
        with self._outcomes.landing:
            if one.epoch < self._outcomes.epoch:
                one.status = CopyStatus.FAILED
                return
            if one.twin is not None and not has_twin(target, one):
                one.status = CopyStatus.NO_SOURCE
                return
            target.table.place(one.record)
        self._outcomes.counters.promoted += 1
        self._outcomes.counters.promoted_bytes += one.size_bytes if one.twin is None else 0

    def _move(
        self,
        one: Copy,
        disk: DiskIo,
        offset: int,
        base: int,
        under_way: deque[tuple[Request, int]],
    ) -> bool:
        """All bytes to the memory from `base` on; False, with a status, where they did not come,
        or are not what they were."""
        hasher = xxhash.xxh3_64()
        place, payload, left = base + one.offset, one.payload_bytes, one.size_bytes
        while left or under_way:
            while left and len(under_way) < AHEAD:
                buffer = disk.staging.take(0.0 if under_way else DEVICE_S)
                if buffer is None:
                    break
                step = min(left, BUFFER_BYTES)
                request = Request(buffer, [(offset, step + -step % BLOCK_BYTES, 0)])
                disk.start(request)
                under_way.append((request, step))
                offset, left = offset + step, left - step
            if not under_way:
                one.status = CopyStatus.FAILED
                return False
            request, step = under_way[0]
            if not disk.finish(request, DEVICE_S) or request.error is not None:
                one.status = CopyStatus.FAILED
                return False
            hashed = min(step, payload)
            hasher.update(MEMORY[request.address : request.address + hashed])
            payload -= hashed
            if not self._land(one, place, request.address, step):
                return False
            place += step
            under_way.popleft()
            disk.give_up(request)
        if hasher.intdigest() != one.checksum:
            one.status = CopyStatus.SOURCE_CHANGED
            return False
        return True

    def _land(self, one: Copy, place: int, buffer: int, length: int) -> bool:
        """Copy to memory, unless its space may be another's by now."""
        for start in range(0, length, STEP_BYTES):
            with self._outcomes.landing:
                if one.epoch < self._outcomes.epoch:
                    one.status = CopyStatus.FAILED
                    return False
                step = min(STEP_BYTES, length - start)
                copy(place + start, buffer + start, step)
        return True
