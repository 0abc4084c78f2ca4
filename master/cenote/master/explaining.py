"""Why a key is there, or is not; and who holds what. Read, never changed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cenote.api.rows import UNIT_BYTES

from .commands import Digests
from .decisions import Decision
from .lookups import hits
from .nodes import NodeState
from .pool import Pool
from .spans import SEGMENT_MASK

__all__ = ["Explanation", "HolderStatus", "Place", "explain", "holders"]

KeyState = Literal["present", "unreachable", "being put", "absent"]


@dataclass(slots=True)
class Place:
    """One extent of one replica."""

    replica: int
    segment_id: int
    tier: int
    node_name: str
    node_state: NodeState
    attached: bool
    offset_bytes: int
    length_bytes: int


@dataclass(slots=True)
class Explanation:
    state: KeyState
    size_bytes: int = 0
    seq: int = 0
    epoch: int = 0
    idle_s: float = 0.0
    leases: int = 0
    pinned_s: float = 0.0
    """How much longer: 0 not at all, infinite until it is unpinned."""
    places: list[Place] = field(default_factory=list)
    writer: str = ""
    """Who is putting it now."""
    decisions: list[tuple[Decision, float]] = field(default_factory=list)
    """Newest first, and how long before each the object was used last; nan: not known."""
    log_keys: int = 0
    """How many keys the log of decisions holds."""
    log_s: float = 0.0
    """How far back it reaches."""
    over_quota: bool = False
    """Whether its namespace holds more than it has for sure: then its objects go first."""


@dataclass(slots=True)
class HolderStatus:
    """A session, and what it keeps others from having."""

    session_id: bytes
    client_name: str
    boot_id: str
    process_id: int
    leases: int
    holds: int
    """Of these, those that no time ends."""
    leased_objects: int
    leased_bytes: int
    """Payload; what several leases cover counts for each."""
    ends_s: float
    """Until the last of its leases ends; holds aside."""
    grants: int
    granted_bytes: int
    expires_s: float
    """Until it runs out unless it is heard of."""


def explain(
    pool: Pool, namespace_id: int, generation: int, digest: Digests, now_s: float
) -> Explanation:
    namespace = pool.namespaces.check(namespace_id, generation)
    rows = pool.objects.lookup(np.ascontiguousarray(digest).reshape(1, 2))
    row = int(rows[0])
    there = row >= 0 and int(pool.incarnations_of(rows)[0]) == namespace.incarnation
    out = Explanation("absent")
    if there:
        _describe(pool, row, now_s, out)
        out.state = "present" if hits(pool, rows, namespace.incarnation)[0] else "unreachable"
    else:
        _find_writer(pool, digest, out)
    log = pool.decisions
    for decision in log.find(digest):
        idle_s = math.nan
        if decision.stamp:
            idle_s = max(0.0, pool.idle_s(decision.stamp, now_s) - (now_s - decision.at_s))
        out.decisions.append((decision, idle_s))
    out.log_keys = len(log)
    oldest_s = log.oldest_s()
    out.log_s = 0.0 if oldest_s is None else max(0.0, now_s - oldest_s)
    units, objects = pool.quotas.excess(pool, on_ssd=False)
    at = namespace.incarnation
    out.over_quota = pool.quotas.active and (int(units[at]) > 0 or int(objects[at]) > 0)
    return out


def _describe(pool: Pool, row: int, now_s: float, out: Explanation) -> None:
    size, _, seq, epoch, *_ = pool.record_of(row)
    out.size_bytes, out.seq, out.epoch = int(size), int(seq), int(epoch)
    out.idle_s = pool.idle_s(int(pool.stamp[row]), now_s)
    out.leases = int(pool.lease_count[row])
    if pool.pin[row]:
        ends_s = {timed.tag: timed.at_s for timed in pool.unpins.entries}
        out.pinned_s = max(0.001, ends_s.get(int(pool.pin[row]), math.inf) - now_s)
    for number, replica, _, _, offset, length in pool.objects.extents_of_one(row):
        segment = pool.segments.by_id.get(number & SEGMENT_MASK)
        if segment is None:
            continue
        node = segment.node
        out.places.append(
            Place(
                replica,
                segment.segment_id,
                segment.tier,
                node.name,
                node.state,
                node.attached,
                offset * UNIT_BYTES,
                length * UNIT_BYTES,
            )
        )


def _find_writer(pool: Pool, digest: Digests, out: Explanation) -> None:
    for grant in pool.grants.by_id.values():
        match = (grant.digests == digest).all(axis=1)
        if grant.pending is not None:
            match &= grant.pending
        if not grant.spare_units and match.any():
            session = pool.sessions.by_id.get(grant.session_id)
            out.writer = session.client_name if session is not None else "a session that ended"
            out.state = "being put"
            return


def holders(pool: Pool, now_s: float) -> list[HolderStatus]:
    """All sessions, those that hold most first."""
    found = []
    for session in pool.sessions.by_id.values():
        if session.observer and not session.leases and not session.grants:
            continue
        objects = size_bytes = holds = 0
        ends_s = 0.0
        for lease in session.leases:
            rows = np.array([lease.rows]) if isinstance(lease.rows, int) else lease.rows
            objects += len(rows)
            size_bytes += int(pool.sizes_of(rows).sum())
            if lease.is_hold:
                holds += 1
            else:
                ends_s = max(ends_s, lease.deadline_s - now_s)
        found.append(
            HolderStatus(
                session.session_id,
                session.client_name,
                session.boot_id,
                session.process_id,
                len(session.leases),
                holds,
                objects,
                size_bytes,
                ends_s,
                len(session.grants),
                session.granted_units * UNIT_BYTES,
                max(0.0, session.expires_s - now_s),
            )
        )
    found.sort(key=lambda h: (-(h.leased_bytes + h.granted_bytes), h.client_name, h.session_id))
    return found
