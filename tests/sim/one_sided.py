"""A transport with the freedom of RDMA: who writes asks nobody, and can't be told to stop.

What a client has posted lands at the daemon's memory piece by piece, in any order, some of it very
late; also while the daemon, or the client, is stopped, and for a while after the client gave up or
died. The daemon looks at none of it. All it can do is to move a queue pair to error (`revoke`), or
to die: then nothing of it lands any more. So two rules stand for what it checks elsewhere:

- a daemon that follows a new leader ends every queue pair for writing that is older, used or not;
- who writes posts nothing for a grant that was void when the queue pair was made.

Reads go over queue pairs of their own. Seals are messages, as over TCP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.store.segments import NO_GRANT
from cenote.transport.base import ExtentArray, SessionIdentity, U8Array, U64Array
from cenote.v1 import common_pb2
from sim.data_connection import (
    DataConnection,
    SimChannel,
    Write,
    cut_pieces,
    open_connection,
    sums,
)
from sim.disk_serving import disk_ids
from sim.loop import Signal
from sim.stores import SegmentFile
from sim.transports import SimTransport

__all__ = ["SimOneSided"]

_STALE: Final = StaleLocation.code
_INVALID: Final = InvalidArgument.code

Place = tuple[SegmentFile, int, int]
Landing = Callable[[SegmentFile, int, int], None]
"""Called with (file, offset, length) when a piece is there."""


class QueuePair(DataConnection):
    """A connection whose data the daemon never sees."""

    made_in = 0
    """The epoch that the daemon was attached to then, as the client was told, too."""
    first_grant_id = NO_GRANT
    """Likewise."""
    for_writes = False

    def refuses(self, grant_id: int) -> bool:
        """Whether the client must not use it for this grant."""
        return grant_id < self.first_grant_id

    def writes_of_older(self, epoch: int) -> bool:
        return self.for_writes and self.made_in < epoch


class OneSidedChannel(SimChannel):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._readers: list[QueuePair] = []
        self._writers: list[QueuePair] = []

    # ---- queue pairs ------------------------------------------------------------------------

    def _queue_pair(self, until_s: float, *, write: bool) -> QueuePair:
        if self._closed:
            raise ClientClosed("the channel is closed")
        idle = self._writers if write else self._readers
        while idle:
            made = idle.pop()
            if not made.closed:
                return made
        made = open_connection(
            self.world, self.party, self.host_name, self.identity, until_s, QueuePair
        )
        self._every.append(made)

        def set_up(reply: Callable[[Any], None]) -> None:
            made.made_in = made.store.segments.epoch
            made.first_grant_id = made.store.segments.first_grant_id
            made.for_writes = write
            reply(True)

        made.call(set_up, until_s)
        return made

    def _locate(self, pair: QueuePair, extents: ExtentArray) -> tuple[U8Array, list[Place | None]]:
        """What the daemon said of its memory when it was asked last: here, it always knows."""
        statuses = np.zeros(len(extents), np.uint8)
        found: list[Place | None] = []
        files = {s.segment_id: s for s in pair.store.sim_segments if s.segment_id}
        for i, (segment_id, _, offset, length) in enumerate(extents.tolist()):
            segment = files.get(segment_id)
            if segment is None:
                statuses[i] = _STALE
            elif not length or offset + length > segment.ready_bytes:
                statuses[i] = _INVALID
            found.append(None if segment is None or statuses[i] else (segment.file, offset, length))
        return statuses, found

    # ---- what is under way ------------------------------------------------------------------

    def _post(
        self, pair: QueuePair, pieces: list[Place], landing: Landing, crawl_s: float, until_s: float
    ) -> None:
        """Have every piece land; returns when all have, and raises where that can't be told."""
        world, loop = self.world, self.world.loop
        signal = Signal(loop)
        left = [len(pieces)]

        def arrive(piece: Place) -> None:
            if pair.closed:
                return
            if world.network.is_cut(self.party.name, self.host_name):
                loop.after(world.piece_delay_s(crawl_s) + 0.05, partial(arrive, piece))
                return
            landing(*piece)
            left[0] -= 1
            if left[0]:
                return
            pair.end_write()
            if pair.given_up:
                pair._close(Unavailable("closed by the client"))
            else:
                loop.after(world.network.delay_s(), signal.set, self.party)

        pair.calls[signal] = None
        for number, piece in enumerate(pieces):
            delay_s = world.network.delay_s() + world.piece_delay_s(crawl_s)
            delay_s += number * 2 * crawl_s * loop.dice.random()
            loop.after(delay_s, partial(arrive, piece))
        if not pieces:
            signal.set()
        ended = signal.wait(max(0.0, until_s - loop.now_s))
        pair.calls.pop(signal, None)
        if not ended:
            pair.client_gone()  # moved to error here: nothing lands in our memory any more
            raise DeadlineExceeded(f"{self.host_name} did not complete before the deadline")
        if isinstance(signal.value, CenoteError):
            pair.client_gone()
            raise type(signal.value)(signal.value.message)

    def _run(
        self, deadline_s: float, write: bool, act: Callable[[QueuePair, float], U8Array]
    ) -> U8Array:
        self.world.step()
        until_s = self.world.loop.now_s + deadline_s
        pair = self._queue_pair(until_s, write=write)
        if pair.closed:  # nothing is posted then
            raise pair.farewell or Unavailable("the queue pair is in error")
        try:
            statuses = act(pair, until_s)
        except CenoteError as error:
            if self._closed:
                raise ClientClosed("the channel was closed during the call") from error
            raise
        (self._writers if write else self._readers).append(pair)
        self.world.step()
        return statuses

    def read(
        self, extents: ExtentArray, addresses: U64Array, deadline_s: float, checksums: Any = None
    ) -> U8Array:
        def act(pair: QueuePair, until_s: float) -> U8Array:
            statuses, found = self._locate(pair, extents)
            # Several, where a stale location and a newer one begin at the same place.
            targets: dict[Place, list[int]] = {}
            pieces: list[Place] = []
            for place, address in zip(found, addresses.tolist(), strict=True):
                cut = [] if place is None else cut_pieces(self.world, [place])
                pieces += cut
                for piece in cut:
                    assert place is not None
                    targets.setdefault(piece, []).append(address + piece[1] - place[1])

            def landing(file: SegmentFile, offset: int, length: int) -> None:
                if not pair.given_up:
                    data = file.data[offset : offset + length].tobytes()
                    mine = targets[file, offset, length]
                    ctypes.memmove(mine.pop() if len(mine) > 1 else mine[0], data, length)

            self._post(pair, pieces, landing, self.world.crawl_s(), until_s)
            asked = np.isin(extents["segment"], disk_ids(pair.store))
            if asked.any():  # staged, and sent as over TCP
                left_s = max(0.0, until_s - self.world.loop.now_s)
                statuses[asked] = self._read_disk(extents[asked], addresses[asked], left_s)
            sums(addresses, extents, checksums)
            return statuses

        return self._run(deadline_s, False, act)

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: Any = None,
    ) -> U8Array:
        world = self.world
        world.faults.strike_before_write(self.party, world.hosts[self.host_name])

        def act(pair: QueuePair, until_s: float) -> U8Array:
            if pair.refuses(grant_id):
                if pair.first_grant_id == NO_GRANT:
                    pair.client_gone()  # its daemon was not attached yet
                else:
                    self._writers.append(pair)
                raise StaleEpoch("the grant is older than the queue pair")
            statuses, found = self._locate(pair, extents)
            payload: dict[tuple[int, int], bytes] = {}
            pieces: list[Place] = []
            for place, address in zip(found, addresses.tolist(), strict=True):
                if place is None:
                    continue
                cut = cut_pieces(world, [place])
                pieces += cut
                for file, offset, length in cut:
                    source = address + offset - place[1]
                    payload[id(file), offset] = ctypes.string_at(source, length)
            write = pair.write = Write(self.party.name, grant_id, list(pieces))
            world.write_begins(write, self.party, pair.store.party)

            def landing(file: SegmentFile, offset: int, length: int) -> None:
                write.pieces.remove((file, offset, length))
                world.oracle.landed(write, file, offset, length)
                data = payload[id(file), offset]
                file.data[offset : offset + length] = np.frombuffer(data, np.uint8)

            if not pieces:
                pair.end_write()
            self._post(pair, pieces, landing, write.crawl_s, until_s)
            sums(addresses, extents, checksums)
            return statuses

        return self._run(deadline_s, True, act)


class SimOneSided(SimTransport):
    kind = common_pb2.TRANSPORT_KIND_RDMA

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        return None

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> OneSidedChannel:
        channel = OneSidedChannel(self._world, self._party, node, identity)
        until_s = self._world.loop.now_s + deadline_s
        channel._idle.append(channel._take(until_s))
        self._channels.append(channel)
        return channel
