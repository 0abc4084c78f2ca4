"""Data connections of the simulator: who may write where, what is under way, how it is cut off."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.api.rows import EXTENT, PROOF, SEAL
from cenote.store.proofs import prove_rows
from cenote.store.segment import SegmentSet
from cenote.transport.base import (
    ExtentArray,
    SealBatch,
    Seen,
    SessionIdentity,
    U8Array,
    U64Array,
)
from cenote.transport.proofs import ProofBatch
from cenote.v1 import common_pb2
from sim.disk_serving import serve
from sim.loop import Party, Signal
from sim.stores import SegmentFile, StoreProcess

if TYPE_CHECKING:
    from sim.world import World

__all__ = [
    "DataConnection",
    "SimChannel",
    "Write",
    "cut_pieces",
    "open_connection",
    "seal_at",
    "spread",
    "sums",
]

_STALE: Final = StaleLocation.code
PIECE_BYTES: Final = (64, 512, 4096)
PIECES_MAX: Final = 24
NO_EPOCH: Final = 1 << 32


class Write:
    """Bytes on their way into segments. The oracle knows all that have begun and not ended."""

    def __init__(self, who: str, grant_id: int, pieces: list[tuple[SegmentFile, int, int]]) -> None:
        self.who = who
        self.grant_id = grant_id
        self.pieces = pieces
        """(file, offset, length) still to come, first one last."""
        self.crawl_s = 0.0
        """What each piece takes on average, where it is very slow."""
        self.is_mapped = False
        """The client's own hand writes."""

    def may_touch(self, file: SegmentFile, first: int, end: int) -> bool:
        return any(f is file and o < end and o + n > first for f, o, n in self.pieces)


class DataConnection:
    """A greeted connection, both ends. `cenote.store.sessions.SessionConnection` for the daemon."""

    def __init__(self, world: World, party: Party, store: StoreProcess, session_id: bytes) -> None:
        self.world = world
        self.party = party
        self.store = store
        self.session_id = session_id
        self.farewell: CenoteError | None = None
        """Why the daemon closed it, as the client will learn."""
        self.closed = False
        """By the daemon: nothing that arrives has any effect."""
        self.given_up = False
        """By the client."""
        self.calls: dict[Signal, None] = {}
        self.write: Write | None = None
        self.epoch = NO_EPOCH
        party.on_death.append(self.client_gone)

    # ---- the daemon's end -----------------------------------------------------------------------

    def revoke(self) -> None:
        self._close(GrantRevoked("this session was cut off"))

    def supersede(self, epoch: int) -> None:
        """Nothing of it lands by itself."""

    def writes_of_older(self, epoch: int) -> bool:
        return self.write is not None and self.epoch < epoch

    def wait_quiet(self, timeout_s: float) -> bool:
        return self.write is None

    def daemon_died(self) -> None:
        self._close(Unavailable("the daemon is gone"), told=False)

    def _close(self, farewell: CenoteError, *, told: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        self.farewell = farewell
        self.end_write()
        self.store.connections.pop(self, None)
        loop = self.world.loop
        if told:
            loop.after(0.0, lambda: self.store.sessions.leave(self.session_id, self), None)
        for signal in list(self.calls):
            delay_s = self.world.network.delay_s()
            loop.after(delay_s, partial(signal.set, farewell), self.party)

    def end_write(self) -> None:
        if self.write is not None:
            self.world.oracle.write_ended(self.write)
            self.write = None
            self.epoch = NO_EPOCH

    # ---- the client's end -----------------------------------------------------------------------

    def client_gone(self) -> None:
        """Closed by its process's end, or after an error. What lies in buffers may still arrive."""
        if self.given_up:
            return
        self.given_up = True
        loop = self.world.loop
        if self.write is None or loop.dice.random() < 0.4:
            loop.after(
                self.world.network.delay_s(),
                lambda: self._close(Unavailable("closed by the client")),
                self.store.party,
            )

    def call(self, act: Callable[[Callable[[Any], None]], None], until_s: float) -> Any:
        """`act(reply)` happens at the daemon; what it replies. In a task of the client."""
        world, loop = self.world, self.world.loop
        store = self.store
        signal = Signal(loop)

        def reply(value: Any) -> None:
            world.network.send(
                store.host.name, self.party.name, self.party, lambda: signal.set(value), lost
            )

        def lost() -> None:
            self.client_gone()
            loop.after(0.0, lambda: signal.set(_gone()), self.party)

        def arrive() -> None:
            if not self.closed:
                act(reply)

        if self.closed:
            raise self.farewell or Unavailable("the connection is closed")
        self.calls[signal] = None
        store.ask(self.party.name, arrive, lost)
        if not store.party.alive:
            loop.after(world.network.delay_s(), lambda: signal.set(_gone()), self.party)
        ended = signal.wait(max(0.0, until_s - loop.now_s))
        self.calls.pop(signal, None)
        if not ended:
            self.client_gone()
            raise DeadlineExceeded(f"{store.host.name} did not finish before the deadline")
        if isinstance(signal.value, CenoteError):
            self.client_gone()  # whatever it is, the connection is discarded
            raise type(signal.value)(signal.value.message)
        return signal.value


C = TypeVar("C", bound=DataConnection)


def _gone() -> CenoteError:
    return Unavailable("the daemon is gone")


def open_connection(
    world: World,
    party: Party,
    host_name: str,
    identity: SessionIdentity,
    until_s: float,
    kind: type[C],
) -> C:
    """Connect and greet. Raises Unavailable, DeadlineExceeded, GrantRevoked."""
    loop = world.loop
    store = world.hosts[host_name].process
    if store is None or not store.party.alive:
        refused_s = loop.now_s + world.network.delay_s()
        loop.sleep(min(refused_s, until_s) - loop.now_s)
        if refused_s > until_s:
            raise DeadlineExceeded(f"{host_name} did not answer before the deadline")
        raise Unavailable(f"nobody listens at {host_name}")
    connection = kind(world, party, store, identity.session_id)

    def greet(reply: Callable[[Any], None]) -> None:
        try:
            store.sessions.admit(identity.session_id, connection)
        except CenoteError as error:
            reply(error)
            return
        store.connections[connection] = None
        reply(True)

    connection.call(greet, until_s)
    return connection


def cut_pieces(world: World, found: list[tuple[SegmentFile, int, int]]) -> list[Any]:
    """Pieces of what is moved, the first one last."""
    total = sum(length for _, _, length in found)
    step = max(world.loop.dice.choice(PIECE_BYTES), -(-total // PIECES_MAX // 64) * 64)
    pieces = [
        (file, at, min(step, offset + length - at))
        for file, offset, length in found
        for at in range(offset, offset + length, step)
    ]
    return pieces[::-1]


def seal_at(store: StoreProcess, batch: SealBatch) -> Any:
    """What `ServedConnection` does with a SEAL: statuses, or StaleEpoch."""
    rows = np.frombuffer(batch.rows, SEAL)
    statuses = np.full(len(rows), _STALE, np.uint8)
    if batch.epoch < store.segments.epoch:
        return StaleEpoch(f"sealed in epoch {batch.epoch}, this is {store.segments.epoch}")
    if not store.segments.knows(batch.namespace_id, batch.generation):
        return np.full(len(rows), Unavailable.code, np.uint8)
    ends = np.cumsum(rows["key_length"], dtype=np.int64)
    starts = ends - rows["key_length"]
    for segment_id in np.unique(rows["segment"]).tolist():
        segment = store.segments.by_id(segment_id)
        if segment is None:
            continue
        mine = rows["segment"] == segment_id
        try:
            statuses[mine] = segment.seal(
                batch.epoch,
                batch.namespace_id,
                batch.generation,
                rows[mine],
                memoryview(batch.keys),
                starts[mine],
            )
        except StaleEpoch as error:
            return error
    return statuses


class SimChannel:
    """What both kinds of channels do alike."""

    verifies_by_lease = False
    route = "simulated"
    obstacle = ""

    def proves(self, lease_id: int) -> bool:
        return False

    def __init__(
        self, world: World, party: Party, node: common_pb2.NodeView, identity: SessionIdentity
    ) -> None:
        self.world = world
        self.party = party
        self.node_id = node.node_id
        self.host_name = node.name
        self.identity = identity
        self._idle: list[DataConnection] = []
        self._every: list[DataConnection] = []
        self._closed = False

    def _take(self, until_s: float) -> DataConnection:
        if self._closed:
            raise ClientClosed("the channel is closed")
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        connection = open_connection(
            self.world, self.party, self.host_name, self.identity, until_s, DataConnection
        )
        self._every.append(connection)
        if self._closed:
            connection.client_gone()
            raise ClientClosed("the channel is closed")
        return connection

    def _call(self, make: Callable[[DataConnection], Any], deadline_s: float) -> Any:
        """`make(connection)` is what happens at the daemon, with a connection of one's own."""
        self.world.step()
        until_s = self.world.loop.now_s + deadline_s
        connection = self._take(until_s)
        try:
            value = connection.call(make(connection), until_s)
        except CenoteError as error:
            if self._closed:
                raise ClientClosed("the channel was closed during the call") from error
            raise
        self._idle.append(connection)
        self.world.step()
        return value

    def seal(self, batch: SealBatch, deadline_s: float) -> U8Array:
        def make(connection: DataConnection) -> Any:
            def act(reply: Callable[[Any], None]) -> None:
                def sealed() -> None:
                    if not connection.closed:
                        reply(seal_at(connection.store, batch))

                # One that was read from the socket late.
                late_s = self.world.loop.dice.random() * 3 if self.world.crawl_s() else 0.0
                self.world.loop.after(late_s, sealed, connection.store.party)

            return act

        self.world.faults.strike_daemon(self.world.hosts[self.host_name])
        with self.world.sealing(self.host_name, batch):
            return cast("U8Array", self._call(make, deadline_s))

    def _read_disk(self, extents: ExtentArray, addresses: U64Array, deadline_s: float) -> U8Array:
        """What the daemon reads from its SSD, and sends."""

        def make(connection: DataConnection) -> Any:
            return lambda reply: serve(connection, extents, reply)

        statuses, data = self._call(make, deadline_s)
        spread(statuses, data, extents, addresses)
        return cast("U8Array", statuses)

    def prove(self, batch: ProofBatch, deadline_s: float) -> tuple[U8Array, bytes]:
        def make(connection: DataConnection) -> Any:
            def act(reply: Callable[[Any], None]) -> None:
                rows = np.frombuffer(batch.rows, PROOF)
                segments = cast("SegmentSet", connection.store.segments)
                reply(prove_rows(segments, batch.grant_id, rows))

            return act

        self.world.faults.strike_daemon(self.world.hosts[self.host_name])
        statuses, tickets = self._call(make, deadline_s)
        return np.frombuffer(statuses, np.uint8), tickets

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        extents = np.array([(segment, 0, offset, length)], EXTENT)
        sums = np.zeros(1, np.uint64) if checksum else None
        statuses = self.read(extents, np.array([address], np.uint64), deadline_s, sums)
        return int(statuses[0]), 0 if sums is None else int(sums[0])

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
        extents = np.array([(segment, 0, offset, length)], EXTENT)
        sums = np.zeros(1, np.uint64) if checksum else None
        statuses = self.write(extents, np.array([address], np.uint64), grant_id, deadline_s, sums)
        return int(statuses[0]), 0 if sums is None else int(sums[0])

    def read(
        self, extents: ExtentArray, addresses: U64Array, deadline_s: float, checksums: Any = None
    ) -> U8Array:
        raise NotImplementedError

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: Any = None,
    ) -> U8Array:
        raise NotImplementedError

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        return Seen([None] * len(extents))

    def close(self) -> None:
        self._closed = True
        for connection in self._every:
            for signal in list(connection.calls):
                signal.set(ClientClosed("the channel was closed during the call"))
            connection.client_gone()
        self._idle.clear()


def spread(statuses: U8Array, data: bytearray, extents: ExtentArray, addresses: U64Array) -> None:
    """Bytes of the items that could be read to where these are wanted."""
    at = 0
    for i, length in enumerate(extents["length"].tolist()):
        if not statuses[i]:
            ctypes.memmove(int(addresses[i]), bytes(data[at : at + length]), length)
            at += length


def sums(addresses: U64Array, extents: ExtentArray, checksums: Any) -> None:
    if checksums is not None:
        for i, (address, length) in enumerate(
            zip(addresses.tolist(), extents["length"].tolist(), strict=True)
        ):
            checksums[i] = xxh3_64_intdigest(ctypes.string_at(address, length))
