"""Messages of store daemons as commands of the state, and an attach collected from its slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.codec import unpack_ids, unpack_rows
from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.api.rows import EXTENT, SLOT
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .commands import (
    Attach,
    Detach,
    EndpointInfo,
    Heartbeat,
    NodeCounters,
    SegmentReport,
)
from .requests import check_id, check_text

__all__ = ["AttachCollector", "detach_command", "heartbeat_command"]

SEGMENTS_MAX: Final = 256
"""Of one node."""
ENDPOINTS_MAX: Final = 16
DEVICE_INFO_BYTES_MAX: Final = 64 << 10
INCARNATION_BYTES_MAX: Final = 64
RETIRED_EXTENTS_MAX: Final = 65_536
SLOTS_MAX: Final = 1 << 26
"""Of one node: more than any has room for."""
DAMAGED_SLOTS_MAX: Final = 16_384
SESSIONS_MAX: Final = 65_536
"""In one heartbeat."""
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
    )


def _endpoint(message: common_pb2.Endpoint) -> EndpointInfo:
    if message.kind not in _KINDS:
        raise InvalidArgument(f"transport kind {message.kind} is unknown")
    if len(message.device_info) > DEVICE_INFO_BYTES_MAX:
        raise InvalidArgument(f"device_info has more than {DEVICE_INFO_BYTES_MAX} bytes")
    address = check_text(message.address, "an endpoint's address", 512)
    return EndpointInfo(message.kind, address, message.device_info)


def _attach(message: pb.AttachRequest) -> Attach:
    name = check_text(message.node_name, "node_name")
    if not name:
        raise InvalidArgument("a node needs a node_name")
    if len(message.endpoints) > ENDPOINTS_MAX:
        raise InvalidArgument(f"a node has at most {ENDPOINTS_MAX} endpoints")
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
        [_endpoint(endpoint) for endpoint in message.endpoints],
        segments,
        np.zeros(0, SLOT),
        message.process_id,
        check_text(message.server_version, "server_version"),
    )


@dataclass(slots=True)
class _Collected:
    """`first`: the command of the first slice, without an inventory."""

    first: Attach
    heard_s: float
    size_bytes: int = 0
    pieces: list[bytes] = field(default_factory=list)


@final
class AttachCollector:
    """Inventories come in slices; the last one makes an Attach. Bounded in number, bytes and time.

    A daemon whose connection broke halfway sends all of them again: of two rows for one slot the
    later counts.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[bytes, int], _Collected] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, message: pb.AttachRequest, now_s: float) -> Attach | None:
        """The command, or None while more slices are to come.

        Name, endpoints and segments are those of the last slice that has segments. Raises
        InvalidArgument and ResourceUnavailable.
        """
        rows = unpack_rows(message.inventory, SLOT, "inventory")
        command = _attach(message)
        key = (command.node_uuid, command.process_id)
        collected = self._under_way.get(key)
        if collected is None:
            if not message.more:
                command.inventory = rows
                return command
            collected = self._begin(key, command, now_s)
        elif command.segments:
            collected.first = command
        self._size_bytes += len(message.inventory)
        collected.size_bytes += len(message.inventory)
        collected.pieces.append(message.inventory)
        collected.heard_s = now_s
        slots_max = min(sum(segment.slots for segment in collected.first.segments), SLOTS_MAX)
        too_many = collected.size_bytes > 2 * slots_max * SLOT.itemsize
        if too_many or self._size_bytes > INVENTORY_BYTES_MAX:
            self._drop(key)
            if too_many:
                raise InvalidArgument(
                    f"the inventory has more rows than the {slots_max} slots of the segments"
                )
            raise ResourceUnavailable("too many inventories are sent at once", remedy="try again")
        if message.more:
            return None
        self._drop(key)
        command = collected.first
        command.inventory = _latest(b"".join(collected.pieces))
        return command

    def _begin(self, key: tuple[bytes, int], command: Attach, now_s: float) -> _Collected:
        for old, collected in list(self._under_way.items()):
            if collected.heard_s + ATTACH_TIMEOUT_S < now_s or old[0] == key[0]:
                self._drop(old)
        if len(self._under_way) >= ATTACHES_MAX:
            raise ResourceUnavailable(
                f"{ATTACHES_MAX} daemons are attaching already", remedy="try again in a second"
            )
        begun = self._under_way[key] = _Collected(command, now_s)
        return begun

    def _drop(self, key: tuple[bytes, int]) -> None:
        self._size_bytes -= self._under_way.pop(key).size_bytes


def _latest(inventory: bytes) -> NDArray[np.void]:
    """Rows of an inventory, the last one of each slot."""
    rows = np.frombuffer(inventory, SLOT)
    slots = rows["segment_index"].astype(np.uint64) << np.uint64(32) | rows["slot"]
    _, last = np.unique(slots[::-1], return_index=True)
    return rows if len(last) == len(rows) else rows[np.sort(len(rows) - 1 - last)]


# ---- heartbeats -----------------------------------------------------------------------------


def heartbeat_command(message: pb.HeartbeatRequest, *, held: bool = False) -> Heartbeat:
    """`held`: it was taken down before. Raises InvalidArgument."""
    if max(len(message.cut_session_ids), len(message.quarantined_session_ids)) > SESSIONS_MAX * 16:
        raise InvalidArgument(f"a heartbeat names at most {SESSIONS_MAX} sessions")
    if len(message.segments) > SEGMENTS_MAX:
        raise InvalidArgument(f"a node has at most {SEGMENTS_MAX} segments")
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
        ),
        [segment.incarnation for segment in message.segments],
        frozenset(s.node_segment_index for s in message.segments if s.unverified),
        unpack_rows(stats.damaged_slots, SLOT, "damaged_slots") if stats.damaged_slots else None,
        held,
    )


def detach_command(message: pb.DetachRequest) -> Detach:
    return Detach(message.node_id, message.contents_survive)
