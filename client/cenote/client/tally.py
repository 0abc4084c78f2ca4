"""What all clients of this process counted, those that are closed included.

Nothing is done while calls run: clients count plain ints, which are added up when somebody asks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Final, final

from cenote.runtime.metrics import Histogram

from .plan.counters import CALL_KINDS, SpaceCounters

if TYPE_CHECKING:
    from .session import Session

__all__ = ["COLUMNS", "TALLY", "Tally", "Totals"]

_SUMMED: Final = (
    "cached_reads",
    "stale_locations",
    "misreads",
    "stored",
    "existed",
    "read_bytes",
    "written_bytes",
)
COLUMNS: Final = (
    "asked",
    "present",
    "fetched",
    "verified",
    "verified_ssd",
    "absent",
    "unreachable",
    *_SUMMED,
)
"""Of a namespace; the first says how busy it is."""


@final
class Totals:
    """What some clients counted, added up."""

    def __init__(self) -> None:
        self.calls = [0] * len(CALL_KINDS)
        self.seconds = [Histogram() for _ in CALL_KINDS]
        self.moved: dict[str, list[int]] = {}
        """By transport: bytes read and written."""
        self.spaces: dict[str, list[float]] = {}
        """By name of the namespace, `COLUMNS`."""
        self.failures: dict[tuple[str, str, str], int] = {}
        self.retries = 0
        self.node_failures = 0

    def add(self, session: Session) -> None:
        """What a client counted so far."""
        state = session.state
        self._add_calls(state.calls, state.seconds)
        self._add_moved(session.moved)
        for space in list(session.spaces.values()):
            self._add_space(space.name, _columns(space.counters))
            self._add_failures(space.counters.failures)
        self.retries += state.counters.retries
        self.node_failures += state.counters.node_failures

    def merge(self, other: Totals) -> None:
        """What others counted."""
        self._add_calls(other.calls, other.seconds)
        self._add_moved(other.moved)
        for name, values in other.spaces.items():
            self._add_space(name, values)
        self._add_failures(other.failures)
        self.retries += other.retries
        self.node_failures += other.node_failures

    def _add_calls(self, calls: list[int], seconds: list[Histogram]) -> None:
        for kind, count in enumerate(calls):
            self.calls[kind] += count
            self.seconds[kind].add(seconds[kind])

    def _add_moved(self, moved: dict[str, list[int]]) -> None:
        for name, (read, written) in list(moved.items()):
            sums = self.moved.setdefault(name, [0, 0])
            sums[0] += read
            sums[1] += written

    def _add_space(self, name: str, values: list[float]) -> None:
        sums = self.spaces.setdefault(name, [0.0] * len(COLUMNS))
        for i, value in enumerate(values):
            sums[i] += value

    def _add_failures(self, failures: dict[tuple[str, str, str], int]) -> None:
        for reason, keys in list(failures.items()):
            self.failures[reason] = self.failures.get(reason, 0) + keys


def _columns(counters: SpaceCounters) -> list[float]:
    funnel = counters.funnel()
    return [
        funnel["asked"],
        funnel["present"],
        funnel["fetched"],
        funnel["verified"],
        counters.ssd_hits,
        counters.misses - counters.unreachable_misses,
        counters.unreachable_misses,
        *(getattr(counters, name) for name in _SUMMED),
    ]


@final
class Tally:
    """Of sessions, which are held weakly: a client that nobody holds any more is closed by its own
    thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Know of nothing; also in a process that was forked, where another thread's lock would be
        held for ever, and the clients are the parent's."""
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = Totals()

    def opened(self, session: Session) -> None:
        """It counts from now on."""
        with self._lock:
            self._open.add(session)

    def closed(self, session: Session) -> None:
        """What it counted is kept; twice does no harm."""
        with self._lock:
            if session in self._open:
                self._open.discard(session)
                self._closed.add(session)

    def take(self) -> tuple[Totals, int, int]:
        """(what all have counted, open clients, the nodes that these are connected to)."""
        with self._lock:
            totals = Totals()
            totals.merge(self._closed)
            sessions = list(self._open)
            for session in sessions:
                totals.add(session)
            return totals, len(sessions), sum(len(session.channels) for session in sessions)


TALLY: Final = Tally()
os.register_at_fork(after_in_child=TALLY.begin)
