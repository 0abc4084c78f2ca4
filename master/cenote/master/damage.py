"""Replicas whose bytes are not what was sealed: dropped, so that they are misses and not errors.

A store daemon finds them when it takes the checksums of contents that outlived it, a reader when
what it read twice from the same place has the wrong checksum. Either names the version that it
means: whatever stands in the table with that very version, at that very place, has stood there ever
since it was decided, so its bytes can't have been anybody else's.

Likewise what a put decided and could not have sealed at as many nodes as it must.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

from .commands import PutAbort, ReportFailure
from .effects import GoneReason
from .nodes import Node
from .objects import LIVE
from .pool import Pool, Rows
from .sealing import unsealed_rows
from .spans import Spans, distinct, segments_of

__all__ = ["drop_damaged", "drop_misread", "drop_unsealed"]

_EPOCH_MASK = np.uint64(0xFFFF_FFFF)


def drop_damaged(pool: Pool, node: Node, slots: NDArray[np.void]) -> None:
    """The daemon found these slots (SLOT rows) damaged, or stale, which is none of our concern.

    An object under lease goes as a whole, other replicas included: the damaged one's space can't be
    free yet, and from now on nobody may be given a lease on it.
    """
    digests = np.ascontiguousarray(slots["digest"]).view(np.uint64).reshape(-1, 2)
    rows, at = _of_version(pool, digests, slots["epoch"], slots["seq"])
    if not len(rows):
        return
    named = slots[at]
    ids = {pool.segments.by_id[i].index: i for i in node.segment_ids}
    counts, spans = pool.spans_of(rows)
    owner = np.repeat(np.arange(len(rows)), counts)
    segment_ids = np.array([ids.get(i, -1) for i in named["segment_index"].tolist()], np.int64)
    hit = (segments_of(spans) == segment_ids[owner]) & (spans[:, 1] == named["slot"][owner])
    rows, spans = rows[owner[hit]], spans[hit]
    _count(pool, rows, spans)
    leased = pool.lease_count.take(rows) != 0
    pool.unlink(distinct(rows[leased]), GoneReason.LOST)
    pool.drop_replicas(rows[~leased], spans[~leased], GoneReason.LOST)


def drop_misread(pool: Pool, command: ReportFailure, node: Node) -> None:
    """A reader found these objects damaged on this node, in memory or on its SSD.

    Its own lease, or another reader's, may keep a replica until the next report, where there is
    another one. It takes the checksum of all that it reads there, or it would not have noticed.
    """
    misread = command.misread
    assert command.digests is not None
    assert misread is not None
    rows, at = _of_version(pool, command.digests, misread["epoch"], misread["seq"])
    if not len(rows):
        return
    counts, spans = pool.spans_of(rows)
    owner = np.repeat(np.arange(len(rows)), counts)
    hit = np.isin(segments_of(spans), np.array(node.segment_ids, np.int64))
    if command.misread_at is not None:
        places = command.misread_at[at][owner]
        hit &= segments_of(spans) == places["segment"]
        hit &= spans[:, 2] == places["offset"] // UNIT_BYTES
    rows, spans = rows[owner[hit]], spans[hit]
    _count(pool, rows, spans)
    pool.drop_replicas(rows, spans, GoneReason.LOST)


def drop_unsealed(pool: Pool, command: PutAbort) -> None:
    """A put that was decided could not be sealed as it must: it begins anew. Where somebody else
    has had it sealed meanwhile, and was told that it exists, it stays."""
    seqs = command.unsealed_seqs
    assert command.unsealed is not None
    assert seqs is not None
    epochs = np.full(len(seqs), command.unsealed_epoch, np.uint32)
    rows, _ = _of_version(pool, command.unsealed, epochs, seqs)
    rows = distinct(rows[unsealed_rows(pool, rows)])
    pool.counters.unsealed += len(rows)
    pool.unlink(rows, GoneReason.LOST)


def _of_version(
    pool: Pool,
    digests: NDArray[np.uint64],
    epochs: NDArray[np.uint32],
    seqs: NDArray[np.uint64],
) -> tuple[Rows, NDArray[np.int64]]:
    """(live rows that have just that version, the position of each in the arguments)."""
    rows = pool.objects.lookup(digests)
    at = np.flatnonzero(rows > 0)
    records = pool.records_of(rows[at])
    same = (records[:, 2] == seqs[at]) & ((records[:, 3] & _EPOCH_MASK) == epochs[at])
    same &= (pool.state.take(rows[at]) & LIVE) != 0
    at = at[same]
    return rows[at], at


def _count(pool: Pool, rows: Rows, spans: Spans) -> None:
    replicas = rows * 256 + ((spans[:, 0] >> 16) & 0xFF)
    pool.counters.damaged += len(distinct(replicas))
