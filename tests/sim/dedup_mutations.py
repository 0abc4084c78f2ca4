"""Bugs on purpose in content dedup: to be noticed by seeds in which the same bytes are put under
several keys; and in what becomes of references that are copied between tiers and nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cenote.client.plan.aliases import AliasStore
from cenote.master import aliases, demotion, moves, node_ops, tiers
from cenote.master.copies import end_copies
from cenote.master.pool import Pool
from cenote.master.segments import DRAM, Segment
from cenote.master.twins import Twin
from cenote.store import demoter, promoter, proofs, puller
from sim.mutations import replaced, together

__all__ = ["DEDUP_MUTATIONS", "TWIN_MUTATIONS"]


def _free_with_the_first() -> contextlib.AbstractContextManager[None]:
    """Bytes are free when the first of their holders goes; nothing comes of the others."""
    unshare = Segment._unshare
    freed: set[tuple[bytes, int]] = set()

    def first(segment: Any, offset: int, length: int) -> bool:
        place = segment.incarnation, offset
        if unshare(segment, offset, length):
            if place in freed:
                return True
            freed.add(place)
            return False
        if place in freed:
            freed.discard(place)
            return True
        return False

    return replaced(Segment, "_unshare", first)


def _digests_are_believed() -> contextlib.AbstractContextManager[None]:
    """A daemon gives tickets to whoever asks: a reference outlives a digest that is not of the
    bytes."""
    return replaced(proofs, "compare_digest", lambda due, shown: True)


def _holders_are_forgotten() -> contextlib.AbstractContextManager[None]:
    """A next leader takes the bytes of several objects for one's."""
    build = Segment.build

    def alone(segment: Any, *arguments: Any) -> Any:
        refused = build(segment, *arguments)
        segment.shared, segment.shared_units = {}, 0
        return refused

    return replaced(Segment, "build", alone)


def _references_hold_nothing() -> contextlib.AbstractContextManager[None]:
    """What is to be referred to may go before the reference is decided."""
    take = aliases._take

    def loose(at: Any, found: Any) -> Any:
        spans, counts = take(at, found)
        for segment, offset, length in [e for _, extents in found.values() for e in extents]:
            segment._unshare(offset, length)
        return spans, counts

    return replaced(aliases, "_take", loose)


def _commits_need_no_ticket() -> contextlib.AbstractContextManager[None]:
    """A reference is decided, whatever the daemon said; and a client does not look."""

    def proven(at: Any, grant: Any, entries: Any, tickets: Any) -> Any:
        return np.ones(len(entries), np.bool_)

    @contextlib.contextmanager
    def both() -> Any:
        def heard(store: Any, part: Any, owner: Any) -> Any:
            return np.zeros(len(owner), np.bool_)

        with replaced(aliases, "_are_proven", proven), replaced(AliasStore, "_refused", heard):
            yield

    return both()


def _foreign_bytes_are_ones_own() -> contextlib.AbstractContextManager[None]:
    """What a namespace's reset leaves is free, though another one's objects lie in the same place:
    nobody counts those who hold another namespace's bytes."""
    take = aliases._take

    def uncounted(at: Any, found: Any) -> Any:
        spans, counts = take(at, found)
        foreign = [one for one in found.values() if one.foreign]
        for segment, offset, length in [e for one in foreign for e in one.extents]:
            segment._unshare(offset, length)
        return spans, counts

    return replaced(aliases, "_take", uncounted)


# ---- references that are copied -----------------------------------------------------------------


def _twins_hold_nothing() -> contextlib.AbstractContextManager[None]:
    """A copy that shares its place does not count among those who hold it."""

    def hold(twin: Any) -> Any:
        slot = twin.segment.slots.take_one()
        return None if slot < 0 else (twin.segment, slot, twin.offset, twin.length)

    return replaced(Twin, "hold", hold)


def _twins_are_anywhere() -> contextlib.AbstractContextManager[None]:
    """A copy shares the place of the same bytes wherever they are: where it comes from, too."""

    def anywhere(find: Any) -> Any:
        return lambda pool, row, source, is_good: find(pool, row, source, lambda segment: True)

    return together(
        *(
            replaced(module, "find_twin", anywhere(module.find_twin))
            for module in (demotion, tiers, moves)
        )
    )


def _daemons_do_not_look() -> contextlib.AbstractContextManager[None]:
    """A slot is made beside another one, whatever that tells of."""
    return together(
        replaced(demoter, "has_twin", lambda target, one: True),
        replaced(promoter, "has_twin", lambda target, one: True),
        replaced(puller, "has_bytes", lambda *_: True),
    )


def _copies_beside_keep_their_share() -> contextlib.AbstractContextManager[None]:
    """Of a copy that shares its place and comes to nothing the share is never given back."""

    def ending(pool: Any, node: Any, copied: Any, now_s: float) -> None:
        for one in [pool.copies.by_id.get(row[0]) for row in copied.tolist() if row[1]]:
            if one is not None and one.shares is not None:
                one.target.share(*one.span[0, 2:4].tolist())
        end_copies(pool, node, copied, now_s)

    return replaced(node_ops, "end_copies", ending)


def _holders_on_ssds_are_forgotten() -> contextlib.AbstractContextManager[None]:
    """A next leader takes bytes on an SSD that several objects have for one's."""
    build = Segment.build

    def alone(segment: Any, *arguments: Any) -> Any:
        refused = build(segment, *arguments)
        if segment.tier != DRAM:
            segment.shared, segment.shared_units = {}, 0
        return refused

    return replaced(Segment, "build", alone)


def _evicted_references_take_the_place_along() -> contextlib.AbstractContextManager[None]:
    """Whoever leaves memory for having a copy frees the place, whoever else has it."""
    drop = Pool.drop_replicas

    def dropping(pool: Any, rows: Any, spans: Any, reason: Any, *more: Any) -> Any:
        for word, _, offset, length in spans.tolist():
            segment = pool.segments.by_id.get(word & 0xFFFF)
            while segment is not None and segment._unshare(offset, length):
                pass
        return drop(pool, rows, spans, reason, *more)

    return replaced(Pool, "drop_replicas", dropping)


DEDUP_MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "free with the first": _free_with_the_first,
    "digests are believed": _digests_are_believed,
    "holders are forgotten": _holders_are_forgotten,
    "references hold nothing": _references_hold_nothing,
    "commits need no ticket": _commits_need_no_ticket,
    "foreign bytes are one's own": _foreign_bytes_are_ones_own,
}

TWIN_MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "twins hold nothing": _twins_hold_nothing,
    "twins are anywhere": _twins_are_anywhere,
    "daemons do not look": _daemons_do_not_look,
    "copies beside keep their share": _copies_beside_keep_their_share,
    "holders on SSDs are forgotten": _holders_on_ssds_are_forgotten,
    "evicted references take the place along": _evicted_references_take_the_place_along,
}
"""To be noticed with tiers."""
