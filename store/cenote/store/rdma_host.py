"""The daemon's RDMA end: what its devices have registered, and the queue pairs of its clients.

The daemon moves no byte here: it registers its segments piece by piece as they get their memory,
connects queue pairs that clients ask for over their data connections, and ends them. An ended queue
pair takes nothing any more, whatever its client has posted: that is how a writer is cut off.

Each connection of a client has a *lane*: its queue pairs here, those for reading and those for
writing. A lane belongs to the epoch in which it began, and ends with it; its client makes another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from cenote.api.errors import (
    CenoteError,
    InvalidArgument,
    PermissionDenied,
    ResourceUnavailable,
    StaleEpoch,
    Unavailable,
)
from cenote.runtime.log import get_logger
from cenote.runtime.memlock import pinning_error
from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.sysfs import read_traffic_bytes
from cenote.transport.rdma_lane import address_in
from cenote.transport.rdma_nics import Nics
from cenote.transport.verbs.base import (
    Access,
    CompletionQueue,
    Device,
    MemoryRegion,
    PathSettings,
    QueuePair,
    VerbsError,
)
from cenote.v1 import store_pb2

from .segment import Segment, SegmentSet

__all__ = ["HostedLane", "RdmaHost"]

CHUNK_BYTES: Final = 1 << 30
CHUNK_BYTES_WITH_GIL: Final = 64 << 20
"""Where registering keeps the GIL: a GiB takes a quarter of a second and more."""
QUEUE_PAIRS_MAX: Final = 8_192
_QUEUE_PAIRS_PER_REQUEST_MAX: Final = 32
_LOOK_S: Final = 0.1
_LOOK_WHEN_DONE_S: Final = 1.0
_AGAIN_AFTER_FAILURE_S: Final = 30.0
_COMPLETIONS: Final = 16
_SEGMENT_ACCESS: Final = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

_log = get_logger("cenote.store.rdma")


@dataclass(slots=True)
class _Chunk:
    """A piece of a segment, and its registration with each device that took it."""

    offset: int
    length: int
    regions: dict[str, MemoryRegion] = field(default_factory=dict)


@final
class RdmaHost:
    """Serves `segments` over `nics` until `close`; `start` begins to register."""

    def __init__(
        self,
        segments: SegmentSet,
        nics: Nics,
        *,
        queue_pairs_max: int = QUEUE_PAIRS_MAX,
        chunk_bytes: int | None = None,
    ) -> None:
        self.nics = nics
        self._segments = segments
        self._queue_pairs_max = queue_pairs_max
        if chunk_bytes is None:
            chunk_bytes = CHUNK_BYTES if nics.verbs.name == "ibverbs" else CHUNK_BYTES_WITH_GIL
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._chunks: dict[int, list[_Chunk]] = {}
        """By the segment's index."""
        self._seen_ready: dict[int, int] = {}
        self._lanes: dict[tuple[bytes, int], HostedLane] = {}
        self._queues: dict[str, CompletionQueue] = {}
        """Nothing is ever told there: clients do the work, and these answer by themselves."""
        self.queue_pairs = 0
        self.trouble: CenoteError | None = None
        """What keeps memory from being registered now."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cenote-rdma", daemon=True)
        self._traffic_before: dict[str, tuple[int, int]] = {}
        try:
            for device in nics.devices.values():
                self._make_queue(device)
        except VerbsError as error:
            self._close_queues()
            raise ResourceUnavailable(f"RDMA can't be served: {error}") from error
        self._note_traffic(nics.ports)

    def start(self) -> None:
        self._thread.start()

    # ---- ports --------------------------------------------------------------------------------

    def _make_queue(self, device: Device) -> None:
        self._queues[device.name] = device.completion_queue(_COMPLETIONS)

    def _note_traffic(self, ports: Sequence[NicPort]) -> None:
        for port in ports:
            self._traffic_before[port.name] = read_traffic_bytes(port)

    def add_ports(self, ports: Sequence[NicPort]) -> Sequence[NicPort]:
        """Serve more of them: those that came up. What is registered with others is with their
        devices, too, before long. Returns those that can be served."""
        self._note_traffic(ports)
        return self.nics.add(ports, self._make_queue)

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """(received, sent) since the daemon's start over the ports that are served."""
        received = sent = 0
        for port in self.nics.ports:
            now, before = read_traffic_bytes(port), self._traffic_before[port.name]
            received += max(0, now[0] - before[0])
            sent += max(0, now[1] - before[1])
        return received, sent

    # ---- memory -------------------------------------------------------------------------------

    @property
    def registered_bytes(self) -> int:
        """What at least one device has registered."""
        with self._lock:
            every = [chunk for chunks in self._chunks.values() for chunk in chunks]
        return sum(chunk.length for chunk in every if chunk.regions)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self._run_once())

    def _run_once(self) -> float:
        """After how long to go on."""
        try:
            return _LOOK_WHEN_DONE_S if self.register_more() else _LOOK_S
        except CenoteError as error:
            self.trouble = error
            _log.warning("memory can't be registered; what isn't goes over TCP", error=error)
            return _AGAIN_AFTER_FAILURE_S

    def register_more(self) -> bool:
        """Register what got memory meanwhile; whether all of it is. Raises `pinning_error`s."""
        done = True
        for segment in self._segments.all():
            if segment.disk is not None:  # read over TCP
                continue
            while not self._stopping.is_set() and self._register_next(segment):
                pass
            done &= self._registered_of(segment) == segment.size_bytes
        for segment in self._segments.all():
            self._fill_gaps(segment)
        self.trouble = None
        return done

    def _fill_gaps(self, segment: Segment) -> None:
        """With the devices that are new, and those that refused before."""
        for chunk in self._chunks.get(segment.index, ()):
            for name, device in self.nics.devices.items():
                if name in chunk.regions or self._stopping.is_set():
                    continue
                try:
                    chunk.regions[name] = device.register(
                        segment.address + chunk.offset, chunk.length, _SEGMENT_ACCESS
                    )
                except VerbsError as error:
                    what = f"segment {segment.index}, for {name}"
                    raise pinning_error(error.errno or 0, chunk.length, what) from error

    def _registered_of(self, segment: Segment) -> int:
        chunks = self._chunks.get(segment.index)
        return chunks[-1].offset + chunks[-1].length if chunks else 0

    def _register_next(self, segment: Segment) -> bool:
        """The next chunk of a segment. Small ones only where no more seems to come soon."""
        offset, ready = self._registered_of(segment), segment.ready_bytes
        length = min(self._chunk_bytes, ready - offset)
        settled = self._seen_ready.get(segment.index) == ready or ready == segment.size_bytes
        self._seen_ready[segment.index] = ready
        if length <= 0 or (length < self._chunk_bytes and not settled):
            return False
        chunk = _Chunk(offset, length)
        refusal: VerbsError | None = None
        for name, device in self.nics.devices.items():
            try:
                chunk.regions[name] = device.register(
                    segment.address + offset, length, _SEGMENT_ACCESS
                )
            except VerbsError as error:
                refusal = error
        if not chunk.regions:
            assert refusal is not None
            raise pinning_error(refusal.errno or 0, length, f"segment {segment.index}")
        with self._lock:
            self._chunks.setdefault(segment.index, []).append(chunk)
        return True

    def _tell_registrations(self, reply: store_pb2.RdmaReply) -> None:
        names = list(self.nics.devices)
        reply.devices.extend(names)
        with self._lock:
            known = {index: list(chunks) for index, chunks in self._chunks.items()}
        for segment in self._segments.all():
            if not segment.segment_id or segment.disk is not None:
                continue
            for chunk in known.get(segment.index, ()):
                reply.registrations.add(
                    segment_id=segment.segment_id,
                    offset=chunk.offset,
                    length=chunk.length,
                    address=segment.address + chunk.offset,
                    remote_keys=[
                        chunk.regions[name].remote_key if name in chunk.regions else 0
                        for name in names
                    ],
                )

    # ---- lanes --------------------------------------------------------------------------------

    def new_lane(self) -> HostedLane:
        """For a connection; nothing is made before its client asks for it."""
        return HostedLane(self)

    def answer(
        self, lane: HostedLane, session_id: bytes, writer: bool, request: store_pb2.RdmaRequest
    ) -> store_pb2.RdmaReply:
        """Do what a client asked for over the connection of `lane`.

        Raises InvalidArgument, PermissionDenied (it said in its hello that it does not write),
        ProtocolError, StaleEpoch (the lane has ended), ResourceUnavailable, Unavailable.
        """
        if len(request.queue_pairs) > _QUEUE_PAIRS_PER_REQUEST_MAX:
            raise InvalidArgument(f"more than {_QUEUE_PAIRS_PER_REQUEST_MAX} queue pairs at once")
        if not writer and any(wanted.writes for wanted in request.queue_pairs):
            raise PermissionDenied("this connection said in its hello that it does not write")
        for lane_id in request.ended_lane_ids:
            self._end_lane(session_id, lane_id)
        reply = store_pb2.RdmaReply()
        if request.queue_pairs:
            with self._lock:
                known = self._lanes.setdefault((session_id, request.lane_id), lane)
            if known is not lane:
                raise InvalidArgument("two connections have lanes of one id")
            lane.key = (session_id, request.lane_id)
            lane.connect(request, reply)
        else:
            lane.tell_epoch(reply)
        self._tell_registrations(reply)
        return reply

    def _end_lane(self, session_id: bytes, lane_id: int) -> None:
        with self._lock:
            lane = self._lanes.get((session_id, lane_id))
        if lane is not None and not lane.end():
            raise Unavailable("a queue pair could not be moved to error")

    def forget(self, lane: HostedLane) -> None:
        with self._lock:
            if lane.key is not None and self._lanes.get(lane.key) is lane:
                del self._lanes[lane.key]

    def make_pair(self, wanted: store_pb2.RdmaQueuePair) -> tuple[QueuePair, NicPort]:
        """A queue pair that answers, not connected yet."""
        port = next(
            (p for p in self.nics.ports if (p.device, p.port) == (wanted.device, wanted.port)), None
        )
        if port is None:
            raise InvalidArgument(f"RDMA port {wanted.device}:{wanted.port} is not served")
        with self._lock:
            if self.queue_pairs >= self._queue_pairs_max:
                raise ResourceUnavailable(
                    f"the daemon serves {self._queue_pairs_max} RDMA queue pairs, not more",
                    remedy="close clients that are not used; others go on over TCP",
                )
            self.queue_pairs += 1
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE if wanted.writes else Access.REMOTE_READ
        try:
            device = self.nics.devices[port.device]
            return device.queue_pair(self._queues[port.device], 1, access), port
        except VerbsError as error:
            self.gave_back(1)
            raise ResourceUnavailable(f"no queue pair can be had: {error}") from error

    def gave_back(self, count: int) -> None:
        with self._lock:
            self.queue_pairs -= count

    @property
    def segments(self) -> SegmentSet:
        return self._segments

    def close(self, timeout_s: float = 1.0) -> None:
        """End all lanes and let the memory go. To be called when no connection is served."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        for chunks in self._chunks.values():
            for chunk in chunks:
                for region in chunk.regions.values():
                    with suppress(VerbsError):  # the process is about to end; the kernel does it
                        region.close()
        self._chunks = {}
        self._close_queues()
        self.nics.close()

    def _close_queues(self) -> None:
        while self._queues:
            _, queue = self._queues.popitem()
            with suppress(VerbsError):
                queue.close()


@final
class HostedLane:
    """The queue pairs of one connection; `end` and `end_older` may be called from any thread."""

    def __init__(self, host: RdmaHost) -> None:
        self.key: tuple[bytes, int] | None = None
        self._host = host
        self._lock = threading.Lock()
        self._pairs: list[QueuePair] = []
        self._made_in = 0
        self._ended = False

    def tell_epoch(self, reply: store_pb2.RdmaReply) -> None:
        segments = self._host.segments
        # In this order: a grant that is void in the epoch told must not seem valid.
        reply.epoch = segments.epoch
        reply.first_grant_id = segments.first_grant_id

    def connect(self, request: store_pb2.RdmaRequest, reply: store_pb2.RdmaReply) -> None:
        """Make a queue pair for each that is asked for. See `RdmaHost.answer` for errors."""
        # Under the lock: whoever raises the epoch, and then ends what is older, sees these pairs,
        # or they are made after it.
        with self._lock:
            self._check()
            self.tell_epoch(reply)
            if self._pairs and self._made_in != reply.epoch:
                raise StaleEpoch("this lane began in an earlier epoch", remedy="make another")
            self._made_in = reply.epoch
            for wanted in request.queue_pairs:
                pair, port = self._host.make_pair(wanted)
                self._pairs.append(pair)
                reply.queue_pairs.append(self._connected(pair, port, wanted))

    def _check(self) -> None:
        if self._ended:
            raise StaleEpoch("this lane was ended", remedy="connect again")

    def _connected(
        self, pair: QueuePair, port: NicPort, wanted: store_pb2.RdmaQueuePair
    ) -> store_pb2.RdmaQueuePair:
        device = self._host.nics.devices[port.device]
        peer = address_in(wanted)
        psn = secrets.randbits(24)
        reads = max(1, min(device.limits.reads_in_flight, wanted.reads_in_flight, 255))
        try:
            info = device.port(port.port)
            gid = device.gid(port.port, wanted.gid_index)
            path = PathSettings(port.port, wanted.gid_index, reads_in_flight=reads)
            pair.connect(psn, peer, path)
        except (VerbsError, ValueError) as error:
            raise Unavailable(f"{port.name} can't be connected with the client: {error}") from error
        return store_pb2.RdmaQueuePair(
            device=port.device,
            port=port.port,
            gid_index=wanted.gid_index,
            number=pair.number,
            first_psn=psn,
            lid=info.lid,
            gid=gid,
            mtu_code=info.mtu_code,
            reads_in_flight=reads,
            writes=wanted.writes,
        )

    def end(self) -> bool:
        """Nothing lands over its queue pairs any more, and none is made; False where that can't be
        had. Idempotent."""
        with self._lock:
            self._ended = True
            return self._fail_all()

    def end_older(self, epoch: int) -> bool:
        """`end` it where it began before this epoch; whether it did."""
        with self._lock:
            if not self._pairs or self._made_in >= epoch:
                return False
            self._ended = True
            self._fail_all()
            return True

    def _fail_all(self) -> bool:
        """Under the lock."""
        for pair in list(self._pairs):
            try:
                pair.fail()
            except VerbsError as error:  # the device is in trouble: destroying is the other way
                _log.warning("a queue pair can't be moved to error", error=error)
                try:
                    pair.close()
                except VerbsError:
                    return False
                self._pairs.remove(pair)
                self._host.gave_back(1)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can land over it; after `end`."""
        with self._lock:
            return not self._pairs or (self._ended and self._fail_all())

    def close(self) -> bool:
        """Destroy its queue pairs; whether none is left that something could land over."""
        with self._lock:
            self._ended = True
            pairs, self._pairs = self._pairs, []
            closed = 0
            for pair in pairs:
                try:
                    pair.close()
                    closed += 1
                except VerbsError as error:
                    _log.warning("a queue pair can't be closed", error=error)
                    self._pairs.append(pair)
            left = list(self._pairs)
        self._host.gave_back(closed)
        if not left:
            self._host.forget(self)
        return not left or self.end()
