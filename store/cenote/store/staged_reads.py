"""Reads from the SSD by clients on this host that have mapped the staging memory.

    device -> staging buffer -> (told where) -> copied by the reader -> (told so) -> free

What is read is copied once, by the reader, and never by this daemon. A buffer is lent from the time
when its bytes are being read until the reader says that it has copied them, or is gone. Readers
take the checksum of all that lies on an SSD: one that copies from a buffer which is not lent to it
any more finds no bytes that it would take for right.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from cenote.api.errors import DeadlineExceeded
from cenote.transport import wire
from cenote.v1 import store_pb2

from .disk_io import DiskIo, Request
from .disk_reads import Group, group_bytes_for, plan_groups, reading_max

__all__ = ["offer_staging", "send_staged"]

SHORT_GROUPS: Final = 5
LENT_BUFFERS: Final = 8
"""That one connection has beside those that are being read at most."""


class Outlet(Protocol):
    """What is needed of `ServedSocket`."""

    def send_bytes(self, data: bytes | memoryview, flags: int = 0) -> None: ...

    def receive_some(self, most: int) -> int: ...


def offer_staging(
    disk: DiskIo | None,
    hello: store_pb2.DataHelloRequest,
    answer: store_pb2.DataHelloResponse,
    descriptors: list[int],
) -> None:
    """Append the descriptor of the staging memory, where there is one and it is asked for. Raises
    ResourceUnavailable."""
    if disk is not None and hello.wants_staging:
        descriptors.append(disk.staging.open_for_reader())
        answer.staging_id = disk.staging.staging_id
        answer.staging_bytes = disk.staging.size_bytes


def send_staged(
    disk: DiskIo,
    outlet: Outlet,
    head: bytes,
    addresses: list[int],
    lengths: list[int],
    stall_s: float,
) -> None:
    """Read items (all on the SSD) and tell where their bytes lie; `head` is sent with the first.

    Raises DeadlineExceeded where the device, the reader, or those who have all the staging memory,
    don't get on for `stall_s`, and what the outlet raises.
    """
    staging = disk.staging
    groups = deque(
        plan_groups(addresses, lengths, disk.threads, group_bytes_for(lengths, disk.threads))
    )
    # Of a short read this thread reads the first part itself, while others have the rest.
    own = groups[0] if len(groups) <= SHORT_GROUPS else None
    mine: Request | None = None
    reading: deque[tuple[Group, Request]] = deque()
    lent: deque[int] = deque()
    reading_most = reading_max(disk)
    buffers_max = min(reading_most + LENT_BUFFERS, max(1, staging.buffers // 2))
    try:
        while groups or reading or lent:
            while groups and len(reading) < reading_most:
                held = len(reading) + len(lent)
                if held >= buffers_max:
                    break
                # Who has a buffer goes on with that: never all wait for each other.
                buffer = staging.take(0.0 if held else stall_s)
                if buffer is None:
                    if not held:
                        raise _stalled("no staging memory became free")
                    break
                group = groups.popleft()
                request = Request(buffer, group.pieces)
                if group is own:
                    mine = request
                else:
                    disk.start(request)
                reading.append((group, request))
            if mine is not None:
                disk.carry_out(mine)
                mine = None
            if not reading:
                _take_back(outlet, disk, lent)
                continue
            group, request = reading[0]
            if not disk.finish(request, stall_s):
                raise _stalled("the SSD did not answer")
            outlet.send_bytes(head + _told(group, request.address - staging.address))
            head = b""
            reading.popleft()
            lent.append(request.address)
            if groups and len(reading) + len(lent) >= buffers_max:
                _take_back(outlet, disk, lent)
    finally:
        while lent:
            staging.give(lent.popleft())
        for _, request in reading:
            disk.give_up(request)


def _take_back(outlet: Outlet, disk: DiskIo, lent: deque[int]) -> None:
    """Wait for the reader to have copied at least one; they are answered in order."""
    for _ in range(outlet.receive_some(len(lent))):
        disk.staging.give(lent.popleft())


def _told(group: Group, base: int) -> bytes:
    """The group as it travels: in which runs of the staging memory its bytes lie."""
    runs = group.sends
    start, length = runs[0]
    first = wire.STAGED_GROUP.pack(len(runs), 0, base + start, length)
    if len(runs) == 1:
        return first
    pack = wire.STAGED_RUN.pack
    return first + b"".join([pack(base + start, length) for start, length in runs[1:]])


def _stalled(why: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"a read from the SSD did not get on: {why}")
