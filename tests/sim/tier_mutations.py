"""Bugs on purpose in what copies objects between tiers and nodes: each takes one rule out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cenote.api.rows import COPIED, CopyStatus
from cenote.master import (
    adopting,
    attach,
    copies,
    demotion,
    lookups,
    moves,
    reconciling,
    replay,
    tiers,
)
from cenote.master.effects import ReplicasChanged
from cenote.master.move_tables import NO_REPLICA
from cenote.master.nodes import Node
from cenote.master.object_columns import COPYING
from cenote.master.objects import LIVE
from cenote.master.spans import from_placed
from cenote.store import copy_writer
from cenote.store.copy_outcomes import Outcomes
from cenote.store.copy_writer import PayloadWriter
from cenote.store.demoter import Demoter
from cenote.store.disk_io import DiskIo
from cenote.store.puller import Puller
from sim.mutations import replaced, together

__all__ = ["TIER_MUTATIONS"]

Mutation = Callable[[], contextlib.AbstractContextManager[None]]


def _slots_before_payloads() -> contextlib.AbstractContextManager[None]:
    """Slots are written as soon as payloads are, flushed or not."""

    flush = Demoter._flush

    def late(demoter: Any, written: Any, placed: Any) -> None:
        if placed:
            flush(demoter, written, placed)

    return replaced(Demoter, "_flush", late)


def _slots_are_not_flushed() -> contextlib.AbstractContextManager[None]:
    """A copy is reported when its slot is written; a power cut may take it back."""

    place, end = Demoter._place, Demoter._end
    told: dict[int, Any] = {}

    def placing(demoter: Any, written: Any) -> None:
        place(demoter, written)
        done = [one for one in written if one.status == CopyStatus.DONE]
        end(demoter, done)
        told.update((id(one), one) for one in done)

    def ending(demoter: Any, some: Any) -> None:
        end(demoter, [one for one in some if id(one) not in told])

    return together(replaced(Demoter, "_place", placing), replaced(Demoter, "_end", ending))


def _failed_writes_count() -> contextlib.AbstractContextManager[None]:
    """A request that failed is as good as any other."""
    write = DiskIo._write

    def writing(disk: Any, request: Any) -> None:
        write(disk, request)
        request.error = None

    return replaced(DiskIo, "_write", writing)


def _demotions_are_not_proven() -> contextlib.AbstractContextManager[None]:
    """A source that was overwritten while it was copied is not noticed."""
    staged = PayloadWriter._add_staged

    def adding(writer: Any, one: Any, offset: int) -> bool:
        added = staged(writer, one, offset)
        one.status = CopyStatus.DONE
        return added

    return together(
        replaced(copy_writer, "_is_unchanged", lambda one: True),
        replaced(PayloadWriter, "_add_staged", adding),
    )


def _pulls_are_not_proven() -> contextlib.AbstractContextManager[None]:
    """What came from another daemon is taken for what was asked for."""

    def fetch(puller: Any, window: Any) -> None:
        pieces, at = [], puller._address
        for one in window:
            for part in one.parts:
                pieces.append((part, 0, part.length, at))
                at += part.length
        if pieces:
            puller._read(pieces)
        at = puller._address
        for one in window:
            if puller._land(one, at, 0, one.size_bytes):
                puller._seal(one)
            at += one.size_bytes

    return replaced(Puller, "_fetch", fetch)


def _copies_outlive_tenures() -> contextlib.AbstractContextManager[None]:
    """A promotion that an earlier leader ordered lands where the next one has others."""
    return replaced(Outcomes, "fence", lambda outcomes, epoch: None)


def _pulls_outlive_tenures() -> contextlib.AbstractContextManager[None]:
    """Likewise a copy from another node."""
    return replaced(Puller, "fence", lambda puller, epoch: None)


def _copies_count_when_ordered() -> contextlib.AbstractContextManager[None]:
    """What is to be copied is taken for copied, so that its source may go."""
    order = copies.order_copies

    def ordering(pool: Any, node: Any, rows: Any) -> None:
        order(pool, node, rows)
        ended = np.zeros(len({row[0] for row in rows}), COPIED)
        ended["copy_id"] = sorted({row[0] for row in rows})
        copies.end_copies(pool, node, ended, pool.now_s)

    return together(
        replaced(tiers, "order_copies", ordering), replaced(demotion, "order_copies", ordering)
    )


def _sources_go_first() -> contextlib.AbstractContextManager[None]:
    """What is to move leaves its place when that is ordered."""
    order = moves.Targets.order

    def ordering(
        targets: Any, row: int, source: Any, place: Any, task: Any, leaves: int, *twin: Any
    ) -> None:
        order(targets, row, source, place, task, leaves, *twin)
        if leaves != NO_REPLICA:
            moves.leave(targets._pool, row, leaves)

    return replaced(moves.Targets, "order", ordering)


def _versions_are_not_compared() -> contextlib.AbstractContextManager[None]:
    """A copy counts for whatever its key has now."""

    def rows_of(pool: Any, some: Any) -> Any:
        digests = np.array([(one.low, one.high) for one in some], np.uint64)
        rows = np.maximum(pool.objects.lookup(digests), 0)
        rows[(pool.state.take(rows) & LIVE) == 0] = 0
        pool.state[rows[rows > 0]] &= ~np.uint8(COPYING)
        return rows

    return replaced(copies, "_rows_of", rows_of)


def _sources_may_leave() -> contextlib.AbstractContextManager[None]:
    """A copy counts though its source has left memory meanwhile."""
    return replaced(copies, "_have_stayed", lambda some, *_: np.ones(len(some), np.bool_))


def _untold_copies_are_cleared() -> contextlib.AbstractContextManager[None]:
    """What a journal has lost of copies is not looked for on SSDs."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    return together(replaced(adopting, "regain", nothing), replaced(reconciling, "regain", nothing))


def _pins_are_overlooked() -> contextlib.AbstractContextManager[None]:
    """Room in memory is made of what has a copy, pinned or not."""

    def mask(pool: Any, low: Any) -> Any:
        end = pool.objects.high_water
        good = (pool.state[:end] & LIVE).view(np.bool_) & (pool.lease_count[:end] == 0)
        return good & low[pool.objects.segment]

    return together(
        replaced(tiers, "evictable_mask", mask), replaced(moves, "evictable_mask", mask)
    )


def _dead_daemons_go_on() -> contextlib.AbstractContextManager[None]:
    """Copies of a daemon that died are waited for."""
    return replaced(attach, "abandon_copies", lambda pool, node: None)


def _copies_are_inherited() -> contextlib.AbstractContextManager[None]:
    """A daemon's next process goes on with copies whose space was given back."""
    return replaced(Node, "forget_copies", lambda node: None)


def _disks_are_leased() -> contextlib.AbstractContextManager[None]:
    """A lease is given on what lies on an SSD, as if that could not fail."""

    def lease_all(told: Any, rows: Any, sizes: Any, lease: Any) -> Any:
        return lease(rows, sizes)

    return replaced(lookups, "lease_hot", lease_all)


def _changes_are_mixed_up() -> contextlib.AbstractContextManager[None]:
    """Changes of one object that are read as one are carried out side by side."""

    def changed(pool: Any, effect: ReplicasChanged) -> None:
        rows = pool.objects.lookup(np.ascontiguousarray(effect.digests))
        there = rows >= 0
        there[there] = pool.seqs_of(rows[there]) == effect.seqs[there]
        counts = effect.extent_counts.astype(np.int64)
        spans = from_placed(effect.placed)[np.repeat(there, counts)]
        if there.any():
            pool.set_spans(rows[there], counts[there], spans, effect.replicas[there])

    return replaced(replay, "_REPLAY", {**replay._REPLAY, ReplicasChanged: changed})


TIER_MUTATIONS: dict[str, Mutation] = {
    "slots before payloads": _slots_before_payloads,
    "slots are not flushed": _slots_are_not_flushed,
    "failed writes count": _failed_writes_count,
    "demotions are not proven": _demotions_are_not_proven,
    "pulls are not proven": _pulls_are_not_proven,
    "copies outlive tenures": _copies_outlive_tenures,
    "pulls outlive tenures": _pulls_outlive_tenures,
    "copies count when ordered": _copies_count_when_ordered,
    "sources go first": _sources_go_first,
    "versions are not compared": _versions_are_not_compared,
    "sources may leave": _sources_may_leave,
    "untold copies are cleared": _untold_copies_are_cleared,
    "pins are overlooked": _pins_are_overlooked,
    "dead daemons go on": _dead_daemons_go_on,
    "copies are inherited": _copies_are_inherited,
    "disks are leased": _disks_are_leased,
    "changes are mixed up": _changes_are_mixed_up,
}
