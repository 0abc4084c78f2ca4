"""The one interface of the data path: batches of extents between local memory and a peer's.

Local memory is named by raw addresses (columns of uint64), so that a batch of thousands of pieces
needs no Python object for each; whoever passes an address keeps its memory alive until the call
returned (or `BufferInUse` was resolved). All implementations pass `cenote.transport.testing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from cenote.v1 import common_pb2

from .access import Access
from .proofs import ProofBatch

U8Array = NDArray[np.uint8]
U64Array = NDArray[np.uint64]
ExtentArray = NDArray[np.void]
"""Array of `cenote.api.rows.EXTENT` rows."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Who connects: the same identity that the master knows as a session."""

    session_id: bytes
    boot_id: str
    process_id: int
    credentials: common_pb2.Credentials
    """For the master alone."""
    access: Access = field(default_factory=Access, compare=False)
    """For daemons."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered local memory: `[address, address + length)`, until its transport is closed."""

    address: int
    length: int
    keeper: object
    """Whatever must stay alive for the memory to stay valid."""


@dataclass(frozen=True, slots=True)
class SealBatch:
    """Slots to write at one daemon: packed `rows.SEAL` rows and their keys back to back."""

    epoch: int
    namespace_id: int
    generation: int
    rows: bytes
    keys: bytes


class ItemStatus:
    """Completion codes of one item of a batch; other values are `CenoteError` wire codes."""

    OK = 0
    STALE = 21
    REVOKED = 22
    NOT_DONE = 18


@final
class Seen:
    """Extents that are looked at in place."""

    __slots__ = ("_withdraw", "views")

    def __init__(
        self, views: list[memoryview | None], withdraw: Callable[[], None] | None = None
    ) -> None:
        self.views = views
        """Read-only, in the order of the extents; None for what can't be seen from here."""
        self._withdraw = withdraw

    def end(self) -> None:
        """Nobody looks there any more. Idempotent."""
        self.views = []
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()


class Channel(Protocol):
    """A connection to one daemon on behalf of one session; safe from several threads.

    Every call returns when nothing of it can touch its local memory any more. Items complete one by
    one: a status array of uint8[n], `ItemStatus.OK` or the wire code of the error. A call as a
    whole raises `Unavailable` (peer gone: no item counts), `DeadlineExceeded`, `BufferInUse`,
    `StaleEpoch`, `ClientClosed`. `deadline_s` is a duration from now.
    """

    @property
    def node_id(self) -> int: ...

    @property
    def route(self) -> str:
        """What the bytes go over now, for people: an address, a socket, NICs."""
        ...

    @property
    def obstacle(self) -> str:
        """Why the bytes go over TCP for the time being, and not over what this channel is for; ""
        where they do not."""
        ...

    @property
    def verifies_by_lease(self) -> bool:
        """True where `verify="auto"` trusts the lease alone (shm, GPU memory)."""
        ...

    def proves(self, lease_id: int) -> bool:
        """Whether this lease alone (0: none) can prove reads that have returned.

        Not once the daemon follows a later tenure than the lease's: the next leader knows no lease
        of the one before, and may have granted their space. False where that can't be told.
        """
        ...

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        """Copy each extent to the local address of the same position.

        `checksums`, if given, receives XXH3-64 of each item's bytes, taken while they are in cache.
        """
        ...

    def write(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        grant_id: int,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        """Copy local bytes into granted extents; as `read`, in the other direction."""
        ...

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        """One extent without arrays: (status, XXH3-64 or 0). The latency path."""
        ...

    def write_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        grant_id: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]: ...

    def seal(self, batch: SealBatch, deadline_s: float) -> U8Array:
        """Have the daemon write slots; uint8 status for each row. Idempotent."""
        ...

    def prove(self, batch: ProofBatch, deadline_s: float) -> tuple[U8Array, bytes]:
        """Show the daemon that we have bytes that lie there: uint8 status for each row, and a
        ticket for each (`cenote.api.contents`), zeros where it is refused."""
        ...

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        """Memory of the peer itself where it is mapped here (shm, memory), held by this lease.

        It is claimed at the daemon until `Seen.end`: should the master be restarted meanwhile, its
        successor knows no lease of before, but the claim. Raises as a call does.
        """
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes channels of one kind."""

    @property
    def kind(self) -> int:
        """`common_pb2.TransportKind` value."""
        ...

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        """Why this transport can't work to that node from here, for people; None where it can.

        No I/O but questions to the kernel: what only a connection can tell, `connect` raises.
        """
        ...

    def register(self, address: int, length: int, keeper: object) -> Region: ...

    def deregister(self, region: Region) -> None: ...

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> Channel: ...

    def close(self) -> None: ...
