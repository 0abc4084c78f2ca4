"""What can be asked of the master's state, and what it answers.

`MasterState.apply(command, now_s) -> (reply, effects)`. Columns are NumPy arrays or the packed rows
of `cenote.api.rows`, so that a batch costs per byte, not per object. Commands are plain slotted
dataclasses (not frozen: a frozen one costs three times as much to make; they live for one call).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .admin_commands import AdminCommand
from .namespace_commands import NamespaceReply as NamespaceReply
from .namespace_commands import OpenNamespace as OpenNamespace
from .namespace_commands import ResetNamespace as ResetNamespace
from .namespace_commands import SetQuota as SetQuota
from .node_counters import NodeCounters
from .task_commands import TaskCommand

if TYPE_CHECKING:
    from .effects import NamespaceOpened, QuotaSet
    from .instructions import Instruction

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Digests = NDArray[np.uint64]
"""uint64[n, 2]."""
Rows = NDArray[np.void]

EMPTY_DIGESTS: Digests = np.zeros((0, 2), np.uint64)
EMPTY_U64: U64 = np.zeros(0, np.uint64)


@dataclass(slots=True)
class Piggyback:
    """News that rides on other commands; applied before them."""

    namespace_id: int = 0
    generation: int = 0
    released_lease_ids: U64 = field(default_factory=lambda: EMPTY_U64)
    touched: Digests = field(default_factory=lambda: EMPTY_DIGESTS)
    touched_chain: Digests = field(default_factory=lambda: EMPTY_DIGESTS)
    chained: Digests = field(default_factory=lambda: EMPTY_DIGESTS)
    """One chain, root first, of which some was put just now: says in which order it goes."""


# ---- sessions -------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenSession:
    session_id: bytes
    client_name: str = ""
    boot_id: str = ""
    process_id: int = 0
    observer: bool = False


@dataclass(slots=True)
class RenewSession:
    session_id: bytes
    lease_ids: U64 = field(default_factory=lambda: EMPTY_U64)
    lease_ttl_ms: int = 0
    cancelled_request_ids: U64 = field(default_factory=lambda: EMPTY_U64)
    sealed_through: int = 0


@dataclass(slots=True)
class RenewSessionReply:
    view_version: int
    lost_lease_ids: U64


@dataclass(slots=True)
class CloseSession:
    """The client says goodbye: nothing of it can write any more."""

    session_id: bytes
    sealed_through: int = 0


@dataclass(slots=True)
class CutSession:
    """Its token counts no more: whatever it holds, it is to touch nothing any more, anywhere."""

    session_id: bytes


# ---- lookups --------------------------------------------------------------------------------


@dataclass(slots=True)
class Exists:
    """Reply: uint8[n]. No lease, no touch: looking never starves writers."""

    namespace_id: int
    generation: int
    digests: Digests


@dataclass(slots=True)
class Acquire:
    session_id: bytes
    namespace_id: int
    generation: int
    digests: Digests
    ttl_ms: int
    lease: bool = True
    chain: bool = False
    hold: bool = False
    replicas_max: int = 0
    avoid_node_ids: U32 | None = None
    request_id: int = 0


@dataclass(slots=True)
class AcquireReply:
    objects: bytes
    """Packed rows.OBJECT, one a key."""
    extents: bytes
    """Packed rows.EXTENT of the hits; `slot` is the replica number, lengths end where it ends."""
    lease_id: int
    ttl_ms: int
    view_version: int


@dataclass(slots=True)
class Release:
    lease_ids: U64


@dataclass(slots=True)
class Touch:
    namespace_id: int
    generation: int
    digests: Digests
    chain: bool


# ---- writes ---------------------------------------------------------------------------------


@dataclass(slots=True)
class PutStart:
    session_id: bytes
    request_id: int
    namespace_id: int
    generation: int
    digests: Digests
    sizes: U64
    """Payload sizes, uint64[n]."""
    tail_lengths: NDArray[np.uint16] | None = None
    """Extra bytes behind each payload (keys over 64 B), or None."""
    replicas: int = 1
    min_replicas: int = 1
    durability: int = 0
    tier: int = 1
    local_first: bool = False
    ttl_ms: int = 0
    chain: bool = False
    avoid_node_ids: U32 | None = None
    shard_index: int = 0
    shard_count: int = 0
    spare_count: int = 0
    """Spare extents that the writer would like to have, too; see `spares.py`."""
    spare_bytes: int = 0
    sealed_seqs: U64 | None = None
    """Versions that it had sealed for others, 0 where none; see `sealing`."""
    sealed_epoch: int = 0
    contents: U64 | None = None
    """uint64[n, 2]: content digests, zeros where there is none; see `aliases`."""


@dataclass(slots=True)
class PutStartReply:
    puts: bytes
    """Packed rows.PUT."""
    extents: bytes
    """Packed rows.EXTENT of the granted keys; `slot` holds the slot number."""
    grant_id: int
    view_version: int
    spare_grant_id: int = 0
    spare_extents: bytes = b""
    unsealed: bytes = b""
    """Packed rows.SEAL of the UNSEALED keys."""
    alias_grant_id: int = 0
    """Of the DEDUPLICATED keys."""
    alias_extents: bytes = b""
    """Packed rows.EXTENT of these."""
    alias_checksums: bytes = b""
    """Packed u64: of the bytes that lie there."""


@dataclass(slots=True)
class SpareNames:
    """What spare extents are to hold."""

    namespace_id: int
    generation: int
    digests: Digests
    sizes: U64
    tail_lengths: NDArray[np.uint16] | None
    chain: bool


@dataclass(slots=True)
class PutCommit:
    session_id: bytes
    request_id: int
    grant_id: int
    indexes: U32 | None
    """Positions in the PutStart batch; None = every granted one."""
    checksums: U64
    failed_replicas: NDArray[np.uint32] | None = None
    """uint32[k, 2]: (position in the PutStart batch, replica) of what could not be written."""
    names: SpareNames | None = None
    """For a grant of spare extents: one for each of `indexes`."""
    sealed_through: int = 0
    """All earlier commits of the session, by request id, that are sealed; see `sealing`."""
    tickets: bytes | None = None
    """For a grant of aliases: 16 bytes for each of `indexes`."""


@dataclass(slots=True)
class CommitSpare:
    """`PutCommit` of one spare extent, as plain values; answered alike."""

    session_id: bytes
    request_id: int
    grant_id: int
    position: int
    checksum: int
    namespace_id: int
    generation: int
    digest: bytes
    size: int
    tail: int
    sealed_through: int = 0

    def as_commit(self) -> PutCommit:
        """The same, in columns."""
        digests = np.frombuffer(self.digest, np.uint64).reshape(1, 2)
        size, tail = np.array((self.size,), np.uint64), np.array((self.tail,), np.uint16)
        names = SpareNames(self.namespace_id, self.generation, digests, size, tail, False)
        at, checksum = np.array((self.position,), np.uint32), np.array((self.checksum,), np.uint64)
        return PutCommit(
            self.session_id, self.request_id, self.grant_id, at, checksum, None, names,
            self.sealed_through,
        )  # fmt: skip


@dataclass(slots=True)
class PutCommitReply:
    statuses: bytes
    """One rows.CommitStatus byte for each committed key."""
    epoch: int
    seq_first: int
    durability: int
    """Strictest durability among the batch: the shell waits for the backend if JOURNALED."""


@dataclass(slots=True)
class PutAbort:
    session_id: bytes
    grant_id: int
    indexes: U32 | None = None
    unfenced: bool = False
    unsealed: Digests | None = None
    """Keys that were decided and not sealed at enough nodes: they go, if they have ..."""
    unsealed_seqs: U64 | None = None
    unsealed_epoch: int = 0
    """... still these versions."""


@dataclass(slots=True)
class Remove:
    """Reply: uint8[n]. Always journaled before it is acknowledged."""

    namespace_id: int
    generation: int
    digests: Digests
    session_id: bytes = b""
    request_id: int = 0
    """With a session that is known: a retry gets the same reply, and removes nothing more."""


@dataclass(slots=True)
class Pin:
    """Reply: uint8[n]."""

    namespace_id: int
    generation: int
    digests: Digests
    ttl_ms: int


@dataclass(slots=True)
class Unpin:
    namespace_id: int
    generation: int
    digests: Digests


# ---- nodes ----------------------------------------------------------------------------------


@dataclass(slots=True)
class SegmentReport:
    index: int
    tier: int
    incarnation: bytes
    size_bytes: int
    ready_bytes: int
    unit_bytes: int
    slots: int
    retired: Rows
    """rows.EXTENT: data ranges given up for table growth."""
    unverified: bool = False
    """No lease proves its contents yet."""
    slot_sums: Rows | None = None
    """rows.SLOT_SUM of each block, where the attach has `slots_per_block`."""


@dataclass(slots=True)
class EndpointInfo:
    kind: int
    address: str
    device_info: bytes = b""


@dataclass(slots=True)
class PoolCopy:
    """What daemons keep of a pool; see `rebuilding`."""

    pool_id: bytes
    ancestors: list[bytes]
    namespaces: list[NamespaceOpened]
    quotas: list[QuotaSet] = field(default_factory=list)
    """Of some of these namespaces."""


@dataclass(slots=True)
class Attach:
    node_uuid: bytes
    node_name: str
    boot_id: str
    failure_domain: str
    endpoints: list[EndpointInfo]
    segments: list[SegmentReport]
    inventory: Rows
    """rows.SLOT of all sealed slots (the service collects the slices)."""
    process_id: int = 0
    server_version: str = ""
    start_number: int = 0
    """Rises with each start of the node's daemon."""
    claims: Rows | None = None
    """rows.CLAIM: what writers under void grants may still be writing into."""
    pool: PoolCopy | None = None
    slots_per_block: int = 0
    """Not 0: the segments carry sums, and the inventory is only of `told_blocks`."""
    told_blocks: Rows | None = None
    """rows.BLOCK."""
    ticket_key: bytes = b""
    """By which this process's tickets are known; empty: it gives none."""


@dataclass(slots=True)
class AttachReply:
    node_id: int
    epoch: int
    segment_ids: list[int]
    clear_slots: bytes
    """Packed rows.SLOT_REF."""
    adopted: int
    dropped: int
    last_seq: int
    """What was decided up to here and is not sealed there was dropped, so it must not be sealed."""
    first_grant_id: int
    """Older grants are void there: their writers may have been cut off by an earlier process."""
    pool: PoolCopy | None = None
    """Which one it is, without its namespaces; None where no metadata are kept."""
    wanted_blocks: bytes = b""
    """Packed rows.BLOCK: if any, nothing was decided, and their inventory is to be told, too."""


@dataclass(slots=True)
class Heartbeat:
    node_id: int
    epoch: int
    ready_bytes: list[tuple[int, int]]
    """(segment index, ready_bytes)."""
    done_instruction: int
    cut_session_ids: list[bytes]
    quarantined_session_ids: list[bytes]
    counters: NodeCounters
    start_number: int = 0
    withdrawn_session_ids: list[bytes] = field(default_factory=list)
    """Sessions of which none of the claims that the attach named is left."""
    unverified: frozenset[int] = frozenset()
    """Indexes of segments whose contents no lease proves."""
    damaged: Rows | None = None
    """rows.SLOT: whose payload is not what was sealed."""
    copied: Rows | None = None
    """rows.COPIED: what became of copies between tiers."""
    held: bool = False
    """One that was taken down before and held open since: it says nothing of its sender now."""
    endpoints: list[EndpointInfo] | None = None
    """Where it is served now; None: as it was told last."""


@dataclass(slots=True)
class HeartbeatReply:
    instructions: list[Instruction]
    """Not yet done ones, oldest first, at most 64; empty = the shell holds the long poll open."""


@dataclass(slots=True)
class Detach:
    node_id: int
    contents_survive: bool
    start_number: int = 0


@dataclass(slots=True)
class ReportFailure:
    node_id: int
    session_id: bytes
    what: str
    digests: Digests | None = None
    """Keys that were misread there; then it says nothing of the node itself."""
    misread: Rows | None = None
    """rows.OBJECT of each, as it was acquired."""
    misread_at: Rows | None = None
    """rows.EXTENT of each, the first of the replica; None: whatever lies on the node."""


@dataclass(slots=True)
class NodeProbed:
    """Whether a node that a client could not reach answers a hello (see effects.ProbeNode)."""

    node_id: int
    answered: bool


@dataclass(slots=True)
class ExtendTenure:
    """Until `end_s`, on the clock of `now_s`, nobody else can be the leader."""

    end_s: float


@dataclass(slots=True)
class Tick:
    """Housekeeping, every 10-50 ms: leases and sessions that ran out, eviction ahead of need,
    sweep of reset namespaces, nodes that fell silent, compaction; each step bounded."""


Command = (
    OpenSession
    | RenewSession
    | CloseSession
    | CutSession
    | OpenNamespace
    | ResetNamespace
    | SetQuota
    | Exists
    | Acquire
    | Release
    | Touch
    | PutStart
    | PutCommit
    | CommitSpare
    | PutAbort
    | Remove
    | Pin
    | Unpin
    | Attach
    | Heartbeat
    | Detach
    | TaskCommand
    | AdminCommand
    | ReportFailure
    | NodeProbed
    | ExtendTenure
    | Tick
    | Piggyback
)
