"""DRAM segments: files in memory that clients map, each with the slot table of its contents.

A data file gets its full size at once, without memory behind it, and never another: a client that
maps it can't meet SIGBUS. Memory comes chunk by chunk from `posix_fallocate`, which fails with an
error where a page fault would kill; so much is `ready_bytes`, and only that is ever granted. Then
the pages are touched, so that the first writer does not pay for them.

The files survive their daemon. Whoever opens them again after a restart finds in the table's header
whether they are what they were (same boot, same data file, same size): then the incarnation stays
and the slots count; else the segment begins anew under a new incarnation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.api.rows import EXTENT, UNIT_BYTES
from cenote.runtime.log import get_logger
from cenote.runtime.mapped_file import MappedFile, collapse, huge_part
from cenote.runtime.memory import PAGE_BYTES, allocate_file, populate
from cenote.runtime.units import format_size
from cenote.v1 import common_pb2, master_pb2

from .node_files import NodeFiles
from .ranges import RangeSet
from .slot_format import SLOT_BYTES, TableHeader, slots_for, table_memory_bytes
from .slots import SlotTable
from .table_file import Survivor, TableFile, read_table

__all__ = [
    "SEGMENT_BYTES_MAX",
    "SEGMENT_BYTES_MIN",
    "DramSegment",
    "SegmentPlan",
    "find_survivor",
    "plan_segments",
]

SEGMENT_BYTES_MAX: Final = 256 << 30
"""Data and table; larger ones are split. The master counts a segment's units in 32 bits."""
SEGMENT_BYTES_MIN: Final = 1 << 20
TABLE_BYTES_MIN: Final = 256 << 10
TABLE_SHARE: Final = 256
"""1/256 of a segment is its first slot table: a slot for every 48 KiB."""

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

_log = get_logger(__name__)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How large one segment's files are to be. Bytes."""

    index: int
    data_bytes: int
    slots: int

    @property
    def table_bytes(self) -> int:
        """Memory of the slot table."""
        return table_memory_bytes(self.slots, PAGE_BYTES)

    @property
    def memory_bytes(self) -> int:
        """Data and table together."""
        return self.data_bytes + self.table_bytes


def plan_segments(total_bytes: int, granule_bytes: int = PAGE_BYTES) -> list[SegmentPlan]:
    """Segments that take up at most `total_bytes` with their tables, as equal as can be.

    `granule_bytes` is the page size of the file system, of which data files are a multiple. Raises
    InvalidArgument where it is too little for one.
    """
    smallest = max(SEGMENT_BYTES_MIN, 2 * granule_bytes)
    if total_bytes < smallest:
        raise InvalidArgument(
            f"{format_size(total_bytes)} of memory is too little for a segment",
            remedy=f"give at least {format_size(smallest)} (--dram)",
        )
    count = -(-total_bytes // SEGMENT_BYTES_MAX)
    each = total_bytes // count
    table_bytes = max(TABLE_BYTES_MIN, each // TABLE_SHARE)
    table_bytes = -(-table_bytes // PAGE_BYTES) * PAGE_BYTES
    slots = slots_for(table_bytes, PAGE_BYTES)
    data_bytes = (each - table_bytes) // granule_bytes * granule_bytes
    return [SegmentPlan(index, data_bytes, slots) for index in range(count)]


def find_survivor(files: NodeFiles, index: int, boot_id: bytes) -> Survivor | None:
    """What is known of segment `index` where its files are intact and of this boot, else None."""
    found = read_table(files.table_path(index))
    if found is None or (found.header.boot_id, found.header.index) != (boot_id, index):
        return None
    try:
        data = files.data_path(index).stat()
    except FileNotFoundError:
        return None
    header = found.header
    intact = (data.st_size, data.st_ino) == (header.data_bytes, header.data_inode)
    return found if intact and header.unit_bytes == UNIT_BYTES else None


@final
class DramSegment:
    """One segment in memory; implements `cenote.store.segment.Segment`.

    Safe from several threads. `close` at the end, when nobody uses `view` any more.
    """

    disk = None
    failed = ""

    def __init__(
        self,
        files: NodeFiles,
        plan: SegmentPlan,
        boot_id: bytes,
        *,
        survivor: Survivor | None = None,
        granule_bytes: int = PAGE_BYTES,
    ) -> None:
        """Make the files of `plan` anew, or open those of `survivor`.

        Raises ResourceUnavailable where the slot table can't get its memory, OSError.
        """
        self.index = plan.index
        self._lock = threading.Lock()
        self._pages = threading.Lock()
        """Held, before the other one, while a range's pages are made or given up. That may take
        long, where the kernel has to look for memory; only `retire` waits for it."""
        self._granule_bytes = granule_bytes
        self._name = str(files.data_path(plan.index))
        self.reopened = survivor is not None
        """Whether the contents are those of an earlier life."""
        self.verified_epoch = 0
        """Of the leader for which all that it holds of earlier times was verified."""
        if survivor is None:
            files.remove(plan.index)
        make = 0 if self.reopened else os.O_CREAT | os.O_EXCL
        self._fd = os.open(self._name, os.O_RDWR | os.O_CLOEXEC | make, 0o600)
        self.size_bytes = plan.data_bytes
        try:
            if survivor is None:
                os.ftruncate(self._fd, plan.data_bytes)
                header = self._fresh_header(files, plan, boot_id)
            else:
                header = survivor.header
            header = header.next(start_number=files.start_number)
            self._table_file = TableFile(files.table_path(plan.index), header)
            with contextlib.suppress(ResourceUnavailable):  # then it is asked for when needed
                self._table_file.back_next_range()
            self._map = self._mapped(plan.data_bytes)
        except BaseException:
            os.close(self._fd)
            if not self.reopened:
                files.remove(plan.index)
            raise
        self.segment_id = header.segment_id
        """As the master knows it: 0 before the first attach."""
        self.view = self._map.memory
        """The data area, writable."""
        self.address = self._map.address
        """Of its first byte in this process."""
        self.ready_bytes = header.ready_bytes
        """Backed by memory so far, from the beginning."""
        self._huge_bytes = 0
        self._given_up = list(survivor.retired) if survivor else []
        self._retired = RangeSet(self._given_up)
        self._table = SlotTable(
            self._table_file.slots_memory(),
            self.view,
            unit_bytes=UNIT_BYTES,
            limit_bytes=self.ready_bytes,
        )
        self._table.set_bounds(self.ready_bytes, self._retired)
        self._table.fence(header.last_epoch)

    def _mapped(self, size_bytes: int) -> MappedFile:
        try:
            return MappedFile(self._fd, size_bytes)
        except OSError as error:  # as it happens with huge pages, which are set aside here
            raise ResourceUnavailable(
                f"can't map {format_size(size_bytes)} of {self._name}: {error.strerror}",
                remedy="ask for less with --dram, or give the machine more (huge) pages",
            ) from error

    def _fresh_header(self, files: NodeFiles, plan: SegmentPlan, boot_id: bytes) -> TableHeader:
        return TableHeader(
            sequence=0,
            incarnation=secrets.token_bytes(16),
            boot_id=boot_id,
            node_uuid=files.node_uuid,
            index=plan.index,
            unit_bytes=UNIT_BYTES,
            data_bytes=plan.data_bytes,
            data_inode=os.fstat(self._fd).st_ino,
            ready_bytes=0,
            last_epoch=0,
            slots=plan.slots,
        )

    # ---- what it is ---------------------------------------------------------------------------

    @property
    def tier(self) -> int:
        """`common_pb2.TIER_DRAM`."""
        return int(common_pb2.TIER_DRAM)

    @property
    def incarnation(self) -> bytes:
        """16 bytes that change whenever the contents are lost."""
        return self._table_file.header.incarnation

    @property
    def fd(self) -> int:
        """Descriptor of the data file; -1 once closed."""
        return self._fd

    @property
    def table(self) -> SlotTable:
        """Its slots: counters, inventory, keys."""
        return self._table

    @property
    def header(self) -> TableHeader:
        """What is written about the segment."""
        return self._table_file.header

    @property
    def retired_bytes(self) -> int:
        """Bytes of the data area that were given up for slots."""
        return self._retired.total_bytes

    def info(self, *, retired: bool = True) -> master_pb2.SegmentInfo:
        """What the master is told; the `retired` ranges matter to it when the daemon attaches."""
        given_up = list(self._given_up) if retired else []
        ranges = np.zeros(len(given_up), EXTENT)
        for i, given in enumerate(given_up):
            ranges[i] = (self.segment_id, 0, *given)
        return master_pb2.SegmentInfo(
            node_segment_index=self.index,
            tier=common_pb2.TIER_DRAM,
            incarnation=self.incarnation,
            size_bytes=self.size_bytes,
            ready_bytes=self.ready_bytes,
            unit_bytes=UNIT_BYTES,
            slots=self._table.slots,
            retired_extents=ranges.tobytes(),
            unverified=self.verified_epoch != self.header.last_epoch,
        )

    # ---- contents -----------------------------------------------------------------------------

    def recover(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Take up the slots of an earlier life; how many are sealed. Before the first use."""
        if not self.reopened:
            return 0
        with self._lock:
            if self._table.slots < self.header.slots:  # a growth was cut short
                self._table.grow(self._table_file.extend())
        sealed = self._table.recover(stopping)
        if self._table.broken:
            _log.warning(
                "slots that were written only in part are ignored",
                segment=self._name,
                slots=self._table.broken,
            )
        return sealed

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Write slots; see `Segment.seal`. Raises StaleEpoch where the fence has passed `epoch`."""
        return self._table.seal(epoch, namespace_id, generation, rows, keys, key_starts)

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        """See `Segment.record`."""
        return self._table.record(slot, epoch, seq)

    def namespace_at(self, slot: int) -> int:
        """See `Segment.namespace_at`."""
        return self._table.namespace_at(slot)

    def clear(self, refs: NDArray[np.void]) -> int:
        """See `SlotTable.clear`."""
        return self._table.clear(refs)

    def fence(self, epoch: int) -> None:
        """Refuse seals from epochs below `epoch`, now and after every restart."""
        with self._lock:
            if epoch > self.header.last_epoch:
                self._table_file.update(last_epoch=epoch)
            self._table.fence(epoch)
            if not self._table.sealed:  # nothing to verify, and nothing older can come any more
                self.verified_epoch = self.header.last_epoch

    def attached(self, node_id: int, segment_id: int) -> None:
        """Keep what the master calls this segment, also for the time before the next attach."""
        with self._lock:
            self.segment_id = segment_id
            header = self.header
            if (header.node_id, header.segment_id) != (node_id, segment_id):
                self._table_file.update(node_id=node_id, segment_id=segment_id)

    # ---- memory -------------------------------------------------------------------------------

    def allocated_bytes(self) -> int:
        """Memory that the data file holds now."""
        return os.fstat(self._fd).st_blocks * 512

    def allocate_next(self, chunk_bytes: int) -> tuple[int, int] | None:
        """Back the next chunk of the data area with memory; (offset, length), None where all is.

        To be called by one thread at a time. Raises ResourceUnavailable.
        """
        offset = self.ready_bytes
        length = min(chunk_bytes, self.size_bytes - offset)
        if not length:
            return None
        self._back(offset, length)
        with self._lock:
            self._table_file.update(ready_bytes=offset + length)
            self._table.set_bounds(offset + length, self._retired)
            self.ready_bytes = offset + length
        return offset, length

    def _back(self, offset: int, length: int) -> None:
        name = f"the segment {self._name}"
        if self._granule_bytes == PAGE_BYTES:
            allocate_file(self._fd, offset, length, name=name)
            return
        # Huge pages were set aside for us when the file was mapped, so none counts as available.
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't get {format_size(length)} for {name}: {error.strerror}"
            ) from error

    def touch(self, offset: int, length: int) -> bool:
        """Give the pages of a backed range their place in this process's page table.

        False where the kernel can't, which costs only time later.
        """
        # Under that lock, so that a range that is punched out meanwhile does not get memory again;
        # hence in small steps.
        with self._pages:
            for start, size in self._retired.gaps(offset, offset + length):
                first = -(-start // self._granule_bytes) * self._granule_bytes
                last = (start + size) // self._granule_bytes * self._granule_bytes
                if last > first and not populate(self.address + first, last - first, write=True):
                    return False
        return True

    def make_huge(self, offset: int, length: int) -> bool:
        """Put huge pages behind a backed range, contents and all, except where data was given up.

        False where the kernel can't for any of it, which costs only time later.
        """
        if self._granule_bytes != PAGE_BYTES:
            return True  # they are what the file is of
        with self._pages:
            ranges = [
                (self.address + start, size)
                for start, size in self._retired.gaps(offset, offset + length)
            ]
            made = sum(collapse(*each) for each in ranges)
            self._huge_bytes += made
        return bool(made) or not any(huge_part(*each) for each in ranges)

    @property
    def huge_bytes(self) -> int:
        """Of the data area, what this process has put huge pages behind; all that is backed where
        the file is of huge pages."""
        return self._huge_bytes if self._granule_bytes == PAGE_BYTES else self.ready_bytes

    def retire(self, offset: int, length: int, slots: int) -> bool:
        """Give a data range up, and grow the table by as many slots, towards `slots` in all.

        Can be repeated after any failure or crash; returns False where all of it was done before.
        Raises InvalidArgument where the range can't be given up, ResourceUnavailable where the
        memory that was given back went elsewhere meanwhile.
        """
        with self._pages, self._lock:
            known = self._retired.covers(offset, length)
            if known and self._table.slots == self.header.slots:
                return False
            if not known:
                self._note_retired(offset, length, slots)
            # Also when this is a repetition, in case it was not done: nothing lies there any more.
            self._punch(offset, length)
            self._table.grow(self._table_file.extend())
            with contextlib.suppress(ResourceUnavailable):  # then it is asked for when needed
                self._table_file.back_next_range()
        if self._table.slots < slots:
            _log.debug("more ranges are due for slots", segment=self._name, slots=slots)
        return True

    def _note_retired(self, offset: int, length: int, slots: int) -> None:
        inside = 0 < length <= self.ready_bytes - offset and offset >= 0
        if not inside or offset % UNIT_BYTES or length % UNIT_BYTES:
            raise InvalidArgument(f"[{offset}, +{length}) can't be given up: no range of units")
        if self._retired.overlaps(offset, length):
            raise InvalidArgument(f"[{offset}, +{length}) can't be given up: part of it was before")
        # What the range pays for, even if the master counts on ranges that are yet to come.
        slots = max(self.header.slots, min(slots, self.header.slots + length // SLOT_BYTES))
        try:
            self._table_file.retire(offset, length, slots)
        except ValueError as error:
            raise InvalidArgument(f"{self._name}: {error}") from error
        self._given_up.append((offset, length))
        self._retired = self._retired.added(offset, length)
        self._table.set_bounds(self.ready_bytes, self._retired)

    def _punch(self, offset: int, length: int) -> None:
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        if _fallocate(self._fd, mode, offset, length):
            error = ctypes.get_errno()
            # The memory stays with the data file: more than was configured, but nothing breaks.
            _log.warning(
                "can't give memory back", segment=self._name, bytes=length, error=os.strerror(error)
            )

    def close(self) -> None:
        """Unmap, where nobody has memory of it any more, and close the files; they stay."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._table_file.close()
        with contextlib.suppress(BufferError):
            self.view.release()
            del self._map
