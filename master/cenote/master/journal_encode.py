"""Durable effects as the entries of the journal. No I/O.

A batch of objects becomes its columns, so that encoding costs per column, not per object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InternalError

from .effects import (
    Configured,
    Digested,
    EpochStarted,
    Expires,
    Gone,
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
    HEAD_BYTES_MAX,
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
    NAMESPACE,
    NAMESPACE_GONE,
    NODE,
    PAYLOAD_BYTES_MAX,
    PINNED,
    PINNED_WIDTHS,
    POOL,
    POOL_ID_BYTES,
    QUOTA,
    REPLICAS,
    REPLICAS_ROW_BYTES,
    SEGMENT,
    SEGMENT_GONE,
    SEGMENT_MET,
    SERVES,
    STORED,
    STORED_ROW_BYTES,
    Entry,
    SnapshotEnd,
)

__all__ = ["encode_entry", "split_entry"]

_Parts: TypeAlias = tuple[bytes, ...]


def _encode_stored(effect: Stored) -> _Parts:
    n, m = len(effect.sizes), len(effect.placed)
    if not n:
        return ()
    parts = (
        STORED.pack(effect.namespace_id, effect.generation, effect.epoch, n, m),
        effect.digests.tobytes(),
        effect.sizes.tobytes(),
        effect.checksums.tobytes(),
        effect.seqs.tobytes(),
        effect.tails.tobytes(),
        effect.extent_counts.tobytes(),
        effect.replicas.tobytes(),
        effect.placed.tobytes(),
    )
    _check(effect, parts, STORED.size + n * STORED_ROW_BYTES + m * EXTENT_BYTES)
    return parts


def _encode_replicas(effect: ReplicasChanged) -> _Parts:
    n, m = len(effect.seqs), len(effect.placed)
    if not n:
        return ()
    parts = (
        REPLICAS.pack(n, m),
        effect.digests.tobytes(),
        effect.seqs.tobytes(),
        effect.extent_counts.tobytes(),
        effect.replicas.tobytes(),
        effect.placed.tobytes(),
    )
    _check(effect, parts, REPLICAS.size + n * REPLICAS_ROW_BYTES + m * EXTENT_BYTES)
    return parts


def _encode_gone(effect: Gone) -> _Parts:
    n = len(effect.seqs)
    if not n:
        return ()
    head = GONE.pack(effect.namespace_id, effect.reason, n)
    parts = (head, effect.digests.tobytes(), effect.seqs.tobytes())
    _check(effect, parts, GONE.size + n * sum(GONE_WIDTHS))
    return parts


def _encode_pinned(effect: Pinned) -> _Parts:
    n = len(effect.digests)
    if not n:
        return ()
    head = PINNED.pack(effect.namespace_id, effect.pinned, effect.ttl_ms, n)
    parts = (head, effect.digests.tobytes())
    _check(effect, parts, PINNED.size + n * sum(PINNED_WIDTHS))
    return parts


def _encode_expires(effect: Expires) -> _Parts:
    n = len(effect.seqs)
    if not n:
        return ()
    head = EXPIRES.pack(effect.until_unix_ms, effect.ttl_ms, n)
    parts = (head, effect.digests.tobytes(), effect.seqs.tobytes())
    _check(effect, parts, EXPIRES.size + n * sum(EXPIRES_WIDTHS))
    return parts


def _encode_digested(effect: Digested) -> _Parts:
    n = len(effect.seqs)
    if not n:
        return ()
    columns = effect.digests.tobytes(), effect.seqs.tobytes(), effect.contents.tobytes()
    parts = (DIGESTED.pack(0, n), *columns)
    _check(effect, parts, DIGESTED.size + n * sum(DIGESTED_WIDTHS))
    return parts


def _check(effect: object, parts: _Parts, expected_bytes: int) -> None:
    if sum(map(len, parts)) != expected_bytes:
        raise InternalError(f"the columns of {type(effect).__name__} have wrong types or lengths")


# ---- batches too large for one record -------------------------------------------------------


def _spans(extent_counts: NDArray[np.uint16], row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Rows and extents of pieces that fit in a record each."""
    budget = PAYLOAD_BYTES_MAX - HEAD_BYTES_MAX
    ends = np.cumsum(extent_counts, dtype=np.int64)
    costs = ends * EXTENT_BYTES + np.arange(1, len(ends) + 1) * row_bytes
    row = extent = cost = 0
    while row < len(ends):
        end = max(int(np.searchsorted(costs, cost + budget, "right")), row + 1)
        yield slice(row, end), slice(extent, int(ends[end - 1]))
        row, extent, cost = end, int(ends[end - 1]), int(costs[end - 1])


def _split_stored(effect: Stored) -> Iterator[Stored]:
    for rows, extents in _spans(effect.extent_counts, STORED_ROW_BYTES):
        yield Stored(
            namespace_id=effect.namespace_id,
            generation=effect.generation,
            epoch=effect.epoch,
            digests=effect.digests[rows],
            sizes=effect.sizes[rows],
            checksums=effect.checksums[rows],
            seqs=effect.seqs[rows],
            tails=effect.tails[rows],
            extent_counts=effect.extent_counts[rows],
            replicas=effect.replicas[rows],
            placed=effect.placed[extents],
        )


def _split_replicas(effect: ReplicasChanged) -> Iterator[ReplicasChanged]:
    for rows, extents in _spans(effect.extent_counts, REPLICAS_ROW_BYTES):
        yield ReplicasChanged(
            digests=effect.digests[rows],
            seqs=effect.seqs[rows],
            extent_counts=effect.extent_counts[rows],
            replicas=effect.replicas[rows],
            placed=effect.placed[extents],
        )


def _split_gone(effect: Gone) -> Iterator[Gone]:
    step = (PAYLOAD_BYTES_MAX - HEAD_BYTES_MAX) // sum(GONE_WIDTHS)
    for a in range(0, len(effect.seqs), step):
        rows = slice(a, a + step)
        yield Gone(effect.namespace_id, effect.digests[rows], effect.seqs[rows], effect.reason)


def _split_pinned(effect: Pinned) -> Iterator[Pinned]:
    step = (PAYLOAD_BYTES_MAX - HEAD_BYTES_MAX) // sum(PINNED_WIDTHS)
    for a in range(0, len(effect.digests), step):
        digests = effect.digests[a : a + step]
        yield Pinned(effect.namespace_id, digests, effect.pinned, effect.ttl_ms)


def _split_expires(effect: Expires) -> Iterator[Expires]:
    step = (PAYLOAD_BYTES_MAX - HEAD_BYTES_MAX) // sum(EXPIRES_WIDTHS)
    for a in range(0, len(effect.seqs), step):
        digests, seqs = effect.digests[a : a + step], effect.seqs[a : a + step]
        yield Expires(effect.until_unix_ms, effect.ttl_ms, digests, seqs)


def _split_digested(effect: Digested) -> Iterator[Digested]:
    step = (PAYLOAD_BYTES_MAX - HEAD_BYTES_MAX) // sum(DIGESTED_WIDTHS)
    for a in range(0, len(effect.seqs), step):
        rows = slice(a, a + step)
        yield Digested(effect.digests[rows], effect.seqs[rows], effect.contents[rows])


# ---- effects without columns ----------------------------------------------------------------


def _encode_namespace(effect: NamespaceOpened) -> _Parts:
    name = effect.name.encode()
    head = NAMESPACE.pack(
        effect.namespace_id,
        effect.generation,
        effect.digest_seed,
        effect.durability,
        len(name),
        len(effect.fingerprint),
    )
    return (head, name, effect.fingerprint)


def _encode_namespace_gone(effect: NamespaceGone) -> _Parts:
    return (NAMESPACE_GONE.pack(effect.namespace_id),)


def _encode_configured(effect: Configured) -> _Parts:
    parts = [CONFIGURED.pack(len(effect.values))]
    for name, value in effect.values.items():
        parts += (CONFIGURED_VALUE.pack(value, len(name.encode())), name.encode())
    return tuple(parts)


def _encode_quota(effect: QuotaSet) -> _Parts:
    what = effect.dram_bytes, effect.ssd_bytes, effect.objects
    return (QUOTA.pack(effect.namespace_id, effect.priority, *what),)


def _encode_node(effect: NodeKnown) -> _Parts:
    texts = (
        effect.node_uuid,
        effect.name.encode(),
        effect.boot_id.encode(),
        effect.failure_domain.encode(),
    )
    return (NODE.pack(effect.node_id, *map(len, texts)), *texts)


def _encode_serves(effect: NodeServes) -> _Parts:
    parts = [SERVES.pack(effect.node_id, len(effect.endpoints))]
    for endpoint in effect.endpoints:
        address = endpoint.address.encode()
        parts.append(ENDPOINT.pack(endpoint.kind, len(address), len(endpoint.device_info)))
        parts += (address, endpoint.device_info)
    return tuple(parts)


def _encode_drains(effect: NodeDrains) -> _Parts:
    return (DRAINS.pack(effect.node_id, effect.drains, effect.bandwidth),)


def _encode_segment(effect: SegmentKnown) -> _Parts:
    head = SEGMENT.pack(
        effect.segment_id,
        effect.node_id,
        effect.index,
        effect.tier,
        effect.size_bytes,
        effect.unit_bytes,
        effect.slots,
        len(effect.incarnation),
    )
    return (head, effect.incarnation)


def _encode_grown(effect: SlotsGrown) -> _Parts:
    return (GROWN.pack(effect.segment_id, effect.offset_units, effect.length_units, effect.slots),)


def _encode_segment_met(effect: SegmentMet) -> _Parts:
    return (SEGMENT_MET.pack(effect.segment_id, effect.epoch),)


def _encode_segment_gone(effect: SegmentGone) -> _Parts:
    return (SEGMENT_GONE.pack(effect.segment_id),)


def _encode_epoch(effect: EpochStarted) -> _Parts:
    return (EPOCH.pack(effect.epoch, 0, effect.last_seq),)


def _encode_pool(effect: PoolKnown) -> _Parts:
    ids = (effect.pool_id, *effect.ancestors)
    if any(len(one) != POOL_ID_BYTES for one in ids):
        raise InternalError("a pool's id has another length")
    head = POOL.pack(effect.rebuilt_epoch, effect.adopt_below, POOL_ID_BYTES, len(ids) - 1)
    return (head, *ids)


def _encode_end(effect: SnapshotEnd) -> _Parts:
    return (END.pack(effect.covers, effect.epoch, 0),)


_ENCODERS: Final[dict[type[Entry], tuple[int, Callable[..., _Parts]]]] = {
    Stored: (KIND_STORED, _encode_stored),
    Gone: (KIND_GONE, _encode_gone),
    ReplicasChanged: (KIND_REPLICAS, _encode_replicas),
    NamespaceOpened: (KIND_NAMESPACE, _encode_namespace),
    NamespaceGone: (KIND_NAMESPACE_GONE, _encode_namespace_gone),
    Configured: (KIND_CONFIGURED, _encode_configured),
    QuotaSet: (KIND_QUOTA, _encode_quota),
    NodeKnown: (KIND_NODE, _encode_node),
    NodeServes: (KIND_SERVES, _encode_serves),
    NodeDrains: (KIND_DRAINS, _encode_drains),
    SegmentKnown: (KIND_SEGMENT, _encode_segment),
    SlotsGrown: (KIND_GROWN, _encode_grown),
    SegmentMet: (KIND_SEGMENT_MET, _encode_segment_met),
    SegmentGone: (KIND_SEGMENT_GONE, _encode_segment_gone),
    Pinned: (KIND_PINNED, _encode_pinned),
    Expires: (KIND_EXPIRES, _encode_expires),
    Digested: (KIND_DIGESTED, _encode_digested),
    EpochStarted: (KIND_EPOCH, _encode_epoch),
    PoolKnown: (KIND_POOL, _encode_pool),
    SnapshotEnd: (KIND_SNAPSHOT_END, _encode_end),
}
_SPLITTERS: Final[dict[type[Entry], Callable[..., Iterator[Entry]]]] = {
    Stored: _split_stored,
    Gone: _split_gone,
    ReplicasChanged: _split_replicas,
    Pinned: _split_pinned,
    Expires: _split_expires,
    Digested: _split_digested,
}


def encode_entry(entry: Entry) -> tuple[int, _Parts]:
    """The kind of `entry` and its payload in parts.

    Raises InternalError where a column has the wrong type or length.
    """
    kind, encode = _ENCODERS[type(entry)]
    return kind, encode(entry)


def split_entry(entry: Entry) -> Iterator[Entry]:
    """Pieces of a batch whose payload exceeds PAYLOAD_BYTES_MAX, as few as there can be.

    A batch of one object can't be split and comes back as it is.
    """
    split = _SPLITTERS.get(type(entry))
    return iter([entry]) if split is None else split(entry)
