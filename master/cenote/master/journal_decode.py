"""The entries of the journal as durable effects. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .commands import EndpointInfo
from .effects import (
    PLACED,
    Configured,
    Digested,
    DurableEffect,
    EpochStarted,
    Expires,
    Gone,
    GoneReason,
    NamespaceGone,
    NamespaceOpened,
    NodeDrains,
    NodeKnown,
    NodeServes,
    Pinned,
    PoolKnown,
    QuotaSet,
    ReplicasChanged,
    SegmentGone,
    SegmentKnown,
    SegmentMet,
    SlotsGrown,
    Stored,
)
from .journal_layout import (
    CONFIGURED,
    CONFIGURED_VALUE,
    DIGESTED,
    DIGESTED_WIDTHS,
    DRAINS,
    END,
    ENDPOINT,
    EPOCH,
    EXPIRES,
    EXPIRES_WIDTHS,
    EXTENT_BYTES,
    GONE,
    GONE_WIDTHS,
    GROWN,
    KIND_CONFIGURED,
    KIND_DIGESTED,
    KIND_DRAINS,
    KIND_EPOCH,
    KIND_EXPIRES,
    KIND_GONE,
    KIND_GROWN,
    KIND_NAMESPACE,
    KIND_NAMESPACE_GONE,
    KIND_NODE,
    KIND_PINNED,
    KIND_POOL,
    KIND_QUOTA,
    KIND_REPLICAS,
    KIND_SEGMENT,
    KIND_SEGMENT_GONE,
    KIND_SEGMENT_MET,
    KIND_SERVES,
    KIND_SNAPSHOT_END,
    KIND_STORED,
    MERGED_ROWS_MAX,
    NAMESPACE,
    NAMESPACE_GONE,
    NODE,
    PINNED,
    PINNED_WIDTHS,
    POOL,
    QUOTA,
    REPLICAS,
    REPLICAS_WIDTHS,
    SEGMENT,
    SEGMENT_GONE,
    SEGMENT_MET,
    SERVES,
    STORED,
    STORED_WIDTHS,
    Entry,
    JournalCorrupt,
    SchemaUnknown,
    SnapshotEnd,
)

__all__ = ["Merger"]


@dataclass(frozen=True, slots=True)
class _Table:
    """How an entry made of columns is laid out, and what becomes of it.

    The head ends in the number of objects and, `with_extents`, that of extents; what stands before
    is the key: neighbouring entries with equal keys can be joined.
    """

    head: Struct
    widths: tuple[int, ...]
    with_extents: bool
    build: Callable[[list[int], list[bytes]], DurableEffect]


def _digests(column: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(column, "<u8").reshape(-1, 2)


def _build_stored(key: list[int], columns: list[bytes]) -> Stored:
    digests, sizes, checksums, seqs, tails, extent_counts, replicas, placed = columns
    return Stored(
        namespace_id=key[0],
        generation=key[1],
        epoch=key[2],
        digests=_digests(digests),
        sizes=np.frombuffer(sizes, "<u8"),
        checksums=np.frombuffer(checksums, "<u8"),
        seqs=np.frombuffer(seqs, "<u8"),
        tails=np.frombuffer(tails, "<u2"),
        extent_counts=np.frombuffer(extent_counts, "<u2"),
        replicas=np.frombuffer(replicas, "u1"),
        placed=np.frombuffer(placed, PLACED),
    )


def _build_replicas(_key: list[int], columns: list[bytes]) -> ReplicasChanged:
    digests, seqs, extent_counts, replicas, placed = columns
    return ReplicasChanged(
        digests=_digests(digests),
        seqs=np.frombuffer(seqs, "<u8"),
        extent_counts=np.frombuffer(extent_counts, "<u2"),
        replicas=np.frombuffer(replicas, "u1"),
        placed=np.frombuffer(placed, PLACED),
    )


def _build_gone(key: list[int], columns: list[bytes]) -> Gone:
    return Gone(
        namespace_id=key[0],
        digests=_digests(columns[0]),
        seqs=np.frombuffer(columns[1], "<u8"),
        reason=GoneReason(key[1]),
    )


def _build_pinned(key: list[int], columns: list[bytes]) -> Pinned:
    return Pinned(
        namespace_id=key[0], digests=_digests(columns[0]), pinned=bool(key[1]), ttl_ms=key[2]
    )


def _build_expires(key: list[int], columns: list[bytes]) -> Expires:
    return Expires(key[0], key[1], _digests(columns[0]), np.frombuffer(columns[1], "<u8"))


def _build_digested(_key: list[int], columns: list[bytes]) -> Digested:
    seqs = np.frombuffer(columns[1], "<u8")
    return Digested(_digests(columns[0]), seqs, _digests(columns[2]))


_TABLES: Final = {
    KIND_STORED: _Table(STORED, STORED_WIDTHS, True, _build_stored),
    KIND_GONE: _Table(GONE, GONE_WIDTHS, False, _build_gone),
    KIND_REPLICAS: _Table(REPLICAS, REPLICAS_WIDTHS, True, _build_replicas),
    KIND_PINNED: _Table(PINNED, PINNED_WIDTHS, False, _build_pinned),
    KIND_EXPIRES: _Table(EXPIRES, EXPIRES_WIDTHS, False, _build_expires),
    KIND_DIGESTED: _Table(DIGESTED, DIGESTED_WIDTHS, False, _build_digested),
}


class Merger:
    """Decodes entries and joins neighbours that can be one effect.

    Twice: entries of one shape (most often one object each) are only collected, then cut into
    columns all at once; columns with one key become one effect. So a journal of single puts
    replays in batches, at a microsecond or two for each.
    """

    __slots__ = (
        "_columns",
        "_extents",
        "_head",
        "_key",
        "_kind",
        "_length",
        "_rows",
        "_same",
        "_same_max",
        "_table",
    )

    def __init__(self) -> None:
        self._kind = 0
        self._table: _Table | None = None
        # Entries of one shape, i.e. with equal heads.
        self._head = b""
        self._length = 0
        self._same: list[memoryview] = []
        self._same_max = 0
        # Columns of one key.
        self._key: list[int] = []
        self._columns: list[list[bytes]] = []
        self._rows = 0
        self._extents = 0

    def add(self, kind: int, payload: memoryview) -> list[Entry]:
        """Take one entry; gives the effects that are complete by now, in order.

        Raises JournalCorrupt where the payload is not what `encode_entry` makes.
        """
        if kind == self._kind and len(payload) == self._length:
            head = self._head
            if payload[: len(head)] == head and len(self._same) < self._same_max:
                self._same.append(payload)
                return []
        table = _TABLES.get(kind)
        if table is None:
            return [*self.flush(), _decode_plain(kind, payload)]
        return self._begin(kind, table, payload)

    def _begin(self, kind: int, table: _Table, payload: memoryview) -> list[Entry]:
        try:
            fields = table.head.unpack_from(payload)
        except StructError as error:
            raise JournalCorrupt(f"an entry of kind {kind} is too short") from error
        if table.with_extents:
            *key, rows, extents = fields
        else:
            *key, rows = fields
            extents = 0
        expected = table.head.size + rows * sum(table.widths) + extents * EXTENT_BYTES
        if expected != len(payload) or not rows:
            raise JournalCorrupt(
                f"an entry of kind {kind} has {len(payload)} bytes for {rows} rows"
            )
        self._cut()
        done: list[Entry] = []
        if kind != self._kind or key != self._key or self._rows + rows > MERGED_ROWS_MAX:
            done = self.flush()
            self._kind, self._table, self._key = kind, table, key
            self._columns = [[] for _ in range(len(table.widths) + table.with_extents)]
        self._head = bytes(payload[: table.head.size])
        self._length = len(payload)
        self._same_max = max(1, (MERGED_ROWS_MAX - self._rows) // rows)
        self._same.append(payload)
        return done

    def _cut(self) -> None:
        """Cut the collected entries of one shape into columns."""
        table, same = self._table, self._same
        if table is None or not same:
            return
        entries = np.frombuffer(b"".join(same), "u1").reshape(len(same), self._length)
        fields = table.head.unpack(self._head)
        rows = fields[-2] if table.with_extents else fields[-1]
        position = table.head.size
        for column, width in zip(self._columns, table.widths, strict=False):
            end = position + rows * width
            column.append(entries[:, position:end].tobytes())
            position = end
        if table.with_extents:
            self._columns[-1].append(entries[:, position:].tobytes())
            self._extents += fields[-1] * len(same)
        self._rows += rows * len(same)
        self._same = []

    def flush(self) -> list[Entry]:
        """The effect that is still being joined, if any."""
        table = self._table
        if table is None:
            return []
        self._cut()
        columns = [b"".join(column) for column in self._columns]
        if table.with_extents:
            counts = np.frombuffer(columns[-3], "<u2")
            if int(counts.sum(dtype=np.uint64)) != self._extents:
                raise JournalCorrupt("extents and extent counts of an entry differ")
        try:
            effect = table.build(self._key, columns)
        except ValueError as error:  # an unknown reason
            raise JournalCorrupt(f"an entry of kind {self._kind}: {error}") from error
        self._kind, self._table, self._key = 0, None, []
        self._length = self._rows = self._extents = 0
        return [effect]


def _texts(payload: memoryview, position: int, lengths: tuple[int, ...]) -> list[bytes]:
    if position + sum(lengths) != len(payload):
        raise JournalCorrupt(f"an entry has {len(payload)} bytes and not those that it names")
    found = []
    for length in lengths:
        found.append(bytes(payload[position : position + length]))
        position += length
    return found


def _decode_namespace(payload: memoryview) -> NamespaceOpened:
    namespace_id, generation, seed, durability, *lengths = NAMESPACE.unpack_from(payload)
    name, fingerprint = _texts(payload, NAMESPACE.size, tuple(lengths))
    return NamespaceOpened(name.decode(), namespace_id, generation, fingerprint, seed, durability)


def _decode_configured(payload: memoryview) -> Configured:
    (count,) = CONFIGURED.unpack_from(payload)
    values: dict[str, float] = {}
    at = CONFIGURED.size
    for _ in range(count):
        value, length = CONFIGURED_VALUE.unpack_from(payload, at)
        end = at + CONFIGURED_VALUE.size + length
        (name,) = _texts(payload[:end], at + CONFIGURED_VALUE.size, (length,))
        values[name.decode()] = value
        at = end
    if at != len(payload):
        raise JournalCorrupt(f"{len(payload) - at} bytes are left behind {count} values")
    return Configured(values)


def _decode_quota(payload: memoryview) -> QuotaSet:
    namespace_id, priority, dram, ssd, objects = QUOTA.unpack(payload)
    return QuotaSet(namespace_id, dram, ssd, objects, priority)


def _decode_node(payload: memoryview) -> NodeKnown:
    node_id, *lengths = NODE.unpack_from(payload)
    node_uuid, name, boot_id, failure_domain = _texts(payload, NODE.size, tuple(lengths))
    return NodeKnown(node_id, node_uuid, name.decode(), boot_id.decode(), failure_domain.decode())


def _decode_serves(payload: memoryview) -> NodeServes:
    node_id, count = SERVES.unpack_from(payload)
    endpoints = []
    at = SERVES.size
    for _ in range(count):
        kind, *lengths = ENDPOINT.unpack_from(payload, at)
        end = at + ENDPOINT.size + sum(lengths)
        address, info = _texts(payload[:end], at + ENDPOINT.size, tuple(lengths))
        endpoints.append(EndpointInfo(kind, address.decode(), info))
        at = end
    if at != len(payload):
        raise ValueError(f"{len(payload) - at} bytes are left behind {count} endpoints")
    return NodeServes(node_id, endpoints)


def _decode_drains(payload: memoryview) -> NodeDrains:
    node_id, drains, bandwidth = DRAINS.unpack(payload)
    return NodeDrains(node_id, bool(drains), bandwidth)


def _decode_segment(payload: memoryview) -> SegmentKnown:
    segment_id, node_id, index, tier, size_bytes, unit_bytes, slots, length = SEGMENT.unpack_from(
        payload
    )
    (incarnation,) = _texts(payload, SEGMENT.size, (length,))
    return SegmentKnown(
        segment_id, node_id, index, tier, incarnation, size_bytes, unit_bytes, slots
    )


def _decode_epoch(payload: memoryview) -> EpochStarted:
    epoch, _, last_seq = EPOCH.unpack(payload)
    return EpochStarted(epoch, last_seq)


def _decode_pool(payload: memoryview) -> PoolKnown:
    rebuilt, below, length, count = POOL.unpack_from(payload)
    if length == 0 or count > len(payload):  # before so many lengths are made
        raise ValueError(f"{count} ancestors of {length} bytes")
    pool_id, *ancestors = _texts(payload, POOL.size, (length,) * (count + 1))
    return PoolKnown(pool_id, ancestors, rebuilt, below)


def _decode_end(payload: memoryview) -> SnapshotEnd:
    covers, epoch, _ = END.unpack(payload)
    return SnapshotEnd(covers, epoch)


_DECODERS: Final[dict[int, Callable[[memoryview], Entry]]] = {
    KIND_NAMESPACE: _decode_namespace,
    KIND_NAMESPACE_GONE: lambda payload: NamespaceGone(*NAMESPACE_GONE.unpack(payload)),
    KIND_CONFIGURED: _decode_configured,
    KIND_QUOTA: _decode_quota,
    KIND_NODE: _decode_node,
    KIND_SERVES: _decode_serves,
    KIND_DRAINS: _decode_drains,
    KIND_SEGMENT: _decode_segment,
    KIND_GROWN: lambda payload: SlotsGrown(*GROWN.unpack(payload)),
    KIND_SEGMENT_MET: lambda payload: SegmentMet(*SEGMENT_MET.unpack(payload)),
    KIND_SEGMENT_GONE: lambda payload: SegmentGone(*SEGMENT_GONE.unpack(payload)),
    KIND_EPOCH: _decode_epoch,
    KIND_POOL: _decode_pool,
    KIND_SNAPSHOT_END: _decode_end,
}


def _decode_plain(kind: int, payload: memoryview) -> Entry:
    decode = _DECODERS.get(kind)
    if decode is None:
        raise SchemaUnknown(f"entries of kind {kind} are unknown")
    try:
        return decode(payload)
    except (StructError, ValueError) as error:  # no UTF-8 is a ValueError, too
        raise JournalCorrupt(f"an entry of kind {kind}: {error}") from error
