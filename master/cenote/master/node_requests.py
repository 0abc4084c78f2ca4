"""Messages of store daemons as commands of the state, and an attach collected from its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.codec import unpack_ids, unpack_rows
from cenote.api.errors import (
    InvalidArgument,
    NodeSuperseded,
    ResourceUnavailable,
    SessionUnknown,
)
from cenote.api.rows import BLOCK, CLAIM, COPIED, EXTENT, SLOT, SLOT_SUM
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .commands import (
    Attach,
    Detach,
    EndpointInfo,
    Heartbeat,
    PoolCopy,
    SegmentReport,
)
from .effects import NamespaceOpened, QuotaSet
from .node_counters import NodeCounters
from .quota_requests import check_quota
from .requests import check_id, check_text

__all__ = ["AttachCollector", "detach_command", "heartbeat_command", "pool_message"]

SEGMENTS_MAX: Final = 256
"""Of one node."""
ENDPOINTS_MAX: Final = 16
DEVICE_INFO_BYTES_MAX: Final = 64 << 10
TROUBLE_BYTES_MAX: Final = 1024
INCARNATION_BYTES_MAX: Final = 64
RETIRED_EXTENTS_MAX: Final = 65_536
SLOTS_MAX: Final = 1 << 26
"""Of one node: more than any has room for."""
DAMAGED_SLOTS_MAX: Final = 16_384
SESSIONS_MAX: Final = 65_536
COPIES_MAX: Final = 16_384
"""In one heartbeat."""
CLAIMS_MAX: Final = 1 << 20
ANCESTORS_MAX: Final = 64
NAMESPACES_MAX: Final = 100_000
ATTACHES_MAX: Final = 64
"""Under way at once; each is forgotten after `ATTACH_TIMEOUT_S` without a slice."""
ATTACH_TIMEOUT_S: Final = 60.0
INVENTORY_BYTES_MAX: Final = 8 << 30
"""Of all attaches under way."""

_KINDS: Final = frozenset(common_pb2.TransportKind.values())
_TIERS: Final = frozenset(common_pb2.Tier.values()) - {common_pb2.TIER_UNSPECIFIED}


def _segment(message: pb.SegmentInfo) -> SegmentReport:
    where = f"segment {message.node_segment_index}"
    if message.tier not in _TIERS:
        raise InvalidArgument(f"{where}: tier {message.tier} is unknown")
    if not 0 < len(message.incarnation) <= INCARNATION_BYTES_MAX:
        raise InvalidArgument(f"{where}: an incarnation has 1 to {INCARNATION_BYTES_MAX} bytes")
    if message.node_segment_index >= SEGMENTS_MAX:
        raise InvalidArgument(f"{where}: a node has at most {SEGMENTS_MAX} segments")
    unit = message.unit_bytes
    if unit <= 0 or unit & (unit - 1):
        raise InvalidArgument(f"{where}: unit_bytes is {unit}, a power of two is due")
    if not 0 < message.size_bytes < 1 << 50 or message.ready_bytes > message.size_bytes:
        raise InvalidArgument(
            f"{where}: {message.ready_bytes} of {message.size_bytes} bytes can't be ready"
        )
    if message.slots > SLOTS_MAX:
        raise InvalidArgument(f"{where}: {message.slots} slots, at most {SLOTS_MAX} are due")
    retired = unpack_rows(message.retired_extents, EXTENT, "retired_extents")
    if len(retired) > RETIRED_EXTENTS_MAX:
        raise InvalidArgument(f"{where}: more than {RETIRED_EXTENTS_MAX} retired_extents")
    return SegmentReport(
        message.node_segment_index,
        message.tier,
        message.incarnation,
        message.size_bytes,
        message.ready_bytes,
        unit,
        message.slots,
        retired,
        message.unverified,
        unpack_rows(message.slot_sums, SLOT_SUM, "slot_sums"),
    )


def _endpoint(message: common_pb2.Endpoint) -> EndpointInfo:
    if message.kind not in _KINDS:
        raise InvalidArgument(f"transport kind {message.kind} is unknown")
    if len(message.device_info) > DEVICE_INFO_BYTES_MAX:
        raise InvalidArgument(f"device_info has more than {DEVICE_INFO_BYTES_MAX} bytes")
    address = check_text(message.address, "an endpoint's address", 512)
    return EndpointInfo(message.kind, address, message.device_info)


def _endpoints(messages: Sequence[common_pb2.Endpoint]) -> list[EndpointInfo]:
    if len(messages) > ENDPOINTS_MAX:
        raise InvalidArgument(f"a node has at most {ENDPOINTS_MAX} endpoints")
    return [_endpoint(endpoint) for endpoint in messages]


def _attach(message: pb.AttachRequest) -> Attach:
    name = check_text(message.node_name, "node_name")
    if not name:
        raise InvalidArgument("a node needs a node_name")
    if len(message.segments) > SEGMENTS_MAX:
        raise InvalidArgument(f"a node has at most {SEGMENTS_MAX} segments")
    segments = [_segment(segment) for segment in message.segments]
    if len({segment.index for segment in segments}) != len(segments):
        raise InvalidArgument("two segments have the same node_segment_index")
    return Attach(
        check_id(message.node_uuid, "node_uuid"),
        name,
        check_text(message.boot_id, "boot_id"),
        check_text(message.failure_domain, "failure_domain"),
        _endpoints(message.endpoints),
        segments,
        np.zeros(0, SLOT),
        message.process_id,
        check_text(message.server_version, "server_version"),
        message.start_number,
        _claims(message.claims),
        _pool(message.pool) if message.HasField("pool") else None,
        message.slots_per_block,
        unpack_rows(message.told_blocks, BLOCK, "told_blocks"),
        check_id(message.ticket_key, "ticket_key") if message.ticket_key else b"",
    )


def _pool(message: pb.PoolCopy) -> PoolCopy | None:
    """None where the daemon belongs to no pool yet."""
    if not message.pool_id:
        return None
    if len(message.ancestors) > ANCESTORS_MAX or len(message.namespaces) > NAMESPACES_MAX:
        raise InvalidArgument("a daemon's copy of its pool has too many entries")
    namespaces, quotas = [], []
    for copy in message.namespaces:
        name = check_text(copy.name, "a namespace's name", 256)
        good = name and copy.namespace_id and copy.generation and len(copy.fingerprint) <= 4096
        if not good or copy.durability not in (1, 2):
            raise InvalidArgument(f"a copy of namespace {name!r} can't be right")
        namespaces.append(
            NamespaceOpened(
                name,
                copy.namespace_id,
                copy.generation,
                copy.fingerprint,
                copy.digest_seed,
                copy.durability,
            )
        )
        if copy.priority:
            limits = copy.dram_quota_bytes, copy.ssd_quota_bytes, copy.objects_quota
            quotas.append(check_quota(QuotaSet(copy.namespace_id, *limits, copy.priority)))
    return PoolCopy(
        check_id(message.pool_id, "pool_id"),
        [check_id(one, "an ancestor") for one in message.ancestors],
        namespaces,
        quotas,
    )


def pool_message(copy: PoolCopy) -> pb.PoolCopy:
    """What a daemon is to keep."""
    quotas = {quota.namespace_id: quota for quota in copy.quotas}
    none = QuotaSet(0, 0, 0, 0, 0)
    return pb.PoolCopy(
        pool_id=copy.pool_id,
        ancestors=copy.ancestors,
        namespaces=[
            pb.NamespaceCopy(
                namespace_id=opened.namespace_id,
                generation=opened.generation,
                name=opened.name,
                fingerprint=opened.fingerprint,
                digest_seed=opened.digest_seed,
                durability=cast("common_pb2.Durability", opened.durability),
                dram_quota_bytes=quota.dram_bytes,
                ssd_quota_bytes=quota.ssd_bytes,
                objects_quota=quota.objects,
                priority=cast("common_pb2.Priority", quota.priority),
            )
            for opened in copy.namespaces
            for quota in (quotas.get(opened.namespace_id, none),)
        ],
    )


def _claims(packed: bytes) -> NDArray[np.void]:
    rows = unpack_rows(packed, CLAIM, "claims")
    if len(rows) > CLAIMS_MAX:
        raise InvalidArgument(f"an attach names at most {CLAIMS_MAX} claims")
    return rows


@dataclass(slots=True)
class _Collected:
    """`first`: the command of the first slice, without an inventory."""

    first: Attach
    attempt: int
    heard_s: float
    size_bytes: int = 0
    pieces: list[bytes] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        """Later attaches of a node have a higher one."""
        return self.first.start_number, self.attempt

    def is_of(self, command: Attach, attempt: int) -> bool:
        return self.place == (command.start_number, attempt) and (
            self.first.process_id == command.process_id
        )


@final
class AttachCollector:
    """Inventories come in slices; the last one makes an Attach. Bounded in number, bytes and time.

    A slice without those before it is refused, and the daemon begins anew: what is missing from an
    inventory would be dropped as lost. Of several attaches of one node the latest one counts.
    """

    def __init__(self) -> None:
        self._under_way: dict[bytes, _Collected] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, message: pb.AttachRequest, now_s: float) -> Attach | None:
        """The command, or None while more slices are to come.

        Everything but the inventory is that of the first slice. Raises InvalidArgument,
        ResourceUnavailable, SessionUnknown (slices are missing), NodeSuperseded (a later attach of
        this node is under way).
        """
        rows = unpack_rows(message.inventory, SLOT, "inventory")
        command = _attach(message)
        uuid = command.node_uuid
        collected = self._under_way.get(uuid)
        if collected is not None and not collected.is_of(command, message.attempt):
            if collected.place > (command.start_number, message.attempt):
                raise NodeSuperseded(f"node {command.node_name!r} attaches anew by now")
            self._drop(uuid)
            collected = None
        if collected is None:
            if message.slice:
                raise SessionUnknown(
                    f"slice {message.slice} came without those before it", remedy="attach again"
                )
            if not message.more:
                command.inventory = rows
                return command
            collected = self._begin(command, message.attempt, now_s)
        elif message.slice < len(collected.pieces):
            return None  # it comes twice
        elif message.slice > len(collected.pieces):
            self._drop(uuid)
            raise SessionUnknown(
                f"slice {message.slice} came after {len(collected.pieces)}", remedy="attach again"
            )
        self._add_piece(collected, message.inventory, now_s)
        if message.more:
            return None
        self._drop(uuid)
        command = collected.first
        command.inventory = np.frombuffer(b"".join(collected.pieces), SLOT)
        return command

    def _add_piece(self, collected: _Collected, piece: bytes, now_s: float) -> None:
        self._size_bytes += len(piece)
        collected.size_bytes += len(piece)
        collected.pieces.append(piece)
        collected.heard_s = now_s
        slots_max = min(sum(segment.slots for segment in collected.first.segments), SLOTS_MAX)
        too_many = collected.size_bytes > 2 * slots_max * SLOT.itemsize
        if too_many or self._size_bytes > INVENTORY_BYTES_MAX:
            self._drop(collected.first.node_uuid)
            if too_many:
                raise InvalidArgument(
                    f"the inventory has more rows than the {slots_max} slots of the segments"
                )
            raise ResourceUnavailable("too many inventories are sent at once", remedy="try again")

    def _begin(self, command: Attach, attempt: int, now_s: float) -> _Collected:
        for uuid, collected in list(self._under_way.items()):
            if collected.heard_s + ATTACH_TIMEOUT_S < now_s:
                self._drop(uuid)
        if len(self._under_way) >= ATTACHES_MAX:
            raise ResourceUnavailable(
                f"{ATTACHES_MAX} daemons are attaching already", remedy="try again in a second"
            )
        begun = self._under_way[command.node_uuid] = _Collected(command, attempt, now_s)
        return begun

    def _drop(self, uuid: bytes) -> None:
        self._size_bytes -= self._under_way.pop(uuid).size_bytes


# ---- heartbeats -----------------------------------------------------------------------------


def heartbeat_command(message: pb.HeartbeatRequest, *, held: bool = False) -> Heartbeat:
    """`held`: it was taken down before. Raises InvalidArgument."""
    named = (
        message.cut_session_ids,
        message.quarantined_session_ids,
        message.withdrawn_session_ids,
    )
    if max(map(len, named)) > SESSIONS_MAX * 16:
        raise InvalidArgument(f"a heartbeat names at most {SESSIONS_MAX} sessions")
    if len(message.segments) > SEGMENTS_MAX:
        raise InvalidArgument(f"a node has at most {SEGMENTS_MAX} segments")
    if len(message.copied) > COPIES_MAX * COPIED.itemsize:
        raise InvalidArgument(f"a heartbeat reports at most {COPIES_MAX} copies")
    stats = message.stats
    if len(stats.damaged_slots) > DAMAGED_SLOTS_MAX * SLOT.itemsize:
        raise InvalidArgument(f"a heartbeat names at most {DAMAGED_SLOTS_MAX} damaged slots")
    return Heartbeat(
        message.node_id,
        message.epoch,
        [(segment.node_segment_index, segment.ready_bytes) for segment in message.segments],
        message.done_instruction,
        unpack_ids(message.cut_session_ids, "cut_session_ids"),
        unpack_ids(message.quarantined_session_ids, "quarantined_session_ids"),
        NodeCounters(
            stats.read_bytes,
            stats.written_bytes,
            stats.seals,
            stats.sessions,
            stats.connections,
            stats.broken_slots,
            stats.unverified_slots,
            stats.rdma_registered_bytes,
            stats.rdma_queue_pairs,
            stats.rdma_received_bytes,
            stats.rdma_sent_bytes,
            check_text(stats.rdma_trouble, "rdma_trouble", TROUBLE_BYTES_MAX),
            stats.ssd_write_budget_bytes,
            stats.ssd_write_allowance_bytes,
            stats.ssd_written_day_bytes,
            stats.ssd_written_total_bytes,
        ),
        message.start_number,
        unpack_ids(message.withdrawn_session_ids, "withdrawn_session_ids"),
        frozenset(s.node_segment_index for s in message.segments if s.unverified),
        unpack_rows(stats.damaged_slots, SLOT, "damaged_slots") if stats.damaged_slots else None,
        unpack_rows(message.copied, COPIED, "copied") if message.copied else None,
        held,
        _endpoints(message.endpoints) if message.endpoints else None,
    )


def detach_command(message: pb.DetachRequest) -> Detach:
    return Detach(message.node_id, message.contents_survive, message.start_number)
