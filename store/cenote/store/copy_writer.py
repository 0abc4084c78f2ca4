"""Payloads of copies on their way to the SSD: hashed, packed into buffers, written side by side."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cenote.api.rows import CopyStatus
from cenote.transport.memory_access import MEMORY, copy

from .device import BLOCK_BYTES
from .disk_io import BUFFER_BYTES, DiskIo, Piece, Request
from .segments import LocalSegments
from .slot_format import SLOT_RECORD
from .ssd import DISK_ADDRESS

__all__ = ["DEVICE_S", "STEP_BYTES", "Copy", "PayloadWriter"]

WINDOW_BUFFERS: Final = 16
DEVICE_S: Final = 20.0
"""A device that takes longer for a request counts as dead."""
STEP_BYTES: Final = 256 << 10
"""Copied and hashed at once: it is still in the second-level cache."""


@dataclass(slots=True, eq=False)
class Copy:
    copy_id: int
    epoch: int
    """Of the leader that planned it."""
    rows: NDArray[np.void]
    status: int = CopyStatus.DONE
    record: bytes = b""
    """Of the target, once the source was found."""
    size_bytes: int = 0
    """Payload, and a long key behind it."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """(address, length) of a source in memory."""


@final
class PayloadWriter:
    """Payloads on their way to the device: packed into buffers, some of which are under way."""

    def __init__(self, disk: DiskIo, segments: LocalSegments) -> None:
        self._disk = disk
        self._segments = segments
        self._buffer = 0
        self._used = 0
        self._pieces: list[Piece] = []
        self._under_way: deque[Request] = deque()
        self._failed = False
        self._window = min(WINDOW_BUFFERS, max(1, disk.staging.buffers // 2))
        self.written_bytes = 0

    def add(self, one: Copy) -> None:
        """Hash a copy's source into buffers, and have full ones written."""
        record = np.frombuffer(one.record, SLOT_RECORD)[0]
        segment = self._segments.by_id(int(one.rows["target_segment"][0]))
        if segment is None:
            one.status = CopyStatus.FAILED
            return
        offset = segment.address + int(record["offset"]) - DISK_ADDRESS
        payload = int(record["object_size"])
        hasher = xxhash.xxh3_64()
        room = BUFFER_BYTES - self._used
        if one.size_bytes > room and (one.size_bytes <= BUFFER_BYTES or room < BUFFER_BYTES // 2):
            self._send()
        began = len(self._pieces), self._used
        pending = deque(one.parts)
        while pending:
            if self._buffer and self._used == BUFFER_BYTES:
                self._send()
                began = 0, 0
            if not self._buffer and not self._begin():
                one.status = CopyStatus.FAILED
                return
            taken = self._fill(pending, hasher, payload)
            payload -= min(payload, taken)
            whole = -(-taken // BLOCK_BYTES) * BLOCK_BYTES
            start = self._buffer + self._used
            MEMORY[start + taken : start + whole] = bytes(whole - taken)
            self._pieces.append((offset, whole, self._used))
            self._used += whole
            offset += whole
        if hasher.intdigest() != int(record["checksum"]):
            one.status = CopyStatus.SOURCE_CHANGED
            # What of it is in this buffer needs not be written.
            del self._pieces[began[0] :]
            self._used = began[1]

    def _fill(self, pending: deque[tuple[int, int]], hasher: xxhash.xxh3_64, payload: int) -> int:
        """Copy as much as the buffer has room for; how many bytes that were."""
        room = BUFFER_BYTES - self._used
        start = self._buffer + self._used
        taken = 0
        while pending and taken < room:
            address, length = pending.popleft()
            step = min(length, room - taken, STEP_BYTES)
            copy(start + taken, address, step)
            hashed = min(step, max(0, payload - taken))
            if hashed:
                hasher.update(MEMORY[start + taken : start + taken + hashed])
            taken += step
            if step < length:
                pending.appendleft((address + step, length - step))
        return taken

    def _begin(self) -> bool:
        """Get a buffer; False where there is none in time, since the device is dead."""
        while len(self._under_way) >= self._window:
            self._await_first()
        buffer = None
        while buffer is None:
            buffer = self._disk.staging.take(0.0 if self._under_way else DEVICE_S)
            if buffer is None:
                if not self._under_way:
                    return False
                self._await_first()
        self._buffer, self._used = buffer, 0
        return True

    def _send(self) -> None:
        """Have what is in the buffer written."""
        if not self._buffer:
            return
        request = Request(self._buffer, _joined(self._pieces), is_write=True)
        self.written_bytes += sum(length for _, length, _ in request.pieces)
        self._disk.start(request)
        self._under_way.append(request)
        self._buffer, self._used, self._pieces = 0, 0, []

    def _await_first(self) -> None:
        request = self._under_way.popleft()
        # Once one did not end in time, there is no use in waiting as long for each of the others.
        ended = self._disk.finish(request, 0.0 if self._failed else DEVICE_S)
        self._failed = self._failed or not ended or request.error is not None
        self._disk.give_up(request)

    def finish(self) -> bool:
        """Wait for all writes; False where one failed: which copies it was part of is not known."""
        self._send()
        while self._under_way:
            self._await_first()
        return not self._failed


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces that lie side by side on both sides, as one."""
    joined: list[Piece] = []
    for offset, length, at in pieces:
        if joined:
            before, size, place = joined[-1]
            if before + size == offset and place + size == at:
                joined[-1] = (before, size + length, place)
                continue
        joined.append((offset, length, at))
    return joined
