"""A channel over RDMA: the daemon's processor has no part in it.

A channel works on *lanes* (`rdma_lane`): a connection to the daemon, and queue pairs that were set
up over it. What can't go over RDMA goes over the same connections as over TCP: memory that the
daemon has not registered (yet), and everything while no NIC path works. So a channel never fails
where TCP would not, and comes back to RDMA by itself.

Why nothing lands late in a caller's buffer: a call that ends early, for whatever reason, moves its
queue pairs to error and waits until all that they had under way is told as ended, or destroys them;
where neither can be had, the call raises `BufferInUse`.

Why nothing lands late in the pool: a write that is done over on another path first has the daemon
confirm that the old queue pairs are ended. What a failed write leaves is its daemon's to end, which
moves them to error before it says that the session is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.errors import (
    GrantRevoked,
    ResourceUnavailable,
    StaleEpoch,
)
from cenote.api.rows import EXTENT
from cenote.v1 import store_pb2

from .base import ExtentArray, Seen, U8Array, U64Array
from .claims import is_of_tenure
from .memory_access import checksum_at, checksums_of, copy
from .nics.choice import NicPath
from .pool import ConnectionPool, PooledMessages
from .rdma_lane import Lane, LaneSettings, ask_daemon
from .rdma_lanes import LaneKeeper, RdmaCounters
from .rdma_memory import LocalMemory, StagingBlock
from .rdma_mover import SPIN_S, Mover, NicsFailed
from .rdma_nics import Nics
from .rdma_places import NOWHERE
from .rdma_staged import BLOCKS_PER_CALL, StagedMove
from .tcp import TcpChannel
from .verbs.base import Opcode

__all__ = ["RdmaChannel"]

_VOID: Final = GrantRevoked.code
_NO_GRANT: Final = (1 << 64) - 1
_ONE_BYTES_MAX: Final = 256 << 10
"""Longer ones are worth being divided among NICs."""
_ELSEWHERE: Final = 255
"""Status of what is to go over TCP; no error has this code."""
_ATTEMPTS: Final = 3
_AGAIN_AFTER_S: Final = 1.0
"""How long everything goes over TCP where lanes can't be had for another reason than a NIC's."""
_FENCE_S: Final = 0.3


@final
class RdmaChannel(PooledMessages):
    """See `base.Channel`, and the module."""

    verifies_by_lease = False

    def proves(self, lease_id: int) -> bool:
        """The bytes say nothing of the daemon's tenure at the time when the last one left."""
        return False

    def __init__(
        self,
        pool: ConnectionPool,
        node_id: int,
        epoch: int,
        nics: Nics,
        memory: LocalMemory,
        paths: Sequence[NicPath],
        settings: LaneSettings,
        counters: RdmaCounters,
        spin_s: float = SPIN_S,
    ) -> None:
        self._pool = pool
        self._tcp = TcpChannel(pool, node_id, epoch, pool.access)
        self._node_id = node_id
        self._memory = memory
        self._counters = counters
        self._spin_s = spin_s
        self._lanes = LaneKeeper(pool, nics, memory, paths, settings, counters, spin_s)
        self.closed = self._lanes.closed
        """To be told of each connection that was closed."""

    @property
    def obstacle(self) -> str:
        """Why it goes over TCP now; "" where it does not."""
        return self._lanes.obstacle

    @property
    def node_id(self) -> int:
        return self._node_id

    @property
    def route(self) -> str:
        return self._lanes.route or self._tcp.route

    @property
    def epoch(self) -> int:
        """As of TcpChannel."""
        return self._tcp.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._tcp.epoch = epoch

    def open(self, deadline_s: float) -> None:
        """Make the first connection, so that errors show now. Raises a hello's errors."""
        deadline = monotonic() + deadline_s
        lane = self._lanes.take(deadline, self.epoch, writes=False)
        if lane is None:
            self._tcp.open(max(0.001, deadline - monotonic()))
        else:
            self._pool.give_back(lane.connection)

    # ---- moving -----------------------------------------------------------------------------

    def _move(
        self,
        lane: Lane,
        opcode: int,
        extents: ExtentArray,
        addresses: U64Array,
        deadline: float,
        checksums: U64Array | None,
    ) -> U8Array:
        """Move what can be; _ELSEWHERE for each item that can't. Ends the lane on any error."""
        blocks: Sequence[StagingBlock] = ()
        mover: Mover | None = None
        direct = False
        try:
            pieces, reachable = lane.places.find(extents, addresses)
            if not reachable.all() and self._memory_grew(lane):
                pieces, reachable = lane.places.find(extents, addresses)
            snapshot = self._memory.snapshot
            regions = snapshot.find(pieces.local, pieces.lengths)
            at_hand = regions != NOWHERE
            direct = bool(at_hand.any())
            mine, staged = pieces, None
            if not at_hand.all():
                mine, staged = pieces[at_hand], pieces[~at_hand]
                wanted = BLOCKS_PER_CALL if int(staged.lengths.sum()) > 1 << 20 else 1
                blocks = self._memory.take(wanted, deadline)
                snapshot = self._memory.snapshot
                regions = snapshot.find(mine.local, mine.lengths)
            queues = lane.readers if opcode == Opcode.READ else lane.writers
            mover = Mover(lane, queues, opcode, snapshot, deadline, self._spin_s)
            lengths = np.ascontiguousarray(extents["length"])
            ticket = mover.post(mine, regions) if direct else None
            if staged is not None:
                through = StagedMove(mover, blocks, snapshot, staged, lengths, checksums, deadline)
                through.read() if opcode == Opcode.READ else through.write()
                self._counters.staged_bytes += int(staged.lengths.sum())
            if ticket is not None:
                mover.finish(ticket)
                if checksums is not None:
                    items = np.unique(mine.items)
                    checksums[items] = checksums_of(addresses[items], lengths[items])
        except BaseException:  # whatever it was, nothing of it may land when this has returned
            self._lanes.note_failed(mover)
            self._lanes.drop(lane, blocks, direct=direct)
            raise
        self._memory.give_back(blocks)
        self._end_well(lane, mover, opcode, deadline)
        moved = int(pieces.lengths.sum())
        if opcode == Opcode.READ:
            self._counters.read_bytes += moved
        else:
            self._counters.written_bytes += moved
        return np.where(reachable, 0, _ELSEWHERE).astype(np.uint8)

    def _memory_grew(self, lane: Lane) -> bool:
        """Ask again what is registered, unless that was just done; whether it is more."""
        before = lane.places.covered_bytes
        return lane.refresh_if_due(monotonic()) and lane.places.covered_bytes != before

    def _end_well(self, lane: Lane, mover: Mover, opcode: int, deadline: float) -> None:
        if not mover.failed:
            self._lanes.note_success()
            self._pool.give_back(lane.connection)
            return
        self._lanes.note_failed(mover)
        try:
            if opcode == Opcode.WRITE:
                ask_daemon(lane.connection, store_pb2.RdmaRequest(ended_lane_ids=[lane.lane_id]))
        finally:
            self._pool.discard(lane.connection)

    def _over_rdma(
        self,
        opcode: int,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline: float,
        checksums: U64Array | None,
    ) -> U8Array | None:
        """As `_move`; None where all of it is to go over TCP."""
        for _ in range(_ATTEMPTS):
            lane = self._lanes.take(deadline, self.epoch, writes=opcode == Opcode.WRITE)
            if lane is None:
                return None
            if opcode == Opcode.WRITE:
                refusal = self._refusal(lane, grant_id)
                if refusal is not None:
                    return np.full(len(extents), refusal, np.uint8)
            try:
                return self._move(lane, opcode, extents, addresses, deadline, checksums)
            except NicsFailed as error:
                if opcode == Opcode.WRITE:
                    self._lanes.end_at_daemon(lane.lane_id, deadline)
                self._lanes.obstacle = error.message
                return None
            except ResourceUnavailable as error:  # nothing could be posted: no staging memory
                self._lanes.go_over_tcp(error)
                return None
            except StaleEpoch:
                if opcode == Opcode.WRITE:
                    raise
        return None

    def _refusal(self, lane: Lane, grant_id: int) -> int | None:
        """The status of all items where nothing may be written. Raises StaleEpoch."""
        if self.epoch >= lane.epoch and grant_id >= lane.first_grant_id:
            return None
        if lane.first_grant_id == _NO_GRANT:  # it was made before the daemon attached
            self._pool.discard(lane.connection)
        else:
            self._pool.give_back(lane.connection)
        if self.epoch < lane.epoch:
            raise StaleEpoch(
                f"a change of epoch {self.epoch}; this daemon follows epoch {lane.epoch}",
                remedy="ask the master again",
            )
        return _VOID

    # ---- calls ------------------------------------------------------------------------------

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        return self._call(Opcode.READ, extents, addresses, 0, deadline_s, checksums)

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        return self._call(Opcode.WRITE, extents, addresses, grant_id, deadline_s, checksums)

    def _call(
        self,
        opcode: int,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None,
    ) -> U8Array:
        if not len(extents):
            return np.zeros(0, np.uint8)
        if checksums is not None and self._memory.has_device_memory:
            self._keep_off(addresses, "a checksum can't be taken of it", "pass no checksums")
        deadline = monotonic() + deadline_s
        statuses = self._over_rdma(opcode, extents, addresses, grant_id, deadline, checksums)
        if statuses is None:
            return self._over_tcp(opcode, extents, addresses, grant_id, deadline, checksums)
        left = statuses == _ELSEWHERE
        if left.any():
            some = None if checksums is None else np.zeros(int(left.sum()), np.uint64)
            statuses[left] = self._over_tcp(
                opcode, extents[left], addresses[left], grant_id, deadline, some
            )
            if checksums is not None and some is not None:
                checksums[left] = some
        return statuses

    def _over_tcp(
        self,
        opcode: int,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline: float,
        checksums: U64Array | None,
    ) -> U8Array:
        if self._memory.has_device_memory:
            why = self.obstacle or "some of it is not registered at the daemon"
            self._keep_off(
                addresses, f"it does not go over RDMA now: {why}", "copy it to host memory first"
            )
        self._counters.tcp_calls += 1
        left_s = max(0.001, deadline - monotonic())
        if opcode == Opcode.READ:
            return self._tcp.read(extents, addresses, left_s, checksums)
        return self._tcp.write(extents, addresses, grant_id, left_s, checksums)

    def _keep_off(self, addresses: U64Array, why: str, remedy: str) -> None:
        """The processor must not touch memory of a GPU. Raises ResourceUnavailable."""
        if self._memory.holds_device_memory(addresses):
            raise ResourceUnavailable(f"memory of a GPU: {why}", remedy=remedy)

    def read_direct(
        self, extents: ExtentArray, addresses: U64Array, lease_id: int, deadline_s: float
    ) -> U8Array:
        """As `read`, by NICs alone, into memory that was registered (`register_device`); proven by
        the lease, in the place of a checksum.

        Raises ResourceUnavailable where not all of it can go so, StaleEpoch where the daemon
        follows a later tenure than the lease's.
        """
        deadline = monotonic() + deadline_s
        found = self._memory.snapshot.find(addresses, np.ascontiguousarray(extents["length"]))
        if (found == NOWHERE).any():
            raise ResourceUnavailable("the memory is not registered", remedy="register it")
        statuses = self._over_rdma(Opcode.READ, extents, addresses, 0, deadline, None)
        if statuses is None or (statuses == _ELSEWHERE).any():
            why = self.obstacle or "some of it is not registered at the daemon"
            raise ResourceUnavailable(f"it does not go over RDMA now: {why}")
        lane = self._lanes.take(deadline, self.epoch, writes=False)
        if lane is None:
            raise ResourceUnavailable(f"it does not go over RDMA now: {self.obstacle}")
        try:
            first_grant_id = ask_daemon(lane.connection, store_pb2.RdmaRequest()).first_grant_id
        except BaseException:  # whatever it was, an answer may still come over this connection
            self._lanes.drop(lane, (), direct=False)
            raise
        self._pool.give_back(lane.connection)
        if not is_of_tenure(lease_id, first_grant_id):
            raise StaleEpoch("the lease's leader was replaced", remedy="ask the master again")
        return statuses

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        if length <= _ONE_BYTES_MAX:
            found = self._move_one(
                Opcode.READ, segment, offset, length, address, 0, deadline_s, checksum
            )
            if found is not None:
                return found
        sums = np.zeros(1, np.uint64) if checksum else None
        statuses = self.read(*_one(segment, offset, length, address), deadline_s, sums)
        return int(statuses[0]), 0 if sums is None or statuses[0] else int(sums[0])

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
        if length <= _ONE_BYTES_MAX:
            found = self._move_one(
                Opcode.WRITE, segment, offset, length, address, grant_id, deadline_s, checksum
            )
            if found is not None:
                return found
        sums = np.zeros(1, np.uint64) if checksum else None
        statuses = self.write(*_one(segment, offset, length, address), grant_id, deadline_s, sums)
        return int(statuses[0]), 0 if sums is None or statuses[0] else int(sums[0])

    def _move_one(
        self,
        opcode: int,
        segment: int,
        offset: int,
        length: int,
        address: int,
        grant_id: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int] | None:
        """One small extent, without columns; None where it takes more than the plain way."""
        if checksum and self._memory.has_device_memory:
            return None  # looked at more closely as a batch
        deadline = monotonic() + deadline_s
        writes = opcode == Opcode.WRITE
        lane = self._lanes.take(deadline, self.epoch, writes=writes)
        if lane is None:
            return None
        place = lane.places.find_one(segment, offset, length)
        if place is None or (writes and self._must_ask(lane, grant_id)):
            self._pool.give_back(lane.connection)
            return None
        digest = checksum_at(address, length) if writes and checksum else 0
        try:
            self._through(lane, opcode, place, address, length, deadline)
        except (NicsFailed, ResourceUnavailable, StaleEpoch) as error:
            # Nothing is under way any more: as a batch it is tried in other ways.
            if writes:
                if isinstance(error, StaleEpoch):
                    raise
                self._lanes.end_at_daemon(lane.lane_id, deadline)
            return None
        self._lanes.note_success()
        self._pool.give_back(lane.connection)
        if writes:
            self._counters.written_bytes += length
        else:
            self._counters.read_bytes += length
            digest = checksum_at(address, length) if checksum else 0
        return 0, digest

    def _must_ask(self, lane: Lane, grant_id: int) -> bool:
        """Whether a write may be refused."""
        return self.epoch < lane.epoch or grant_id < lane.first_grant_id

    def _through(
        self,
        lane: Lane,
        opcode: int,
        place: tuple[int, int],
        address: int,
        length: int,
        deadline: float,
    ) -> None:
        """Move one piece over the first path. Ends the lane on any error."""
        snapshot = self._memory.snapshot
        region = snapshot.find_one(address, length)
        blocks: Sequence[StagingBlock] = ()
        mover: Mover | None = None
        local = address
        try:
            if region == NOWHERE:
                blocks = self._memory.take(1, deadline)
                snapshot, local = self._memory.snapshot, blocks[0].address
                region = snapshot.find_one(local, length)
                if opcode == Opcode.WRITE:
                    copy(local, address, length)
                self._counters.staged_bytes += length
            queue = (lane.readers if opcode == Opcode.READ else lane.writers)[0]
            mover = Mover(lane, (queue,), opcode, snapshot, deadline, self._spin_s)
            local_keys, remote_keys = mover.keys_of(queue)
            remote, registration = place
            ticket = queue.post_one(
                opcode,
                local,
                length,
                int(local_keys[region]),
                remote,
                int(remote_keys[registration]),
            )
            mover.finish(ticket)
            if blocks and opcode == Opcode.READ:
                copy(address, local, length)
        except BaseException:  # whatever it was, nothing of it may land when this has returned
            self._lanes.note_failed(mover)
            self._lanes.drop(lane, blocks, direct=not blocks)
            raise
        self._memory.give_back(blocks)

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        return Seen([None] * len(extents))

    def close(self) -> None:
        self._pool.close()


def _one(segment: int, offset: int, length: int, address: int) -> tuple[ExtentArray, U64Array]:
    extents = np.zeros(1, EXTENT)
    extents[0] = (segment, 0, offset, length)
    return extents, np.array([address], np.uint64)
