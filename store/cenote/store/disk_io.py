"""Many requests in flight on one device: a few threads, each of which waits for one.

A request is a buffer of the staging memory and the pieces of the device that go into it, or come
from it. Whoever started it waits for it, or gives it up: then the thread that carries it out gives
the buffer back. Nothing here waits without a bound but the threads themselves, for work and for the
device; a device that hangs takes its threads and buffers with it, and nothing else.

Why threads: measured against the maintained binding of io_uring (liburing on PyPI, which takes
`bytearray` alone and no memory by address, hence none that is aligned for direct I/O), and since a
process that is killed has none of its writes under way when its lock on the device is gone.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.runtime.mapped_file import MappedFile, collapse, huge_part
from cenote.transport.memory_access import MEMORY

from .device import BLOCK_BYTES, PARTS_MAX, Device, Part

__all__ = ["BUFFER_BYTES", "DiskCounters", "DiskIo", "Piece", "Request", "Staging"]

BUFFER_BYTES: Final = 1 << 20
"""Of staging memory: one request moves so much at most."""
THREADS: Final = 16
STAGING_BYTES_MIN: Final = 4 * BUFFER_BYTES
_JOIN_S: Final = 0.5
_ZEROS: Final = bytes(BUFFER_BYTES)

_log = get_logger(__name__)

Piece = tuple[int, int, int]
"""(offset on the device, length, where in the buffer, or from there on): the former two are
multiples of BLOCK_BYTES."""


@final
class Staging:
    """Aligned memory that bytes pass through between the device and everybody else, registered once
    as one region (`address`, `size_bytes`), in buffers of BUFFER_BYTES.

    It is a file in memory, so that readers on this host can map it (`open_for_reader`) and take
    what was read from there. `staging_id` says to them that it still is the one that they mapped.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool = True) -> None:
        """`huge_pages`: where there are any; a device is told of memory page by page. Raises
        ResourceUnavailable."""
        count = max(STAGING_BYTES_MIN, size_bytes) // BUFFER_BYTES
        self.size_bytes = count * BUFFER_BYTES
        self.staging_id = secrets.randbits(63) | 1
        try:
            self._fd = os.memfd_create("cenote-staging", os.MFD_CLOEXEC)
            # All of it now: whoever touches a page that can't be had is killed.
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            self._mapped = MappedFile(self._fd, self.size_bytes)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't get {self.size_bytes} bytes of staging memory: {error.strerror}",
                remedy="ask for less with --ssd-staging",
            ) from error
        self.address = self._mapped.address
        place = (self.address, self.size_bytes)
        if huge_pages and collapse(*place) < huge_part(*place):
            _log.debug("staging memory has not only huge pages", bytes=self.size_bytes)
        self.buffers = count
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(count):
            self._free.put(self.address + number * BUFFER_BYTES)

    def open_for_reader(self) -> int:
        """A descriptor for mapping it read-only, which the caller closes. Raises
        ResourceUnavailable."""
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceUnavailable(
                f"the staging memory can't be opened for a client: {error.strerror}",
                remedy="raise the daemon's limit of open files (ulimit -n), and mount /proc",
            ) from error

    def close(self) -> None:
        """Let go of the file. The memory stays for as long as requests may be under way."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def take(self, timeout_s: float) -> int | None:
        """The address of a buffer, None where none becomes free in time."""
        try:
            return self._free.get(timeout=timeout_s) if timeout_s > 0 else self._free.get_nowait()
        except queue.Empty:
            return None

    def give(self, address: int) -> None:
        self._free.put(address)

    @property
    def free(self) -> int:
        """Buffers that nobody has now, about."""
        return self._free.qsize()


@dataclass(slots=True)
class DiskCounters:
    """Since the start."""

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    flushes: int = 0
    errors: int = 0
    """Reads, writes and flushes that failed."""


@dataclass(slots=True, eq=False)
class Request:
    """Pieces of the device and the buffer they go into (or come from)."""

    address: int
    """Of a buffer of the staging memory; 0 for one that has none: the places of its pieces are
    addresses then."""
    pieces: Sequence[Piece]
    is_write: bool = False
    error: OSError | None = None
    done: threading.Lock = field(default_factory=lambda: threading.Lock())
    """Held until it is carried out."""
    given_up: bool = False


@final
class DiskIo:
    """The threads of one device. `close` at the end."""

    def __init__(self, device: Device, staging: Staging, *, threads: int = THREADS) -> None:
        self.device = device
        self.staging = staging
        self.threads = threads
        self.counters = DiskCounters()
        self._lock = threading.Lock()
        self._failures = 0
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"cenote-disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failures(self) -> int:
        """Requests that failed since the last one that did not."""
        return self._failures

    # ---- requests -----------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Have a thread carry it out. `finish` waits; `give_up` when nobody needs it any more."""
        request.done.acquire()
        self._work.put(request)

    def finish(self, request: Request, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended. Its buffer stays the caller's."""
        ended = request.done.acquire(timeout=timeout_s)
        if ended:
            request.done.release()
        return ended

    def give_up(self, request: Request) -> None:
        """Nobody will look at it or its buffer again."""
        with self._lock:
            if request.done.locked():
                request.given_up = True
                return
        self._give(request)

    def _give(self, request: Request) -> None:
        if request.address:
            self.staging.give(request.address)

    @property
    def backlog(self) -> int:
        """Requests that no thread has taken up yet, about."""
        return self._work.qsize()

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            if not request.given_up:  # else nobody wants it any more, or its memory is another's
                self.carry_out(request)
            with self._lock:
                given_up = request.given_up
                request.done.release()
            if given_up:
                self._give(request)

    def carry_out(self, request: Request) -> None:
        """Here and now; what went wrong is noted in it. What could not be read is zeros then."""
        if request.is_write:
            self._write(request)
        else:
            self._read(request)
        if request.error is None and self._failures:
            self._failures = 0

    def _read(self, request: Request) -> None:
        moved = 0
        for offset, length, at in request.pieces:
            start = request.address + at
            try:
                self.device.read(start, length, offset)
                moved += length
            except OSError as error:
                request.error = error
                self.note_failure("read", offset, error)
                MEMORY[start : start + length] = _ZEROS[:length]
        self.counters.reads += len(request.pieces)
        self.counters.read_bytes += moved

    def _write(self, request: Request) -> None:
        """Pieces that are neighbours on the device as one."""
        runs: list[tuple[int, list[Part]]] = []
        end = -1
        for offset, length, at in request.pieces:
            if offset != end or len(runs[-1][1]) == PARTS_MAX:
                runs.append((offset, []))
            runs[-1][1].append((request.address + at, length))
            end = offset + length
        for offset, parts in runs:
            try:
                self.device.write(parts, offset)
            except OSError as error:
                request.error = error
                self.note_failure("write", offset, error)
                return
            self.counters.writes += 1
            self.counters.written_bytes += sum(length for _, length in parts)

    def flush(self) -> None:
        """`Device.flush`, counted. Raises OSError."""
        try:
            self.device.flush()
        except OSError as error:
            self.note_failure("flush", 0, error)
            raise
        self.counters.flushes += 1

    def note_failure(self, what: str, offset: int, error: OSError) -> None:
        """Something failed at the device."""
        self.counters.errors += 1
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            _log.error(
                f"the SSD fails: a {what} did not succeed",
                device=self.device.name,
                offset=offset,
                why=error.strerror or str(error),
                in_a_row=self._failures,
            )

    def close(self) -> None:
        """End the threads, as far as the device lets them."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)
        self.staging.close()


def aligned(offset: int, length: int) -> tuple[int, int]:
    """The blocks that these bytes lie in: (offset, length)."""
    first = offset & -BLOCK_BYTES
    return first, -(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES - first


def default_threads() -> int:
    """How many requests are kept in flight: more than processors, since they wait."""
    return max(THREADS, min(64, 2 * (os.cpu_count() or 1)))
