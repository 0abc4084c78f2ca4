"""A daemon attaches: its segments become usable, and its slot tables and the object table agree.

For each segment, in this order: extents of the table that are not sealed there are dropped; the
allocator is made from what is left (`reconciling`); slots newer than the journal are adopted where
they are whole and overlap nothing (but what has the same bytes there); all other slots that the
table does not know are to be cleared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument, NodeNameTaken, NodeSuperseded, StaleEpoch
from cenote.api.rows import CLAIM, SLOT, SLOT_REF, UNIT_BYTES

from .adopting import Adoption, adopt
from .commands import Attach, AttachReply, PoolCopy, SegmentReport
from .copies import abandon_copies
from .effects import NodeKnown, SegmentKnown, SegmentMet, SlotsGrown
from .node_ops import set_endpoints
from .nodes import Node, NodeState
from .objects import LIVE
from .pool import Pool
from .rebuilding import check_copy, take_in_copy, tell_pool
from .reconciling import reconcile
from .segments import NO_SLOT, Segment
from .session_ops import node_cut_session
from .sessions import SESSION_ID_BYTES, claimer, is_claimer
from .slot_growth import instruct_growth
from .spans import distinct
from .summed import check_sums, wanted_blocks

__all__ = ["attach"]

_UUID_BYTES = 16
_INCARNATION_BYTES_MAX = 64
_SEGMENTS_MAX = 256
_SLOTS_MAX = 1 << 31


def attach(pool: Pool, command: Attach, now_s: float) -> AttachReply:
    """Take a node in, or take it up again.

    Where it has sums that differ from the table's, and no inventory of those blocks, nothing is
    changed, and the inventory is asked for. Raises InvalidArgument (a report that can't be right),
    StaleEpoch (the daemon has followed a later leader than this one), PoolMismatch (its contents
    are another pool's), NodeSuperseded (it comes from an earlier process than the one that has
    attached), NodeNameTaken (another daemon of that name is alive), ResourceUnavailable (segment
    numbers used up).
    """
    _check(pool, command)
    check_copy(pool, command)
    _check_place(pool, command)
    wanted = wanted_blocks(pool, command)
    if len(wanted):
        return AttachReply(0, pool.epoch, [], b"", 0, 0, 0, 0, None, wanted.tobytes())
    take_in_copy(pool, command)
    node, same_process = _node(pool, command, now_s)
    if not same_process:
        abandon_copies(pool, node)
    segments = _segments(pool, node, command)
    # Slots are adopted when a segment is met first in this epoch: what was refused stays refused.
    fresh = [segment for segment in segments if segment.allocator is None]
    inventory = command.inventory
    known = np.zeros(len(inventory), np.bool_)
    work = Adoption(pool, {segment.index: segment for segment in fresh}, inventory, known)
    dropped = reconcile(work, node, command, segments, same_process=same_process)
    adopted, stale = adopt(work)
    # After what was adopted, and before all that becomes of it: a journal that has lost this, has
    # lost who was given the space of what was evicted, too, so that nobody was.
    for segment in fresh:
        segment.met_epoch = pool.epoch
        pool.effects.append(SegmentMet(segment.segment_id, pool.epoch))
    _withhold(pool, node, fresh, command)
    node.attached = True
    if not same_process:
        # An earlier process alone knew whom it could not cut off yet.
        for session_id in pool.orphans.sessions_at(node.node_id):
            if not is_claimer(session_id):
                pool.cut_off(node, session_id)
    if pool.tell_all:
        pool.tell_all = False
        for other in pool.nodes.by_id.values():
            if other.attached:
                tell_pool(pool, other)
    elif not same_process:
        tell_pool(pool, node)
    node.heard_s = now_s
    node.state = node.up_state
    node.drained = False
    node.unanswered = False
    node.unverified = frozenset(report.index for report in command.segments if report.unverified)
    pool.segments.refresh_readable()
    pool.view_changed()
    refs = _refs_of(inventory[stale])
    pool.counters.adopted += adopted
    pool.counters.lost += dropped
    if not same_process:
        node.last_seq = pool.last_seq
        node.first_grant_id = pool.grants.next_id
    return AttachReply(
        node.node_id,
        pool.epoch,
        [segment.segment_id for segment in segments],
        refs.tobytes(),
        adopted,
        dropped,
        node.last_seq,
        node.first_grant_id,
        PoolCopy(pool.pool_id, list(pool.ancestors), []) if pool.pool_id else None,
    )


def _refs_of(slots: NDArray[np.void]) -> NDArray[np.void]:
    """What the daemon is to clear, as SLOT_REF."""
    refs = np.zeros(len(slots), SLOT_REF)
    for name in ("segment_index", "slot", "epoch", "seq"):
        refs[name] = slots[name]
    return refs


def _check(pool: Pool, command: Attach) -> None:
    if len(command.node_uuid) != _UUID_BYTES:
        raise InvalidArgument(f"a node's uuid has {_UUID_BYTES} bytes")
    if len(command.segments) > _SEGMENTS_MAX:
        raise InvalidArgument(f"a node has at most {_SEGMENTS_MAX} segments")
    indexes = {report.index for report in command.segments}
    if len(indexes) != len(command.segments):
        raise InvalidArgument("two segments have the same index")
    for report in command.segments:
        if not 0 < len(report.incarnation) <= _INCARNATION_BYTES_MAX:
            raise InvalidArgument(f"segment {report.index}: an incarnation has 1 to 64 bytes")
        if report.unit_bytes < UNIT_BYTES or report.unit_bytes % UNIT_BYTES:
            raise InvalidArgument(
                f"segment {report.index}: a unit is a multiple of {UNIT_BYTES} bytes"
            )
        if not 0 <= report.ready_bytes <= report.size_bytes < UNIT_BYTES << 32:
            raise InvalidArgument(f"segment {report.index}: ready is more than its size")
        if not 0 < report.slots < _SLOTS_MAX:
            raise InvalidArgument(f"segment {report.index}: {report.slots} slots")
        other = pool.segments.by_incarnation.get(report.incarnation)
        if other is not None and other.node.uuid != command.node_uuid:
            raise InvalidArgument(
                f"segment {report.index}: its incarnation belongs to node {other.node.name!r}",
                remedy="give the copied node directory a new identity",
            )
    check_sums(command)
    inventory = command.inventory
    if inventory.dtype != SLOT:
        raise InvalidArgument("the inventory does not consist of SLOT rows")
    if not np.isin(inventory["segment_index"], list(indexes)).all():
        raise InvalidArgument("the inventory names a segment that is not reported")
    if len(inventory) and int(inventory["epoch"].max()) > pool.epoch:
        raise StaleEpoch(
            f"the node holds slots of epoch {int(inventory['epoch'].max())}, "
            f"this leader's is {pool.epoch}",
            remedy="start the master with the metadata that this cluster has used last",
        )


def _check_place(pool: Pool, command: Attach) -> None:
    """Refuse what is late, and a second daemon where there is one."""
    for node in pool.nodes.by_id.values():
        if not node.attached:
            continue
        if node.uuid == command.node_uuid:
            same_start = node.start_number == command.start_number
            if node.start_number > command.start_number or (
                same_start and node.state == NodeState.DETACHED and node.start_number
            ):
                raise NodeSuperseded(
                    f"start {command.start_number} of node {node.name!r} attaches after start"
                    f" {node.start_number}, process {node.process_id}"
                )
            if same_start and node.start_number and node.process_id != command.process_id:
                raise _name_taken(node, "has the same files, or a copy of them")
        elif node.name == command.node_name and node.is_readable:
            raise _name_taken(node, "is alive")


def _name_taken(node: Node, why: str) -> NodeNameTaken:
    where = ", ".join(endpoint.address for endpoint in node.endpoints) or "an unknown place"
    return NodeNameTaken(
        f"node {node.node_id}, called {node.name!r}, {why}: process {node.process_id} at {where},"
        f" boot id {node.boot_id or 'unknown'}"
    )


def _node(pool: Pool, command: Attach, now_s: float) -> tuple[Node, bool]:
    """The node, and whether this is the very process that attached to this epoch before."""
    node = pool.nodes.by_uuid.get(command.node_uuid)
    same_process = (
        node is not None
        and node.attached
        and node.process_id == command.process_id != 0
        and node.start_number == command.start_number
        and node.state != NodeState.DETACHED
    )
    known = NodeKnown(
        node.node_id if node is not None else pool.nodes.new_id(),
        command.node_uuid,
        command.node_name,
        command.boot_id,
        command.failure_domain,
    )
    if node is None or node.known() != known:
        node = pool.nodes.apply(known)
        pool.effects.append(known)
    set_endpoints(pool, node, command.endpoints)
    node.process_id = command.process_id
    node.start_number = command.start_number
    node.server_version = command.server_version
    node.ticket_key = command.ticket_key
    node.suspect_until_s.clear()
    return node, same_process


def _segments(pool: Pool, node: Node, command: Attach) -> list[Segment]:
    """The segments reported, in order."""
    segments = []
    for report in command.segments:
        segment = pool.segments.by_incarnation.get(report.incarnation)
        if segment is None:
            known = SegmentKnown(
                pool.segments.new_id(),
                node.node_id,
                report.index,
                report.tier or 1,
                report.incarnation,
                report.size_bytes,
                report.unit_bytes,
                report.slots,
            )
            pool.effects.append(known)
            segment = pool.segments.apply(known, node, pool.config.slots_grow_bytes_min)
            segment.is_new = True
        segment.index = report.index
        _reconcile_growth(pool, segment, report)
        segments.append(segment)
    return segments


def _reconcile_growth(pool: Pool, segment: Segment, report: SegmentReport) -> None:
    """Ranges given up for slots: learn what the journal missed, repeat what the daemon missed."""
    theirs = {
        (offset // UNIT_BYTES, length // UNIT_BYTES)
        for offset, length in zip(
            report.retired["offset"].tolist(), report.retired["length"].tolist(), strict=True
        )
    }
    for offset, length in sorted(theirs - set(segment.retired)):
        grown = SlotsGrown(segment.segment_id, offset, length, report.slots)
        segment.note_growth(grown)
        pool.effects.append(grown)
    segment.slots.total = max(segment.slots.total, report.slots)
    for offset, length in segment.retired:
        if (offset, length) not in theirs:
            grown = SlotsGrown(segment.segment_id, offset, length, segment.slots.total)
            instruct_growth(pool, segment, grown)


def _withhold(pool: Pool, node: Node, fresh: list[Segment], command: Attach) -> None:
    """What stopped writers of an earlier tenure may be writing into is not granted to others before
    their daemon says that it is over. A grant of this tenure is known here by itself."""
    claims = command.claims if command.claims is not None else np.zeros(0, CLAIM)
    claiming = {row.tobytes() for row in claims["session_id"]}
    for name in pool.orphans.sessions_at(node.node_id):
        if is_claimer(name) and name[:SESSION_ID_BYTES] not in claiming:
            node_cut_session(pool, name, node.node_id)
    for segment in fresh:
        for row in claims[claims["segment_index"] == segment.index]:
            start = int(row["offset"]) // UNIT_BYTES
            end = -(-(int(row["offset"]) + int(row["length"])) // UNIT_BYTES)
            pieces = segment.claim_free(start, end)
            if pieces:
                spans = np.array(
                    [(segment.segment_id, NO_SLOT, at, length) for at, length in pieces], np.uint32
                )
                pool.orphans.add(claimer(row["session_id"].tobytes()), node.node_id, spans)
        here = claims[claims["segment_index"] == segment.index]
        if len(here):
            _hold_claimed(pool, node, segment, here)


def _hold_claimed(pool: Pool, node: Node, segment: Segment, claims: NDArray[np.void]) -> None:
    """What lives in a claimed range stays where it is, also when it is evicted or removed, before
    its daemon says that the claim is over: somebody may be looking at it in place, or overwriting
    it (what was adopted from slots may have been evicted before the metadata were lost)."""
    rows, spans = pool.rows_in_segment(segment.segment_id)
    live = (pool.state.take(rows) & LIVE) != 0
    rows, spans = rows[live], spans[live]
    first = spans[:, 2].astype(np.int64)
    last = first + spans[:, 3]
    for claim in claims:
        start = int(claim["offset"]) // UNIT_BYTES
        end = -(-(int(claim["offset"]) + int(claim["length"])) // UNIT_BYTES)
        touched = distinct(rows[(first < end) & (last > start)])
        if len(touched):
            hold = pool.hold(touched)
            pool.orphans.add_hold(claimer(claim["session_id"].tobytes()), hold, {node.node_id})
