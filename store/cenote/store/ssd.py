"""SSD segments: parts of one file or block device, each with its slot table and its data.

    0         header copy A, header copy B (4 KiB each): as in a table file of DRAM
    64 KiB    slot 0, slot 1, ...                        192 bytes each, a fixed number
    ...       data, from a multiple of 1 MiB on

Only this daemon reads and writes it (clients ask over a data connection), and only copies that its
master has planned are written: so the slots need no order of versions, and none is sealed by a
client. The table is held in memory and written through, page by page. A page that is torn by a
power cut has, but for the slots that were to change, the same bytes before and after; a changed
slot that is torn has not its checksum. A payload is flushed before its slot is written.

It outlives reboots. Whoever opens it finds in the header whether it is of this node and this size;
no payload is looked at: every reader takes the checksum of what it gets.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.api.rows import UNIT_BYTES
from cenote.runtime.log import get_logger
from cenote.runtime.memory import address_of
from cenote.runtime.units import format_size
from cenote.transport.memory_access import MEMORY
from cenote.v1 import common_pb2, master_pb2

from .device import BLOCK_BYTES, Device, open_device
from .disk_io import BUFFER_BYTES, DiskIo, Staging, default_threads
from .node_files import NodeFiles
from .slot_format import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    SLOT_BYTES,
    TableHeader,
    unpack_header,
)
from .slot_records import slot_of
from .slots import SlotTable

__all__ = [
    "DISK_ADDRESS",
    "OBJECT_BYTES",
    "SSD_INDEX_FIRST",
    "SsdFile",
    "SsdPlan",
    "SsdSegment",
    "plan_ssd",
]

DISK_ADDRESS: Final = len(MEMORY)
"""Places on the device are addresses from here on, above all memory: an extent of an SSD segment is
judged as any other, and told from it by its address."""
SSD_INDEX_FIRST: Final = 128
"""DRAM segments have lower indexes, and a node has at most 256 (32 TiB of either, as it is)."""
SEGMENT_BYTES_MAX: Final = 256 << 30
SEGMENT_BYTES_MIN: Final = 4 << 20
OBJECT_BYTES: Final = 128 << 10
"""A segment has a slot for every so much of it, unless told otherwise. Slots take memory, too."""
TABLE_BYTES_MIN: Final = 256 << 10
FAILURES_MAX: Final = 32
"""So many requests in a row that fail, and the device counts as dead."""
_SLOTS_AT: Final = 64 << 10
_DATA_ALIGN: Final = 1 << 20
_NO_BOOT: Final = bytes(16)

_CLOSE_S: Final = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SsdPlan:
    """Where one segment lies on the device. Bytes."""

    index: int
    base: int
    slots: int
    data_at: int
    """From the beginning of the device."""
    data_bytes: int

    @property
    def table_bytes(self) -> int:
        return -(-self.slots * SLOT_BYTES // BLOCK_BYTES) * BLOCK_BYTES


def plan_ssd(total_bytes: int, object_bytes: int = OBJECT_BYTES) -> list[SsdPlan]:
    """Segments that fill the device, as equal as can be, with a slot for each `object_bytes`.

    Raises InvalidArgument (too small).
    """
    if total_bytes < SEGMENT_BYTES_MIN:
        raise InvalidArgument(
            f"{format_size(total_bytes)} is too little for an SSD segment",
            remedy=f"give at least {format_size(SEGMENT_BYTES_MIN)} (--ssd-size)",
        )
    count = -(-total_bytes // SEGMENT_BYTES_MAX)
    each = total_bytes // count // _DATA_ALIGN * _DATA_ALIGN
    plans = []
    for number in range(count):
        base = number * each
        slots = max(TABLE_BYTES_MIN // SLOT_BYTES, each // object_bytes)
        table_end = base + _SLOTS_AT + slots * SLOT_BYTES
        data_at = -(-table_end // _DATA_ALIGN) * _DATA_ALIGN
        plans.append(SsdPlan(SSD_INDEX_FIRST + number, base, slots, data_at, base + each - data_at))
    return plans


@final
class SsdSegment:
    """One segment on a device; implements `cenote.store.segment.Segment`. Safe from threads."""

    tier = int(common_pb2.TIER_SSD)
    fd = -1
    view = memoryview(b"")

    def __init__(self, plan: SsdPlan, disk: DiskIo, survivor: TableHeader | None, node: NodeFiles):
        """Raises ResourceUnavailable (no memory for the table), OSError (the device fails)."""
        self.index = plan.index
        self.plan = plan
        self.disk = disk
        self.size_bytes = self.ready_bytes = plan.data_bytes
        self.address = DISK_ADDRESS + plan.data_at
        self.reopened = survivor is not None
        self.failed = ""
        """Why it can't be used any more; empty while it can."""
        self.verified_epoch = 0
        """Not asked for: who reads here takes the checksum anyway."""
        self._lock = threading.Lock()
        try:
            self._memory = mmap.mmap(-1, plan.table_bytes)
            self._page = mmap.mmap(-1, HEADER_COPY_BYTES)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't get {format_size(plan.table_bytes)} for the slots of {disk.device.name}",
                remedy="give the machine more memory, or a smaller SSD (--ssd-size)",
            ) from error
        self._table_address = address_of(self._memory)
        header = survivor or TableHeader(
            sequence=0,
            incarnation=secrets.token_bytes(16),
            boot_id=_NO_BOOT,
            node_uuid=node.node_uuid,
            index=plan.index,
            unit_bytes=BLOCK_BYTES,
            data_bytes=plan.data_bytes,
            data_inode=plan.data_at,
            ready_bytes=plan.data_bytes,
            last_epoch=0,
            slots=plan.slots,
        )
        self.header = header.next(start_number=node.start_number)
        if survivor is None:
            # Slots of whatever lay here before are not ours.
            self.write_pages(range(plan.table_bytes // BLOCK_BYTES))
        self._writer: threading.Thread | None = None
        """Brings the header up to date on the device, while it is not."""
        self._written = 0
        """Its sequence there."""
        self._write_header(self.header)
        self.segment_id = self.header.segment_id
        self.table = SlotTable(
            memoryview(self._memory)[: plan.slots * SLOT_BYTES],
            self.view,
            unit_bytes=UNIT_BYTES,
            limit_bytes=plan.data_bytes,
        )
        self.table.fence(self.header.last_epoch)

    @property
    def incarnation(self) -> bytes:
        """16 bytes that change whenever the contents are lost."""
        return self.header.incarnation

    @property
    def retired_bytes(self) -> int:
        """0: the table does not grow."""
        return 0

    def info(self, *, retired: bool = True) -> master_pb2.SegmentInfo:
        """What the master is told."""
        return master_pb2.SegmentInfo(
            node_segment_index=self.index,
            tier=common_pb2.TIER_SSD,
            incarnation=self.incarnation,
            size_bytes=self.size_bytes,
            ready_bytes=self.ready_bytes,
            unit_bytes=BLOCK_BYTES,
            slots=self.table.slots,
        )

    def retire(self, offset: int, length: int, slots: int) -> bool:
        """Refused: the table does not grow. Raises InvalidArgument."""
        raise InvalidArgument(f"the slot table of SSD segment {self.segment_id} does not grow")

    def check_health(self) -> bool:
        """Whether the device still works; once it does not, the segment is given up."""
        if not self.failed and self.disk.failures >= FAILURES_MAX:
            self._fail(f"{self.disk.failures} requests in a row failed")
        return not self.failed

    def _fail(self, why: str) -> None:
        self.failed = why
        _log.error(
            "an SSD segment is given up: what it holds is lost until the daemon is started again",
            device=self.disk.device.name,
            segment=self.index,
            why=why,
        )

    # ---- contents -----------------------------------------------------------------------------

    def recover(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Take up the slots of an earlier life; how many are sealed. Before the first use."""
        if not self.reopened:
            return 0
        lost = 0
        at = self.plan.base + _SLOTS_AT
        for start in range(0, self.plan.table_bytes, BUFFER_BYTES):
            if stopping():
                return 0
            length = min(BUFFER_BYTES, self.plan.table_bytes - start)
            lost += self._read_table(start, length, at + start)
        sealed = self.table.recover(stopping)
        if lost or self.table.broken:
            _log.warning(
                "slots of the SSD that can't be read, or were written only in part, are ignored",
                device=self.disk.device.name,
                unreadable_bytes=lost,
                broken_slots=self.table.broken,
            )
        return sealed

    def _read_table(self, start: int, length: int, offset: int) -> int:
        """Bytes that could not be read; they stay zero, page by page."""
        device = self.disk.device
        try:
            device.read(self._table_address + start, length, offset)
        except OSError as error:
            self.disk.note_failure("read of the slot table", offset, error)
        else:
            return 0
        lost = 0
        for page in range(0, length, BLOCK_BYTES):
            target = self._table_address + start + page
            try:
                device.read(target, BLOCK_BYTES, offset + page)
            except OSError:
                MEMORY[target : target + BLOCK_BYTES] = bytes(BLOCK_BYTES)
                lost += BLOCK_BYTES
        return lost

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Refused: nobody but this daemon's copies fills an SSD segment."""
        return np.full(len(rows), InvalidArgument.code, np.uint8)

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        """See `Segment.record`."""
        return self.table.record(slot, epoch, seq)

    def namespace_at(self, slot: int) -> int:
        """See `Segment.namespace_at`."""
        return self.table.namespace_at(slot)

    def place(self, records: list[bytes]) -> list[int]:
        """Take up finished slot records; the pages that are to be written for it. They survive a
        power cut once that is done and the device was flushed. Their payloads must have been
        flushed before."""
        return self._pages_of([self.table.place(record) for record in records])

    def take_back(self, records: list[bytes]) -> None:
        """These were placed, and could not be written or flushed: they don't count."""
        self.table.unplace([slot_of(record) for record in records])

    def clear(self, refs: NDArray[np.void]) -> int:
        """`SlotTable.clear`. What the device has of it is behind until the page is written next:
        a cleared slot that comes back names bytes that have another checksum, or are right."""
        return self.table.clear(refs)

    def _pages_of(self, slots: Iterable[int]) -> list[int]:
        pages: set[int] = set()
        for slot in slots:
            first = slot * SLOT_BYTES
            pages.update(range(first // BLOCK_BYTES, (first + SLOT_BYTES - 1) // BLOCK_BYTES + 1))
        return sorted(pages)

    def write_pages(self, pages: Iterable[int]) -> None:
        """Write pages of the table, neighbours together. Raises OSError."""
        run: list[int] = []
        most = BUFFER_BYTES // BLOCK_BYTES
        for page in pages:
            if run and (page != run[-1] + 1 or len(run) == most):
                self._write_run(run)
                run = []
            run.append(page)
        if run:
            self._write_run(run)

    def _write_run(self, pages: list[int]) -> None:
        start, length = pages[0] * BLOCK_BYTES, len(pages) * BLOCK_BYTES
        offset = self.plan.base + _SLOTS_AT + start
        try:
            self.disk.device.write([(self._table_address + start, length)], offset)
        except OSError as error:
            self.disk.note_failure("write of the slot table", offset, error)
            raise

    # ---- header -------------------------------------------------------------------------------

    def _write_header(self, header: TableHeader) -> None:
        # The copies take turns: one of them is whole at any moment.
        copy = header.sequence % 2
        self._page[:] = header.pack()
        offset = self.plan.base + copy * HEADER_COPY_BYTES
        self.disk.device.write([(address_of(self._page), HEADER_COPY_BYTES)], offset)
        self.disk.device.flush()
        self._written = header.sequence

    def _update(self, **changes: object) -> None:
        """Under the lock: change the header, on the device a little later. Who follows a new leader
        does not wait for that, since a device may hang."""
        self.header = self.header.next(**changes)
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_changes, name="cenote-header", daemon=True
            )
            self._writer.start()

    def _write_changes(self) -> None:
        while True:
            with self._lock:
                if self._written == self.header.sequence:
                    self._writer = None
                    return
                # Several changes are one: the next copy's turn, whatever their number.
                self.header = replace(self.header, sequence=self._written + 1)
                header = self.header
            try:
                self._write_header(header)
            except OSError as error:
                self._fail(f"its header can't be written: {error.strerror or error}")
                return

    def fence(self, epoch: int) -> None:
        """Note that this epoch is followed now, also for the time after a restart."""
        with self._lock:
            if epoch > self.header.last_epoch and not self.failed:
                self._update(last_epoch=epoch)
            self.table.fence(epoch)

    def attached(self, node_id: int, segment_id: int) -> None:
        """Keep what the master calls this segment."""
        with self._lock:
            self.segment_id = segment_id
            header = self.header
            if (header.node_id, header.segment_id) != (node_id, segment_id) and not self.failed:
                self._update(node_id=node_id, segment_id=segment_id)

    def close(self) -> None:
        """Wait for the header, a second at most; the device is closed by whoever opened it."""
        writer = self._writer
        if writer is not None:
            writer.join(_CLOSE_S)


@final
class SsdFile:
    """The SSD of a daemon: looked at when made, opened by `open`, closed by `close`."""

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        staging_bytes: int,
        *,
        object_bytes: int = OBJECT_BYTES,
        huge_pages: bool = True,
        device: Device | None = None,
    ) -> None:
        """`huge_pages`: for staging memory. `device`: another one than `path` (for tests). Raises
        ResourceUnavailable, InvalidArgument."""
        self.device: Device = open_device(path, size_bytes) if device is None else device
        try:
            self._plans = plan_ssd(self.device.size_bytes, object_bytes)
            self.survivors = find_survivors(self.device, self._plans)
            """Of each segment to be, the header that an earlier life left, if it did."""
            self.disk = DiskIo(
                self.device,
                Staging(staging_bytes, huge_pages=huge_pages),
                threads=default_threads(),
            )
        except BaseException:
            self.device.close()
            raise

    def open(self, node: NodeFiles) -> list[SsdSegment]:
        """The segments, once the node has its uuid. Raises ResourceUnavailable."""
        for number, header in enumerate(self.survivors):
            if header is not None and header.node_uuid != node.node_uuid:
                _log.warning(
                    "what an SSD holds is another node's and is given up",
                    device=self.device.name,
                    node_uuid=header.node_uuid.hex(),
                )
                self.survivors[number] = None
        kept = sum(header is not None for header in self.survivors)
        _log.info(
            "SSD opened",
            device=self.device.name,
            size=format_size(self.device.size_bytes),
            segments=len(self._plans),
            with_contents=kept,
        )
        return open_ssd(self.disk, self._plans, self.survivors, node)

    def close(self) -> None:
        """Nobody reads or writes there any more."""
        self.disk.close()
        self.device.close()


def find_survivors(device: Device, plans: list[SsdPlan]) -> list[TableHeader | None]:
    """The header of each planned segment, None where there is none that fits.

    Raises ResourceUnavailable where that can't be read: it may be there, and would be written over.
    """
    page = mmap.mmap(-1, HEADER_BYTES)
    found: list[TableHeader | None] = []
    for plan in plans:
        try:
            device.read(address_of(page), HEADER_BYTES, plan.base)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't read {device.name}: {error.strerror or error}",
                remedy="try again, replace the device, or start without it (--ssd)",
            ) from error
        header = unpack_header(page[:])
        fits = header is not None and (
            (header.boot_id, header.index, header.unit_bytes, header.slots)
            == (_NO_BOOT, plan.index, BLOCK_BYTES, plan.slots)
            and (header.data_bytes, header.data_inode) == (plan.data_bytes, plan.data_at)
        )
        if header is not None and not fits:
            _log.warning(
                "what an SSD holds can't be used any more and is given up: it was laid out for"
                " another size, of it or of objects",
                device=device.name,
            )
        found.append(header if fits else None)
    return found


def open_ssd(
    disk: DiskIo, plans: list[SsdPlan], survivors: list[TableHeader | None], node: NodeFiles
) -> list[SsdSegment]:
    """The segments of a device: those of `survivors` opened, others made anew.

    Raises ResourceUnavailable, also where the device fails.
    """
    try:
        return [
            SsdSegment(plan, disk, survivor, node)
            for plan, survivor in zip(plans, survivors, strict=True)
        ]
    except OSError as error:
        raise ResourceUnavailable(
            f"can't write {disk.device.name}: {error.strerror or error}",
            remedy="replace the device, or start without it (--ssd)",
        ) from error
