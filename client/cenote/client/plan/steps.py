"""What a plan asks of the world: the only things that it can't do by itself.

A plan is a generator. It yields a step; whoever drives it does what the step says and sends the
result back, or throws a `CenoteError` into it. The blocking client, the asyncio client and the
simulator are three drivers of the same plans (`drive` in `driver.py` is the shortest one).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.transport.base import ExtentArray, ItemStatus, SealBatch, U8Array, U64Array
from cenote.transport.proofs import ProofBatch

from .device_rows import CopyRows, Devices
from .pieces import Pieces

__all__ = [
    "Allocate",
    "AllocateOne",
    "Ask",
    "AskMany",
    "AskRaw",
    "Checksum",
    "CopyBegin",
    "CopyWait",
    "Hash",
    "Move",
    "MoveOne",
    "Part",
    "Pause",
    "Plan",
    "RefreshView",
    "Reopen",
    "SealPart",
    "Seals",
    "Settle",
    "Stage",
    "Staged",
    "StagingAreas",
    "Step",
    "TakeAreas",
]

T = TypeVar("T")
M = TypeVar("M", bound=Message)

READ_GRANT: Final = 0
"""`grant_id` of a part that reads."""
NO_LEASE: Final = 0


class Checksum:
    """When a part's checksums are wanted."""

    NEVER: Final = 0
    """Of a write."""
    UNLESS_LEASED: Final = 1
    """Not where the channel's reads are proven by the lease alone (shm), and the daemon still
    follows the leader that gave it when they have ended."""
    ALWAYS: Final = 2


class Ask:
    """One metadata request. Result: its reply."""

    __slots__ = ("deadline_s", "method", "request")

    def __init__(self, method: str, request: Message, deadline_s: float) -> None:
        self.method = method
        self.request = request
        self.deadline_s = deadline_s


class AskRaw:
    """`Ask` with the request as its ready bytes, for the paths where making a message shows."""

    __slots__ = ("body", "deadline_s", "method")

    def __init__(self, method: str, body: bytes, deadline_s: float) -> None:
        self.method = method
        self.body = body
        self.deadline_s = deadline_s


class AskMany:
    """Requests of one method, sent without waiting in between. Result: a reply or error for each.

    `make[i]()` gives request i when it is its turn, so that the master works on one while the next
    is made.
    """

    __slots__ = ("deadline_s", "make", "method")

    def __init__(
        self, method: str, make: Sequence[Callable[[], Message]], deadline_s: float
    ) -> None:
        self.method = method
        self.make = make
        self.deadline_s = deadline_s


class Part:
    """What moves between here and one node. The driver fills in how it went."""

    __slots__ = (
        "addresses",
        "budget_s",
        "checksum",
        "checksums",
        "direct",
        "error",
        "extents",
        "grant_id",
        "keeper",
        "lease_id",
        "node_id",
        "size_bytes",
        "statuses",
        "unfenced",
    )

    def __init__(
        self,
        node_id: int,
        extents: ExtentArray,
        addresses: U64Array,
        *,
        budget_s: float,
        size_bytes: int,
        checksum: int,
        grant_id: int = READ_GRANT,
        lease_id: int = NO_LEASE,
        keeper: object = None,
        direct: Devices | None = None,
    ) -> None:
        self.direct = direct
        """It reads into memory of GPUs, which NICs alone may touch: a lease has to prove it."""
        self.node_id = node_id
        self.extents = extents
        self.addresses = addresses
        self.keeper = keeper
        """Keeps memory valid that isn't the caller's."""
        self.grant_id = grant_id
        self.lease_id = lease_id
        self.checksum = checksum
        self.budget_s = budget_s
        self.size_bytes = size_bytes
        self.statuses: U8Array | None = None
        self.checksums: U64Array | None = None
        self.error: CenoteError | None = None
        """Why none of its items counts."""
        self.unfenced = False
        """It writes, and bytes of it may still be on their way to the node."""

    def done(self) -> NDArray[np.bool_]:
        """bool[items]: which items completed."""
        if self.statuses is None:
            return np.zeros(len(self.addresses), np.bool_)
        return np.asarray(self.statuses == ItemStatus.OK)


class Move:
    """Transfers with several nodes, at once where that pays. Result: None, see the parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts


class MoveOne:
    """One extent, one piece. Result: (item status, XXH3-64 or 0, whether the lease proves it).

    `tail` is written behind the piece, and is no part of what the checksum is of.
    """

    __slots__ = (
        "address",
        "budget_s",
        "checksum",
        "grant_id",
        "lease_id",
        "length",
        "node_id",
        "offset",
        "segment",
        "tail",
        "unfenced",
    )

    def __init__(
        self,
        node_id: int,
        segment: int,
        offset: int,
        length: int,
        address: int,
        budget_s: float,
        checksum: int,
        grant_id: int = READ_GRANT,
        tail: bytes = b"",
        lease_id: int = NO_LEASE,
    ) -> None:
        self.tail = tail
        self.node_id = node_id
        self.segment = segment
        self.offset = offset
        self.length = length
        self.address = address
        self.budget_s = budget_s
        self.checksum = checksum
        self.grant_id = grant_id
        self.lease_id = lease_id
        self.unfenced = False


class SealPart:
    """What one daemon is to seal. The driver fills in how it went."""

    __slots__ = ("batch", "budget_s", "error", "node_id", "statuses")

    def __init__(self, node_id: int, batch: SealBatch, budget_s: float) -> None:
        self.node_id = node_id
        self.batch = batch
        self.budget_s = budget_s
        self.statuses: U8Array | None = None
        self.error: CenoteError | None = None


class Seals:
    """Seals at several daemons at the same time. Result: None, see the parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[SealPart]) -> None:
        self.parts = parts


class Hash:
    """XXH3-64 over each object's pieces. Result: uint64[n]."""

    __slots__ = ("pieces", "sizes")

    def __init__(self, pieces: Pieces, sizes: U64Array) -> None:
        self.pieces = pieces
        self.sizes = sizes


class HashWide:
    """XXH3-128 over each object's pieces, in canonical byte order; or, with a key, BLAKE2b of 16
    bytes. Result: bytes, 16 each."""

    __slots__ = ("key", "pieces", "seed", "sizes")

    def __init__(self, pieces: Pieces, sizes: U64Array, seed: int, key: bytes = b"") -> None:
        self.pieces = pieces
        self.sizes = sizes
        self.seed = seed
        self.key = key


class ProofPart:
    """What one daemon is shown. The driver fills in how it went."""

    __slots__ = ("batch", "budget_s", "error", "node_id", "statuses", "tickets")

    def __init__(self, node_id: int, batch: ProofBatch, budget_s: float) -> None:
        self.node_id = node_id
        self.batch = batch
        self.budget_s = budget_s
        self.statuses: U8Array | None = None
        self.tickets = b""
        self.error: CenoteError | None = None


class Proofs:
    """Proofs for several daemons. Result: None, see the parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ProofPart]) -> None:
        self.parts = parts


class Stage:
    """Copies of payloads of one size (one piece each) with their keys, all of one length, behind
    them. Result: Staged."""

    __slots__ = ("keys", "pieces", "size")

    def __init__(self, pieces: Pieces, size: int, keys: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.size = size
        self.keys = keys


class Staged:
    """Where the copies lie, and XXH3-64 of each payload."""

    __slots__ = ("checksums", "pieces")

    def __init__(self, pieces: Pieces, checksums: U64Array) -> None:
        self.pieces = pieces
        self.checksums = checksums


class Allocate:
    """Memory for objects of these sizes, as new `bytes`. Result: (Pieces, values)."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: U64Array) -> None:
        self.sizes = sizes


class AllocateOne:
    """Memory for one object, as new `bytes`. Result: (value, its address)."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class StagingAreas(Protocol):
    """Host memory that GPUs and NICs reach, one area a turn, the same ones again and again. `close`
    it in any case. See `client.devices.Areas`."""

    lost: bool

    def __len__(self) -> int: ...

    def address(self, turn: int) -> int: ...

    def close(self) -> None: ...


class TakeAreas:
    """Memory to stage what lies on GPUs: up to `count` areas. Result: StagingAreas."""

    __slots__ = ("count", "deadline_s")

    def __init__(self, count: int, deadline_s: float) -> None:
        self.count = count
        self.deadline_s = deadline_s


class CopyBegin:
    """Begin the copies of a turn, between GPUs and its area. Result: None."""

    __slots__ = ("areas", "keepers", "rows", "to_host", "turn")

    def __init__(
        self,
        areas: StagingAreas,
        turn: int,
        rows: CopyRows,
        keepers: Sequence[object],
        *,
        to_host: bool,
    ) -> None:
        self.areas = areas
        self.turn = turn
        self.rows = rows
        self.keepers = keepers
        self.to_host = to_host


class CopyWait:
    """Wait until the copies of the area of a turn have ended. Result: None."""

    __slots__ = ("areas", "deadline_s", "turn")

    def __init__(self, areas: StagingAreas, turn: int, deadline_s: float) -> None:
        self.areas = areas
        self.turn = turn
        self.deadline_s = deadline_s


class Settle:
    """Wait until what GPUs have queued for this memory has ended. Result: None."""

    __slots__ = ("deadline_s", "devices")

    def __init__(self, devices: Devices, deadline_s: float) -> None:
        self.devices = devices
        self.deadline_s = deadline_s


class Pause:
    """Wait for a moment. Result: None."""

    __slots__ = ("duration_s",)

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s


class RefreshView:
    """Fetch the cluster view if there is a newer one. Result: None."""

    __slots__ = ("deadline_s",)

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s


class Reopen:
    """Open the call's namespace (and, if need be, the session) again. Result: None.

    `cut_session_id`: a daemon cut this session off; begin another, unless that was done already.
    """

    __slots__ = ("cut_session_id", "deadline_s", "session_too")

    def __init__(
        self, deadline_s: float, *, session_too: bool, cut_session_id: bytes = b""
    ) -> None:
        self.deadline_s = deadline_s
        self.session_too = session_too
        self.cut_session_id = cut_session_id


Step: TypeAlias = (
    Ask
    | AskRaw
    | AskMany
    | Move
    | MoveOne
    | Seals
    | Hash
    | HashWide
    | Proofs
    | Stage
    | Allocate
    | AllocateOne
    | TakeAreas
    | CopyBegin
    | CopyWait
    | Settle
    | Pause
    | RefreshView
    | Reopen
)
Plan: TypeAlias = Generator[Step, Any, T]


def ask(method: str, request: Message, reply_type: type[M], deadline_s: float) -> Plan[M]:
    """Yield one `Ask`; the reply with its type."""
    return cast("M", (yield Ask(method, request, deadline_s)))
