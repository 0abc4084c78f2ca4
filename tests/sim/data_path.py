"""Data connections and the two transports: bytes land piece by piece, in virtual time.

*TCP*: what is under way keeps landing when the client has given up or died, until the daemon closes
the connection. *shm*: the client's own hand copies; it stops when its process dies, and can be
stopped in the middle for as long as you like.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

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
from cenote.transport.base import (
    ExtentArray,
    Seen,
    U8Array,
    U64Array,
)
from cenote.transport.claims import (
    RANGES_MAX,
    VIEW_RANGES_MAX,
    VOID,
    WORD_AT,
    ClaimPage,
    is_of_tenure,
    ranges_of,
)
from sim.data_connection import (
    DataConnection,
    SimChannel,
    Write,
    cut_pieces,
    spread,
    sums,
)
from sim.disk_serving import disk_ids, serve
from sim.stores import SegmentFile, StoreProcess

if TYPE_CHECKING:
    pass

__all__ = ["ShmChannel", "TcpChannel"]

_STALE: Final = StaleLocation.code
_INVALID: Final = InvalidArgument.code
_ON_DISK: Final = 255
"""Not for us to read: no status that anybody is told."""


class TcpChannel(SimChannel):
    """See the module; `epoch` as in `cenote.transport.tcp.TcpChannel`."""

    def __init__(self, *arguments: Any, epoch: int) -> None:
        super().__init__(*arguments)
        self.epoch = epoch

    @staticmethod
    def _locate(
        store: StoreProcess, extents: ExtentArray
    ) -> tuple[U8Array, list[tuple[SegmentFile, int, int] | None]]:
        statuses = np.zeros(len(extents), np.uint8)
        found: list[tuple[SegmentFile, int, int] | None] = []
        for i, (segment_id, _, offset, length) in enumerate(extents.tolist()):
            segment = cast("Any", store.segments.by_id(segment_id))
            if segment is None:
                statuses[i] = _STALE
            elif not length or offset + length > segment.ready_bytes:
                statuses[i] = _INVALID
            found.append(None if statuses[i] else (segment.file, offset, length))
        return statuses, found

    def read(
        self, extents: ExtentArray, addresses: U64Array, deadline_s: float, checksums: Any = None
    ) -> U8Array:
        def make(connection: DataConnection) -> Any:
            def act(reply: Callable[[Any], None]) -> None:
                if np.isin(extents["segment"], disk_ids(connection.store)).any():
                    serve(connection, extents, reply)
                    return
                statuses, found = self._locate(connection.store, extents)
                pieces = cut_pieces(self.world, [f for f in found if f is not None])
                crawl_s = self.world.crawl_s()
                self._send(
                    connection, pieces, bytearray(), crawl_s, lambda data: reply((statuses, data))
                )

            return act

        statuses, data = self._call(make, deadline_s)
        spread(statuses, data, extents, addresses)
        sums(addresses, extents, checksums)
        return cast("U8Array", statuses)

    def _send(
        self,
        connection: DataConnection,
        pieces: list[Any],
        data: bytearray,
        crawl_s: float,
        then: Callable[[bytearray], None],
    ) -> None:
        """The daemon sends piece by piece: what it reads later may have changed meanwhile."""
        if connection.closed or connection.given_up:
            return
        if not pieces:
            then(data)
            return
        file, offset, length = pieces.pop()
        data += file.data[offset : offset + length].tobytes()
        self.world.loop.after(
            self.world.piece_delay_s(crawl_s),
            lambda: self._send(connection, pieces, data, crawl_s, then),
            connection.store.party,
        )

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: Any = None,
    ) -> U8Array:
        self.world.faults.strike_before_write(self.party, self.world.hosts[self.host_name])
        payload = b"".join(
            ctypes.string_at(address, length)
            for address, length in zip(addresses.tolist(), extents["length"].tolist(), strict=True)
        )
        sums(addresses, extents, checksums)
        epoch = self.epoch

        def make(connection: DataConnection) -> Any:
            return lambda reply: self._begin(connection, extents, payload, grant_id, epoch, reply)

        return cast("U8Array", self._call(make, deadline_s))

    def _begin(
        self,
        connection: DataConnection,
        extents: ExtentArray,
        payload: bytes,
        grant_id: int,
        epoch: int,
        reply: Callable[[Any], None],
    ) -> None:
        store = connection.store
        if epoch < store.segments.epoch:
            reply(StaleEpoch(f"a change of epoch {epoch}; this is {store.segments.epoch}"))
            return
        statuses, found = self._locate(store, extents)
        if grant_id < store.segments.first_grant_id:
            reply(np.full(len(extents), GrantRevoked.code, np.uint8))
            return
        chunks: list[bytes] = []
        at = 0
        for place, length in zip(found, extents["length"].tolist(), strict=True):
            if place is not None:
                chunks.append(payload[at : at + length])
            at += length
        pieces = cut_pieces(self.world, [f for f in found if f is not None])
        connection.write = Write(connection.party.name, grant_id, pieces)
        connection.epoch = min(epoch, store.segments.epoch)
        self.world.write_begins(connection.write, connection.party, connection.store.party)
        self._land(connection, connection.write, b"".join(chunks), 0, lambda: reply(statuses))

    def _land(
        self,
        connection: DataConnection,
        write: Write,
        payload: bytes,
        at: int,
        then: Callable[[], None],
    ) -> None:
        """One piece arrives, and the next is on its way."""
        if connection.closed or connection.write is not write:
            return
        if not write.pieces:
            connection.end_write()
            if connection.given_up:
                connection._close(Unavailable("closed by the client"))
            then()
            return
        delay_s = self.world.piece_delay_s(write.crawl_s)
        if self.world.network.is_cut(connection.party.name, connection.store.host.name):
            self.world.loop.after(
                delay_s + 0.05,
                lambda: self._land(connection, write, payload, at, then),
                connection.store.party,
            )
            return
        file, offset, length = write.pieces.pop()
        self.world.oracle.landed(write, file, offset, length)
        file.data[offset : offset + length] = np.frombuffer(payload, np.uint8, length, at)
        self.world.loop.after(
            delay_s,
            lambda: self._land(connection, write, payload, at + length, then),
            connection.store.party,
        )


class ShmChannel(SimChannel):
    """See the module. Mappings are counted at the file, as the kernel counts its locks."""

    verifies_by_lease = True

    def __init__(self, *arguments: Any, epoch: int) -> None:
        super().__init__(*arguments)
        self.epoch = epoch
        self._maps: dict[int, SegmentFile] = {}
        self._ready: dict[int, int] = {}
        self._indexes: dict[int, int] = {}
        self._disks: list[int] = []
        """Segments that nobody can map."""
        self._held: dict[SegmentFile, None] = {}
        self._page: ClaimPage | None = None
        self._page_of: tuple[Counter[int], int] | None = None
        self._users = 0
        self._watched: DataConnection | None = None
        self.party.on_death.append(self._unmap)

    def open(self, deadline_s: float) -> None:
        until_s = self.world.loop.now_s + deadline_s
        self._watched = self._take(until_s)
        self._map(self._watched, until_s)

    def _map(self, connection: DataConnection, until_s: float) -> None:
        """The daemon passes descriptors: from then on the kernel knows this session's mark."""

        def act(reply: Callable[[Any], None]) -> None:
            if connection.given_up:
                return  # descriptors that nobody takes are closed by the kernel
            found = {}
            for segment in connection.store.sim_segments:
                found[segment.segment_id] = (segment.file, segment.ready_bytes, segment.index)
                if segment.file not in self._held:
                    self._held[segment.file] = None
                    segment.file.mapped_by[self.identity.session_id] += 1
            if self._page_of is None:
                self._take_page(connection.store)
            reply((found, disk_ids(connection.store)))

        try:
            found, disks = connection.call(act, until_s)
        except CenoteError:
            if not self._maps:
                self._unmap()
            raise
        if self._closed:
            self._unmap()
            raise ClientClosed("the channel is closed")
        self._disks = disks
        self._maps = {i: file for i, (file, _, _) in found.items() if i}
        self._ready = {i: ready for i, (_, ready, _) in found.items()}
        self._indexes = {i: index for i, (_, _, index) in found.items()}

    def _take_page(self, store: StoreProcess) -> None:
        host, held = store.host, store.host.claims_held

        def mark(page: int) -> None:
            held[page] += 1

        page = store.segments.claims.take_page(self.identity.session_id, mark)
        self._page, self._page_of = ClaimPage(host.page(page)), (held, page)

    def _unmap(self) -> None:
        if self._page_of is not None:
            held, page = self._page_of
            held[page] -= 1
            self._page = self._page_of = None
        for file in self._held:
            file.mapped_by[self.identity.session_id] -= 1
        self._held.clear()
        self._maps = {}

    def _locate(
        self, extents: ExtentArray, until_s: float
    ) -> tuple[U8Array, list[tuple[SegmentFile, int, int] | None]]:
        for again in (False, True):
            statuses = np.zeros(len(extents), np.uint8)
            found: list[tuple[SegmentFile, int, int] | None] = []
            for i, (segment_id, _, offset, length) in enumerate(extents.tolist()):
                file = self._maps.get(segment_id)
                if segment_id in self._disks:
                    statuses[i] = _ON_DISK
                elif file is None:
                    statuses[i] = _STALE
                elif not length or offset + length > self._ready[segment_id]:
                    statuses[i] = _INVALID
                found.append(None if statuses[i] else (cast("Any", file), offset, length))
            if again or not ((statuses != 0) & (statuses != _ON_DISK)).any():
                break
            connection = self._take(until_s)
            self._map(connection, until_s)
            self._idle.append(connection)
        return statuses, found

    def _check_not_cut(self) -> None:
        watched = self._watched
        if watched is None or self._closed:
            raise ClientClosed("the channel is closed")
        if watched.closed:
            farewell = watched.farewell or Unavailable("the daemon is gone")
            raise type(farewell)(farewell.message)

    def proves(self, lease_id: int) -> bool:
        proven = self._is_of_tenure(lease_id)
        if proven:
            self.world.oracle.readings.proven(lease_id)
        return proven

    def _is_of_tenure(self, lease_id: int) -> bool:
        page = self._page
        return page is not None and is_of_tenure(lease_id, page._words[WORD_AT])

    def read(
        self, extents: ExtentArray, addresses: U64Array, deadline_s: float, checksums: Any = None
    ) -> U8Array:
        world, loop = self.world, self.world.loop
        world.step()
        if self._closed:
            raise ClientClosed("the channel is closed")
        until_s = loop.now_s + deadline_s
        self._users += 1
        try:
            statuses, found = self._locate(extents, until_s)
            world.oracle.readings.begun(found)
            for place, address in zip(found, addresses.tolist(), strict=True):
                self._copy_out(place, address, until_s)
                if checksums is None:  # the lease alone is to prove it
                    world.faults.strike_read(self.party)
            asked = statuses == _ON_DISK
            if asked.any():
                left_s = max(0.0, until_s - loop.now_s)
                statuses[asked] = self._read_disk(extents[asked], addresses[asked], left_s)
        finally:
            self._leave()
        sums(addresses, extents, checksums)
        world.step()
        return statuses

    def _copy_out(
        self, place: tuple[SegmentFile, int, int] | None, address: int, until_s: float
    ) -> None:
        if place is None:
            return
        base = place[1]
        crawl_s = self.world.crawl_s()
        for file, offset, length in reversed(cut_pieces(self.world, [place])):
            ctypes.memmove(
                address + offset - base, file.data[offset : offset + length].tobytes(), length
            )
            self._stroke(until_s, crawl_s)

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: Any = None,
    ) -> U8Array:
        world, loop = self.world, self.world.loop
        world.faults.strike_before_write(self.party, world.hosts[self.host_name])
        world.step()
        until_s = loop.now_s + deadline_s
        self._check_not_cut()
        self._users += 1
        write: Write | None = None
        page, pen = self._page, -1
        try:
            statuses, found = self._locate(extents, until_s)
            if statuses.all():
                return statuses
            page = self._page
            assert page is not None
            pen = page.claim(grant_id, self._ranges(extents[statuses == 0]), 0.0)
            if pen < 0:
                return np.full(len(extents), VOID, np.uint8)
            world.step()
            places = [f for f in found if f is not None]
            write = Write(self.party.name, grant_id, cut_pieces(world, places))
            write.is_mapped = True
            world.write_begins(write, self.party)
            world.step()
            payload = b"".join(
                ctypes.string_at(address, place[2])
                for address, place in zip(addresses.tolist(), found, strict=True)
                if place is not None
            )
            at = 0
            while write.pieces:
                file, offset, length = write.pieces.pop()
                world.oracle.landed(write, file, offset, length)
                file.data[offset : offset + length] = np.frombuffer(payload, np.uint8, length, at)
                at += length
                self._stroke(until_s, write.crawl_s)
        finally:
            if write is not None:
                world.oracle.write_ended(write)
            if pen >= 0 and page is not None and self.party.alive:
                page.withdraw(pen)
            self._leave()
        sums(addresses, extents, checksums)
        world.step()
        return statuses

    def _ranges(self, extents: ExtentArray, most: int = RANGES_MAX) -> U64Array:
        indexes = np.array([self._indexes[i] for i in extents["segment"].tolist()], np.uint64)
        return ranges_of(indexes, extents["offset"], extents["length"], most)

    def _stroke(self, until_s: float, crawl_s: float) -> None:
        """Between two pieces of a copy the process may be stopped, and the clock is looked at."""
        loop = self.world.loop
        if crawl_s:
            self.world.clients[self.party.name].pauses += 1  # its own hand is what is slow
        if crawl_s or loop.dice.random() < 0.3:
            loop.sleep(self.world.piece_delay_s(crawl_s))
        if loop.now_s > until_s:
            raise DeadlineExceeded("the copy took too long")

    def _leave(self) -> None:
        self._users -= 1
        if self._closed and not self._users:
            self._unmap()

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        if self._closed:
            raise ClientClosed("the channel is closed")
        statuses, found = self._locate(extents, self.world.loop.now_s + deadline_s)
        page, nothing = self._page, Seen([None] * len(extents))
        if page is None or statuses.all():
            return nothing
        self.world.step()
        ranges = self._ranges(extents[statuses == 0], VIEW_RANGES_MAX)
        pen = page.claim_view(lease_id, ranges)
        if pen < 0:
            return nothing
        self._users += 1
        views = [p and memoryview(cast("Any", p[0].data))[p[1] : p[1] + p[2]] for p in found]

        def withdraw() -> None:
            if self.party.alive:
                page.withdraw_view(pen)
            self._leave()

        return Seen(views, withdraw)

    def close(self) -> None:
        super().close()
        if not self._users:
            self._unmap()
