"""Durable effects in, durable effects out: how a state is rebuilt, and how it is written down.

Replaying needs no allocator: extents are only noted in the object table, and a segment's free
space follows from them when its daemon attaches. Effects are idempotent; a newer version of a key
replaces an older one, whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InternalError, StaleEpoch

from .dynamic_config import apply_configured
from .effects import (
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
from .lifetimes import lifetimes, pins, replay_expires, replay_pinned, start_timers
from .move_tables import Cause
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import NO_QUOTA
from .rebuilding import begin_pool, known_pool, name_pool
from .spans import SEGMENT_MASK, distinct, from_placed, to_placed

__all__ = ["replay", "snapshot", "start_epoch"]

_CHUNK_ROWS = 8192
_EPOCH_MASK = np.uint64(0xFFFF_FFFF)


def replay(pool: Pool, effect: DurableEffect) -> None:
    """Apply one durable effect of the past. Only before the epoch starts."""
    if pool.started:
        raise InternalError("effects can't be replayed into a running epoch")
    _REPLAY[type(effect)](pool, effect)


def _stored(pool: Pool, effect: Stored) -> None:
    n = len(effect.digests)
    if not n:
        return
    top = int(effect.seqs.max())
    pool.last_seq = max(pool.last_seq, top)
    if effect.epoch == pool.replayed_epoch:
        # Else one daemon brought it, and the journal still misses what others may bring of then.
        pool.adoption.stored(effect.epoch, top)
    namespace = pool.namespaces.by_id.get(effect.namespace_id)
    if namespace is None or namespace.generation != effect.generation:
        return
    keep = _newest(pool, effect)
    spans = from_placed(effect.placed)
    if keep is not None:
        counts = effect.extent_counts.astype(np.int64)
        spans = spans[np.repeat(keep, counts)]
        effect = Stored(
            effect.namespace_id,
            effect.generation,
            effect.epoch,
            effect.digests[keep],
            effect.sizes[keep],
            effect.checksums[keep],
            effect.seqs[keep],
            effect.tails[keep],
            effect.extent_counts[keep],
            effect.replicas[keep],
            effect.placed[:0],
        )
        if not len(effect.digests):
            return
    stamps = pool.policy.restored(len(effect.digests))
    pool.link(namespace, effect, stamps, spans, int(spans[:, 3].sum(dtype=np.int64)))


def _newest(pool: Pool, effect: Stored) -> NDArray[np.bool_] | None:
    """Which objects of the effect to insert (None = all); older rows of their keys are removed."""
    digests = np.ascontiguousarray(effect.digests)
    effect.digests = digests
    keep: NDArray[np.bool_] | None = None
    low = np.sort(digests[:, 0])
    if (low[1:] == low[:-1]).any():
        # The last of a key that comes several times.
        _, last = np.unique(digests[::-1], axis=0, return_index=True)
        keep = np.zeros(len(digests), np.bool_)
        keep[len(digests) - 1 - last] = True
    rows = pool.objects.lookup(digests)
    there = np.flatnonzero(rows >= 0)
    if len(there):
        records = pool.records_of(rows[there])
        epochs = records[:, 3] & _EPOCH_MASK
        newer = (epochs < effect.epoch) | (
            (epochs == effect.epoch) & (records[:, 2] < effect.seqs[there])
        )
        keep = np.ones(len(digests), np.bool_) if keep is None else keep
        keep[there[~newer]] = False
        pool.unlink(distinct(rows[there[newer & keep[there]]]), GoneReason.LOST, quiet=True)
    return keep


def _gone(pool: Pool, effect: Gone) -> None:
    digests = np.ascontiguousarray(effect.digests)
    rows = pool.objects.lookup(digests)
    there = rows >= 0
    there[there] = (pool.seqs_of(rows[there]) == effect.seqs[there]) | (effect.seqs[there] == 0)
    pool.unlink(distinct(rows[there]), effect.reason, quiet=True)
    if effect.reason == GoneReason.REMOVED:
        raw = digests.tobytes()
        pool.adoption.removed(
            (raw[i : i + 16] for i in range(0, len(raw), 16)), pool.replayed_epoch
        )


def _replicas_changed(pool: Pool, effect: ReplicasChanged) -> None:
    rows = pool.objects.lookup(np.ascontiguousarray(effect.digests))
    there = rows >= 0
    there[there] = pool.seqs_of(rows[there]) == effect.seqs[there]
    counts = effect.extent_counts.astype(np.int64)
    spans = from_placed(effect.placed)[np.repeat(there, counts)]
    rows, counts, replicas = rows[there], counts[there], effect.replicas[there]
    if not len(rows):
        return
    # Several changes were joined when they were read: of one object the last is what it has.
    _, from_end = np.unique(rows[::-1], return_index=True)
    if len(from_end) < len(rows):
        last = np.zeros(len(rows), np.bool_)
        last[len(rows) - 1 - from_end] = True
        spans = np.ascontiguousarray(spans[np.repeat(last, counts)])
        rows, counts, replicas = rows[last], counts[last], replicas[last]
    pool.set_spans(rows, counts, spans, replicas)


def _namespace(pool: Pool, effect: NamespaceOpened) -> None:
    pool.namespaces.apply(effect)
    pool.sweep_at = 1


def _namespace_gone(pool: Pool, effect: NamespaceGone) -> None:
    pool.namespaces.delete(effect.namespace_id)
    pool.quotas.apply(replace(NO_QUOTA, namespace_id=effect.namespace_id))
    pool.sweep_at = 1


def _quota(pool: Pool, effect: QuotaSet) -> None:
    pool.quotas.apply(effect)


def _node(pool: Pool, effect: NodeKnown) -> None:
    pool.nodes.apply(effect)


def _serves(pool: Pool, effect: NodeServes) -> None:
    node = pool.nodes.by_id.get(effect.node_id)
    if node is None:
        raise InternalError(f"endpoints are of node {effect.node_id}, unknown")
    node.endpoints = effect.endpoints


def _drains(pool: Pool, effect: NodeDrains) -> None:
    node = pool.nodes.by_id.get(effect.node_id)
    if node is None:
        raise InternalError(f"node {effect.node_id} is drained, and unknown")
    node.draining, node.drain_bandwidth = effect.drains, effect.bandwidth
    node.state = node.up_state


def _segment(pool: Pool, effect: SegmentKnown) -> None:
    node = pool.nodes.by_id.get(effect.node_id)
    if node is None:
        raise InternalError(f"segment {effect.segment_id} is of node {effect.node_id}, unknown")
    pool.segments.apply(effect, node, pool.config.slots_grow_bytes_min)


def _grown(pool: Pool, effect: SlotsGrown) -> None:
    segment = pool.segments.by_id.get(effect.segment_id)
    if segment is not None:
        segment.note_growth(effect)


def _segment_met(pool: Pool, effect: SegmentMet) -> None:
    segment = pool.segments.by_id.get(effect.segment_id)
    if segment is not None:
        segment.met_epoch = max(segment.met_epoch, effect.epoch)


def _segment_gone(pool: Pool, effect: SegmentGone) -> None:
    pool.segments.drop(effect.segment_id)


def _digested(pool: Pool, effect: Digested) -> None:
    pool.blobs.add(effect.contents, effect.digests, effect.seqs)


def _epoch(pool: Pool, effect: EpochStarted) -> None:
    pool.replayed_epoch = max(pool.replayed_epoch, effect.epoch)
    pool.last_seq = max(pool.last_seq, effect.last_seq)
    pool.adoption.start(effect.epoch, effect.last_seq)


def _pool(pool: Pool, effect: PoolKnown) -> None:
    name_pool(pool, effect.pool_id)
    pool.ancestors = list(effect.ancestors)
    pool.rebuilt_epoch, pool.adoption.below = effect.rebuilt_epoch, effect.adopt_below


_REPLAY: dict[type[DurableEffect], Callable[[Pool, Any], None]] = {
    Stored: _stored,
    Gone: _gone,
    ReplicasChanged: _replicas_changed,
    NamespaceOpened: _namespace,
    NamespaceGone: _namespace_gone,
    Configured: apply_configured,
    QuotaSet: _quota,
    NodeKnown: _node,
    NodeServes: _serves,
    NodeDrains: _drains,
    SegmentKnown: _segment,
    SlotsGrown: _grown,
    SegmentMet: _segment_met,
    SegmentGone: _segment_gone,
    Pinned: replay_pinned,
    Expires: replay_expires,
    Digested: _digested,
    EpochStarted: _epoch,
    PoolKnown: _pool,
}


def start_epoch(pool: Pool, now_s: float, unix_s: float | None = None) -> None:
    """Replay is over: the tenure begins. Emits EpochStarted.

    `unix_s`: what the wall clock says; None: the same as `now_s`, where all leaders share a clock.
    Raises StaleEpoch where what was replayed is of this epoch or a later one.
    """
    if pool.started:
        return
    if pool.replayed_epoch >= pool.epoch:
        raise StaleEpoch(
            f"the metadata is of epoch {pool.replayed_epoch}, a new one can't be {pool.epoch}"
        )
    pool.started = True
    _drop_orphaned_extents(pool)
    config = pool.config
    if pool.segments.by_id:
        pool.gathering_until_s = now_s + config.gathering_s
    pool.adoption_until_s = now_s + config.adoption_window_s
    for node in pool.nodes.by_id.values():
        node.heard_s = now_s
        if node.draining:
            pool.moves.task(Cause.DRAIN, node.node_id, now_s)
    start_timers(pool, now_s, now_s if unix_s is None else unix_s)
    pool.adoption.start(pool.epoch, pool.last_seq)
    pool.effects.append(EpochStarted(pool.epoch, pool.last_seq))
    begin_pool(pool)
    pool.view_changed()


def _drop_orphaned_extents(pool: Pool) -> None:
    """Extents in segments that are gone: their objects lost that replica before the crash."""
    known = np.zeros(SEGMENT_MASK + 1, np.bool_)
    known[list(pool.segments.by_id)] = True
    used = (pool.objects.state & LIVE) != 0
    single = np.flatnonzero(used & ~known[pool.objects.segment] & (pool.objects.extents == 1))
    several = np.flatnonzero(used & (pool.objects.extents > 1))
    if len(single):
        pool.drop_replicas(single, pool.spans_of(single)[1], GoneReason.LOST)
    if len(several):
        counts, spans = pool.spans_of(several)
        lost = ~known[spans[:, 0] & SEGMENT_MASK]
        pool.drop_replicas(np.repeat(several, counts)[lost], spans[lost], GoneReason.LOST)


# ---- snapshot -------------------------------------------------------------------------------


def snapshot(pool: Pool) -> Iterator[DurableEffect]:
    """The state as effects, in chunks of at most 8192 objects, coldest first.

    To be consumed before the state changes again (or in a fork). Raises InternalError otherwise.
    """
    changes = pool.changes
    for effect in _parts(pool):
        if pool.changes != changes:
            raise InternalError("the state changed while its snapshot was taken")
        yield effect


def _parts(pool: Pool) -> Iterator[DurableEffect]:
    yield from _epochs(pool)
    for namespace in sorted(pool.namespaces.by_id.values(), key=lambda n: n.namespace_id):
        yield namespace.opened()
    if pool.namespaces.highest_deleted:
        yield NamespaceGone(pool.namespaces.highest_deleted)
    if pool.overrides:
        yield Configured(pool.overrides)
    yield from pool.quotas.by_id.values()
    if pool.pool_id:
        yield known_pool(pool)
    for node in pool.nodes.by_id.values():
        yield node.known()
        if node.endpoints:
            yield NodeServes(node.node_id, node.endpoints)
        if node.draining:
            yield NodeDrains(node.node_id, True, node.drain_bandwidth)
    for segment in pool.segments.by_id.values():
        yield segment.known()
        for offset, length in segment.retired:
            yield SlotsGrown(segment.segment_id, offset, length, segment.slots.total)
        if segment.met_epoch:
            yield SegmentMet(segment.segment_id, segment.met_epoch)
    rows = pool.objects.live_rows(0, pool.objects.high_water)[0]
    rows = rows[pool.namespaces.alive[pool.incarnations_of(rows)]]
    rows = rows[np.argsort(pool.stamp.take(rows), kind="stable")]
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield from _stored_chunk(pool, rows[start : start + _CHUNK_ROWS])
    yield from pins(pool, rows)
    yield from lifetimes(pool)
    yield from _contents(pool)


def _contents(pool: Pool) -> Iterator[Digested]:
    contents, digests, seqs = pool.blobs.entries()
    for start in range(0, len(seqs), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        yield Digested(digests[part], seqs[part], contents[part])


def _epochs(pool: Pool) -> Iterator[DurableEffect]:
    last_seqs = dict(pool.adoption.known)
    if pool.started:
        last_seqs[pool.epoch] = pool.last_seq
    elif pool.replayed_epoch not in last_seqs:
        # Where it is known, what was adopted of earlier epochs may have later seqs than it has.
        last_seqs[pool.replayed_epoch] = pool.last_seq
    for number in sorted(last_seqs):
        yield EpochStarted(number, last_seqs[number])
        digests = b"".join(d for d, e in pool.adoption.tombstones.items() if e == number)
        if digests:
            packed = np.frombuffer(digests, np.uint64).reshape(-1, 2)
            yield Gone(0, packed, np.zeros(len(packed), np.uint64), GoneReason.REMOVED)


def _stored_chunk(pool: Pool, rows: Rows) -> Iterator[Stored]:
    records = pool.records_of(rows)
    epochs = records[:, 3] & _EPOCH_MASK
    incarnations = pool.incarnations_of(rows)
    key = incarnations.astype(np.uint64) << np.uint64(32) | epochs
    by_id = {n.incarnation: n for n in pool.namespaces.by_id.values()}
    for group in distinct(key).tolist():
        here = key == group
        part = rows[here]
        words = records[here]
        last = words[:, 4]
        counts, spans = pool.spans_of(part)
        namespace = by_id[group >> 32]
        yield Stored(
            namespace.namespace_id,
            namespace.generation,
            group & 0xFFFF_FFFF,
            pool.digests_of(part),
            np.ascontiguousarray(words[:, 0]),
            np.ascontiguousarray(words[:, 1]),
            np.ascontiguousarray(words[:, 2]),
            (last >> np.uint64(16)).astype(np.uint16),
            counts.astype(np.uint16),
            (last >> np.uint64(48)).astype(np.uint8),
            to_placed(spans),
        )
