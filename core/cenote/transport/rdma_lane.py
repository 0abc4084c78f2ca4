"""A lane: one data connection to a daemon and the queue pairs that were set up over it.

It is used by one call at a time, and begins and ends with its connection: whoever reaches a daemon
that was restarted does so over another connection, hence with other queue pairs and with keys of
what that process has registered. Reading and writing have queue pairs of their own; those for
writing are made at the first write.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, final

from cenote.api.errors import ProtocolError, Unavailable
from cenote.v1 import store_pb2

from . import wire
from .connection import DataConnection
from .nics.choice import NicPath
from .rdma_nics import Nics
from .rdma_places import Places
from .rdma_queue import WorkQueue
from .verbs.base import PathSettings, PortState, QueuePairAddress, VerbsError

__all__ = ["Lane", "LaneSettings", "address_in", "ask_daemon"]

_ASK_AGAIN_S: Final = 0.2
_READS_MAX: Final = 255
"""The field of a connection request has 8 bits."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How queue pairs find out that their peer is silent; see `PathSettings`."""

    timeout_exponent: int = 14
    retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    probe_s: float = 0.05
    """How long a read over a path that had failed before may take, for it to be used again."""


def address_in(message: store_pb2.RdmaQueuePair) -> QueuePairAddress:
    """The sender's end, in the bounds of what a device takes. Raises ProtocolError."""
    fits = (
        message.number < 1 << 24
        and message.first_psn < 1 << 24
        and message.lid < 1 << 16
        and len(message.gid) == 16
        and 1 <= message.mtu_code <= 5
        and message.gid_index < 1 << 15
    )
    if not fits:
        raise ProtocolError("the address of a queue pair is not what it should be")
    return QueuePairAddress(
        number=message.number,
        first_psn=message.first_psn,
        lid=message.lid,
        gid=message.gid,
        mtu_code=message.mtu_code,
    )


def ask_daemon(connection: DataConnection, request: store_pb2.RdmaRequest) -> store_pb2.RdmaReply:
    """One exchange over a connection on which a call has begun.

    Raises StaleEpoch, ResourceUnavailable, Unavailable (the daemon has no RDMA, or can't connect),
    after which the connection is as good as before if it is not broken; and a connection's errors.
    """
    call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
    body = wire.encode_rdma_request(request)
    head = wire.REQUEST.pack(wire.OP_RDMA, 0, 0, 1, call_id, 0, 0, len(body))
    connection.send_views([head, body])
    length, _ = connection.receive_reply(wire.OP_RDMA, call_id, 1)
    if length > wire.RDMA_REPLY_BYTES_MAX:
        raise ProtocolError(f"{connection.name} answered with {length} bytes about RDMA")
    answer = bytearray(length)
    if length:
        connection.receive_view(memoryview(answer))
    return wire.decode_rdma_reply(answer)


@final
class Lane:
    """See the module. Raises what `ask_daemon` does, and Unavailable where no path works."""

    def __init__(
        self,
        connection: DataConnection,
        nics: Nics,
        paths: Sequence[NicPath],
        settings: LaneSettings,
    ) -> None:
        self.connection = connection
        self.lane_id = secrets.randbits(63) or 1
        self._nics = nics
        self._settings = settings
        self.readers: list[WorkQueue] = []
        self.writers: list[WorkQueue] = []
        self.epoch = 0
        """Of its queue pairs for writing; the daemon ends them with it."""
        self.first_grant_id = 0
        """Nothing may be written under an older grant."""
        self.places = Places(store_pb2.RdmaReply())
        self.is_fresh = True
        """Not used yet."""
        self._asked_at = monotonic()
        self.refusals: dict[NicPath, str] = {}
        """Paths that could not be connected, and why."""
        try:
            self.readers = self._connected(paths, writes=False)
        except BaseException:  # whatever it was, nothing may stay open
            self.close()
            raise

    def make_writers(self) -> None:
        """Queue pairs for writing, over the paths for reading."""
        if not self.writers:
            self.writers = self._connected([queue.path for queue in self.readers], writes=True)

    def refresh_if_due(self, now: float) -> bool:
        """Ask what is registered by now, unless that was just done; whether it was asked."""
        if now - self._asked_at < _ASK_AGAIN_S:
            return False
        self._asked_at = now
        self.places = Places(ask_daemon(self.connection, store_pb2.RdmaRequest()))
        return True

    def _connected(self, paths: Sequence[NicPath], *, writes: bool) -> list[WorkQueue]:
        made: list[WorkQueue] = []
        try:
            for path in paths:
                queue = self._made(path)
                if queue is not None:
                    made.append(queue)
            if not made:
                why = "; ".join(self.refusals.values()) or "there is no path"
                raise Unavailable(f"no RDMA path to {self.connection.name} works: {why}")
            request = store_pb2.RdmaRequest(
                lane_id=self.lane_id, queue_pairs=[self._asked(queue, writes) for queue in made]
            )
            reply = ask_daemon(self.connection, request)
            if len(reply.queue_pairs) != len(made):
                raise ProtocolError(f"{self.connection.name} connected other queue pairs")
            for queue, answer in zip(made, reply.queue_pairs, strict=True):
                self._connect(queue, answer)
        except BaseException:  # whatever it was, nothing may stay open
            for queue in made:
                queue.close()
            raise
        self.places = Places(reply)
        if writes:
            self.epoch, self.first_grant_id = reply.epoch, reply.first_grant_id
        return [queue for queue in made if queue.path.peer.device in self.places.keys]

    def _made(self, path: NicPath) -> WorkQueue | None:
        device = self._nics.devices[path.local.device]
        try:
            if device.port(path.local.port).state != PortState.ACTIVE:
                self.refusals[path] = f"port {path.local.name} is down"
                return None
            return WorkQueue(path, device)
        except VerbsError as error:
            self.refusals[path] = str(error.strerror or error)
            return None

    def _asked(self, queue: WorkQueue, writes: bool) -> store_pb2.RdmaQueuePair:
        path = queue.path
        port = queue.device.port(path.local.port)
        return store_pb2.RdmaQueuePair(
            device=path.peer.device,
            port=path.peer.port,
            gid_index=path.peer_gid.index,
            number=queue.pair.number,
            first_psn=queue.first_psn,
            lid=port.lid,
            gid=path.local_gid.value.packed,
            mtu_code=port.mtu_code,
            reads_in_flight=min(_READS_MAX, queue.device.limits.reads_in_flight),
            writes=writes,
        )

    def _connect(self, queue: WorkQueue, answer: store_pb2.RdmaQueuePair) -> None:
        peer = address_in(answer)
        settings = PathSettings(
            port=queue.path.local.port,
            gid_index=queue.path.local_gid.index,
            reads_in_flight=max(1, min(_READS_MAX, answer.reads_in_flight)),
            timeout_exponent=self._settings.timeout_exponent,
            retries=self._settings.retries,
            traffic_class=self._settings.traffic_class,
            service_level=self._settings.service_level,
        )
        try:
            queue.connect(peer, settings)
        except VerbsError as error:
            raise Unavailable(f"{queue.path.local.name} can't be connected: {error}") from error

    def stop(self) -> bool:
        """Nothing of its queue pairs touches memory here any more, if that is certain."""
        outcomes = [queue.stop() for queue in (*self.readers, *self.writers)]  # each, in any case
        return all(outcomes)

    def close(self) -> bool:
        """Destroy its queue pairs; whether nothing touches memory here any more."""
        outcomes = [queue.close() for queue in (*self.readers, *self.writers)]
        return all(outcomes)
