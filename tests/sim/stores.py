"""Store daemons: the real slot tables, sessions and agent over memory that outlives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, InvalidArgument, PoolMismatch
from cenote.api.rows import EXTENT, UNIT_BYTES
from cenote.runtime.memory import address_of
from cenote.store.agent import AgentIdentity, StoreAgent
from cenote.store.claims import ClaimTable
from cenote.store.dram import DramSegment
from cenote.store.pool_copy import PoolCopyFile
from cenote.store.ranges import RangeSet
from cenote.store.segments import LocalSegments
from cenote.store.sessions import SessionTable
from cenote.store.slot_format import SLOT_BYTES
from cenote.store.slots import SlotTable
from cenote.transport.claims import CLAIM_PAGE_BYTES
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from sim.lanes import StoreLink
from sim.loop import Party

if TYPE_CHECKING:
    from sim.disk import SimDisk
    from sim.world import World

CLAIM_PAGES: Final = 64

__all__ = ["SegmentFile", "SimSegment", "StoreHost", "StoreProcess"]

SLOTS_FIRST: Final = 48
SLOTS_PER_BLOCK: Final = 8
"""Small, as the tables are: inventories are of some of their blocks, mostly."""


@dataclass(eq=False)
class SegmentFile:
    """What of a segment outlives its daemon: data, slot table, header."""

    name: str
    incarnation: bytes
    size_bytes: int
    data: NDArray[np.uint8]
    table: bytearray
    slots: int = SLOTS_FIRST
    ready_bytes: int = 0
    last_epoch: int = 0
    node_id: int = 0
    segment_id: int = 0
    retired: list[tuple[int, int]] = field(default_factory=list)
    owner: NDArray[np.int64] = field(init=False)
    """Per unit: the number of the grant that it was given in last (the oracle's)."""
    mapped_by: Counter[bytes] = field(default_factory=Counter)
    """Session -> mappings."""
    is_lost: bool = False
    damaged: set[tuple[int, int]] = field(default_factory=set)
    """Versions whose slot was torn or flipped."""

    def __post_init__(self) -> None:
        self.owner = np.zeros(self.size_bytes // UNIT_BYTES, np.int64)


class SimSegment:
    """What `DramSegment` is, without files. One per life of its daemon."""

    def __init__(self, file: SegmentFile, index: int, is_unverified: Callable[[], bool]) -> None:
        self.is_unverified = is_unverified
        """Whether bytes may have been written over without a word of it: no lease proves them
        then. Daemons find that out by reading everything again, which takes its time here."""
        self.file = file
        self.index = index
        self.segment_id = file.segment_id
        self.tier = int(common_pb2.TIER_DRAM)
        self.disk = None
        self.failed = ""
        self.incarnation = file.incarnation
        self.size_bytes = file.size_bytes
        self.ready_bytes = file.ready_bytes
        self.view = memoryview(cast("Any", file.data))
        self.address = address_of(file.data)
        self.fd = -1
        self.header = file
        self._retired = RangeSet(file.retired)
        self.table = SlotTable(
            self._slots_memory(), self.view, unit_bytes=UNIT_BYTES, limit_bytes=file.ready_bytes
        )
        self.table.set_bounds(file.ready_bytes, self._retired)
        self.table.fence(file.last_epoch)
        self.table.recover()

    def _slots_memory(self) -> memoryview:
        return memoryview(self.file.table)[: self.file.slots * SLOT_BYTES]

    def clear(self, refs: NDArray[np.void]) -> int:
        return self.table.clear(refs)

    def info(self, *, retired: bool = True) -> pb.SegmentInfo:
        given_up = self.file.retired if retired else []
        ranges = np.zeros(len(given_up), EXTENT)
        for i, given in enumerate(given_up):
            ranges[i] = (self.segment_id, 0, *given)
        return pb.SegmentInfo(
            node_segment_index=self.index,
            tier=common_pb2.TIER_DRAM,
            incarnation=self.incarnation,
            size_bytes=self.size_bytes,
            ready_bytes=self.ready_bytes,
            unit_bytes=UNIT_BYTES,
            slots=self.table.slots,
            retired_extents=ranges.tobytes(),
            unverified=self.is_unverified(),
        )

    def seal(self, *arguments: Any) -> NDArray[np.uint8]:
        return self.table.seal(*arguments)

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        return self.table.record(slot, epoch, seq)

    def fence(self, epoch: int) -> None:
        self.file.last_epoch = max(self.file.last_epoch, epoch)
        self.table.fence(epoch)

    def attached(self, node_id: int, segment_id: int) -> None:
        self.segment_id = self.file.segment_id = segment_id
        self.file.node_id = node_id

    def make_ready(self, ready_bytes: int) -> None:
        """More of the memory is backed now."""
        self.ready_bytes = self.file.ready_bytes = ready_bytes
        self.table.set_bounds(ready_bytes, self._retired)

    def retire(self, offset: int, length: int, slots: int) -> bool:
        """As `DramSegment.retire`."""
        if self._retired.covers(offset, length):
            return False
        inside = 0 < length <= self.ready_bytes - offset and offset >= 0
        if not inside or offset % UNIT_BYTES or length % UNIT_BYTES:
            raise InvalidArgument(f"[{offset}, +{length}) can't be given up: no range of units")
        if self._retired.overlaps(offset, length):
            raise InvalidArgument(f"[{offset}, +{length}) can't be given up twice")
        file = self.file
        file.slots = max(file.slots, min(slots, file.slots + length // SLOT_BYTES))
        file.retired.append((offset, length))
        self._retired = self._retired.added(offset, length)
        self.table.set_bounds(self.ready_bytes, self._retired)
        file.data[offset : offset + length] = 0
        self.table.grow(self._slots_memory())
        return True


@dataclass(eq=False)
class StoreHost:
    """A host with memory for one daemon. `boot` counts its reboots."""

    name: str
    files: list[SegmentFile] = field(default_factory=list)
    node_uuid: bytes = b""
    boot: int = 1
    starts: int = 0
    """As the daemon's files count them."""
    party: Party | None = None
    """Who has locked the node's files, from the moment it is started: never two at a time."""
    process: StoreProcess | None = None
    """What `party` runs, once it has begun."""
    claims: memoryview = field(default_factory=lambda: _claim_memory())
    claims_held: Counter[int] = field(default_factory=Counter)
    """By page: channels that have it mapped."""
    pool: PoolCopyFile = field(default_factory=PoolCopyFile)
    disk: SimDisk | None = None
    """Its SSD, where there is one."""

    @property
    def boot_id(self) -> str:
        return f"{self.name}.{self.boot}"

    def reboot(self) -> None:
        """All that is in memory is gone, and of its SSD what was not flushed."""
        for file in self.files:
            file.is_lost = True
        self.files = []
        self.boot += 1
        self.claims, self.claims_held = _claim_memory(), Counter()
        if self.disk is None:
            self.pool = PoolCopyFile()
        else:  # beside which the copy of the pool lies
            self.disk.cut_power()

    def wipe(self) -> None:
        """Nothing is left of what it held."""
        self.reboot()
        self.pool = PoolCopyFile()
        if self.disk is not None:
            self.disk.wipe()

    def page(self, number: int) -> memoryview:
        """A page of claims, as its writer maps it."""
        return self.claims[number * CLAIM_PAGE_BYTES : (number + 1) * CLAIM_PAGE_BYTES]


def _claim_memory() -> memoryview:
    return memoryview(bytearray(CLAIM_PAGES * CLAIM_PAGE_BYTES))


class StoreProcess:
    """One life of a daemon. To be made in a task of its party."""

    def __init__(self, world: World, host: StoreHost, party: Party, number: int) -> None:
        self.world = world
        self.host = host
        self.party = party

        def is_unverified() -> bool:
            """After a power failure or a loss of metadata a leader may adopt what was evicted."""
            return world.oracle.power_failed or world.oracle.has_lost_metadata

        segments = [SimSegment(file, i, is_unverified) for i, file in enumerate(host.files)]
        held = host.claims_held
        claims = ClaimTable(host.claims, lambda page: held[page] > 0, barrier=lambda: None)
        tiers = world.tiers
        host.starts += 1
        disks = [] if tiers is None else tiers.open(host, host.starts)
        self.segments = LocalSegments(cast("list[DramSegment]", segments), claims, disks)
        self.segments.pool = host.pool
        self.sim_segments = segments
        self.sessions = SessionTable(self.segments)
        self.connections: dict[Any, None] = {}
        """Open data connections."""
        self.address = f"{host.name}:{number}"
        hello = pb.HelloRequest(
            session_id=world.loop.dice.randbytes(16),
            client_name=host.name,
            boot_id=host.boot_id,
            process_id=number,
            observer=True,
        )

        def connect(address: str) -> StoreLink:
            hello.pool_id, hello.last_epoch = host.pool.pool_id, self.segments.epoch
            return StoreLink(world, party, hello, address.partition(":")[0])

        copying = tiers and tiers.copying(self, self.segments, hello.session_id)
        copier, puller = copying or (None, None)
        self.agent = StoreAgent(
            AgentIdentity(
                node_name=host.name,
                node_uuid=host.node_uuid,
                boot_id=host.boot_id,
                failure_domain="",
                process_id=number,
                server_version="",
                start_number=host.starts,
                endpoints=(
                    common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=self.address),
                    common_pb2.Endpoint(
                        kind=common_pb2.TRANSPORT_KIND_SHM, address=f"/{host.name}"
                    ),
                ),
                credentials=common_pb2.Credentials(),
            ),
            self.segments,
            self.sessions,
            [f"{name}:1" for name in world.master_names],
            connect=connect,
            stats=pb.NodeStats,
            is_preparing=self._is_preparing,
            on_end=self._on_end,
            copier=copier,
            puller=puller,
            jitter=world.loop.dice.random,
            slots_per_block=SLOTS_PER_BLOCK,
        )
        party.on_death.append(self._died)
        self.agent.start()
        if self._is_preparing():
            world.loop.after(world.loop.dice.random() * 2, self._prepare, party)

    def _is_preparing(self) -> bool:
        return any(s.ready_bytes < s.size_bytes for s in self.sim_segments)

    def _prepare(self) -> None:
        for segment in self.sim_segments:
            step = segment.size_bytes // 4 // UNIT_BYTES * UNIT_BYTES
            segment.make_ready(min(segment.size_bytes, segment.ready_bytes + step))
        if self._is_preparing():
            self.world.loop.after(self.world.loop.dice.random(), self._prepare, self.party)

    def _on_end(self, error: CenoteError) -> None:
        if isinstance(error, PoolMismatch):
            return  # `StoreLink` has it wiped
        raise AssertionError(f"the daemon gave up: {error!r}")

    def _died(self) -> None:
        for connection in list(self.connections):
            connection.daemon_died()

    def ask(self, source: str, act: Callable[[], None], lost: Callable[[], None]) -> None:
        """A message to this daemon."""
        self.world.network.send(source, self.host.name, self.party, act, lost)
