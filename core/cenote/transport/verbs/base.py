"""The seam to a verbs library: what the RDMA data path needs of one, and nothing else.

Three implementations pass `verbs.testing`: `ibverbs` and `pyverbs` (real devices), and `fake` (this
process alone, for tests where no device is). Numbers are those of `infiniband/verbs.h`. Whatever a
library refuses is raised as `VerbsError`, which carries the system's errno; what it means to a user
is said by whoever called, in a typed error.

Two promises that fencing rests on: when `QueuePair.fail` has returned, nothing that a peer sends to
the queue pair reaches memory here any more; when `close` of a queue pair has returned, nothing of
its own requests touches memory here either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Access",
    "CompletionQueue",
    "Device",
    "DeviceLimits",
    "MemoryRegion",
    "Opcode",
    "PathSettings",
    "PortInfo",
    "PortState",
    "QueuePair",
    "QueuePairAddress",
    "QueuePairState",
    "Verbs",
    "VerbsError",
    "WorkStatus",
]


class VerbsError(OSError):
    """A library or device refused; `errno` says why (ENOMEM: often the limit of locked memory)."""


class Access:
    """What a memory region, or a queue pair, allows; to be combined with `|`."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4


class Opcode:
    """What a work request does."""

    WRITE = 0
    READ = 4


class PortState:
    DOWN = 1
    ACTIVE = 4


class QueuePairState:
    RESET = 0
    READY_TO_SEND = 3
    ERROR = 6


class WorkStatus:
    """How a work request ended; others than these exist, and mean failure."""

    SUCCESS = 0
    LOCAL_PROTECTION = 4
    """The local range is not in the memory region that was named."""
    FLUSHED = 5
    """Not carried out: the queue pair was in error, or a request before it failed."""
    REMOTE_ACCESS = 10
    """The peer's device refused: no such region, out of its range, or not allowed."""
    RETRIES_EXCEEDED = 12
    """The peer's device was silent: dead, unreachable, or its queue pair is in error."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device can do at most."""

    queue_pairs: int
    work_requests: int
    """In one queue pair at once."""
    completions: int
    """In one completion queue."""
    regions: int
    region_bytes: int
    reads_in_flight: int
    """RDMA reads that a queue pair can have under way, as a requester and as a responder."""
    ports: int


@dataclass(frozen=True, slots=True)
class PortInfo:
    state: int
    """`PortState`, or another number of ibv_port_state."""
    mtu_code: int
    """ibv_mtu: 1 is 256 bytes, 5 is 4096."""
    message_bytes_max: int
    lid: int
    gids: int
    """Length of the GID table, holes included."""
    is_ethernet: bool
    """RoCE (GIDs route), else InfiniBand (LIDs do, too)."""


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """What a peer must know of a queue pair to connect its own to it."""

    number: int
    first_psn: int
    """24 bits: number of the first packet that will come from there."""
    lid: int
    gid: bytes
    mtu_code: int


@dataclass(frozen=True, slots=True)
class PathSettings:
    """How a queue pair talks to its peer."""

    port: int
    gid_index: int
    reads_in_flight: int = 16
    timeout_exponent: int = 14
    """Each attempt waits for 4.096 µs * 2**this."""
    retries: int = 6
    """At most 6: 7 means for ever to some devices, and a dead peer would never be noticed."""
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.retries <= 6:
            raise ValueError("retries must be 0 to 6: 7 never notices a dead peer")
        if not 0 < self.timeout_exponent <= 31:
            raise ValueError("timeout_exponent must be 1 to 31: 0 never notices a dead peer")

    @property
    def silence_s(self) -> float:
        """After how long a silent peer is given up."""
        return float((self.retries + 1) * 4.096e-6 * 2**self.timeout_exponent)


class MemoryRegion(Protocol):
    """Registered memory of one device; stays pinned until `close`."""

    @property
    def local_key(self) -> int: ...
    @property
    def remote_key(self) -> int: ...
    def close(self) -> None:
        """Let the memory go. Requests that name the region fail from now on."""
        ...


class CompletionQueue(Protocol):
    """Where ended work requests are told; with a descriptor to sleep on."""

    @property
    def fd(self) -> int:
        """Readable after `arm` once there is something to poll; then `consume_event` is due.

        -1 where the library does not tell: then one looks now and then.
        """
        ...

    def poll(self, most: int) -> list[tuple[int, int]]:
        """(work request id, `WorkStatus`) of up to `most` ended requests. Does not wait."""
        ...

    def arm(self) -> None:
        """Have the next completion make `fd` readable. Poll once more before sleeping."""
        ...

    def consume_event(self) -> None:
        """Take the event that made `fd` readable."""
        ...

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection (RC). Its requests complete in their order."""

    @property
    def number(self) -> int: ...

    def connect(self, first_psn: int, peer: QueuePairAddress, path: PathSettings) -> None:
        """RESET to READY_TO_SEND. Raises VerbsError where there is no route, or the port is down.

        MTU: the smaller of the peer's and the own port's.
        """
        ...

    def post(
        self,
        opcode: int,
        first_id: int,
        local_addresses: Sequence[int],
        lengths: Sequence[int],
        local_keys: Sequence[int],
        remote_addresses: Sequence[int],
        remote_keys: Sequence[int],
    ) -> None:
        """Hand over a chain of requests with the ids first_id, first_id + 1 ...

        The last one is signalled: its success is told, and says that of all before it. A failure is
        always told. Whoever posts keeps within the depth of queue pair and completion queue. In
        state ERROR, requests are taken and end with FLUSHED. Raises VerbsError; then it is
        unknown how many were taken.
        """
        ...

    def fail(self) -> None:
        """Move to ERROR: whatever is under way ends, each request of it with a completion.

        Nothing of the peer's requests lands here any more when this has returned. Idempotent.
        """
        ...

    def state(self) -> int:
        """`QueuePairState`, or another number of ibv_qp_state, as the device says."""
        ...

    def close(self) -> None:
        """Destroy it. Nothing of its requests touches memory here afterwards. Idempotent."""
        ...


class Device(Protocol):
    """An open device, with one protection domain."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> DeviceLimits: ...

    @property
    def event_fd(self) -> int:
        """Readable when a port or the device changed; see `consume_event`. -1: can't be told."""
        ...

    def consume_event(self) -> int:
        """Take an event that made `event_fd` readable: its number (ibv_event_type)."""
        ...

    def port(self, number: int) -> PortInfo: ...

    def gid(self, port: int, index: int) -> bytes:
        """16 bytes; zeros where the table has a hole."""
        ...

    def register(self, address: int, length: int, access: int) -> MemoryRegion:
        """Pin `[address, address + length)`. It must stay mapped until the region is closed.

        Raises VerbsError: ENOMEM (limit of locked memory, or out of regions), EFAULT (not mapped,
        or read-only).
        """
        ...

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: int
    ) -> MemoryRegion:
        """As `register`, for a dma-buf (GPU memory), of which `address` names byte `offset`.

        Raises VerbsError (EOPNOTSUPP: the device or kernel can't).
        """
        ...

    def completion_queue(self, depth: int) -> CompletionQueue: ...

    def queue_pair(self, completions: CompletionQueue, depth: int, access: int) -> QueuePair:
        """A new one in RESET that takes `depth` requests; `access`: what its peer may do here.

        The completion queue may be closed only after all of its queue pairs.
        """
        ...

    def close(self) -> None:
        """All that was made of it must be closed before: some libraries refuse else (VerbsError,
        EBUSY), others close it along."""
        ...


class Verbs(Protocol):
    """A verbs library."""

    @property
    def name(self) -> str:
        """ "ibverbs", "pyverbs" or "fake"."""
        ...

    def device_names(self) -> list[str]:
        """Devices of this machine, [] where there are none. Raises VerbsError for other reasons."""
        ...

    def open(self, device_name: str) -> Device:
        """Raises VerbsError (ENODEV: no such device)."""
        ...
