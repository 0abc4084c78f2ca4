"""One-sided access over TCP, emulated by the daemon: a batch of extents, then bytes.

Bytes go straight between socket and memory, in steps that stay in the cache, where they are hashed.
A call uses one connection. Batches beyond SLICE_ITEMS are cut into requests of which the next is
under way while the last is answered, so that neither side waits for the other; a READ request is so
short that a daemon busy sending always has room for the next (no deadlock).
"""

from __future__ import annotations

import socket
import weakref
from collections import deque
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.errors import ClientClosed, InvalidArgument, ProtocolError, Unavailable
from cenote.security.tls import Tls
from cenote.v1 import common_pb2

from . import wire
from .access import GRANTS_MAX, Access
from .base import ExtentArray, Region, Seen, SessionIdentity, U8Array, U64Array
from .connection import SMALL_BYTES, DataConnection
from .item_stream import RECEIVE_STEP_BYTES, SEND_STEP_BYTES, move_hashed, move_items
from .memory_access import MEMORY, checksum_at
from .opening import parse_target
from .pool import ConnectionPool, PooledMessages, hello_for

__all__ = ["TcpChannel", "TcpTransport"]

SPIN_S: Final = 150e-6
SLICE_ITEMS: Final = 1_024
REQUESTS_AHEAD: Final = 2
_MSG_MORE: Final = socket.MSG_MORE

_pack_one: Final = wire.REQUEST_ONE.pack


@final
class TcpChannel(PooledMessages):
    """See `base.Channel`. `epoch` goes into WRITE requests; a client that learns of a new epoch
    sets it (grants of the old one are void)."""

    verifies_by_lease = False
    obstacle = ""

    def proves(self, lease_id: int) -> bool:
        """The bytes say nothing of the daemon's tenure at the time when the last one left."""
        return False

    def __init__(
        self, pool: ConnectionPool, node_id: int, epoch: int, access: Access | None = None
    ) -> None:
        self.epoch = epoch
        self._access = access or Access()
        self._shown: dict[int, None] = {}
        """Grants that the daemon has been shown, oldest first."""
        self._pool = pool
        self._node_id = node_id

    @property
    def node_id(self) -> int:
        return self._node_id

    @property
    def route(self) -> str:
        return self._pool.address

    def open(self, deadline_s: float) -> None:
        """Make the first connection, so that errors show now. Raises a hello's errors."""
        now = monotonic()
        self._pool.give_back(self._pool.take(now + deadline_s, now))

    # ---- reads ------------------------------------------------------------------------------

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        now = monotonic()
        pool = self._pool
        connection = pool.take(now + deadline_s, now)
        try:
            call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
            out = connection.out_address
            MEMORY[out : out + wire.HEAD_BYTES] = _pack_one(
                wire.OP_READ, 0, 0, 1, call_id, 0, 0, wire.EXTENT_BYTES, segment, 0, offset, length
            )
            connection.send(out, wire.HEAD_BYTES)
            body, statuses = connection.receive_reply(wire.OP_READ, call_id, 1)
            if statuses[0]:
                digest = 0
                if body:
                    raise ProtocolError(f"{connection.name} sent {body} bytes of a failed item")
            elif body != length:
                raise ProtocolError(f"{connection.name} sent {body} bytes of {length}")
            elif checksum:
                digest = move_hashed(connection.receive, address, length, RECEIVE_STEP_BYTES)
            else:
                digest = 0
                connection.receive(address, length)
        except BaseException:  # whatever it was, the payload may still be on its way
            pool.discard(connection)
            raise
        pool.give_back(connection)
        return statuses[0], digest

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        now = monotonic()
        statuses = np.zeros(len(extents), np.uint8)
        if not len(extents):
            return statuses
        pool = self._pool
        connection = pool.take(now + deadline_s, now)
        try:
            slices = deque(range(0, len(extents), SLICE_ITEMS))
            under_way: deque[tuple[int, int, int]] = deque()
            while slices or under_way:
                while slices and len(under_way) < REQUESTS_AHEAD:
                    first = slices.popleft()
                    last = min(len(extents), first + SLICE_ITEMS)
                    call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
                    under_way.append((first, last, call_id))
                    _send_request(connection, wire.OP_READ, call_id, 0, 0, extents[first:last])
                first, last, call_id = under_way.popleft()
                lengths = np.ascontiguousarray(extents["length"][first:last])
                part = None if checksums is None else checksums[first:last]
                statuses[first:last] = _receive_items(
                    connection, call_id, addresses[first:last], lengths, part
                )
        except BaseException:  # whatever it was, payload may still be on its way
            pool.discard(connection)
            raise
        pool.give_back(connection)
        return statuses

    # ---- writes -----------------------------------------------------------------------------

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
        now = monotonic()
        pool = self._pool
        connection = pool.take(now + deadline_s, now)
        try:
            if self._access.grants and grant_id not in self._shown:
                self._show(connection, grant_id)
            call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
            head = _pack_one(
                wire.OP_WRITE, 0, 0, 1, call_id, self.epoch, grant_id,
                wire.EXTENT_BYTES + length, segment, 0, offset, length,
            )  # fmt: skip
            digest = 0
            if length <= SMALL_BYTES:
                out = connection.out_address
                end = out + wire.HEAD_BYTES
                MEMORY[out:end] = head
                MEMORY[end : end + length] = MEMORY[address : address + length]
                connection.send(out, wire.HEAD_BYTES + length)
                if checksum:  # while the daemon is at it
                    digest = checksum_at(address, length)
            elif length <= SEND_STEP_BYTES:
                connection.send_views([head, MEMORY[address : address + length]])
                if checksum:
                    digest = checksum_at(address, length)
            else:
                connection.send_views([head], _MSG_MORE)
                if checksum:
                    digest = move_hashed(connection.send, address, length, SEND_STEP_BYTES)
                else:
                    connection.send(address, length)
            _, statuses = connection.receive_reply(wire.OP_WRITE, call_id, 1)
        except BaseException:  # whatever it was, the reply may still be on its way
            pool.discard(connection)
            raise
        pool.give_back(connection)
        return statuses[0], digest

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        now = monotonic()
        statuses = np.zeros(len(extents), np.uint8)
        if not len(extents):
            return statuses
        pool = self._pool
        connection = pool.take(now + deadline_s, now)
        try:
            if self._access.grants and grant_id not in self._shown:
                self._show(connection, grant_id)
            under_way: deque[tuple[int, int, int]] = deque()
            for first in range(0, len(extents), SLICE_ITEMS):
                last = min(len(extents), first + SLICE_ITEMS)
                call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
                some = extents[first:last]
                lengths = np.ascontiguousarray(some["length"])
                _send_request(
                    connection, wire.OP_WRITE, call_id, self.epoch, grant_id, some,
                    int(lengths.sum()),
                )  # fmt: skip
                move_items(
                    connection.send,
                    connection.send_views,
                    addresses[first:last],
                    lengths,
                    None if checksums is None else checksums[first:last],
                    SEND_STEP_BYTES,
                )
                under_way.append((first, last, call_id))
                if len(under_way) >= REQUESTS_AHEAD:
                    _receive_statuses(connection, under_way.popleft(), statuses)
            while under_way:
                _receive_statuses(connection, under_way.popleft(), statuses)
        except BaseException:  # whatever it was, replies may still be on their way
            pool.discard(connection)
            raise
        pool.give_back(connection)
        return statuses

    def _show(self, connection: DataConnection, grant_id: int) -> None:
        """Prove to the daemon that the grant is this session's, before the first write under it."""
        grant = self._access.grants.get(grant_id)
        if grant is None:
            return
        call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
        prefix = wire.GRANT_PREFIX.pack(grant.namespace_id, len(grant.signatures))
        body = b"".join((prefix, grant.signatures, grant.extents))
        count = len(grant.extents) // wire.EXTENT_BYTES
        head = wire.REQUEST.pack(
            wire.OP_GRANT, 0, 0, count, call_id, self.epoch, grant_id, len(body)
        )
        connection.send_views([head, body])
        connection.receive_reply(wire.OP_GRANT, call_id, 1)
        self._shown[grant_id] = None
        while len(self._shown) > GRANTS_MAX:
            self._shown.pop(next(iter(self._shown), 0), None)

    # ---- the rest ---------------------------------------------------------------------------

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        return Seen([None] * len(extents))

    def close(self) -> None:
        self._pool.close()


def _send_request(
    connection: DataConnection,
    op: int,
    call_id: int,
    epoch: int,
    grant_id: int,
    extents: ExtentArray,
    payload_bytes: int = 0,
) -> None:
    rows = np.ascontiguousarray(extents).view(np.uint8).data
    size = wire.REQUEST_BYTES + len(rows)
    head = wire.REQUEST.pack(
        op, 0, 0, len(extents), call_id, epoch, grant_id, len(rows) + payload_bytes
    )
    if payload_bytes:
        connection.send_views([head, rows], _MSG_MORE)
        return
    out = connection.out_address
    MEMORY[out : out + wire.REQUEST_BYTES] = head
    MEMORY[out + wire.REQUEST_BYTES : out + size] = rows
    connection.send(out, size)


def _receive_items(
    connection: DataConnection,
    call_id: int,
    addresses: U64Array,
    lengths: U64Array,
    checksums: U64Array | None,
) -> U8Array:
    """The reply to a READ: statuses, and the payload of the good items to their addresses."""
    count = len(lengths)
    body, raw = connection.receive_reply(wire.OP_READ, call_id, count)
    statuses = np.frombuffer(raw, np.uint8)
    if not any(raw):
        if body != int(lengths.sum()):
            raise ProtocolError(f"{connection.name} sent {body} bytes of payload")
        move_items(
            connection.receive,
            connection.receive_views,
            addresses,
            lengths,
            checksums,
            RECEIVE_STEP_BYTES,
        )
        return statuses
    good = statuses == 0
    if body != int(lengths[good].sum()):
        raise ProtocolError(f"{connection.name} sent {body} bytes of payload")
    if body:
        some = None if checksums is None else np.empty(int(good.sum()), np.uint64)
        move_items(
            connection.receive,
            connection.receive_views,
            addresses[good],
            lengths[good],
            some,
            RECEIVE_STEP_BYTES,
        )
        if checksums is not None and some is not None:
            checksums[good] = some
    return statuses


def _receive_statuses(
    connection: DataConnection, request: tuple[int, int, int], statuses: U8Array
) -> None:
    first, last, call_id = request
    _, raw = connection.receive_reply(wire.OP_WRITE, call_id, last - first)
    statuses[first:last] = np.frombuffer(raw, np.uint8)


@final
class TcpTransport:
    """Channels over TCP.

    `connections_per_peer` bounds the calls that are under way to one daemon at once; others wait.
    `spin_s`: look for a reply for so long before sleeping until it comes; 0 never. `tls`: how to
    speak TLS to daemons that ask for it.
    """

    kind = common_pb2.TRANSPORT_KIND_TCP

    def __init__(
        self,
        *,
        connections_per_peer: int = 4,
        spin_s: float = SPIN_S,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        if connections_per_peer < 1:
            raise InvalidArgument("connections_per_peer must be at least 1")
        self._connections_per_peer = connections_per_peer
        self._spin_s = spin_s
        self._channels: weakref.WeakSet[TcpChannel] = weakref.WeakSet()
        self._closed = False

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        if any(endpoint.kind == self.kind for endpoint in node.endpoints):
            return None
        return "the node tells no TCP address"

    def register(self, address: int, length: int, keeper: object) -> Region:
        return Region(address, length, keeper)

    def deregister(self, region: Region) -> None:
        """Nothing to do: sockets take any memory."""

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> TcpChannel:
        if self._closed:
            raise ClientClosed("the TCP transport is closed")
        target = next(
            (parse_target(e.address) for e in node.endpoints if e.kind == self.kind), None
        )
        if target is None:
            raise Unavailable(f"node {node.name or node.node_id} has no TCP address")
        name = f"{node.name or f'node {node.node_id}'} ({target[0]}:{target[1]})"
        channel = TcpChannel(
            ConnectionPool(
                target,
                name,
                hello_for(identity, epoch, writer=True),
                self._connections_per_peer,
                self._spin_s,
                access=identity.access,
                tls=self._tls,
            ),
            node.node_id,
            epoch,
            identity.access,
        )
        try:
            channel.open(deadline_s)
        except BaseException:  # whatever it was, no socket may stay open
            channel.close()
            raise
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        self._closed = True
        for channel in list(self._channels):
            channel.close()
