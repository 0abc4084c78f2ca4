"""Bugs on purpose in content dedup: to be noticed by seeds in which the same bytes are put under
several keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cenote.client.plan.aliases import AliasStore
from cenote.master import aliases
from cenote.master.segments import Segment
from cenote.store import proofs
from sim.mutations import replaced

__all__ = ["DEDUP_MUTATIONS"]


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


DEDUP_MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "free with the first": _free_with_the_first,
    "digests are believed": _digests_are_believed,
    "holders are forgotten": _holders_are_forgotten,
    "references hold nothing": _references_hold_nothing,
    "commits need no ticket": _commits_need_no_ticket,
}
