"""Objects that are read more than one node should have to serve: they gain a replica, and lose it.

Of the reads that the master is asked about one in `STEP` is noted; counts of a second, smoothed,
tell how many bytes of each object are read. Who reads from a location that it has cached says so
about once a second, however often it does, so that this is a lower bound. Above `hot_bytes_per_s`
for each replica there is, another one is made on a node that has none. Once half as much would do
with one less, for `COOL_S`, it goes again.

What is known of this is not journaled: extra replicas that a master finds stay until their objects
go.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .heat_samples import STEP, Hot
from .move_tables import NO_REPLICA, Cause
from .moves import Extent, Targets, leave
from .objects import LIVE
from .pool import COPYING, Pool

__all__ = ["has_heat", "plan_hot"]

WINDOW_S: Final = 1.0
COOL_S: Final = 15.0
SMOOTHING: Final = 0.3
"""Of each second's count in what is known of an object."""
TRACKED_MAX: Final = 1_024
EXTRA_MAX: Final = 3
"""Replicas that load adds to an object."""
_SAMPLES_MIN: Final = 3
"""In a second: less is no rate."""


def has_heat(pool: Pool) -> bool:
    """Whether anything is to be done about hot objects."""
    return bool(pool.config.hot_bytes_per_s) and (pool.heat.has_news or bool(pool.heat.known))


def plan_hot(pool: Pool, targets: Targets, now_s: float) -> None:
    """One tick's worth. Bounded."""
    heat = pool.heat
    if now_s < heat.look_at_s:
        return
    elapsed_s = max(WINDOW_S, now_s - heat.look_at_s + WINDOW_S) if heat.look_at_s else WINDOW_S
    heat.look_at_s = now_s + WINDOW_S
    seen = _rates(pool, min(elapsed_s, 10.0))
    known = heat.known
    for digest, (seq, rate) in seen.items():
        one = known.get(digest)
        is_watched = one is not None and one.seq == seq
        if not is_watched and len(known) < TRACKED_MAX and rate > pool.config.hot_bytes_per_s / 4:
            known[digest] = Hot(seq)
    for digest, one in list(known.items()):
        seq, rate = seen.get(digest, (one.seq, 0.0))
        one.bytes_per_s += SMOOTHING * ((rate if seq == one.seq else 0.0) - one.bytes_per_s)
        if not _judge(pool, targets, digest, one, now_s):
            del known[digest]


def _rates(pool: Pool, elapsed_s: float) -> dict[tuple[int, int], tuple[int, float]]:
    """Digest -> (seq, bytes a second) of what was noted several times."""
    rows, seqs = pool.heat.take()
    if not len(rows):
        return {}
    good = pool.objects.rows_match(rows, seqs)
    found, counts = np.unique(rows[good], return_counts=True)
    often = counts >= _SAMPLES_MIN
    found, counts = found[often], counts[often]
    if not len(found):
        return {}
    sizes = pool.sizes_of(found).tolist()
    digests = [(low, high) for low, high in pool.digests_of(found).tolist()]
    columns = zip(digests, pool.seqs_of(found).tolist(), sizes, counts.tolist(), strict=True)
    return {digest: (seq, count * STEP * size / elapsed_s) for digest, seq, size, count in columns}


def _judge(pool: Pool, targets: Targets, digest: tuple[int, int], one: Hot, now_s: float) -> bool:
    """Order another replica, or take one away; whether the object is still worth watching."""
    limit = pool.config.hot_bytes_per_s
    row = int(pool.objects.lookup(np.array([digest], np.uint64))[0])
    if row <= 0 or not int(pool.state[row]) & LIVE or int(pool.record_of(row)[2]) != one.seq:
        pool.heat.extra.pop(digest, None)
        return False
    extra = pool.heat.extra.get(digest, [])
    replicas = _in_memory(pool, row)
    if one.bytes_per_s > limit * max(1, len(replicas)):
        one.cool_since_s = -1.0
        if len(extra) < EXTRA_MAX and replicas and not int(pool.state[row]) & COPYING:
            _add(pool, targets, row, replicas, now_s)
        return True
    if not extra:
        return one.bytes_per_s > limit / 16
    if one.bytes_per_s > limit * (len(replicas) - 1) / 2:
        one.cool_since_s = -1.0
    elif one.cool_since_s < 0:
        one.cool_since_s = now_s
    elif now_s - one.cool_since_s >= COOL_S:
        one.cool_since_s = now_s
        number = extra.pop()
        if not extra:
            del pool.heat.extra[digest]
        if number in replicas and len(replicas) > 1:
            pool.moves.task(Cause.HOT, 0, now_s).dropped += 1
            leave(pool, row, number)
    return True


def _in_memory(pool: Pool, row: int) -> dict[int, list[Extent]]:
    """Whole replicas that can be read, by number."""
    by_id, segments = pool.segments.by_id, pool.segments
    replicas: dict[int, list[Extent]] = {}
    for extent in pool.objects.extents_of_one(row):
        replicas.setdefault(extent[1], []).append(extent)
    return {
        number: extents
        for number, extents in replicas.items()
        if all(
            e[0] in by_id and segments.readable[e[0]] and not segments.on_ssd[e[0]] for e in extents
        )
    }


def _add(
    pool: Pool, targets: Targets, row: int, replicas: dict[int, list[Extent]], now_s: float
) -> None:
    by_id = pool.segments.by_id
    owners = {by_id[e[0]].node.node_id for extents in replicas.values() for e in extents}
    usable = targets.within_budget(targets.eligible(owners, ()))
    if not usable:
        return
    source = next(iter(replicas.values()))
    units = sum(extent[5] for extent in source)
    place = targets.take(usable, units, spares_reserve=True)
    place = place or targets.make_room(usable, units, int(pool.stamp[row]))
    if place is not None:
        task = pool.moves.task(Cause.HOT, 0, now_s)
        targets.order(row, source, place, task, NO_REPLICA)
