"""Bugs on purpose where several masters share their metadata: each takes one rule out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cenote.client.masters import Masters
from cenote.master import adopting, replay
from cenote.master.decider import Decider
from cenote.master.effects import SegmentMet
from cenote.master.kv_keeper import Keeper
from cenote.master.operations import Operations
from cenote.master.reconciling import make_usable
from cenote.master.state import MasterState
from sim.journal_mutations import MUTATIONS as JOURNAL_MUTATIONS
from sim.mutations import replaced

__all__ = ["TAKEOVER_MUTATIONS"]

Mutation = Callable[[], contextlib.AbstractContextManager[None]]


def _tenures_never_end() -> contextlib.AbstractContextManager[None]:
    """A leader serves for as long as it has not heard of another one."""

    def tenure_end_s(keeper: Any) -> float:
        return -math.inf if keeper.fence is None or keeper.lost is not None else math.inf

    return replaced(Keeper, "tenure_end_s", property(tenure_end_s))


class _Report:
    def __init__(self, segment: Any) -> None:
        self.ready_bytes = segment.size_bytes


def _space_before_attach() -> contextlib.AbstractContextManager[None]:
    """A new leader gives space of segments whose daemons have not attached to it yet."""
    start = MasterState.start

    def starting(state: Any, *times: Any) -> Any:
        effects = start(state, *times)
        pool = state._pool
        for segment in pool.segments.by_id.values():
            make_usable(pool, segment, _Report(segment))  # type: ignore[arg-type]
        for node in pool.nodes.by_id.values():
            node.attached = True
        return effects

    return replaced(MasterState, "start", starting)


def _nothing_is_adopted() -> contextlib.AbstractContextManager[None]:
    """A new leader believes its journal: what slots tell beyond it is cleared."""
    return replaced(
        adopting, "_newer", lambda pool, segments, slots: np.zeros(len(slots), np.bool_)
    )


def _evicted_comes_back() -> contextlib.AbstractContextManager[None]:
    """What a daemon brought before, and was evicted since, is taken for what the journal missed."""
    forgetful = {**replay._REPLAY, SegmentMet: lambda pool, effect: None}
    return replaced(replay, "_REPLAY", forgetful)


@contextlib.contextmanager
def _clients_stay_behind() -> Iterator[None]:
    """Clients ask whoever says that it leads, of whatever epoch, and past its tenure, too."""
    with (
        replaced(Masters, "accepts", lambda masters, reply: reply.is_leader),
        replaced(Masters, "settles_for", lambda masters, reply: True),
    ):
        yield


@contextlib.contextmanager
def _evictions_are_not_awaited() -> Iterator[None]:
    """Space is given away that a successor takes for an object's."""
    with (
        replaced(Decider, "unsettled_entry", property(lambda decider: 0)),
        replaced(Decider, "unsettled_under", lambda decider, digests, *grants: 0),
    ):
        yield


def _seeds_are_not_awaited() -> contextlib.AbstractContextManager[None]:
    """Clients learn of namespaces that a successor does not know."""
    return replaced(Decider, "unsettled_naming", property(lambda decider: 0))


def _removals_are_not_awaited() -> contextlib.AbstractContextManager[None]:
    """A removal is told before it is durable."""
    remove = Operations.remove

    def at_once(operations: Any, request: Any, session: bytes = b"") -> Any:
        return remove(operations, request, session).reply  # type: ignore[union-attr]

    return replaced(Operations, "remove", at_once)


TAKEOVER_MUTATIONS: dict[str, Mutation] = {
    "tenures never end": _tenures_never_end,
    "space before the attach": _space_before_attach,
    "nothing is adopted": _nothing_is_adopted,
    "what was evicted comes back": _evicted_comes_back,
    "clients stay behind": _clients_stay_behind,
    "evictions are not awaited": _evictions_are_not_awaited,
    "seeds are not awaited": _seeds_are_not_awaited,
    "removals are not awaited": _removals_are_not_awaited,
    "standbys are impatient": JOURNAL_MUTATIONS["standbys are impatient"],
}
"""Other bugs of the journal are for its own simulator, which has more of a minute for each seed."""
