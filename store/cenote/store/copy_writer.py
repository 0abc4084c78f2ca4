"""Payloads of copies on their way to the SSD: several requests under way, and each proven.

What lies in memory as the device wants it (at an address that is a multiple of
`Device.memory_align`) is written from where it is; nothing is copied. Its bytes are hashed after
they were written: memory that has its old bytes then had them before, since space that is given to
another object does not get them back. (Where the very same bytes are put there once more, what the
device took may be what came between; then the source has left that place, which the master knows,
and counts no copy of it.) What does not lie so goes through staging memory and is hashed there.

Neighbours on the device are one write, wherever they are in memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

import xxhash

from cenote.api.rows import CopyStatus
from cenote.transport.memory_access import MEMORY, checksum_at, copy

from .copy_jobs import Copy
from .device import BLOCK_BYTES
from .disk_io import BUFFER_BYTES, DiskIo, Piece, Request
from .segments import LocalSegments
from .ssd import DISK_ADDRESS

__all__ = ["DEVICE_S", "REQUEST_BYTES", "STEP_BYTES", "PayloadWriter"]

WINDOW_REQUESTS: Final = 16
REQUEST_BYTES: Final = 5 << 19
"""Of what is written in place; the fewer requests, the less often threads wake each other."""
REQUEST_PIECES_MAX: Final = 256
BACKLOG_MAX: Final = 256
"""Requests that wait for a thread; more of them means that the device hangs."""
DEVICE_S: Final = 20.0
"""A device that takes longer for a request counts as dead."""
STEP_BYTES: Final = 256 << 10
"""Copied and hashed at once: it is still in the second-level cache."""


@dataclass(slots=True, eq=False)
class _Sent:
    request: Request
    touched: list[Copy] = field(default_factory=list)
    """Copies of which it has something."""
    whole: list[Copy] = field(default_factory=list)
    """Copies whose last bytes it has."""


@final
class PayloadWriter:
    """For one thread. A copy that was added comes out of `take_ended` with its status, once all of
    it was written, or not. None of them is flushed then."""

    def __init__(self, disk: DiskIo, segments: LocalSegments) -> None:
        self._disk = disk
        self._segments = segments
        self._buffer = 0
        self._used = 0
        """Of the staging buffer, for what is not aligned."""
        self._pieces: list[Piece] = []
        """Of the next request; their places are addresses."""
        self._size = 0
        self._touched: list[Copy] = []
        self._whole: list[Copy] = []
        self._under_way: deque[_Sent] = deque()
        self._ended: list[Copy] = []
        self._epoch = 0
        """Of the leader that planned what is under way."""
        self._left: list[Request] = []
        """Requests that the device still has, and nobody waits for any more."""
        self._stuck = False
        """The device did not answer in time: there is no use in waiting as long for the others."""
        self._window = min(WINDOW_REQUESTS, max(2, disk.threads))

    @property
    def is_busy(self) -> bool:
        """Whether copies are to end yet."""
        return bool(self._under_way or self._pieces)

    def take_ended(self) -> list[Copy]:
        """Copies that have ended since the last time."""
        self._reap()
        ended, self._ended = self._ended, []
        return ended

    # ---- copies -------------------------------------------------------------------------------

    def add(self, one: Copy) -> None:
        """Have the payload of a copy (that was found) written, together with those before it."""
        segment = self._segments.by_id(one.segment_id)
        offset = 0 if segment is None else segment.address + one.offset - DISK_ADDRESS
        if one.epoch != self._epoch:
            # Another leader may have given space anew that requests of the one before are for.
            self._finish()
            self._epoch = one.epoch
        hopeless = self._stuck and self._disk.backlog > BACKLOG_MAX
        if segment is None or hopeless or self._may_be_overwritten(offset, one.length):
            one.status = CopyStatus.FAILED
            self._ended.append(one)
            return
        if one.is_aligned:
            self._add_in_place(one, offset)
        elif not self._add_staged(one, offset):
            one.status = CopyStatus.FAILED
            self._ended.append(one)
            return
        self._whole.append(one)

    def _finish(self) -> None:
        while self.is_busy:
            self.send()
            self.await_first()

    def _may_be_overwritten(self, offset: int, length: int) -> bool:
        """Whether a request that was given up may land there yet."""
        if not self._left:
            return False
        self._left = [request for request in self._left if request.done.locked()]
        return any(
            start < offset + length and offset < start + size
            for request in self._left
            for start, size, _ in request.pieces
        )

    def _add_in_place(self, one: Copy, offset: int) -> None:
        for address, length in one.parts:
            left = length + -length % BLOCK_BYTES
            while left:
                step = min(left, self._room())
                self._add_piece(one, offset, step, address)
                address, offset, left = address + step, offset + step, left - step

    def _room(self) -> int:
        """What the next request has room for; it is sent where that is nothing."""
        if self._size >= REQUEST_BYTES or len(self._pieces) >= REQUEST_PIECES_MAX:
            self.send()
        return REQUEST_BYTES - self._size

    def _add_piece(self, one: Copy, offset: int, length: int, address: int) -> None:
        self._pieces.append((offset, length, address))
        self._size += length
        if not self._touched or self._touched[-1] is not one:
            self._touched.append(one)

    def _add_staged(self, one: Copy, offset: int) -> bool:
        """False where no staging memory came free in time, since the device is dead."""
        payload = one.payload_bytes
        hasher = xxhash.xxh3_64()
        pending = deque(one.parts)
        while pending:
            room = min(self._room(), BUFFER_BYTES - self._used)
            if not room:
                self.send()
                continue
            if not self._buffer and not self._begin():
                return False
            taken = self._fill(pending, hasher, payload, room)
            payload -= min(payload, taken)
            whole = taken + -taken % BLOCK_BYTES
            start = self._buffer + self._used
            MEMORY[start + taken : start + whole] = bytes(whole - taken)
            self._add_piece(one, offset, whole, start)
            self._used += whole
            offset += whole
        if hasher.intdigest() != one.checksum:
            one.status = CopyStatus.SOURCE_CHANGED
        return True

    def _fill(
        self, pending: deque[tuple[int, int]], hasher: xxhash.xxh3_64, payload: int, room: int
    ) -> int:
        """Copy as much as there is room for; how many bytes that were."""
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
        """Get a staging buffer."""
        buffer = self._disk.staging.take(0.0)
        while buffer is None and self._under_way:
            self.await_first()
            buffer = self._disk.staging.take(0.0)
        if buffer is None:
            buffer = self._disk.staging.take(0.0 if self._stuck else DEVICE_S)
        self._buffer, self._used = buffer or 0, 0
        return buffer is not None

    # ---- requests -----------------------------------------------------------------------------

    def send(self) -> None:
        """Have what was added so far written; waits while enough is under way."""
        if not self._pieces:
            return
        while len(self._under_way) >= self._window:
            self.await_first()
        base = self._buffer
        pieces = [(offset, length, address - base) for offset, length, address in self._pieces]
        sent = _Sent(Request(base, pieces, is_write=True), self._touched, self._whole)
        self._disk.start(sent.request)
        self._under_way.append(sent)
        self._buffer = self._used = self._size = 0
        self._pieces, self._touched, self._whole = [], [], []

    def _reap(self) -> None:
        while self._under_way and not self._under_way[0].request.done.locked():
            self.await_first()

    def await_first(self) -> None:
        """Wait for the oldest request under way; copies may have ended then."""
        if not self._under_way:
            return
        sent = self._under_way.popleft()
        ended = self._disk.finish(sent.request, 0.0 if self._stuck else DEVICE_S)
        self._stuck = not ended
        if not ended:
            self._left.append(sent.request)
        if not ended or sent.request.error is not None:
            for one in sent.touched:
                one.status = CopyStatus.FAILED
        self._disk.give_up(sent.request)
        for one in sent.whole:
            if one.is_aligned and one.status == CopyStatus.DONE and not _is_unchanged(one):
                one.status = CopyStatus.SOURCE_CHANGED
        self._ended += sent.whole


def _is_unchanged(one: Copy) -> bool:
    """Whether the source still has the bytes of its checksum."""
    if len(one.parts) == 1:
        return checksum_at(one.parts[0][0], one.payload_bytes) == one.checksum
    hasher, left = xxhash.xxh3_64(), one.payload_bytes
    for address, length in one.parts:
        hasher.update(MEMORY[address : address + min(length, left)])
        left -= min(length, left)
    return hasher.intdigest() == one.checksum
