"""A store daemon's segments in memory and on an SSD, with copier and data server, in process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cenote.api.rows import COPIED, COPY, EXTENT, CopyStatus
from cenote.runtime.memory import address_of
from cenote.store.copier import Copier
from cenote.store.device import BLOCK_BYTES, Device, open_device
from cenote.store.dram import DramSegment
from cenote.store.endurance import Endurance
from cenote.store.node_files import NodeFiles
from cenote.store.segments import LocalSegments, open_segments
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable
from cenote.store.ssd import SsdFile
from cenote.transport.base import Channel, SessionIdentity
from cenote.transport.shm import ShmTransport
from cenote.transport.tcp import TcpTransport
from cenote.v1 import common_pb2
from faulty_device import FaultyDevice
from slot_rows import Sealed, seal_arguments
from waiting import wait_until

__all__ = [
    "DRAM_ID",
    "LONG_KEY",
    "SIZES",
    "SSD_ID",
    "SsdNode",
    "fill",
    "payload_of",
    "read",
    "rows_of",
]

MIB = 1 << 20
DRAM_ID, SSD_ID = 11, 12
EPOCH = 3
BOOT = b"1" * 16


def payload_of(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@final
class SsdNode:
    """One life of such a daemon, attached at epoch 3. `close` leaves its files."""

    def __init__(
        self,
        directory: Path,
        *,
        ssd_bytes: int = 24 * MIB,
        start: bool = True,
        daily_writes: int = 0,
        staging_bytes: int = 8 * MIB,
    ) -> None:
        self.path = directory / "ssd"
        inner: Device = open_device(self.path, ssd_bytes)
        self.device = FaultyDevice(inner)
        self.files = NodeFiles(directory, "n1")
        self.ssd_file = SsdFile(self.path, ssd_bytes, staging_bytes, device=self.device)
        self.segments: LocalSegments = open_segments(self.files, 16 * MIB, BOOT, ssd=self.ssd_file)
        self.dram: DramSegment = self.segments.dram()[0]
        while self.dram.allocate_next(16 * MIB):
            pass
        (self.ssd,) = self.segments.ssd()
        for segment in self.segments.all():
            segment.recover()
        self.segments.fence(EPOCH)
        self.segments.attached(1, [DRAM_ID, SSD_ID])
        self.sessions = SessionTable(self.segments)
        self.server = DataServer(
            self.segments,
            self.sessions,
            tcp=("127.0.0.1", 0),
            unix_path=str(directory / "sock"),
            claims=self.segments.claim_file,
        )
        self.server.start()
        self.endurance = Endurance(self.device, daily_writes) if daily_writes else None
        self.copier = Copier(self.segments, endurance=self.endurance)
        self.copier.fence(EPOCH)
        if start:
            self.copier.start()
        self._channels: list[Callable[[], None]] = []
        self._copies = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for close in self._channels:
            close()
        self.device.hang.set()
        self.server.close(2.0)
        self.copier.stop()
        self.segments.close()
        if self.endurance is not None:
            self.endurance.save()
        self.ssd_file.close()
        self.files.close()

    # ---- contents -----------------------------------------------------------------------------

    def put(
        self,
        slot: int,
        data: bytes,
        offsets: Sequence[tuple[int, int]],
        *,
        seq: int = 0,
        key: bytes = b"key",
        checksum: int | None = None,
    ) -> None:
        """An object in memory, in these (offset, length) extents, from this slot on."""
        tail = key if len(key) > 64 else b""
        left = data + tail
        sealed = []
        for index, (offset, length) in enumerate(offsets):
            part, left = left[:length], left[length:]
            self.dram.view[offset : offset + len(part)] = part
            sealed.append(
                Sealed(
                    slot=slot + index,
                    seq=seq or slot + 1,
                    offset=offset,
                    length=length,
                    key=key,
                    checksum=xxh3_64_intdigest(data) if checksum is None else checksum,
                    object_size=len(data),
                    extent_index=index,
                    extent_count=len(offsets),
                )
            )
        statuses = self.dram.seal(EPOCH, 5, 1, *seal_arguments(sealed, DRAM_ID))
        assert not statuses.any()

    def copy(
        self,
        slots: Sequence[int],
        target_slot: int,
        offset: int,
        length: int,
        *,
        seq: int = 0,
        promote: bool = False,
        epoch: int = EPOCH,
    ) -> int:
        """Order one copy; its id."""
        self._copies += 1
        rows = np.zeros(len(slots), COPY)
        rows["copy_id"] = self._copies
        rows["source_slot"] = slots
        rows["source_seq"] = seq or slots[0] + 1
        rows["source_epoch"] = EPOCH
        rows["source_segment"], rows["target_segment"] = (
            (SSD_ID, DRAM_ID) if promote else (DRAM_ID, SSD_ID)
        )
        rows["target_slot"], rows["target_offset"], rows["target_length"] = (
            target_slot,
            offset,
            length,
        )
        rows["target_replica"] = 0 if promote else 1
        self.copier.enqueue(rows, epoch)
        return self._copies

    def results(self, count: int) -> dict[int, int]:
        """Status by copy id, once so many are known."""
        found: dict[int, int] = {}

        def all_there() -> bool:
            told = self.copier.tell()
            self.copier.told(told)
            rows: NDArray[np.void] = np.frombuffer(told, COPIED)
            found.update(zip(rows["copy_id"].tolist(), rows["status"].tolist(), strict=True))
            return len(found) >= count

        wait_until(all_there, what="the copies to end")
        return found

    # ---- clients ------------------------------------------------------------------------------

    def channel(self, *, shm: bool) -> Channel:
        identity = SessionIdentity(b"a session of ten"[:16], "boot", 1, common_pb2.Credentials())
        assert self.server.tcp_address is not None
        host, port = self.server.tcp_address
        node = common_pb2.NodeView(
            node_id=1,
            boot_id="boot",
            endpoints=[
                common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=f"{host}:{port}"),
                common_pb2.Endpoint(
                    kind=common_pb2.TRANSPORT_KIND_SHM, address=self.server.unix_path or ""
                ),
            ],
        )
        transport = ShmTransport() if shm else TcpTransport()
        channel: Channel = transport.connect(node, identity, EPOCH, 5.0)
        self._channels += [channel.close, transport.close]
        return channel

    @property
    def table_slots(self) -> list[int]:
        """Slots that are sealed on the SSD."""
        return [int(s) for rows in self.ssd.table.inventory(0) for s in rows["slot"]]


LONG_KEY = bytes(range(200))


def rows_of(*places: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.zeros(len(places), EXTENT)
    rows["segment"] = SSD_ID
    for i, (offset, length) in enumerate(places):
        rows["offset"][i], rows["length"][i] = offset, length
    return rows


def read(node: SsdNode, places: list[tuple[int, int]], *, shm: bool) -> list[bytes]:
    channel = node.channel(shm=shm)
    buffers = [bytearray(length) for _, length in places]
    addresses = np.array([address_of(b) for b in buffers], np.uint64)
    statuses = channel.read(rows_of(*places), addresses, 10.0)
    assert not statuses.any()
    one = bytearray(places[0][1])
    status, _ = channel.read_one(SSD_ID, *places[0], address_of(one), 10.0, checksum=False)
    assert status == 0
    # Of what can't be read, more of a long request is zeros.
    assert one == buffers[0] or node.ssd.disk.counters.errors
    return [bytes(buffer) for buffer in buffers]


SIZES = [1, 4096, 5000, MIB, MIB + 5, 5 * MIB // 2, 100]


def fill(node: SsdNode) -> list[tuple[bytes, int]]:
    """Objects of all sizes, copied to the SSD: (bytes, offset there)."""
    at, target, made = 0, 0, []
    for slot, size in enumerate(SIZES):
        data = payload_of(slot, size)
        key = LONG_KEY if slot % 2 else b"key"
        whole = size + (len(key) if slot % 2 else 0)
        node.put(slot, data, [(at, whole)], key=key)
        node.copy([slot], 100 - slot, target, -(-whole // BLOCK_BYTES) * BLOCK_BYTES)
        made.append((data, target))
        at += -(-whole // 64) * 64
        target += -(-whole // BLOCK_BYTES) * BLOCK_BYTES
    assert set(node.results(len(SIZES)).values()) == {CopyStatus.DONE}
    return made
