"""What people and clients see: plain values, read and never changed here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT_STRUCT, OBJECT, UNIT_BYTES, ObjectStatus

from .commands import Digests, EndpointInfo
from .counters import Counters
from .lookups import hits
from .nodes import Node, NodeState, rdma_trouble
from .pool import Pool
from .rebuilding import notice
from .segments import DRAM, Segment
from .spans import SEGMENT_MASK

__all__ = [
    "CurveOf",
    "MissRatios",
    "NamespaceStatus",
    "NamespaceUse",
    "NodeStatus",
    "ObjectStats",
    "PoolStatus",
    "SegmentStatus",
    "curves",
    "facts",
    "namespace_uses",
    "namespaces",
    "node_states",
    "nodes",
    "objects",
    "segments",
    "status",
]


@dataclass(slots=True)
class PoolStatus:
    """Bytes are of allocated space unless they are said to be payload."""

    epoch: int
    last_seq: int
    view_version: int
    objects: int
    capacity_bytes: int
    used_bytes: int
    logical_bytes: int
    """What would be used, had each object bytes of its own (content dedup)."""
    """In memory, as the capacity is."""
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    copying_bytes: int
    """Held for copies between tiers."""
    granted_bytes: int
    condemned_bytes: int
    """Of removed objects that are still leased."""
    quarantined_bytes: int
    """Of writers that were not cut off yet."""
    leases: int
    leased_bytes: int
    """Payload."""
    leased_bytes_max: int
    pinned_objects: int
    pinned_bytes: int
    """Payload."""
    pinned_bytes_max: int
    dram_quota_bytes: int
    """What all quotas promise together."""
    ssd_quota_bytes: int
    sessions: int
    quarantined_sessions: int
    """Cut off by the master, and not yet by all daemons."""
    grants: int
    nodes_alive: int
    nodes_total: int
    stale_objects: int
    """Of reset namespaces, not swept yet."""
    metadata_memory_bytes: int
    broken_slots: int
    unverified_slots: int
    policy_wanted: str
    policy: str
    policy_switches: int
    ssd_write_budget_bytes: int
    """Of all SSDs that have one: for any 24 hours."""
    ssd_written_day_bytes: int
    rdma_trouble: str
    """Of a node whose memory goes over TCP though it has RDMA, why; empty where there is none."""
    notice: str
    """What people should know; empty where there is nothing to say."""
    counters: Counters


@dataclass(slots=True)
class NodeStatus:
    node_id: int
    uuid: bytes
    name: str
    boot_id: str
    failure_domain: str
    endpoints: list[EndpointInfo]
    segment_ids: list[int]
    state: NodeState
    """SUSPECT where some host suspects it."""
    attached: bool
    drained: bool
    """It holds nothing more, since that was asked for."""
    capacity_bytes: int
    used_bytes: int
    """As `capacity_bytes` on both tiers; of it on SSDs are `ssd_capacity_bytes`, ..."""
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    heartbeat_age_s: float
    read_bytes: int
    written_bytes: int
    sessions: int
    process_id: int
    server_version: str
    rdma_registered_bytes: int
    rdma_queue_pairs: int
    rdma_received_bytes: int
    rdma_sent_bytes: int
    rdma_trouble: str
    ssd_write_budget_bytes: int
    ssd_write_allowance_bytes: int
    ssd_written_day_bytes: int
    ssd_written_total_bytes: int
    quarantined_session_ids: list[bytes]


@dataclass(slots=True)
class SegmentStatus:
    segment_id: int
    node_id: int
    node_name: str
    index: int
    tier: int
    incarnation: bytes
    size_bytes: int
    ready_bytes: int
    unit_bytes: int
    used_bytes: int
    objects: int
    """Objects whose first extent lies here."""
    slots: int
    slots_used: int
    largest_free_bytes: int
    free_runs: int
    retired_bytes: int
    usable: bool


@dataclass(slots=True)
class NamespaceStatus:
    name: str
    namespace_id: int
    generation: int
    fingerprint: bytes
    durability: int
    objects: int
    used_bytes: int
    """Of all copies, in memory and on SSDs."""
    ssd_used_bytes: int
    dram_quota_bytes: int
    """0: none, as with the others."""
    ssd_quota_bytes: int
    objects_quota: int
    priority: int
    pinned_objects: int
    pinned_bytes: int
    """Payload."""


@dataclass(slots=True)
class NamespaceUse:
    """What is known of a namespace without a look at its objects."""

    name: str
    objects: int
    dram_bytes: int
    ssd_bytes: int
    asked: int
    found: int
    found_ssd: int
    """Of those found, on SSDs alone."""


@dataclass(slots=True)
class ObjectStats:
    """As in an AcquireReply, without a lease or a touch; all columns one a key."""

    objects: bytes
    extents: bytes
    idle_s: NDArray[np.float64]
    lease_counts: NDArray[np.uint32]
    pinned_s: NDArray[np.float64]
    """How much longer it is pinned: 0 not at all, infinite until it is unpinned."""


@dataclass(slots=True)
class CurveOf:
    namespace: str
    """Empty for all together."""
    references: int
    hit_rates: list[float]
    """One for each of `advisor.CURVE_FACTORS`."""


@dataclass(slots=True)
class MissRatios:
    capacity_objects: int
    sampling_rate: float
    dropped: int
    policies: dict[str, float]
    """What each would hit; empty where they are not compared."""
    curves: list[CurveOf]
    """The first is of all namespaces."""


def status(pool: Pool, now_s: float) -> PoolStatus:
    segments_ = pool.segments.by_id.values()
    nodes_ = pool.nodes.by_id.values()
    namespaces_ = pool.namespaces
    # What is granted of others' extents, or is to be a copy there, is no object yet.
    shared = {s.segment_id: s.shared_units for s in segments_}
    copying = 0
    for copy in pool.copies.by_id.values():
        if copy.shares is not None:
            shared[copy.target.segment_id] -= copy.units
        elif copy.target.tier != DRAM:
            copying += copy.units
    granted = sum(g.units for g in pool.grants.by_id.values() if g.checksums is not None)
    on_ssd = max(0, sum(s.used_units for s in segments_ if s.tier != DRAM) - copying)
    ssd_logical = on_ssd + sum(shared[s.segment_id] for s in segments_ if s.tier != DRAM)
    logical = int(namespaces_.units.sum()) - ssd_logical
    saved = sum(shared[s.segment_id] for s in segments_ if s.tier == DRAM) - granted
    return PoolStatus(
        epoch=pool.epoch,
        last_seq=pool.last_seq,
        view_version=pool.view_version,
        objects=pool.objects.live_count,
        capacity_bytes=pool.segments.memory_units * UNIT_BYTES,
        used_bytes=max(0, logical - saved) * UNIT_BYTES,
        logical_bytes=logical * UNIT_BYTES,
        ssd_capacity_bytes=sum(s.capacity_units for s in segments_ if s.tier != DRAM) * UNIT_BYTES,
        ssd_used_bytes=on_ssd * UNIT_BYTES,
        copying_bytes=pool.copies.units * UNIT_BYTES,
        granted_bytes=pool.grants.units * UNIT_BYTES,
        condemned_bytes=pool.condemned_units * UNIT_BYTES,
        quarantined_bytes=pool.orphans.units * UNIT_BYTES,
        leases=len(pool.leases),
        leased_bytes=pool.leased_bytes,
        leased_bytes_max=pool.lease_cap_bytes,
        pinned_objects=pool.pinned_objects,
        pinned_bytes=pool.pinned_bytes,
        pinned_bytes_max=int(pool.capacity_bytes * pool.config.pinned_share_max),
        dram_quota_bytes=sum(quota.dram_bytes for quota in pool.quotas.by_id.values()),
        ssd_quota_bytes=sum(quota.ssd_bytes for quota in pool.quotas.by_id.values()),
        sessions=len(pool.sessions.by_id),
        quarantined_sessions=len(pool.orphans),
        grants=len(pool.grants),
        nodes_alive=sum(node.is_readable and node.attached for node in nodes_),
        nodes_total=sum(bool(node.segment_ids) or node.is_readable for node in nodes_),
        stale_objects=namespaces_.stale_objects,
        metadata_memory_bytes=pool.objects.memory_bytes(),
        broken_slots=sum(node.counters.broken_slots for node in nodes_),
        unverified_slots=sum(node.counters.unverified_slots for node in nodes_),
        policy_wanted=pool.config.policy,
        policy=pool.policy.name,
        policy_switches=pool.advisor.switches,
        ssd_write_budget_bytes=sum(node.counters.ssd_write_budget_bytes for node in nodes_),
        ssd_written_day_bytes=sum(node.counters.ssd_written_day_bytes for node in nodes_),
        rdma_trouble=rdma_trouble(nodes_),
        notice=notice(pool),
        counters=pool.counters,
    )


def _node(node: Node, parts: list[Segment], now_s: float) -> NodeStatus:
    return NodeStatus(
        node_id=node.node_id,
        uuid=node.uuid,
        name=node.name,
        boot_id=node.boot_id,
        failure_domain=node.domain,
        endpoints=list(node.endpoints),
        segment_ids=list(node.segment_ids),
        state=_state_of(node, now_s),
        attached=node.attached,
        drained=node.drained,
        capacity_bytes=sum(s.capacity_units for s in parts) * UNIT_BYTES,
        used_bytes=sum(s.used_units for s in parts) * UNIT_BYTES,
        ssd_capacity_bytes=sum(s.capacity_units for s in parts if s.tier != DRAM) * UNIT_BYTES,
        ssd_used_bytes=sum(s.used_units for s in parts if s.tier != DRAM) * UNIT_BYTES,
        heartbeat_age_s=max(0.0, now_s - node.heard_s),
        read_bytes=node.counters.read_bytes,
        written_bytes=node.counters.written_bytes,
        sessions=node.counters.sessions,
        process_id=node.process_id,
        server_version=node.server_version,
        rdma_registered_bytes=node.counters.rdma_registered_bytes,
        rdma_queue_pairs=node.counters.rdma_queue_pairs,
        rdma_received_bytes=node.counters.rdma_received_bytes,
        rdma_sent_bytes=node.counters.rdma_sent_bytes,
        rdma_trouble=node.counters.rdma_trouble,
        ssd_write_budget_bytes=node.counters.ssd_write_budget_bytes,
        ssd_write_allowance_bytes=node.counters.ssd_write_allowance_bytes,
        ssd_written_day_bytes=node.counters.ssd_written_day_bytes,
        ssd_written_total_bytes=node.counters.ssd_written_total_bytes,
        quarantined_session_ids=list(node.quarantined_session_ids),
    )


def _state_of(node: Node, now_s: float) -> NodeState:
    suspect = node.is_readable and any(t > now_s for t in node.suspect_until_s.values())
    return NodeState.SUSPECT if suspect else node.state


def node_states(pool: Pool, now_s: float) -> list[NodeState]:
    """Of each node that has segments, or can be read from."""
    known = (n for n in pool.nodes.by_id.values() if n.segment_ids or n.is_readable)
    return [_state_of(node, now_s) for node in known]


def nodes(pool: Pool, now_s: float) -> list[NodeStatus]:
    by_id = pool.segments.by_id
    return [
        _node(node, [by_id[i] for i in node.segment_ids], now_s)
        for node in sorted(pool.nodes.by_id.values(), key=lambda n: n.node_id)
    ]


def segments(pool: Pool, now_s: float) -> list[SegmentStatus]:
    table = pool.objects
    live = table.segment[(table.state & 1) != 0]
    counts = np.bincount(live, minlength=SEGMENT_MASK + 1)
    return [
        SegmentStatus(
            segment_id=segment.segment_id,
            node_id=segment.node.node_id,
            node_name=segment.node.name,
            index=segment.index,
            tier=segment.tier,
            incarnation=segment.incarnation,
            size_bytes=segment.size_bytes,
            ready_bytes=segment.ready_units * UNIT_BYTES,
            unit_bytes=segment.unit_bytes,
            used_bytes=segment.used_units * UNIT_BYTES,
            objects=int(counts[segment.segment_id]),
            slots=segment.slots.total,
            slots_used=segment.slots.used,
            largest_free_bytes=segment.largest_free_units * UNIT_BYTES,
            free_runs=segment.free_runs,
            retired_bytes=segment.retired_units * UNIT_BYTES,
            usable=segment.is_usable,
        )
        for segment in pool.segments.by_id.values()
    ]


def namespaces(pool: Pool) -> list[NamespaceStatus]:
    columns = pool.namespaces
    pinned = np.flatnonzero(pool.pin[: pool.objects.high_water])
    owners = pool.incarnations_of(pinned)
    pins = np.bincount(owners, minlength=columns.count)
    pinned_bytes = np.bincount(owners, weights=pool.sizes_of(pinned), minlength=columns.count)
    quotas = {namespace_id: pool.quotas.of(namespace_id) for namespace_id in columns.by_id}
    return [
        NamespaceStatus(
            name=namespace.name,
            namespace_id=namespace.namespace_id,
            generation=namespace.generation,
            fingerprint=namespace.fingerprint,
            durability=namespace.durability,
            objects=int(columns.objects[namespace.incarnation]),
            used_bytes=int(columns.units[namespace.incarnation]) * UNIT_BYTES,
            ssd_used_bytes=int(columns.ssd_units[namespace.incarnation]) * UNIT_BYTES,
            dram_quota_bytes=quotas[namespace.namespace_id].dram_bytes,
            ssd_quota_bytes=quotas[namespace.namespace_id].ssd_bytes,
            objects_quota=quotas[namespace.namespace_id].objects,
            priority=quotas[namespace.namespace_id].priority,
            pinned_objects=int(pins[namespace.incarnation]),
            pinned_bytes=int(pinned_bytes[namespace.incarnation]),
        )
        for namespace in sorted(columns.by_id.values(), key=lambda n: n.namespace_id)
    ]


def facts(pool: Pool, now_s: float) -> dict[str, object]:
    """Counters, and how much there is of everything."""
    table = pool.objects
    return {
        "counters": {name: getattr(pool.counters, name) for name in Counters.__slots__},
        "objects": table.live_count,
        "rows": table.used_rows,
        "high_water": table.high_water,
        "table_bytes": table.memory_bytes(),
        "sessions": len(pool.sessions.by_id),
        "leases": len(pool.leases),
        "grants": len(pool.grants),
        "orphans": len(pool.orphans),
        "incarnations": pool.namespaces.count,
        "stale_objects": pool.namespaces.stale_objects,
        "segments": [
            {
                "segment_id": s.segment_id,
                "node": s.node.name,
                "free_units": s.free_units,
                "largest_free_units": s.largest_free_units,
                "free_runs": s.free_runs,
                "usable": s.is_usable,
            }
            for s in pool.segments.by_id.values()
        ],
        "decisions": {"keys": len(pool.decisions), "batches": pool.decisions.batches},
        "adoption_open": pool.adoption_open,
        "tenure_left_s": pool.tenure_end_s - now_s,
    }


def namespace_uses(pool: Pool) -> list[NamespaceUse]:
    columns = pool.namespaces
    found = []
    for namespace in columns.by_id.values():
        at = namespace.incarnation
        ssd_units = int(columns.ssd_units[at])
        found.append(
            NamespaceUse(
                namespace.name,
                int(columns.objects[at]),
                (int(columns.units[at]) - ssd_units) * UNIT_BYTES,
                ssd_units * UNIT_BYTES,
                columns.asked[at],
                columns.found[at],
                columns.found_ssd[at],
            )
        )
    return found


def curves(pool: Pool) -> MissRatios:
    advisor = pool.advisor
    named: list[tuple[str, int | None]] = [("", None)]
    spaces = sorted(pool.namespaces.by_id.values(), key=lambda namespace: namespace.name)
    named += [(namespace.name, namespace.incarnation) for namespace in spaces]
    found = [(name, advisor.references(owner), advisor.curve(owner)) for name, owner in named]
    return MissRatios(
        capacity_objects=advisor.capacity,
        sampling_rate=advisor.sampling_rate,
        dropped=advisor.dropped,
        policies=advisor.hit_rates(),
        curves=[
            CurveOf(name, references, [] if rates is None else rates.tolist())
            for name, references, rates in found
            if rates is not None or not name
        ],
    )


def objects(
    pool: Pool, namespace_id: int, generation: int, digests: Digests, now_s: float
) -> ObjectStats:
    """Facts of single objects. Raises NamespaceReset."""
    incarnation = pool.namespaces.check(namespace_id, generation).incarnation
    n = len(digests)
    out = np.zeros(n, OBJECT)
    idle_s = np.zeros(n, np.float64)
    lease_counts = np.zeros(n, np.uint32)
    pinned_s = np.zeros(n, np.float64)
    ends_s = {timed.tag: timed.at_s for timed in pool.unpins.entries} if pool.pinned_objects else {}
    extents: list[bytes] = []
    rows = pool.objects.lookup(np.ascontiguousarray(digests))
    found = hits(pool, rows, incarnation)
    for i in np.flatnonzero(found).tolist():
        row = int(rows[i])
        size, checksum, seq, epoch, _, _, _, count, replicas, _ = pool.record_of(row)
        out[i] = (size, checksum, seq, epoch, count, replicas, ObjectStatus.UNLEASED)
        idle_s[i] = pool.idle_s(int(pool.stamp[row]), now_s)
        lease_counts[i] = pool.lease_count[row]
        if pool.pin[row]:
            pinned_s[i] = max(0.001, ends_s.get(int(pool.pin[row]), math.inf) - now_s)
        left: dict[int, int] = {}
        for segment, replica, _, _, offset, length in pool.objects.extents_of_one(row):
            room = left.setdefault(replica, size)
            part = min(room, length * UNIT_BYTES)
            left[replica] = room - part
            extents.append(EXTENT_STRUCT.pack(segment, replica, offset * UNIT_BYTES, part))
    return ObjectStats(out.tobytes(), b"".join(extents), idle_s, lease_counts, pinned_s)
