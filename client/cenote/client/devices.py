"""A client's staging memory for GPUs: pinned, bounded, copied to and from on streams of its own.

Bytes of a GPU go through an *area*: host memory that the GPU reaches by itself (pinned) and that
every transport knows (registered), so that a NIC reads or writes it without another copy. Areas are
made when they are first wanted, `AREAS` at most, and one call uses up to two: while the pool takes
(or gives) the bytes of one, those of the other are copied.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    ResourceUnavailable,
)
from cenote.runtime.gpu_copies import NO_STREAM, CopyTicket, GpuCopies, open_cuda
from cenote.runtime.memory import address_of
from cenote.runtime.units import format_size
from cenote.transport.memory_access import copy

from .plan.device_rows import ON_HOST, CopyRows

__all__ = ["AREAS", "Area", "Areas", "DeviceStaging", "Registered"]

AREAS: Final = 4
_CLOSE_WAIT_S: Final = 0.1
"""For copies that are under way when a call fails: they take milliseconds."""
_LOOK_MIN_S: Final = 20e-6
_LOOK_MAX_S: Final = 1e-3

_KEPT: Final[list[object]] = []
"""What a GPU did not let go of, until the process ends."""


class Registered(Protocol):
    """What makes memory known to the transports."""

    def deregister(self) -> None: ...


@final
class Area:
    """Staging memory of one size, one user at a time."""

    __slots__ = ("address", "keepers", "lane", "memory", "pinned_by", "registered", "tickets")

    def __init__(self, lane: int, size_bytes: int) -> None:
        try:
            self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't allocate {format_size(size_bytes)} of staging memory: {error}",
                remedy="lower device_staging_bytes",
            ) from error
        with suppress(OSError):  # a child of fork() gets no copy, where the kernel can do so
            self.memory.madvise(mmap.MADV_DONTFORK)
        self.address = address_of(self.memory)
        self.lane = lane
        self.registered: Registered | None = None
        self.pinned_by = ON_HOST
        """By which device's driver it was pinned; ON_HOST: not yet, or it can't be."""
        self.tickets: list[CopyTicket] = []
        """Copies that were begun, and not seen to have ended."""
        self.keepers: Sequence[object] = ()
        """Keep what these touch on the device."""

    def settled(self) -> bool:
        """Whether no copy is under way. Raises what went wrong with one, once."""
        while self.tickets:
            try:
                if not self.tickets[-1].done():
                    return False
            except CenoteError:
                self.tickets.pop()
                raise
            self.tickets.pop()
        self.keepers = ()
        return True


@final
class Areas:
    """What one call has taken; `close` it in any case."""

    __slots__ = ("_areas", "_staging", "lost")

    def __init__(self, staging: DeviceStaging, areas: list[Area]) -> None:
        self._staging = staging
        self._areas = areas
        self.lost = False
        """A transport did not let go of one: none of them is used again."""

    def __len__(self) -> int:
        return len(self._areas)

    def address(self, turn: int) -> int:
        """Of the area that this turn uses."""
        return self._areas[turn % len(self._areas)].address

    def begin(self, turn: int, rows: CopyRows, keepers: Sequence[object], to_host: bool) -> None:
        """Begin a turn's copies. Raises InvalidBuffer, ResourceUnavailable."""
        area = self._areas[turn % len(self._areas)]
        area.keepers = keepers
        self._staging.begin(area, rows, to_host)

    def wait(self, turn: int, deadline_s: float) -> None:
        """Until the area's copies have ended. Raises BufferInUse where they have not by then."""
        area = self._areas[turn % len(self._areas)]
        end_s = monotonic() + deadline_s
        pause_s = _LOOK_MIN_S
        while not area.settled():
            if monotonic() > end_s:
                raise BufferInUse(
                    "the deadline passed, and the GPU may still copy to or from the buffer",
                    remedy="keep the buffer until the stream that it waits for has ended",
                )
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)

    def __del__(self) -> None:
        # Of a coroutine that was cancelled before it had them. A finalizer may run in the middle of
        # anything, so it takes no lock.
        if self._areas:
            self._staging.dropped.append(self._areas)

    def close(self) -> None:
        """Give them back; what is still under way is waited for a moment, and kept."""
        areas, self._areas = self._areas, []
        end_s = monotonic() + _CLOSE_WAIT_S
        for area in areas:
            pause_s = _LOOK_MIN_S
            while not _is_settled(area) and monotonic() < end_s:
                sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_MAX_S)
        self._staging.give_back(areas, lost=self.lost)


@final
class DeviceStaging:
    """Of one client, for several threads. Takes nothing before it is used.

    `register` makes memory known to the client's transports; `open_copies` finds the GPU's driver.
    """

    def __init__(
        self,
        size_bytes: int,
        register: Callable[[int, int, object], Registered],
        open_copies: Callable[[], GpuCopies] = open_cuda,
    ) -> None:
        self.area_bytes = max(mmap.PAGESIZE, size_bytes // AREAS // mmap.PAGESIZE * mmap.PAGESIZE)
        self._register = register
        self._open_copies = open_copies
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._copies: GpuCopies | None = None
        self._idle: list[Area] = []
        self.dropped: deque[list[Area]] = deque()
        """Of calls that ended before they could give them back."""
        self._busy: list[Area] = []
        """Given back while a copy was under way."""
        self._made = 0
        self._closed = False
        self._ranges: list[tuple[int, int, int, bool]] = []
        self.pinned = True
        """False: host memory could not be pinned, so copies take longer."""
        self.staged_bytes = 0
        self.direct_bytes = 0

    @property
    def copies(self) -> GpuCopies:
        """Raises ResourceUnavailable where there is no driver."""
        with self._lock:
            if self._closed:
                raise ClientClosed("the client was closed")
            if self._copies is None:
                self._copies = self._open_copies()
            return self._copies

    # ---- registered memory ------------------------------------------------------------------

    @property
    def knows_memory(self) -> bool:
        return bool(self._ranges)

    def add(self, address: int, length: int, device: int, *, direct: bool) -> Callable[[], None]:
        """This is memory of a GPU; `direct`: NICs reach it. What is returned undoes it."""
        row = (address, address + length, device, direct)
        with self._lock:
            self._ranges = sorted([*self._ranges, row])

        def remove() -> None:
            with self._lock:
                if row in self._ranges:
                    self._ranges.remove(row)

        return remove

    def find(
        self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], bool]:
        """(device of each piece or ON_HOST, whether NICs reach all of them)."""
        ranges = list(self._ranges)
        starts = [start for start, *_ in ranges]
        numbers = np.full(len(addresses), ON_HOST, np.int64)
        direct = bool(ranges)
        for i, (address, length) in enumerate(
            zip(addresses.tolist(), lengths.tolist(), strict=True)
        ):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address + length <= ranges[at][1]:
                numbers[i] = ranges[at][2]
                direct &= ranges[at][3]
            else:
                direct = False
        return numbers, direct

    # ---- areas ------------------------------------------------------------------------------

    def take(self, count: int, deadline_s: float) -> Areas:
        """One to `count` areas; waits for the first one only.

        Raises ResourceUnavailable (no driver, no memory), DeadlineExceeded, ClientClosed.
        """
        _ = self.copies
        end_s = monotonic() + deadline_s
        taken: list[Area] = []
        with self._lock:
            while not self._closed:
                self._reclaim()
                while self._idle and len(taken) < count:
                    taken.append(self._idle.pop())
                if taken or self._made < AREAS:
                    break
                left_s = end_s - monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded("all staging memory for GPUs was in use")
                self._changed.wait(min(left_s, 0.01 if self._busy else 0.1))
            if self._closed:
                raise ClientClosed("the client was closed")
            lanes = range(self._made, min(AREAS, self._made + count - len(taken)))
            self._made += len(lanes)
        for lane in lanes:
            try:
                taken.append(self._make(lane))
            except BaseException:  # Ctrl-C, too: its place is to be made by another
                with self._lock:
                    self._made -= 1
                self.give_back(taken)
                raise
        return Areas(self, taken)

    def _make(self, lane: int) -> Area:
        area = Area(lane, self.area_bytes)
        area.registered = self._register(area.address, self.area_bytes, area)
        return area

    def _reclaim(self) -> None:
        """Under the lock."""
        while self.dropped:
            self._busy += self.dropped.popleft()
        still = [area for area in self._busy if not _is_settled(area)]
        if len(still) < len(self._busy):
            self._idle += [area for area in self._busy if area not in still]
            self._busy = still

    def give_back(self, areas: Sequence[Area], *, lost: bool = False) -> None:
        with self._lock:
            if lost:
                _KEPT.extend(areas)
                self._made -= len(areas)
            else:
                for area in areas:
                    (self._idle if _is_settled(area) else self._busy).append(area)
            self._changed.notify_all()

    def begin(self, area: Area, rows: CopyRows, to_host: bool) -> None:
        """Begin copies between an area and devices. Raises InvalidBuffer, ResourceUnavailable."""
        for number in np.unique(rows.numbers).tolist():
            mine = rows.numbers == number
            triples = list(
                zip(
                    rows.pieces[mine].tolist(),
                    rows.staged[mine].tolist(),
                    rows.lengths[mine].tolist(),
                    strict=True,
                )
            )
            if number == ON_HOST:
                for there, here, length in triples:
                    copy(*((here, there) if to_host else (there, here)), length)
                continue
            if area.pinned_by == ON_HOST and self.pinned:
                # Not before: the driver would begin to use a device that nobody else here does.
                self.pinned = self.copies.pin(number, area.address, self.area_bytes)
                area.pinned_by = number if self.pinned else ON_HOST
            streams = [each for each in set(rows.streams[mine].tolist()) if each != NO_STREAM]
            area.tickets.append(self.copies.begin(number, area.lane, triples, streams, to_host))
        self.staged_bytes += int(rows.lengths.sum())

    def settle(self, numbers: Any, streams: Any, deadline_s: float) -> None:
        """Until what owners have queued for this memory has ended. Raises DeadlineExceeded."""
        end_s = monotonic() + deadline_s
        pairs = set(zip(numbers.tolist(), streams.tolist(), strict=True))
        for number in {number for number, stream in pairs if stream != NO_STREAM} - {ON_HOST}:
            mine = [stream for n, stream in pairs if n == number and stream != NO_STREAM]
            ticket = self.copies.settle(number, mine)
            pause_s = _LOOK_MIN_S
            while not ticket.done():
                if monotonic() > end_s:
                    raise DeadlineExceeded("the GPU had not come to the call before its deadline")
                sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_MAX_S)

    def flush(self, numbers: Any) -> None:
        """What NICs wrote on these devices is seen there."""
        for number in set(numbers.tolist()) - {ON_HOST}:
            self.copies.flush(number)

    def close(self) -> None:
        """Let all go. Calls have ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reclaim()
            areas, self._idle = self._idle, []
            _KEPT.extend(self._busy)
            copies, busy, self._copies = self._copies, bool(self._busy), None
            self._changed.notify_all()
        for area in areas:
            if area.registered is not None:
                area.registered.deregister()
            if copies is not None and area.pinned_by != ON_HOST:
                copies.unpin(area.pinned_by, area.address)
        if copies is not None and not busy:
            copies.close()


def _is_settled(area: Area) -> bool:
    with suppress(CenoteError):  # who waited for it was told, or nobody waits any more
        return area.settled()
    return not area.tickets
