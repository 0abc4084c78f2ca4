"""What must hold of a master's state at any time: counted anew, slowly, from the ground up."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.master.object_columns import COPYING
from cenote.master.pool import Pool
from cenote.master.segments import NO_SLOT
from cenote.master.state import MasterState

Contents: TypeAlias = dict[bytes, tuple[object, ...]]


def pool_of(state: MasterState) -> Pool:
    return state._pool


def check(state: MasterState) -> None:
    """Raises AssertionError."""
    pool = pool_of(state)
    pool.objects.check()
    _check_space(pool)
    _check_tiers(pool)
    _check_counts(pool)
    _check_leases(pool)


def _spans(pool: Pool) -> NDArray[np.uint32]:
    """All extents that are not free, whoever has them."""
    used = np.flatnonzero(pool.objects.state & 3)
    parts = [pool.spans_of(used)[1]] if len(used) else []
    parts += [grant.pending_spans() for grant in pool.grants.by_id.values()]
    parts += [
        spans
        for orphan in pool.orphans._by_session.values()
        for several in orphan.extents.values()
        for spans in several
    ]
    parts += [copy.span for copy in pool.copies.by_id.values()]
    return np.concatenate(parts) if parts else np.zeros((0, 4), np.uint32)


def _check_space(pool: Pool) -> None:
    spans = _spans(pool)
    assert (spans[:, 3] > 0).all()
    for segment_id, segment in pool.segments.by_id.items():
        mine = spans[(spans[:, 0] & 0xFFFF) == segment_id]
        places, holders = np.unique(mine[:, 2:4].astype(np.int64), axis=0, return_counts=True)
        starts = places[:, 0]
        ends = starts + places[:, 1]
        assert (starts[1:] >= ends[:-1]).all(), "two extents overlap"
        numbers = mine[mine[:, 1] != NO_SLOT, 1]
        assert len(np.unique(numbers)) == len(numbers), "two extents have one slot"
        if segment.allocator is None:
            continue
        segment.allocator.check()
        assert not len(mine) or ends.max() <= segment.ready_units
        shared = {int(s): int(n) - 1 for s, n in zip(starts, holders, strict=True) if n > 1}
        assert segment.shared == shared, "an extent's holders are miscounted"
        assert segment.shared_units == int((places[:, 1] * (holders - 1)).sum())
        assert segment.allocator.used_units == int(places[:, 1].sum()), "units leaked"
        assert segment.slots.used == len(numbers), "slot numbers leaked"
        assert segment.slots.high <= segment.slots.total
        assert segment.retired_units == segment.allocator.retired_units


def _check_tiers(pool: Pool) -> None:
    live = np.flatnonzero(pool.objects.state & 1)
    counts, spans = pool.spans_of(live)
    on_ssd = pool.segments.on_ssd[spans[:, 0] & 0xFFFF]
    owner = np.repeat(np.arange(len(live)), counts)
    first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]]) if len(owner) else owner
    in_memory = np.zeros(len(live), np.bool_)
    in_memory[owner[~on_ssd]] = True
    assert (on_ssd[first] == ~in_memory).all(), "the first extent does not tell the tier"
    replicas = np.unique(owner * 256 + ((spans[:, 0] >> 16) & 0xFF)) // 256
    held = [pool.record_of(row)[8] for row in live.tolist()]
    assert np.bincount(replicas, minlength=len(live)).tolist() == held, "replicas are miscounted"
    copying = {(copy.low, copy.high) for copy in pool.copies.by_id.values()}
    marked = live[(pool.state.take(live) & COPYING) != 0]
    digests = {tuple(d) for d in pool.digests_of(marked).tolist()}
    assert digests <= copying, "a row is marked as being copied, and is not"
    units: dict[int, int] = {}
    for copy in pool.copies.by_id.values():
        units[copy.node.node_id] = units.get(copy.node.node_id, 0) + copy.units
    assert units == {n: u for n, u in pool.copies.units_by_node.items() if u}
    owned: dict[int, int] = {}
    for copy in pool.copies.by_id.values():
        if pool.segments.on_ssd[copy.target.segment_id]:
            owned[copy.owner] = owned.get(copy.owner, 0) + copy.units
    assert pool.copies.ssd_units_by_owner == owned


def _check_counts(pool: Pool) -> None:
    rows = np.flatnonzero(pool.objects.state & 1)
    incarnations = pool.incarnations_of(rows)
    columns = pool.namespaces
    counted = np.bincount(incarnations, minlength=len(columns.objects))
    assert (columns.objects == counted).all()
    if len(rows):
        counts, spans = pool.spans_of(rows)
        owners = np.repeat(incarnations, counts)
        units = np.bincount(owners, weights=spans[:, 3], minlength=len(columns.units))
        assert (columns.units == units.astype(np.int64)).all()
        assert (counts == pool.objects.extents[rows]).all()
        on_ssd = pool.segments.on_ssd[spans[:, 0] & 0xFFFF]
        units = np.bincount(owners[on_ssd], spans[on_ssd, 3], minlength=len(columns.units))
        assert (columns.ssd_units == units.astype(np.int64)).all()
    else:
        assert not columns.units.any()
        assert not columns.ssd_units.any()
    pinned = rows[pool.pin.take(rows) != 0]
    assert pool.pinned_objects == len(pinned)
    assert pool.pinned_bytes == int(pool.sizes_of(pinned).sum())
    grants = pool.grants.by_id.values()
    assert pool.grants.units == pool.grants.recount() == sum(g.units for g in grants)
    owned: dict[int, int] = {}
    for grant in grants:
        owned[grant.namespace.incarnation] = owned.get(grant.namespace.incarnation, 0) + grant.units
    assert pool.grants.units_by_incarnation == {n: units for n, units in owned.items() if units}
    assert pool.grants.keys == sum(g.pending_count for g in grants)
    for session in pool.sessions.by_id.values():
        assert session.granted_units == sum(g.units for g in session.grants.values())
        assert all(pool.grants.by_id[i] is g for i, g in session.grants.items())
    assert all(g.pending_count for g in grants), "a grant that is over was kept"
    orphans = pool.orphans._by_session.values()
    assert pool.orphans.units == sum(
        int(spans[:, 3].sum())
        for o in orphans
        for several in o.extents.values()
        for spans in several
    )


def _check_leases(pool: Pool) -> None:
    counted: dict[int, int] = {}
    leases = list(pool.leases.by_id.values())
    for lease in leases:
        rows = [lease.rows] if isinstance(lease.rows, int) else lease.rows.tolist()
        assert len(set(rows)) == len(rows)
        for row in rows:
            counted[row] = counted.get(row, 0) + 1
    end = pool.objects.high_water
    leased = np.flatnonzero(pool.lease_count[:end])
    assert {int(row): int(pool.lease_count[row]) for row in leased} == counted
    assert pool.leased_bytes == int(pool.sizes_of(leased).sum())
    condemned = np.flatnonzero(pool.objects.state & 2)
    assert set(condemned.tolist()) <= set(counted), "a removed object is held by nobody"
    assert pool.condemned_rows == len(condemned)
    units = int(pool.spans_of(condemned)[1][:, 3].sum()) if len(condemned) else 0
    assert pool.condemned_units == units


def contents(state: MasterState) -> Contents:
    """Every object of a living generation: digest -> all that is durable of it."""
    pool = pool_of(state)
    rows = np.flatnonzero(pool.objects.state & 1)
    rows = rows[pool.namespaces.alive[pool.incarnations_of(rows)]]
    found: Contents = {}
    names = {n.incarnation: (n.namespace_id, n.generation) for n in pool.namespaces.by_id.values()}
    for row in rows.tolist():
        size, checksum, seq, epoch, _, owner, tail, _, replicas, _ = pool.record_of(row)
        digest = pool.digests_of(np.array([row])).tobytes()
        extents = tuple(pool.objects.extents_of_one(row))
        pinned = bool(pool.pin[row])
        found[digest] = (names[owner], epoch, seq, size, checksum, tail, replicas, extents, pinned)
    return found
