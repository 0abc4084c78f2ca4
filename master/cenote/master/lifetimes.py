"""What ends by itself: objects with a time to live, and pins with one. Over restarts, too.

An object's end is journaled as a wall clock's time beside its time to live: another leader gives it
what is left, and never more than it had at first, whatever that host's clock says. Until an epoch
starts, `expiries` holds wall clock times. A pin's time is journaled alone, and begins anew with
each leader: its owner renews it, or it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .effects import Expires, GoneReason, Pinned, Stored
from .pool import Pool, Rows
from .spans import distinct
from .timers import ObjectTimers, Timed

__all__ = [
    "PIN_FOREVER",
    "end_lifetimes",
    "lifetimes",
    "note_lifetimes",
    "pins",
    "replay_expires",
    "replay_pinned",
    "set_pins",
    "start_timers",
]

PIN_FOREVER = 1
"""In the pin column. Other values are pins that end, by the batch they were set in: never one that
a running timer has, or a pin that was renewed would end with the one before."""
_PIN_TAG_MAX = (1 << 32) - 1
_CHUNK_ROWS = 8192


def set_pins(pool: Pool, rows: Rows, *, timed: bool) -> int:
    """Pin rows. Returns the tag in their pin column: PIN_FOREVER, or one that a timer can name.

    A later pin replaces an earlier one and its time: the earlier one's timer finds another tag.
    """
    fresh = rows[pool.pin.take(rows) == 0]
    pool.pinned_objects += len(fresh)
    pool.pinned_bytes += int(pool.sizes_of(fresh).sum())
    tag = PIN_FOREVER
    if timed:
        pool.pin_tag = tag = max(PIN_FOREVER + 1, (pool.pin_tag + 1) & _PIN_TAG_MAX)
    pool.pin[rows] = tag
    return tag


def note_lifetimes(pool: Pool, stored: Stored, ttl_s: float, now_s: float) -> None:
    """These objects, just decided, go by themselves in `ttl_s`."""
    ttl_ms = max(1, round(ttl_s * 1000))
    pool.expiries.add(now_s + ttl_s, stored.digests, stored.seqs, ttl_ms)
    until_ms = max(0, round((now_s + ttl_s + pool.unix_offset_s) * 1000))
    pool.effects.append(Expires(until_ms, ttl_ms, stored.digests, stored.seqs))


# ---- time passes ----------------------------------------------------------------------------


def end_lifetimes(pool: Pool, now_s: float) -> None:
    """One tick's worth: bounded by `tick_expire_max`, in objects and pins each."""
    limit = pool.config.tick_expire_max
    for due in _due(pool.expiries, now_s, limit):
        rows = _rows_of(pool, due)
        pool.counters.expired += len(rows)
        pool.unlink(rows, GoneReason.EXPIRED)
    for due in _due(pool.unpins, now_s, limit):
        rows = _rows_of(pool, due)
        rows = pool.clear_pins(rows[pool.pin.take(rows) == due.tag])
        owners = pool.namespaces.owner[pool.incarnations_of(rows)]
        for namespace_id in distinct(owners).tolist():
            digests = pool.digests_of(rows[owners == namespace_id])
            pool.effects.append(Pinned(namespace_id, digests, False, 0))
    _tidy(pool)


def _due(timers: ObjectTimers, now_s: float, limit: int) -> Iterator[Timed]:
    """Batches that are due, of about `limit` objects, those with the same tag joined."""
    found: dict[int, list[Timed]] = {}
    while limit > 0 and (due := timers.due(now_s)) is not None:
        limit -= len(due.seqs)
        found.setdefault(due.tag, []).append(due)
    for tag, some in found.items():
        digests = np.concatenate([timed.digests for timed in some])
        seqs = np.concatenate([timed.seqs for timed in some])
        yield Timed(some[0].at_s, digests, seqs, tag)


def _rows_of(pool: Pool, timed: Timed) -> Rows:
    rows = pool.objects.lookup(np.ascontiguousarray(timed.digests))
    return distinct(rows[pool.objects.rows_match(rows, timed.seqs)])


def _tidy(pool: Pool) -> None:
    """Forget the times of what went before."""

    def lives(
        digests: NDArray[np.uint64], seqs: NDArray[np.uint64], _tag: int
    ) -> NDArray[np.bool_]:
        return pool.objects.rows_match(pool.objects.lookup(digests), seqs)

    def is_pinned(
        digests: NDArray[np.uint64], seqs: NDArray[np.uint64], tag: int
    ) -> NDArray[np.bool_]:
        rows = pool.objects.lookup(digests)
        good = pool.objects.rows_match(rows, seqs)
        good[good] = pool.pin.take(rows[good]) == tag
        return good

    limit = pool.config.tick_expire_max
    pool.expiries.tidy(lives, limit)
    pool.unpins.tidy(is_pinned, limit)


# ---- past and future ------------------------------------------------------------------------


def replay_expires(pool: Pool, effect: Expires) -> None:
    digests = np.ascontiguousarray(effect.digests)
    pool.expiries.add(effect.until_unix_ms / 1000, digests, effect.seqs, effect.ttl_ms)
    _tidy(pool)


def replay_pinned(pool: Pool, effect: Pinned) -> None:
    rows = pool.objects.lookup(np.ascontiguousarray(effect.digests))
    rows = distinct(rows[rows >= 0])
    if not effect.pinned:
        pool.clear_pins(rows)
        return
    tag = set_pins(pool, rows, timed=effect.ttl_ms > 0)
    if effect.ttl_ms:
        pool.unpins.add(effect.ttl_ms / 1000, pool.digests_of(rows), pool.seqs_of(rows), tag)
        _tidy(pool)


def start_timers(pool: Pool, now_s: float, unix_s: float) -> None:
    """The epoch starts: what was replayed gets the time that is left to it."""
    replayed, pool.expiries = pool.expiries, ObjectTimers()
    for timed in replayed.entries:
        left_s = min(max(0.0, timed.at_s - unix_s), timed.tag / 1000)
        pool.expiries.add(now_s + left_s, timed.digests, timed.seqs, timed.tag)
    pinned, pool.unpins = pool.unpins, ObjectTimers()
    for timed in pinned.entries:
        pool.unpins.add(now_s + timed.at_s, timed.digests, timed.seqs, timed.tag)
    pool.unix_offset_s = unix_s - now_s


def lifetimes(pool: Pool) -> Iterator[Expires]:
    """For a snapshot: when what is there ends."""
    for timed in pool.expiries.entries:
        there = pool.objects.rows_match(pool.objects.lookup(timed.digests), timed.seqs)
        if there.any():
            until_ms = max(0, round((timed.at_s + pool.unix_offset_s) * 1000))
            yield Expires(until_ms, timed.tag, timed.digests[there], timed.seqs[there])


def pins(pool: Pool, rows: Rows) -> Iterator[Pinned]:
    """For a snapshot: of these rows (all there are), which are pinned, and for how much longer."""
    yield from _pinned(pool, rows[pool.pin.take(rows) == PIN_FOREVER], 0)
    since_s = pool.now_s if pool.started else 0.0
    for timed in pool.unpins.entries:
        pinned = _rows_of(pool, timed)
        pinned = pinned[pool.pin.take(pinned) == timed.tag]
        yield from _pinned(pool, pinned, max(1, int((timed.at_s - since_s) * 1000)))


def _pinned(pool: Pool, rows: Rows, ttl_ms: int) -> Iterator[Pinned]:
    owners = pool.namespaces.owner[pool.incarnations_of(rows)]
    for namespace_id in distinct(owners).tolist():
        here = rows[owners == namespace_id]
        for start in range(0, len(here), _CHUNK_ROWS):
            digests = pool.digests_of(here[start : start + _CHUNK_ROWS])
            yield Pinned(namespace_id, digests, True, ttl_ms)
