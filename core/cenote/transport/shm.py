"""The same host: the daemon's segments are mapped here, and a read or write is one copy.

Over the daemon's Unix socket come descriptors and go seals. Segments are mapped for reading when
the channel is made, and once more for writing at the first write. A thread fills in the page tables
meanwhile (the first touch of a page costs more than its copy).

The daemon can't interrupt a copy. It counts this session as cut off only when it has no mapping any
more; see `cenote.store.sessions`. What it can do is close the connection that this channel watches:
then the channel writes no more. And it sees what is being written, or looked at in place: both are
claimed in a page of this channel's own (`claims`), and no write begins where the daemon has made
its grant void.
Likewise a reader sees, when it has read, whether the daemon still follows the leader of its lease.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    GrantRevoked,
    InvalidArgument,
    ProtocolError,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.v1 import common_pb2, store_pb2

from .access import NO_MAPPING
from .base import ExtentArray, Region, Seen, SessionIdentity, U8Array, U64Array
from .claims import VIEW_RANGES_MAX, VOID, WORD_AT, ClaimPage, is_of_tenure
from .connection import DataConnection
from .copying import CopyTeam
from .mapped import claimed_ranges, finder, head_of, page_of
from .mapping import Mapping
from .memory_access import (
    MEMORY,
    SLICE_COPY_BYTES_MAX,
    checksum_at,
    copy,
    copy_hashed,
    locate,
)
from .opening import close_all, connect, greet
from .pool import ConnectionPool, PooledMessages, hello_for
from .populating import Populator
from .remote_segments import RemoteSegments

__all__ = ["ShmChannel", "ShmTransport"]

SEAL_CONNECTIONS: Final = 2
SPIN_S: Final = 150e-6
_ASK_AGAIN_S: Final = 0.02
_STALE: Final = StaleLocation.code
_INVALID: Final = InvalidArgument.code


@final
class ShmChannel(PooledMessages):
    """See `base.Channel`. The shared state is two dicts that are replaced, never changed: a call
    that took a mapping out of one keeps it alive until it returns."""

    verifies_by_lease = True
    obstacle = ""

    def __init__(
        self,
        path: str,
        name: str,
        node_id: int,
        identity: SessionIdentity,
        epoch: int,
        team: CopyTeam,
        populate_bytes_max: int,
        spin_s: float,
    ) -> None:
        self.epoch = epoch
        self._path = path
        self._name = name
        self._node_id = node_id
        self._identity = identity
        self._team = team
        hello, access = hello_for(identity, epoch, writer=True), identity.access
        self._pool = ConnectionPool(path, name, hello, SEAL_CONNECTIONS, spin_s, access=access)
        self._remote = RemoteSegments(path, name, node_id, identity, epoch, spin_s)
        self._readable: dict[int, Mapping] = {}
        self._writable: dict[int, Mapping] = {}
        self._page: ClaimPage | None = None
        self._head: memoryview | None = None
        """Words of the claims' head: one names the first valid grant."""
        self._watched: DataConnection | None = None
        self._farewell: CenoteError | None = None
        self._mapping = threading.Lock()
        self._asked_at = 0.0
        self._closed = False
        self._populator = Populator(populate_bytes_max)

    @property
    def node_id(self) -> int:
        return self._node_id

    @property
    def route(self) -> str:
        return self._path

    def open(self, deadline_s: float) -> None:
        """Map the segments for reading. Raises a hello's errors."""
        with self._mapping:
            self._map(monotonic() + deadline_s, writable=False)

    # ---- mappings ---------------------------------------------------------------------------

    def _map(self, deadline: float, *, writable: bool, wants_claims: bool = False) -> None:
        """Ask the daemon for its segments and map those that are new. Under the lock."""
        wants_claims = (wants_claims or writable) and self._page is None
        hello = hello_for(
            self._identity,
            self.epoch,
            writer=writable,
            want_descriptors=True,
            wants_claims=wants_claims,
            has_head=self._head is not None,
            wants_staging=not writable and not self._remote.has_staging,
        )
        connection = connect(self._path, self._name, deadline)
        keep = False
        try:
            response, descriptors = greet(connection, hello)
            try:
                self._take_in(response, descriptors, writable, wants_claims)
            finally:
                close_all(descriptors)
            if self._watched is None and not self._closed:
                self._watched = connection
                keep = True
        finally:
            if not keep:
                connection.close()
        self._asked_at = monotonic()

    def _take_in(
        self,
        response: store_pb2.DataHelloResponse,
        descriptors: list[int],
        writable: bool,
        wants_claims: bool,
    ) -> None:
        held = self._writable if writable else self._readable
        mappings = {}
        page = self._page
        staging = self._remote.learn(response, descriptors)
        if response.has_head:
            self._head = head_of(descriptors.pop())
        if response.has_claims:
            page = page_of(descriptors.pop(), response.claims_offset)
        elif wants_claims:
            raise ProtocolError(f"{self._name} gave no page for claims")
        for segment, descriptor in zip(response.segments, descriptors, strict=True):
            known = held.get(segment.segment_id)
            if known is not None and known.incarnation == segment.incarnation:
                known.ready_bytes = max(known.ready_bytes, segment.ready_bytes)
                mappings[segment.segment_id] = known
                continue
            mappings[segment.segment_id] = Mapping(
                descriptor,
                segment.size_bytes,
                segment.ready_bytes,
                segment.incarnation,
                writable=writable,
                index=segment.index,
            )
        if self._closed:
            raise ClientClosed(f"the channel to {self._name} is closed")
        self._page = page  # before the segments: who finds one finds its page
        if writable:
            self._writable = mappings
        else:
            self._readable = mappings
        self._populator.add([*mappings.values(), *staging], writable)

    def _look_again(self, deadline: float, *, writable: bool) -> None:
        """A segment is unknown or was smaller: ask the daemon, unless that was done just now."""
        with self._mapping:
            if self._closed:
                raise ClientClosed(f"the channel to {self._name} is closed")
            held = self._writable if writable else self._readable
            if not held or monotonic() - self._asked_at > _ASK_AGAIN_S:
                self._map(deadline, writable=writable)

    def _one(
        self, segment_id: int, offset: int, length: int, deadline_s: float, *, writable: bool
    ) -> tuple[int, Mapping | None]:
        """The slow way to a mapping: (status, mapping)."""
        if offset < 0 or length <= 0:
            return _INVALID, None
        self._look_again(monotonic() + deadline_s, writable=writable)
        mapping = (self._writable if writable else self._readable).get(segment_id)
        if mapping is None:
            return _STALE, None
        return (_INVALID, None) if offset + length > mapping.ready_bytes else (0, mapping)

    # ---- reads ------------------------------------------------------------------------------

    def proves(self, lease_id: int) -> bool:
        head = self._head
        return head is not None and is_of_tenure(lease_id, head[WORD_AT])

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        mapping = self._readable.get(segment)
        if mapping is None or length <= 0 or not 0 <= offset <= mapping.ready_bytes - length:
            status = 0
            if segment not in self._remote.ids:
                status, mapping = self._one(segment, offset, length, deadline_s, writable=False)
            if segment in self._remote.ids:
                return self._remote.read_one(segment, offset, length, address, deadline_s, checksum)
            if mapping is None:
                return status, 0
        source = mapping.address + offset
        if length < SLICE_COPY_BYTES_MAX:
            MEMORY[address : address + length] = MEMORY[source : source + length]
            return 0, checksum_at(address, length) if checksum else 0
        if checksum:
            return 0, copy_hashed(address, source, length, monotonic() + deadline_s)
        self._team.copy_one(address, source, length, monotonic() + deadline_s)
        return 0, 0

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        deadline = monotonic() + deadline_s
        # The dict stays alive until this returns, whatever `close` does meanwhile.
        mappings = self._readable
        statuses, sources, lengths = locate(extents, finder(mappings))
        if statuses.any():
            if not self._remote.has(extents["segment"][statuses != 0]).all():
                self._look_again(deadline, writable=False)
                mappings = self._readable
                statuses, sources, lengths = locate(extents, finder(mappings))
            remote = self._remote.has(extents["segment"])
            if remote.any():
                self._copy(addresses, sources, lengths, deadline, checksums, statuses)
                self._remote.read(remote, extents, addresses, deadline, checksums, statuses)
                return statuses
        self._copy(addresses, sources, lengths, deadline, checksums, statuses)
        return statuses

    def _copy(
        self,
        targets: U64Array,
        sources: U64Array,
        lengths: U64Array,
        deadline: float,
        checksums: U64Array | None,
        statuses: U8Array,
    ) -> None:
        if not statuses.any():
            self._team.copy(targets, sources, lengths, deadline, checksums)
            return
        good = statuses == 0
        some = None if checksums is None else np.empty(int(good.sum()), np.uint64)
        self._team.copy(targets[good], sources[good], lengths[good], deadline, some)
        if checksums is not None and some is not None:
            checksums[good] = some

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        nothing = Seen([None] * len(extents))
        if self._closed:
            return nothing
        page = self._page
        if page is None:
            page = self._page_for_views(monotonic() + deadline_s)
        mappings = self._readable
        found: list[tuple[Mapping, int, int] | None] = []
        for segment_id, _, offset, length in extents.tolist():
            mapping = mappings.get(segment_id)
            fits = mapping is not None and 0 <= offset <= mapping.ready_bytes - length
            found.append((mapping, offset, length) if mapping is not None and fits else None)
        inside = np.array([place is not None for place in found], np.bool_)
        if not inside.any():
            return nothing
        pen = page.claim_view(lease_id, claimed_ranges(extents[inside], mappings, VIEW_RANGES_MAX))
        if pen < 0:  # a stale lease, or too many views: to be copied
            return nothing
        views = [p and p[0].view[p[1] : p[1] + p[2]] for p in found]
        return Seen(views, lambda: page.withdraw_view(pen))

    def _page_for_views(self, deadline: float) -> ClaimPage:
        """A page of claims for a channel that has not written yet."""
        with self._mapping:
            if self._page is None:
                self._map(deadline, writable=False, wants_claims=True)
            page = self._page
        if page is None:
            raise ClientClosed(f"the channel to {self._name} is closed")
        return page

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
        self._check_not_cut(deadline_s)
        mapping = self._writable.get(segment)
        if mapping is None or length <= 0 or not 0 <= offset <= mapping.ready_bytes - length:
            status, mapping = self._one(segment, offset, length, deadline_s, writable=True)
            if mapping is None:
                return status, 0
        page = self._page
        if page is None:
            raise ClientClosed(f"the channel to {self._name} is closed")
        target = mapping.address + offset
        pen = page.claim_one(grant_id, mapping.index, offset, length, deadline_s)
        if pen < 0:
            return VOID, 0
        try:
            if checksum:
                return 0, copy_hashed(target, address, length, monotonic() + deadline_s)
            if length < SLICE_COPY_BYTES_MAX:
                copy(target, address, length)
            else:
                self._team.copy_one(target, address, length, monotonic() + deadline_s)
        finally:
            page.withdraw(pen)
        return 0, 0

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        deadline = monotonic() + deadline_s
        self._check_not_cut(deadline_s)
        if not len(extents):
            return np.zeros(0, np.uint8)
        mappings = self._writable
        statuses, targets, lengths = locate(extents, finder(mappings))
        if statuses.any():
            self._look_again(deadline, writable=True)
            mappings = self._writable
            statuses, targets, lengths = locate(extents, finder(mappings))
        page = self._page
        if page is None:
            raise ClientClosed(f"the channel to {self._name} is closed")
        pen = page.claim(grant_id, claimed_ranges(extents, mappings), deadline - monotonic())
        if pen < 0:
            return np.full(len(extents), VOID, np.uint8)
        try:
            self._copy(targets, addresses, lengths, deadline, checksums, statuses)
        finally:
            page.withdraw(pen)
        return statuses

    def _check_not_cut(self, deadline_s: float) -> None:
        """Raises GrantRevoked or Unavailable where the daemon closed the watched connection."""
        watched = self._watched
        if watched is None:
            raise ClientClosed(f"the channel to {self._name} is closed")
        if self._farewell is None:
            if watched.is_quiet():
                return
            now = monotonic()
            try:
                watched.receive_farewell(now + deadline_s, now)
            except (GrantRevoked, Unavailable) as error:
                self._farewell = error
                raise
        raise error_from_code(self._farewell.code, self._farewell.message, self._farewell.remedy)

    # ---- the rest ---------------------------------------------------------------------------

    def close(self) -> None:
        self._closed = True
        self._populator.close()
        self._pool.close()
        self._remote.close()
        with self._mapping:
            self._readable = {}
            self._writable = {}
            self._page = self._head = None
            watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()


@final
class ShmTransport:
    """Channels over shared memory, to daemons on this host.

    `copy_helpers`: threads that help with long copies (None: as many as pays on this machine).
    `populate_bytes_max`: how much of the mapped segments gets its page table entries ahead of use
    (1 GiB of it takes 2 MiB of page tables, per process). `spin_s`: as of TcpTransport, for seals.
    """

    kind = common_pb2.TRANSPORT_KIND_SHM

    def __init__(
        self,
        *,
        copy_helpers: int | None = None,
        populate_bytes_max: int = 64 << 30,
        spin_s: float = SPIN_S,
    ) -> None:
        self._team = CopyTeam(copy_helpers)
        self._populate_bytes_max = populate_bytes_max
        self._spin_s = spin_s
        self._channels: weakref.WeakSet[ShmChannel] = weakref.WeakSet()
        self._closed = False

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        if identity.access.no_mapping:
            return NO_MAPPING
        path = self._path(node)
        if path is None:
            return "the node tells no Unix socket"
        if not node.boot_id or node.boot_id != identity.boot_id:
            return "the node is on another host"
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                return None
        except OSError as error:  # another container's file system
            return f"its socket {path} can't be seen from here: {error.strerror}"
        return f"{path} is no socket"

    def _path(self, node: common_pb2.NodeView) -> str | None:
        return next((e.address for e in node.endpoints if e.kind == self.kind), None)

    def register(self, address: int, length: int, keeper: object) -> Region:
        return Region(address, length, keeper)

    def deregister(self, region: Region) -> None:
        """Nothing to do: any memory can be copied."""

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> ShmChannel:
        if self._closed:
            raise ClientClosed("the shm transport is closed")
        path = self._path(node)
        if path is None:
            raise Unavailable(f"node {node.name or node.node_id} has no Unix socket")
        name = f"{node.name or f'node {node.node_id}'} ({path})"
        channel = ShmChannel(
            path,
            name,
            node.node_id,
            identity,
            epoch,
            self._team,
            self._populate_bytes_max,
            self._spin_s,
        )
        try:
            channel.open(deadline_s)
        except BaseException:  # whatever it was, no mapping may stay
            channel.close()
            raise
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        self._closed = True
        for channel in list(self._channels):
            channel.close()
        self._team.close()
