"""Values that calls of the SDK take and give: plain, frozen, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .codes import Code
from .errors import CenoteError
from .rows import DIGEST_BYTES, EXTENT, OBJECT, ObjectStatus

__all__ = [
    "AcquiredLease",
    "ClientStats",
    "GetStatus",
    "MatchResult",
    "PathObstacle",
    "PeerPath",
    "PutResult",
    "PutStatus",
    "RawBuffer",
    "Sameness",
]


class PutStatus(Code):
    """What came of one key of a put."""

    STORED = 1
    EXISTED = 2
    """The key was there already, or another writer was first; nothing was changed."""
    FAILED = 3


class Sameness(Code):
    """Whether the object that was there already holds the bytes that were put."""

    UNKNOWN = 0
    """Not compared: it was there before any byte was sent."""
    SAME = 1
    DIFFERENT = 2


class GetStatus(Code):
    """What came of one key of a read."""

    HIT = 0
    MISS = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class PutResult:
    """What came of one put. `same_bytes`: None unless the key existed and bytes were compared."""

    status: PutStatus
    same_bytes: bool | None = None
    error: CenoteError | None = None

    @property
    def stored(self) -> bool:
        return self.status is PutStatus.STORED

    @property
    def existed(self) -> bool:
        return self.status is PutStatus.EXISTED

    def raise_for_error(self) -> None:
        """Raise the key's typed error if it failed."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class MatchResult:
    """How much of a prefix chain the pool holds.

    `prefix_keys`: how many keys from the first on are present without a gap. `present`: bool[n],
    one for each key asked for.
    """

    prefix_keys: int
    present: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RawBuffer:
    """Memory by address: `[address, address + length)` of this process.

    The caller keeps it allocated until the call returned; `keeper` is held for as long.
    """

    address: int
    length: int
    keeper: object = None
    device: int | None = None
    """The number of the GPU on which it lies; nothing there may be about to change it."""


@dataclass(frozen=True, slots=True)
class AcquiredLease:
    """The right to read some objects until a point in time, and where they are.

    A value: it pickles, and another process that opened the same namespace reads under it with
    `get_into_batch(keys, ..., lease=lease)` without asking the master. Whoever acquired it releases
    it. Its end can't be told on another host than the acquirer's, where checksums prove reads.
    """

    namespace: str
    namespace_id: int
    generation: int
    digest_seed: int
    lease_id: int
    """0: nothing was leased (no hit, or the leased share of the pool is used up)."""
    ttl_s: float
    end_s: float
    """On the monotonic clock that `clock_id` names, after a safety margin."""
    clock_id: str
    digests: bytes = field(repr=False)
    objects: bytes = field(repr=False)
    """Packed `rows.OBJECT`, one a key."""
    extents: bytes = field(repr=False)
    """Packed `rows.EXTENT` of the hits."""

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def _objects(self) -> NDArray[np.void]:
        return np.frombuffer(self.objects, OBJECT)

    @property
    def present(self) -> NDArray[np.bool_]:
        """bool[n]: which of the keys are hits."""
        return np.asarray(self._objects()["status"] != ObjectStatus.MISS)

    @property
    def leased(self) -> NDArray[np.bool_]:
        """bool[n]: which of the keys are protected until the lease ends."""
        return np.asarray(self._objects()["status"] == ObjectStatus.LEASED)

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """uint64[n]: sizes of the objects in bytes, 0 for misses."""
        objects = self._objects()
        return np.where(objects["status"] != ObjectStatus.MISS, objects["size"], 0).astype(
            np.uint64
        )

    @property
    def prefix_keys(self) -> int:
        """How many keys from the first on are hits without a gap."""
        missing = np.flatnonzero(~self.present)
        return int(missing[0]) if len(missing) else len(self)

    @property
    def extent_rows(self) -> NDArray[np.void]:
        return np.frombuffer(self.extents, EXTENT)


@dataclass(frozen=True, slots=True)
class PathObstacle:
    """Why one way to a node is not taken."""

    path: str
    """ "shm", "rdma" or "tcp"."""
    reason: str


@dataclass(frozen=True, slots=True)
class PeerPath:
    """The way that a client's bytes take to one store daemon."""

    node_id: int
    node: str
    path: str | None
    """ "shm", "rdma" or "tcp"; None where no connection could be made."""
    route: str
    """What it goes over: a socket, an address, NICs."""
    obstacles: tuple[PathObstacle, ...]
    """Better ways first, and why they are not taken; where `path` is None, all of them."""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters since the client was made. Threads may lose a count to each other now and then."""

    hits: int
    ssd_hits: int
    """Of the hits, those that were read from an SSD."""
    misses: int
    stored: int
    existed: int
    failed: int
    read_bytes: int
    written_bytes: int
    cached_reads: int
    """Reads that took one round trip, since the location was cached."""
    stale_locations: int
    """Reads that had to ask the master again."""
    node_failures: int
    unreachable_misses: int
    """Misses because no node that holds the object answered."""
    misreads: int
    """Replicas whose bytes were not what was put, reported so that the master drops them."""
    retries: int
    locations_cached: int
    nodes_connected: int
    rdma_read_bytes: int = 0
    rdma_written_bytes: int = 0
    rdma_staged_bytes: int = 0
    """Of what moved over RDMA, what was copied once more since its memory was not registered."""
    rdma_calls_over_tcp: int = 0
    """Of channels over RDMA: calls that went over TCP, wholly or in part."""
    device_staged_bytes: int = 0
    """From and to GPUs, through host memory."""
    device_direct_bytes: int = 0
    """To GPUs, put there by NICs."""
