"""Tiers in the simulator: daemons with an SSD, and copies to it, back, and from node to node.

The copier, its queues and threads, the SSD segment and the puller are the production classes; they
stand on `SimDisk`, and fetch from other daemons over simulated connections.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

import cenote.store.copier
import cenote.store.copy_outcomes
import cenote.store.copy_queue
import cenote.store.demoter
import cenote.store.disk_io
import cenote.store.promoter
import cenote.store.puller
import cenote.store.segments
import cenote.store.ssd
from cenote.api.errors import ResourceUnavailable
from cenote.master.state_config import StateConfig
from cenote.runtime.memory import address_of
from cenote.store.copier import Copier
from cenote.store.disk_io import DiskIo, Staging
from cenote.store.puller import Puller
from cenote.store.segments import LocalSegments
from cenote.store.slot_format import SLOT_RECORD
from cenote.store.slot_reads import records_of
from cenote.store.ssd import SsdSegment, find_survivors, open_ssd
from cenote.transport.base import ExtentArray, SessionIdentity, U8Array, U64Array
from cenote.v1 import common_pb2
from sim.data_path import TcpChannel
from sim.disk import QUICK_S, DiskWeather, SimDisk, versions_in
from sim.facts import known_versions
from sim.loop import Violation
from sim.machine import SimQueue, SimSecrets, SimThreading, SimTime
from sim.stores import SimSegment

if TYPE_CHECKING:
    from sim.data_connection import DataConnection
    from sim.masters import MasterProcess
    from sim.stores import StoreHost, StoreProcess
    from sim.world import World

__all__ = ["TIERS", "Tiers"]

TIERS: Final = "tiers"
THREADS: Final = 3
"""Of a device; in production there are 16 or more."""
OPEN_AGAIN_S: Final = 0.1
_REQUESTS_IN_A_ROW: Final = (4, 32)
"""That fail, and the device counts as dead."""


class Tiers:
    """The SSDs of one world, and what its daemons do with them."""

    def __init__(self, world: World) -> None:
        self._world = world
        dice = world.loop.dice
        self.blocks = dice.choice((12, 24, 60))
        """Of 4 KiB, on each SSD."""
        self.memory_align = dice.choice((16, 1 << 40))
        """Whether a device takes bytes from where they are, or they go through staging memory. (It
        must not depend on where memory happens to be.)"""
        self.write_limit = dice.choice((0, 0, 200_000))
        self._latency_s = dice.choice((QUICK_S, QUICK_S, 1e-3, 20e-3, 0.1))
        self._errors = dice.choice((0.0, 0.0, 0.03))
        self.source_pause_s = dice.choice((0.0, 0.02, 0.2))
        """Between what a source says of its slots, and its bytes."""
        self.failures_max = dice.choice(_REQUESTS_IN_A_ROW)
        hosts = list(world.hosts.values())
        without = dice.randrange(len(hosts)) if dice.random() < 0.2 and len(hosts) > 1 else -1
        for number, host in enumerate(hosts):
            if number != without:
                host.disk = self.new_disk(host)
        self._under_way: set[int] = set()
        self._counters: list[tuple[Any, tuple[str, ...]]] = []

    def new_disk(self, host: StoreHost) -> SimDisk:
        disk = SimDisk(self._world.loop, host.name, self.blocks, self.memory_align)
        disk.weather = self.usual_weather()
        disk.on_request = partial(self._on_request, host)
        disk.is_held = lambda version: self._world.oracle.tiers.is_in_memory(host, version)
        return disk

    def usual_weather(self) -> DiskWeather:
        """Of devices with which nothing special is the matter."""
        if self._world.calm:
            return DiskWeather()
        return DiskWeather(self._latency_s, self._errors)

    def _on_request(self, host: StoreHost, what: str) -> float:
        faults = self._world.faults.tiers
        return 0.0 if faults is None else faults.strike_device(host, what)

    def config(self, config: StateConfig) -> StateConfig:
        """The master's, where things happen in seconds."""
        dice = self._world.loop.dice
        return replace(
            config,
            repair_after_s=dice.choice((1.5, 4.0)),
            hot_bytes_per_s=dice.choice((4_000, 1 << 30)),
            demote_share=dice.choice((0.3, 0.5, 0.9)),
        )

    # ---- a daemon's parts -----------------------------------------------------------------------

    def open(self, host: StoreHost, start_number: int) -> list[SsdSegment]:
        """The segment on a host's SSD. In a task of its daemon; tried again while the SSD fails."""
        disk = host.disk
        if disk is None:
            return []
        node: Any = SimpleNamespace(node_uuid=host.node_uuid, start_number=start_number)
        io = DiskIo(disk, Staging(0), threads=THREADS)
        while True:
            try:
                survivors = find_survivors(disk, [disk.plan])
                (segment,) = open_ssd(io, [disk.plan], survivors, node)
                break
            except ResourceUnavailable:
                self._world.loop.note(host.name, "its SSD can't be opened")
                self._world.loop.sleep(OPEN_AGAIN_S)
        file = disk.file_of(segment.incarnation)
        self._world.files[file.incarnation] = file
        segment.recover()
        attached, fail = segment.attached, segment._fail

        def told(node_id: int, segment_id: int) -> None:
            attached(node_id, segment_id)
            file.segment_id = segment_id

        def failed(why: str) -> None:
            self._world.loop.note(host.name, f"gives its SSD up: {why}")
            file.damaged |= versions_in(file.table)
            fail(why)

        watched: Any = segment
        watched.file, watched.attached, watched._fail = file, told, failed
        return [segment]

    def copying(
        self, process: StoreProcess, segments: LocalSegments, session_id: bytes
    ) -> tuple[Copier | None, Puller]:
        """What makes copies, started, and every landing of it watched."""
        identity = SessionIdentity(session_id, process.host.boot_id, 1, common_pb2.Credentials())
        puller = Puller(segments, identity)
        self._watch_landing(puller, segments)
        puller.start()
        self._counters.append((puller.counters, ("pulled", "failed")))
        copier = None
        if segments.disk is not None:
            copier = Copier(segments, write_limit=self.write_limit)
            self._watch_landing(copier._promoter, segments)
            copier.start()
            self._counters.append((copier.counters, ("demoted", "promoted", "failed")))
        for segment in process.sim_segments:
            self._watch_placing(segment)
        return copier, puller

    def _watch_landing(self, copier: Any, segments: LocalSegments) -> None:
        land, oracle = copier._land, self._world.oracle

        def watched(one: Any, *arguments: Any) -> bool:
            landed: bool = land(one, *arguments)
            if landed:
                target = one.target[0] if hasattr(one, "target") else one.segment_id
                offset = one.target[2] if hasattr(one, "target") else one.offset
                segment: Any = segments.by_id(target)
                oracle.tiers.landed(one.copy_id, segment.file, offset, one.size_bytes)
            return landed

        copier._land = watched

    def _watch_placing(self, segment: SimSegment) -> None:
        table: Any = segment.table
        place, oracle = table.place, self._world.oracle

        def watched(record: bytes) -> int:
            slot: int = place(record)
            oracle.tiers.placed(segment.file, np.frombuffer(record, SLOT_RECORD)[0])
            return slot

        table.place = watched

    def alone_on(self, file: Any) -> list[int]:
        """Slots there of what is nowhere else."""
        oracle, master = self._world.oracle, self._world.master
        if master is None:
            return []
        placed = [oracle._placed.get(version, []) for version in known_versions(master.pool)]
        return [where[0][1] for where in placed if len(where) == 1 and where[0][0] is file]

    def copied(self, *, in_memory: bool) -> list[int]:
        """Keys of what has a copy on an SSD: those that are in memory, too, or those that are not.
        Users can't know; they do what has to do with copies more often for it."""
        master = self._world.master
        if master is None:
            return []
        pool = master.pool
        rows = pool.objects.live_rows(0, pool.objects.high_water)[0]
        counts, spans = pool.spans_of(rows)
        on_ssd = pool.segments.on_ssd[spans[:, 0] & 0xFFFF]
        owner = np.repeat(np.arange(len(rows)), counts)
        some_there, all_there = np.zeros(len(rows), np.bool_), np.ones(len(rows), np.bool_)
        some_there[owner[on_ssd]] = True
        all_there[owner[~on_ssd]] = False
        wanted = some_there & ~all_there if in_memory else all_there
        found = {digest.tobytes() for digest in pool.digests_of(rows[wanted])}
        return [k for k, of in self._world.oracle.digests.items() if not of.isdisjoint(found)]

    @property
    def counts(self) -> dict[str, int]:
        """What happened in all."""
        totals: dict[str, int] = {}
        for counters, names in self._counters:
            for name in names:
                totals[name] = totals.get(name, 0) + getattr(counters, name)
        for host in self._world.hosts.values():
            for what, count in host.disk.counts.items() if host.disk is not None else ():
                totals[f"disk {what}"] = totals.get(f"disk {what}", 0) + count
        return totals

    # ---- at the end -----------------------------------------------------------------------------

    def note_under_way(self, master: MasterProcess) -> None:
        """Copies that have long ended when `check_ended` looks."""
        self._under_way = set(master.service.state._pool.copies.by_id)

    def check_ended(self, master: MasterProcess) -> None:
        left = self._under_way & set(master.service.state._pool.copies.by_id)
        if left:
            raise Violation(f"copies {sorted(n & 0xFFFFFFFFFF for n in left)} never ended")

    # ---- what there is in production ------------------------------------------------------------

    def places(self) -> list[tuple[Any, str, Any]]:
        """What modules of production find instead of threads, clocks, memory: as `inhabited`."""
        loop = self._world.loop
        threads, clock = SimThreading(loop), SimTime(loop)
        store = cenote.store
        no_priorities = SimpleNamespace(PRIO_PROCESS=0, setpriority=lambda *_: None)
        # Staging memory is nobody else's here, and so no file.
        no_files = SimpleNamespace(
            MFD_CLOEXEC=0, memfd_create=lambda *_: -1, posix_fallocate=lambda *_: None
        )
        queues = SimpleNamespace(SimpleQueue=lambda: SimQueue(loop), Empty=Empty)
        found: list[tuple[Any, str, Any]] = [
            (module, "threading", threads)
            for module in (
                store.copy_outcomes,
                store.copy_queue,
                store.demoter,
                store.disk_io,
                store.promoter,
                store.puller,
                store.segments,
                store.ssd,
            )
        ]
        found += [
            (module, "DramSegment", SimSegment)
            for module in (store.copier, store.promoter, store.puller)
        ]
        return [
            *found,
            (store.demoter, "time", clock),
            (store.puller, "os", no_priorities),
            (store.puller, "ReplicaSource", partial(SimSource, self._world)),
            (store.disk_io, "queue", queues),
            (store.disk_io, "os", no_files),
            (store.disk_io, "MappedFile", _Mapped),
            (store.disk_io, "collapse", lambda *_: True),
            (store.ssd, "secrets", SimSecrets(loop)),
            (store.ssd, "FAILURES_MAX", self.failures_max),
        ]


class _Mapped:
    """Memory of no file."""

    def __init__(self, _fd: int, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.address = address_of(self._memory)


class SimSource:
    """`cenote.transport.replica_source.ReplicaSource`: another daemon, for one that copies."""

    def __init__(
        self, world: World, address: str, name: str, identity: SessionIdentity, _tls: object
    ) -> None:
        node = common_pb2.NodeView(name=address.partition(":")[0])
        party = world.loop.present_party()
        self._world = world
        self._channel = TcpChannel(world, party, node, identity, epoch=0)

    def records(self, wanted: NDArray[np.void], deadline_s: float) -> list[bytes | None]:
        packed = memoryview(wanted.tobytes())

        def make(connection: DataConnection) -> Any:
            return lambda reply: reply(records_of(connection.store.segments, packed))

        statuses, records = self._channel._call(make, deadline_s)
        size = SLOT_RECORD.itemsize
        found = (records[at : at + size] for at in range(0, len(records), size))
        return [None if status else next(found) for status in statuses]

    def read(self, extents: ExtentArray, addresses: U64Array, deadline_s: float) -> U8Array:
        tiers, faults = self._world.tiers, self._world.faults.tiers
        if faults is not None and (crawl_s := faults.strike_pull()):
            self._world.loop.sleep(crawl_s)
        elif tiers is not None and tiers.source_pause_s and not self._world.calm:
            self._world.loop.sleep(self._world.loop.dice.expovariate(1 / tiers.source_pause_s))
        return self._channel.read(extents, addresses, deadline_s)

    def close(self) -> None:
        self._channel.close()
