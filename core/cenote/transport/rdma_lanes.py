"""The lanes of one channel: made when they are needed, given up when something is wrong, and when
they are made again over which NIC paths.

A path that failed is left out, and probed now and then when a lane is made (`nics.health`). Without
any path there are no lanes, and the channel goes over TCP until one comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ProtocolError,
    ResourceUnavailable,
    StaleEpoch,
    Unavailable,
)
from cenote.v1 import store_pb2

from .connection import DataConnection
from .nics.choice import NicPath
from .nics.health import PathHealth
from .pool import ConnectionPool
from .rdma_lane import Lane, LaneSettings, ask_daemon
from .rdma_memory import LocalMemory, StagingBlock
from .rdma_mover import Mover
from .rdma_nics import Nics
from .rdma_queue import WorkQueue
from .verbs.base import Opcode, WorkStatus

__all__ = ["LaneKeeper", "RdmaCounters"]

_ATTEMPTS: Final = 3
_AGAIN_AFTER_S: Final = 1.0
"""How long everything goes over TCP where lanes can't be had for another reason than a NIC's."""
_FENCE_S: Final = 0.3
_REFUSED_MAX: Final = 3
_PROBE_S_MAX: Final = 2.0


@final
@dataclass(slots=True)
class RdmaCounters:
    """Totals of a transport."""

    read_bytes: int = 0
    written_bytes: int = 0
    staged_bytes: int = 0
    """Of these, what went through staging memory."""
    tcp_calls: int = 0
    """Calls that went over TCP, wholly or in part."""
    lanes: int = 0
    """Made so far."""
    failed_paths: int = 0


@final
class LaneKeeper:
    """For several threads. `pool`: its connections carry the lanes; it tells `closed` of each that
    it closes."""

    def __init__(
        self,
        pool: ConnectionPool,
        nics: Nics,
        memory: LocalMemory,
        paths: Sequence[NicPath],
        settings: LaneSettings,
        counters: RdmaCounters,
        spin_s: float,
    ) -> None:
        self._pool = pool
        self._nics = nics
        self._memory = memory
        self._paths = list(paths)
        self._settings = settings
        self._counters = counters
        self._spin_s = spin_s
        self._lock = threading.Lock()
        self._health = PathHealth(len(self._paths), monotonic())
        self._lanes: dict[DataConnection, Lane] = {}
        self._tcp_until = 0.0
        self._refused = 0
        """How often in a row the daemon's device did, lately."""
        self.obstacle = ""
        """Why it goes over TCP now; "" where it does not."""

    @property
    def route(self) -> str:
        """The NICs that are used now, ours and the peer's; "" where there is none."""
        with self._lock:
            working = [self._paths[index] for index in self._health.working]
        pairs = ", ".join(f"{path.local.name} -> {path.peer.name}" for path in working)
        if len(working) in (0, len(self._paths)):
            return pairs
        return f"{len(working)} of {len(self._paths)} NICs: {pairs}"

    def closed(self, connection: DataConnection) -> None:
        """Its lane ends with it."""
        lane = self._lanes.pop(connection, None)
        if lane is not None:
            lane.close()

    # ---- lanes ------------------------------------------------------------------------------

    def take(self, deadline: float, epoch: int, *, writes: bool) -> Lane | None:
        """A lane to oneself, its connection's call begun; None: everything goes over TCP now.

        Raises DeadlineExceeded, ClientClosed, GrantRevoked and what else a hello is refused with.
        """
        for _ in range(_ATTEMPTS):
            now = monotonic()
            if now < self._tcp_until:
                return None
            connection = self._pool.take(deadline, now)
            lane = self._lanes.get(connection)
            if lane is not None and (
                not connection.is_quiet() or self._is_outdated(lane, epoch, now)
            ):
                self._pool.discard(connection)
                continue
            try:
                if lane is None:
                    lane = self._new_lane(connection, now)
                if lane is not None and writes:
                    lane.make_writers()
            except StaleEpoch:  # it was ended a moment ago
                self._pool.discard(connection)
                continue
            except (Unavailable, ResourceUnavailable, ProtocolError) as error:
                self._pool.discard(connection)
                self.go_over_tcp(error)
                return None
            except BaseException:  # whatever it was, an answer may still be on its way
                self._pool.discard(connection)
                raise
            if lane is None:
                self._pool.give_back(connection)
            return lane
        return None

    def _is_outdated(self, lane: Lane, epoch: int, now: float) -> bool:
        if lane.writers and lane.epoch < epoch and not lane.is_fresh:
            return True
        lane.is_fresh = False
        with self._lock:
            probe_s = self._health.next_probe_s()
        return probe_s is not None and probe_s <= now

    def _new_lane(self, connection: DataConnection, now: float) -> Lane | None:
        with self._lock:
            chosen = list(self._health.working)
            probed = self._health.begin_probe(now)
        if probed is not None:
            chosen.append(probed)
        if not chosen:
            return None
        numbers = {self._paths[index]: index for index in chosen}
        try:
            lane = Lane(connection, self._nics, list(numbers), self._settings)
        except BaseException:  # whatever it was, the probe has ended
            if probed is not None:
                self._failed(probed, "it could not be connected")
            raise
        self._lanes[connection] = lane  # from here on it ends with its connection
        for path, why in lane.refusals.items():
            self._failed(numbers[path], why)
        if probed is not None and self._paths[probed] not in lane.refusals:
            self._probe(lane, probed)
        if not lane.readers:
            del self._lanes[connection]
            lane.close()
            return None
        self._counters.lanes += 1
        self.obstacle = ""
        return lane

    def _probe(self, lane: Lane, index: int) -> None:
        """Read something over a path that had failed; it stays out of the lane where that fails."""
        [queue] = [queue for queue in lane.readers if queue.path is self._paths[index]]
        until = monotonic() + min(_PROBE_S_MAX, self._settings.probe_s)
        try:
            self._read_a_little(lane, queue, until)
        except CenoteError as error:
            queue.close()
            lane.readers.remove(queue)
            self._failed(index, f"its probe failed: {error.message}")
        else:
            with self._lock:
                self._health.recovered(index, monotonic())

    def _read_a_little(self, lane: Lane, queue: WorkQueue, until: float) -> None:
        pieces = lane.places.first_bytes(queue.path.peer.device)
        if pieces is None:
            return
        blocks = self._memory.take(1, until)
        try:
            snapshot = self._memory.snapshot
            local = np.array([blocks[0].address], np.uint64)
            pieces = pieces.at(local)
            mover = Mover(lane, [queue], Opcode.READ, snapshot, until, self._spin_s)
            mover.finish(mover.post(pieces, snapshot.find(local, pieces.lengths)))
        except BaseException:
            if queue.stop():
                self._memory.give_back(blocks)
            raise
        self._memory.give_back(blocks)

    def _failed(self, index: int, why: str) -> None:
        with self._lock:
            self._health.failed(index, why, monotonic())
            if not self._health.working:
                self.obstacle = why
        self._counters.failed_paths += 1

    def go_over_tcp(self, error: CenoteError) -> None:
        self.obstacle = error.message
        self._tcp_until = monotonic() + _AGAIN_AFTER_S

    def note_success(self) -> None:
        """A call went well."""
        self._refused = 0

    def note_failed(self, mover: Mover | None) -> None:
        for queue in mover.failed if mover is not None else ():
            if queue.status == WorkStatus.REMOTE_ACCESS:
                # Nothing is wrong with the path: what was known of the daemon's memory was.
                self._refused += 1
                if self._refused >= _REFUSED_MAX:
                    self._refused = 0
                    self._tcp_until = monotonic() + _AGAIN_AFTER_S
            elif queue.status != WorkStatus.LOCAL_PROTECTION:
                self._failed(self._paths.index(queue.path), queue.why)

    def drop(self, lane: Lane, blocks: Sequence[StagingBlock], *, direct: bool) -> None:
        """End a lane in the middle of something. Raises BufferInUse, and then keeps the lane."""
        stopped = lane.stop()
        if stopped:
            self._memory.give_back(blocks)
        else:
            self._lanes.pop(lane.connection, None)  # so that it is not closed, nor used again
            self._memory.keep(lane, blocks)
        self._pool.discard(lane.connection)
        if not stopped and direct:
            raise BufferInUse(
                "an RDMA device did not let go of the call's memory",
                remedy="keep the buffer until the client is closed",
            )

    def end_at_daemon(self, lane_id: int, deadline: float) -> None:
        """Have the daemon confirm that nothing lands over a lane any more, over any connection."""
        now = monotonic()
        connection = self._pool.take(min(deadline, now + _FENCE_S), now)
        try:
            ask_daemon(connection, store_pb2.RdmaRequest(ended_lane_ids=[lane_id]))
        except BaseException:  # whatever it was, the answer may still be on its way
            self._pool.discard(connection)
            raise
        self._pool.give_back(connection)
