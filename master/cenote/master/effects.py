"""What came of a command, in order: the stream that journal, metrics and routers' events read.

*Durable* effects rebuild the state: `MasterState.replay(effect)` applies one, and a snapshot is
nothing but a sequence of them (`MasterState.snapshot()`). *Transient* ones concern the present.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .commands import EndpointInfo

PLACED = np.dtype(
    [
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("offset_units", "<u4"),
        ("length_units", "<u4"),
        ("replica", "u1"),
        ("reserved", "V3"),
    ]
)
"""One extent at rest (20 bytes), object by object, replica by replica."""


class GoneReason(IntEnum):
    EVICTED = 1
    REMOVED = 2
    LOST = 3
    """Its daemon or segment is gone, or its slot was not in the inventory."""
    RESET = 4
    EXPIRED = 5


@dataclass(slots=True)
class Stored:
    """Decided commits (durable)."""

    namespace_id: int
    generation: int
    epoch: int
    digests: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    tails: NDArray[np.uint16]
    extent_counts: NDArray[np.uint16]
    replicas: NDArray[np.uint8]
    placed: NDArray[np.void]


@dataclass(slots=True)
class Gone:
    """Objects that are no longer in the table (durable)."""

    namespace_id: int
    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    reason: GoneReason


@dataclass(slots=True)
class ReplicasChanged:
    """The extents of living objects changed: a replica was lost, added or moved (durable)."""

    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    extent_counts: NDArray[np.uint16]
    replicas: NDArray[np.uint8]
    placed: NDArray[np.void]


@dataclass(slots=True)
class NamespaceOpened:
    """Created, or reset to a new generation and seed (durable)."""

    name: str
    namespace_id: int
    generation: int
    fingerprint: bytes
    digest_seed: int
    durability: int


@dataclass(slots=True)
class NamespaceGone:
    """Deleted (durable). Its number is never used again."""

    namespace_id: int


@dataclass(slots=True)
class Configured:
    """All limits that were changed while a master ran (durable)."""

    values: dict[str, float]


@dataclass(slots=True)
class QuotaSet:
    """What a namespace has for sure, and its priority (durable); it outlives resets."""

    namespace_id: int
    dram_bytes: int
    """0: no limit, as with the others."""
    ssd_bytes: int
    objects: int
    priority: int
    """1 low, 2 normal, 3 high."""


@dataclass(slots=True)
class NodeKnown:
    """(durable)"""

    node_id: int
    node_uuid: bytes
    name: str
    boot_id: str
    failure_domain: str


@dataclass(slots=True)
class NodeServes:
    """Where a node can be reached (durable): also before it attaches to the next epoch."""

    node_id: int
    endpoints: list[EndpointInfo]


@dataclass(slots=True)
class NodeDrains:
    """A node is to be left, or is taken up again (durable)."""

    node_id: int
    drains: bool
    bandwidth: int
    """Bytes a second at most; 0 = no limit."""


@dataclass(slots=True)
class SegmentKnown:
    """(durable)"""

    segment_id: int
    node_id: int
    index: int
    tier: int
    incarnation: bytes
    size_bytes: int
    unit_bytes: int
    slots: int


@dataclass(slots=True)
class SlotsGrown:
    """A data range was given up for slots (durable)."""

    segment_id: int
    offset_units: int
    length_units: int
    slots: int


@dataclass(slots=True)
class SegmentMet:
    """Its daemon attached to this epoch for the first time, and what its slots had of earlier ones
    was taken in or refused (durable)."""

    segment_id: int
    epoch: int


@dataclass(slots=True)
class SegmentGone:
    """Its contents are lost; objects that lost all replicas went before as Gone (durable)."""

    segment_id: int


@dataclass(slots=True)
class Pinned:
    """Pins set or cleared (durable)."""

    namespace_id: int
    digests: NDArray[np.uint64]
    pinned: bool
    ttl_ms: int


@dataclass(slots=True)
class Expires:
    """Objects that go by themselves at a time of the wall clock (durable)."""

    until_unix_ms: int
    ttl_ms: int
    """What they were given at first."""
    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]


@dataclass(slots=True)
class Digested:
    """By which content digests these objects were put (durable); see `blobs`."""

    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    contents: NDArray[np.uint64]
    """uint64[n, 2]; zeros: none."""


@dataclass(slots=True)
class EpochStarted:
    """(durable) Replay continues versions above all that were decided before."""

    epoch: int
    last_seq: int


@dataclass(slots=True)
class PoolKnown:
    """Which pool these metadata are of (durable)."""

    pool_id: bytes
    ancestors: list[bytes]
    """Pools that it was rebuilt from."""
    rebuilt_epoch: int
    """0: never."""
    adopt_below: int
    """All slots of epochs below this one are adopted, 0: only those that the journal missed."""


@dataclass(slots=True)
class InstructionsWaiting:
    """This node's long poll should be answered now (transient)."""

    node_id: int


@dataclass(slots=True)
class ViewChanged:
    """Nodes or segments changed (transient)."""

    view_version: int


@dataclass(slots=True)
class ProbeNode:
    """Somebody reported a failure: see whether the node answers (transient)."""

    node_id: int


@dataclass(slots=True)
class Notice:
    """Something that people should know at once (transient)."""

    text: str


DurableEffect = (
    Stored
    | Gone
    | ReplicasChanged
    | NamespaceOpened
    | NamespaceGone
    | Configured
    | QuotaSet
    | NodeKnown
    | NodeServes
    | NodeDrains
    | SegmentKnown
    | SlotsGrown
    | SegmentMet
    | SegmentGone
    | Pinned
    | Expires
    | Digested
    | EpochStarted
    | PoolKnown
)
TransientEffect = InstructionsWaiting | ViewChanged | ProbeNode | Notice
Effect = DurableEffect | TransientEffect
DURABLE = (
    Stored,
    Gone,
    ReplicasChanged,
    NamespaceOpened,
    NamespaceGone,
    Configured,
    QuotaSet,
    NodeKnown,
    NodeServes,
    NodeDrains,
    SegmentKnown,
    SlotsGrown,
    SegmentMet,
    SegmentGone,
    Pinned,
    Expires,
    Digested,
    EpochStarted,
    PoolKnown,
)
