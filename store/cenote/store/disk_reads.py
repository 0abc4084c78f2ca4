"""Items of a read, some of which lie on the SSD, as one stream of bytes to a socket.

What is read next is under way while what was read is sent: a few buffers of the staging memory go
round between the device's threads and this connection's. Items that lie side by side on the device
are read as one, long ones by several threads, small strangers some at a time by each.

An item that can't be read is sent as zeros: its status has left before it by then. Readers take the
checksum of whatever lies on an SSD, so that it is no more to them than bytes that have changed
there, which they report to the master.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from cenote.api.errors import DeadlineExceeded
from cenote.transport.memory_access import MEMORY

from .disk_io import BUFFER_BYTES, DiskIo, Piece, Request, aligned
from .ssd import DISK_ADDRESS

__all__ = ["Group", "group_bytes_for", "plan_groups", "reading_max", "send_items"]

READ_AHEAD: Final = 2
"""Requests that one connection has under way for each of the device's threads: groups are sent in
order, and a thread that is done early is not to wait until the first one is."""
BUFFERS_MAX: Final = 64
"""That one connection has at most."""
GROUP_BYTES_MIN: Final = 128 << 10
GROUP_BYTES_LONG: Final = 512 << 10
ROUNDS: Final = 4
_VIEWS_MAX: Final = 512


class Outlet(Protocol):
    """What is needed of `ServedSocket`."""

    def send(self, address: int, length: int) -> None: ...

    def send_views(self, views: list[memoryview]) -> None: ...


@dataclass(slots=True)
class Group:
    """What one buffer takes: the pieces of the device, and what of them is sent, in order."""

    pieces: list[Piece] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)
    """(where in the buffer, length)."""
    memory: tuple[int, int] | None = None
    """Instead: (address, length) of an item that is in memory already."""


def reading_max(disk: DiskIo) -> int:
    """How many requests of one read are under way at once, at most."""
    return min(READ_AHEAD * disk.threads, BUFFERS_MAX, max(1, disk.staging.buffers // 2))


def group_bytes_for(lengths: list[int], threads: int) -> int:
    """How much one request of a read takes: of a short one a quarter, so that its first bytes are
    on their way to the reader while the others are being read. (Smaller ones cost more in threads
    that wake each other than they gain.) Of a longer one so little that each thread has two, and
    not all end at the same moment."""
    total = sum(lengths)
    if total <= BUFFER_BYTES << 2:
        return max(GROUP_BYTES_MIN, (total >> 2) & -GROUP_BYTES_MIN)
    share = (total // (threads * 2)) & -GROUP_BYTES_MIN
    return min(BUFFER_BYTES, max(GROUP_BYTES_LONG, share))


def plan_groups(
    addresses: list[int], lengths: list[int], threads: int, group_bytes: int = BUFFER_BYTES
) -> list[Group]:
    """The items of a read in order, as groups of at most so many bytes."""
    groups: list[Group] = []
    current: Group | None = None
    used = 0  # of the current group's buffer
    # Several for each thread: or all would end at the same time, with nothing sent before.
    pieces_max = max(1, -(-len(addresses) // (threads * ROUNDS)))
    for address, length in zip(addresses, lengths, strict=True):
        if address < DISK_ADDRESS:
            groups.append(Group(memory=(address, length)))
            current = None
            continue
        offset = address - DISK_ADDRESS
        while length:
            if current is not None and _extends(current, offset):
                begin, size, at = current.pieces.pop()
                room = group_bytes - at
            else:
                if current is None or used == group_bytes or len(current.pieces) >= pieces_max:
                    current, used = Group(), 0
                    groups.append(current)
                begin, size, at = aligned(offset, 1)[0], 0, used
                room = group_bytes - used
            take = min(length, room - (offset - begin))
            if take <= 0:  # what it would extend fills its buffer
                current.pieces.append((begin, size, at))
                current = None
                continue
            first, whole = aligned(offset, take)
            size = max(size, first + whole - begin)
            current.pieces.append((begin, size, at))
            used = at + size
            _add_send(current, at + offset - begin, take)
            offset += take
            length -= take
    return groups


def _extends(group: Group, offset: int) -> bool:
    """Whether bytes at this offset lie in the last piece of the group, or right behind it."""
    if not group.pieces:
        return False
    begin, size, _ = group.pieces[-1]
    return begin <= offset <= begin + size


def _add_send(group: Group, start: int, length: int) -> None:
    if group.sends:
        before, size = group.sends[-1]
        if before + size == start:
            group.sends[-1] = (before, size + length)
            return
    group.sends.append((start, length))


def send_items(
    disk: DiskIo, outlet: Outlet, addresses: list[int], lengths: list[int], stall_s: float
) -> None:
    """Read and send all items. Raises DeadlineExceeded where the device, or those who have all the
    staging memory, don't get on for `stall_s`, and what the outlet raises."""
    groups = deque(
        plan_groups(addresses, lengths, disk.threads, group_bytes_for(lengths, disk.threads))
    )
    if len(groups) == 1 and groups[0].memory is None:
        _send_one(disk, outlet, groups[0], stall_s)
        return
    staging = disk.staging
    window = reading_max(disk)
    under_way: deque[tuple[Group, Request | None]] = deque()
    held = 0
    try:
        while groups or under_way:
            while groups and len(under_way) < window:
                if groups[0].memory is not None:
                    under_way.append((groups.popleft(), None))
                    continue
                # Who has a buffer goes on with that: never all wait for each other.
                buffer = staging.take(0.0 if held else stall_s)
                if buffer is None:
                    break
                group = groups.popleft()
                request = Request(buffer, group.pieces)
                disk.start(request)
                under_way.append((group, request))
                held += 1
            if not under_way:
                raise _stalled("no staging memory became free")
            group, sent = under_way[0]
            if sent is not None:
                if not disk.finish(sent, stall_s):
                    raise _stalled("the SSD did not answer")
                _send(outlet, sent.address, group)
                under_way.popleft()
                staging.give(sent.address)
                held -= 1
            elif group.memory is not None:
                outlet.send(*group.memory)
                under_way.popleft()
    finally:
        for _, left in under_way:
            if left is not None:
                disk.give_up(left)


def _send_one(disk: DiskIo, outlet: Outlet, group: Group, stall_s: float) -> None:
    """One buffer is enough: no other thread is needed."""
    buffer = disk.staging.take(stall_s)
    if buffer is None:
        raise _stalled("no staging memory became free")
    try:
        disk.carry_out(Request(buffer, group.pieces))
        _send(outlet, buffer, group)
    finally:
        disk.staging.give(buffer)


def _send(outlet: Outlet, buffer: int, group: Group) -> None:
    sends = group.sends
    if len(sends) == 1:
        outlet.send(buffer + sends[0][0], sends[0][1])
        return
    views = [MEMORY[buffer + start : buffer + start + length] for start, length in sends]
    for first in range(0, len(views), _VIEWS_MAX):
        outlet.send_views(views[first : first + _VIEWS_MAX])


def _stalled(why: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"a read from the SSD did not get on: {why}")
