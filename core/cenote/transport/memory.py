"""Peers in this very process, with faults on order: for tests and the simulator.

A `MemoryNetwork` holds the daemons' segments and what is wrong with the network just now. Nothing
here has a thread or reads a clock of its own, so the same orders give the same run. A caller that
has to wait does so in `wait(ready, timeout_s)`, which the simulator replaces by virtual time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    InvalidArgument,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.api.rows import EXTENT, SEAL
from cenote.v1 import common_pb2

from .base import ExtentArray, Region, SealBatch, Seen, SessionIdentity, U8Array, U64Array
from .claims import is_of_tenure
from .memory_access import MEMORY, checksum_at, copy, locate
from .proofs import ProofBatch, refused

__all__ = [
    "Fault",
    "FaultKind",
    "MemoryChannel",
    "MemoryNetwork",
    "MemorySegment",
    "MemorySegments",
    "MemoryTransport",
]


class MemorySegment(Protocol):
    """What is needed of a segment; `cenote.store.segment.Segment` has it."""

    @property
    def ready_bytes(self) -> int: ...
    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]: ...


class MemorySegments(Protocol):
    """What is needed of a daemon; `cenote.store.segment.SegmentSet` has it."""

    @property
    def epoch(self) -> int: ...
    @property
    def node_id(self) -> int: ...
    def by_id(self, segment_id: int) -> MemorySegment | None: ...


class FaultKind(Enum):
    """What happens to an operation."""

    DROP = "drop"
    """It is not done; the caller waits until its deadline."""
    LOSE_REPLY = "lose reply"
    """It is done, but the caller learns only that the deadline passed."""
    LATE = "late"
    """A write that the caller gives up at its deadline; it lands with `deliver_late`."""
    DELAY = "delay"
    """It is done after `delay_s`."""
    ERROR = "error"
    """It raises `error`, after `items` items were done."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault for one operation."""

    kind: FaultKind
    delay_s: float = 0.0
    error: CenoteError | None = None
    items: int = 0


@dataclass(slots=True)
class _LateWrite:
    session_id: bytes
    node_id: int
    pieces: list[tuple[int, int, bytes]]
    """(segment id, offset, payload)."""


Wait = Callable[[Callable[[], bool], float], bool]


@final
class MemoryNetwork:
    """The daemons, and the state of the way to them. Safe from several threads."""

    def __init__(self, daemons: Iterable[MemorySegments] = (), *, wait: Wait | None = None) -> None:
        self._daemons = {daemon.node_id: daemon for daemon in daemons}
        self._wait = wait or self._wait_for_change
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._operations = 0
        self._faults: dict[int, Fault] = {}
        self._paused: set[int] = set()
        self._cut: set[bytes] = set()
        self._late: list[_LateWrite] = []

    # ---- orders -----------------------------------------------------------------------------

    @property
    def operations(self) -> int:
        """Operations (connect, read, write, seal) begun so far, over all nodes."""
        return self._operations

    def fail(self, operation: int, fault: Fault) -> None:
        """Let the operation of this number fail; the first one is number 1."""
        self._faults[operation] = fault

    def fail_next(self, fault: Fault) -> None:
        """Let the next operation fail."""
        self.fail(self._operations + 1, fault)

    def add(self, daemon: MemorySegments) -> None:
        """A daemon that can be reached from now on; replaces one of the same node id."""
        with self._lock:
            self._daemons[daemon.node_id] = daemon
            self._changed.notify_all()

    def stop(self, node_id: int) -> None:
        """The daemon is gone: operations raise Unavailable."""
        with self._lock:
            self._daemons.pop(node_id, None)
            self._changed.notify_all()

    def pause(self, node_id: int) -> None:
        """The daemon answers nothing until `resume`."""
        with self._lock:
            self._paused.add(node_id)

    def resume(self, node_id: int) -> None:
        """End of `pause`."""
        with self._lock:
            self._paused.discard(node_id)
            self._changed.notify_all()

    def cut(self, session_ids: Sequence[bytes]) -> None:
        """No byte of these sessions lands any more, late ones included."""
        with self._lock:
            self._cut.update(session_ids)
            self._late = [late for late in self._late if late.session_id not in self._cut]

    def deliver_late(self) -> int:
        """Let the late writes land now: how many there were."""
        with self._lock:
            late, self._late = self._late, []
        for write in late:
            daemon = self._daemons.get(write.node_id)
            for segment_id, offset, payload in write.pieces:
                segment = None if daemon is None else daemon.by_id(segment_id)
                if segment is not None:
                    segment.view[offset : offset + len(payload)] = payload
        return len(late)

    def find(self, node_id: int) -> MemorySegments | None:
        """The daemon of this number, if it is there."""
        return self._daemons.get(node_id)

    # ---- for channels -----------------------------------------------------------------------

    def begin(
        self, node_id: int, session_id: bytes, deadline_s: float, is_closed: Callable[[], bool]
    ) -> tuple[MemorySegments, Fault | None]:
        """Start an operation: the daemon, and what shall go wrong. Raises what did already."""
        with self._lock:
            self._operations += 1
            fault = self._faults.pop(self._operations, None)
        if node_id in self._paused and not self._wait(
            lambda: node_id not in self._paused or is_closed(), deadline_s
        ):
            raise DeadlineExceeded(f"node {node_id} did not answer before the deadline")
        if is_closed():
            raise ClientClosed(f"the channel to node {node_id} is closed")
        if session_id in self._cut:
            raise GrantRevoked("this session was cut off", remedy="open a new session")
        daemon = self._daemons.get(node_id)
        if daemon is None:
            raise Unavailable(f"node {node_id} is gone")
        if fault is not None and fault.kind is FaultKind.DELAY:
            self._wait(is_closed, min(fault.delay_s, deadline_s))
            if fault.delay_s > deadline_s:
                raise DeadlineExceeded(f"node {node_id} did not answer before the deadline")
            fault = None
        if fault is not None and fault.kind is FaultKind.DROP:
            self.time_out(node_id, deadline_s, is_closed)
        return daemon, fault

    def time_out(self, node_id: int, deadline_s: float, is_closed: Callable[[], bool]) -> None:
        """Let the caller wait until its deadline. Raises DeadlineExceeded or ClientClosed."""
        if self._wait(is_closed, deadline_s):
            raise ClientClosed(f"the channel to node {node_id} is closed")
        raise DeadlineExceeded(f"node {node_id} did not answer before the deadline")

    def hold_back(
        self, session_id: bytes, node_id: int, pieces: list[tuple[int, int, bytes]]
    ) -> None:
        """A write that is to land later."""
        with self._lock:
            self._late.append(_LateWrite(session_id, node_id, pieces))

    def wake(self) -> None:
        """Something that a waiting caller looks at has changed."""
        with self._lock:
            self._changed.notify_all()

    def _wait_for_change(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        with self._lock:
            return self._changed.wait_for(ready, timeout_s)


@final
class MemoryChannel:
    """See `base.Channel`."""

    verifies_by_lease = True
    obstacle = ""

    def proves(self, lease_id: int) -> bool:
        daemon = self._network.find(self._node_id)
        return daemon is not None and is_of_tenure(lease_id, daemon.epoch << 40)

    def __init__(self, network: MemoryNetwork, node_id: int, session_id: bytes, epoch: int) -> None:
        self.epoch = epoch
        self._network = network
        self._node_id = node_id
        self._session_id = session_id
        self._closed = False

    @property
    def node_id(self) -> int:
        return self._node_id

    @property
    def route(self) -> str:
        return "this process"

    def open(self, deadline_s: float) -> None:
        """Raises what makes the daemon unreachable."""
        _, fault = self._begin(deadline_s)
        self._end(fault, deadline_s)

    def _begin(self, deadline_s: float) -> tuple[MemorySegments, Fault | None]:
        return self._network.begin(
            self._node_id, self._session_id, deadline_s, lambda: self._closed
        )

    def _end(self, fault: Fault | None, deadline_s: float) -> None:
        """What goes wrong once the operation is done."""
        if fault is None:
            return
        if fault.error is not None:
            raise fault.error
        self._network.time_out(self._node_id, deadline_s, lambda: self._closed)

    # ---- batches ----------------------------------------------------------------------------

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        if not len(extents):
            return np.zeros(0, np.uint8)
        daemon, fault = self._begin(deadline_s)
        statuses, sources, lengths = locate(extents, _finder(daemon))
        self._copy(addresses, sources, lengths, statuses, fault, addresses, checksums)
        self._end(fault, deadline_s)
        return statuses

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        if not len(extents):
            return np.zeros(0, np.uint8)
        daemon, fault = self._begin(deadline_s)
        self._check_epoch(daemon, self.epoch)
        statuses, targets, lengths = locate(extents, _finder(daemon))
        if fault is not None and fault.kind is FaultKind.LATE:
            self._network.hold_back(
                self._session_id, self._node_id, _pieces(extents, addresses, statuses)
            )
        else:
            self._copy(targets, addresses, lengths, statuses, fault, addresses, checksums)
        self._end(fault, deadline_s)
        return statuses

    def _copy(
        self,
        targets: U64Array,
        sources: U64Array,
        lengths: U64Array,
        statuses: U8Array,
        fault: Fault | None,
        hashed: U64Array,
        checksums: U64Array | None,
    ) -> None:
        count = len(lengths)
        if fault is not None and fault.kind is FaultKind.ERROR:
            count = min(count, fault.items)
        for i in np.flatnonzero(statuses[:count] == 0).tolist():
            length = int(lengths[i])
            copy(int(targets[i]), int(sources[i]), length)
            if checksums is not None:
                checksums[i] = checksum_at(int(hashed[i]), length)

    def _check_epoch(self, daemon: MemorySegments, epoch: int) -> None:
        if epoch < daemon.epoch:
            raise StaleEpoch(f"a change of epoch {epoch}; the daemon follows epoch {daemon.epoch}")

    # ---- single items -----------------------------------------------------------------------

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        digests = np.zeros(1, np.uint64) if checksum else None
        statuses = self.read(*_one(segment, offset, length, address), deadline_s, digests)
        return int(statuses[0]), 0 if digests is None else int(digests[0])

    def write_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        grant_id: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        digests = np.zeros(1, np.uint64) if checksum else None
        statuses = self.write(
            *_one(segment, offset, length, address), grant_id, deadline_s, digests
        )
        return int(statuses[0]), 0 if digests is None else int(digests[0])

    # ---- the rest ---------------------------------------------------------------------------

    def seal(self, batch: SealBatch, deadline_s: float) -> U8Array:
        rows = np.frombuffer(batch.rows, SEAL)
        ends = np.cumsum(rows["key_length"], dtype=np.int64)
        if len(rows) and int(ends[-1]) != len(batch.keys):
            raise InvalidArgument(f"{len(batch.keys)} bytes of keys for {int(ends[-1])}")
        daemon, fault = self._begin(deadline_s)
        self._check_epoch(daemon, batch.epoch)
        starts = ends - rows["key_length"]
        statuses = np.full(len(rows), StaleLocation.code, np.uint8)
        count = len(rows)
        if fault is not None and fault.kind is FaultKind.ERROR:
            count = min(count, fault.items)
        for segment_id in dict.fromkeys(rows["segment"][:count].tolist()):
            segment = daemon.by_id(segment_id)
            if segment is not None:
                mine = np.flatnonzero(rows["segment"][:count] == segment_id)
                statuses[mine] = segment.seal(
                    batch.epoch,
                    batch.namespace_id,
                    batch.generation,
                    rows[mine],
                    memoryview(batch.keys),
                    starts[mine],
                )
        self._end(fault, deadline_s)
        return statuses

    def prove(self, batch: ProofBatch, deadline_s: float) -> tuple[U8Array, bytes]:
        return refused(batch)

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        daemon = self._network.find(self._node_id)
        views: list[memoryview | None] = []
        for segment_id, _, offset, length in extents.tolist():
            found = None if daemon is None or self._closed else daemon.by_id(segment_id)
            if found is None or not 0 <= offset <= found.ready_bytes - length:
                views.append(None)
            else:
                views.append(found.view[offset : offset + length].toreadonly())
        return Seen(views)

    def close(self) -> None:
        self._closed = True
        self._network.wake()


def _finder(daemon: MemorySegments) -> Callable[[int], tuple[int, int] | None]:
    def find(segment_id: int) -> tuple[int, int] | None:
        segment = daemon.by_id(segment_id)
        return None if segment is None else (segment.address, segment.ready_bytes)

    return find


def _one(segment: int, offset: int, length: int, address: int) -> tuple[ExtentArray, U64Array]:
    extents = np.zeros(1, EXTENT)
    extents[0] = (segment, 0, offset, length)
    return extents, np.array([address], np.uint64)


def _pieces(
    extents: ExtentArray, addresses: U64Array, statuses: U8Array
) -> list[tuple[int, int, bytes]]:
    pieces = []
    for i in np.flatnonzero(statuses == 0).tolist():
        address, length = int(addresses[i]), int(extents["length"][i])
        payload = bytes(MEMORY[address : address + length])
        pieces.append((int(extents["segment"][i]), int(extents["offset"][i]), payload))
    return pieces


@final
class MemoryTransport:
    """Channels to the daemons of a `MemoryNetwork`."""

    kind = common_pb2.TRANSPORT_KIND_MEMORY

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._channels: weakref.WeakSet[MemoryChannel] = weakref.WeakSet()
        self._closed = False

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        if any(endpoint.kind == self.kind for endpoint in node.endpoints):
            return None
        return "the node is not in this process"

    def register(self, address: int, length: int, keeper: object) -> Region:
        return Region(address, length, keeper)

    def deregister(self, region: Region) -> None:
        """Nothing to do."""

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> MemoryChannel:
        if self._closed:
            raise ClientClosed("the memory transport is closed")
        channel = MemoryChannel(self._network, node.node_id, identity.session_id, epoch)
        channel.open(deadline_s)
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        self._closed = True
        for channel in list(self._channels):
            channel.close()
