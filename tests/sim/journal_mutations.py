"""Bugs on purpose in the shared journal: each takes one rule out; the simulator must notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cenote.api.errors import NotLeader, ResourceUnavailable
from cenote.kv.service import Created, Delete, KvUnavailable, Modified, Put
from cenote.master import kv_election, kv_snapshot
from cenote.master.kv_append import Appender
from cenote.master.kv_election import Candidacy, Observer
from cenote.master.kv_follow import Follower
from cenote.master.kv_keeper import Keeper
from cenote.master.kv_upkeep import Upkeep

__all__ = ["MUTATIONS", "mutated"]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


Mutation = Callable[[], contextlib.AbstractContextManager[None]]


def _unfenced() -> contextlib.AbstractContextManager[None]:
    """Appends are not conditioned on the fence."""

    true_write = Appender._write

    def write(self: Any, values: Any) -> None:
        kv = self._kv

        class Blind:
            def txn(self, conditions: Any, *rest: Any, **named: Any) -> Any:
                return kv.txn([c for c in conditions if isinstance(c, Created)], *rest, **named)

        self._kv = Blind()
        try:
            true_write(self, values)
        finally:
            self._kv = kv

    return _replaced(Appender, "_write", write)


def _overwriting() -> contextlib.AbstractContextManager[None]:
    """Appends are not conditioned on the absence of their key, and not on the fence."""
    true_write = Appender._write

    def write(self: Any, values: Any) -> None:
        kv = self._kv

        class Blind:
            def txn(self, conditions: Any, *rest: Any, **named: Any) -> Any:
                return kv.txn((), *rest, **named)

        self._kv = Blind()
        try:
            true_write(self, values)
        finally:
            self._kv = kv

    return _replaced(Appender, "_write", write)


def _no_read_back() -> contextlib.AbstractContextManager[None]:
    """A condition that failed is taken for an earlier attempt that succeeded."""
    return _replaced(Appender, "_was_done", lambda self, value, rows: True)


def _failed_is_failed() -> contextlib.AbstractContextManager[None]:
    """A lost answer is taken for a failure: what was queued gets other numbers' places."""

    def write(self: Any, values: Any) -> None:
        try:
            self._kv.txn(
                [Modified(self._keys.epoch, self._fence.revision)],
                [Put(self._keys.journal(v.first), v.data) for v in values],
                timeout_s=2.0,
            )
        except ResourceUnavailable:
            self._done(values, 0)  # somebody will have it
            return
        self._done(values, 0)

    return _replaced(Appender, "_write", write)


def _counted_from_the_answer() -> contextlib.AbstractContextManager[None]:
    """The tenure counts from when the answer came, not from when the question was sent."""
    true_beat = Keeper._beat

    def beat(self: Any) -> bool:
        answered = true_beat(self)
        if answered and self.lost is None:
            self._tenure.proven(self._clock.monotonic_s())
        return answered

    return _replaced(Keeper, "_beat", beat)


def _impatient() -> contextlib.AbstractContextManager[None]:
    """A standby waits for half a tenure."""
    true = Observer.vacant_at_s.fget  # type: ignore[attr-defined]

    def vacant_at_s(self: Any) -> float:
        half_s = self._tenure_s / 2
        return float(true(self)) - (half_s if self.seen and self.seen.tenure else 0.0)

    return _replaced(Observer, "vacant_at_s", property(vacant_at_s))


def _blind_election() -> contextlib.AbstractContextManager[None]:
    """An election is not conditioned on what was seen of the tenure."""
    true_init = Candidacy.__init__

    def init(self: Any, keys: Any, *rest: Any, **named: Any) -> None:
        true_init(self, keys, *rest, **named)
        self.conditions = [c for c in self.conditions if c.key != keys.tenure]

    return _replaced(Candidacy, "__init__", init)


def _free_for_all() -> contextlib.AbstractContextManager[None]:
    """An election is conditioned on nothing: two may win the same epoch."""
    true_init = Candidacy.__init__

    def init(self: Any, *rest: Any, **named: Any) -> None:
        true_init(self, *rest, **named)
        self.conditions = []

    return _replaced(Candidacy, "__init__", init)


def _deaf() -> contextlib.AbstractContextManager[None]:
    """A heartbeat that is refused counts as one that was answered."""
    true_beat = Keeper._beat

    def beat(self: Any) -> bool:
        true_beat(self)
        self._tenure.proven(self._clock.monotonic_s())
        return True

    def lose(self: Any, why: str, seen: Any = None) -> Any:
        return NotLeader(why)

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with _replaced(Keeper, "_beat", beat), _replaced(Keeper, "lose", lose):
            yield

    return both()


def _old_news() -> contextlib.AbstractContextManager[None]:
    """A new leader does not read what was appended since it followed last."""

    def rest(self: Any, patience_s: float) -> Iterator[Any]:
        if self.last == 0:
            yield from true_rest(self, patience_s)

    true_rest = Follower.rest
    return _replaced(Follower, "rest", rest)


def _gaps_are_fine() -> contextlib.AbstractContextManager[None]:
    """A reader takes whatever comes next for what is due."""
    true_take = Follower._take

    def take(self: Any, key: bytes, value: bytes, records: Any) -> bool:
        first = self._keys.first_entry(key)
        if first is not None and first > self._resume:
            self._resume, self.last = first, first - 1
        return bool(true_take(self, key, value, records))

    return _replaced(Follower, "_take", take)


def _greedy_truncation() -> contextlib.AbstractContextManager[None]:
    """Truncation deletes a key more than the snapshot covers."""
    true_truncate = Upkeep._truncate

    def truncate(self: Any) -> None:
        row = self.snapshot
        if row is not None:
            self.snapshot = row.__class__(
                row.covers, row.resume + 1, row.chunks, row.size_bytes, row.nonce
            )
        try:
            true_truncate(self)
        finally:
            self.snapshot = row

    return _replaced(Upkeep, "_truncate", truncate)


def _unfenced_truncation() -> contextlib.AbstractContextManager[None]:
    """Standbys truncate, too, as far as they have followed."""
    true_step = Upkeep._step

    def step(self: Any) -> None:
        true_step(self)
        with contextlib.suppress(ResourceUnavailable):
            self._kv.txn((), [Delete(*self._keys.journal_before(self.entry()))], timeout_s=2.0)

    return _replaced(Upkeep, "_step", step)


def _snapshot_before_its_parts() -> contextlib.AbstractContextManager[None]:
    """A snapshot is put in force without looking whether its parts arrived."""

    def attempt(run: Any) -> None:
        with contextlib.suppress(KvUnavailable):
            run()

    return _replaced(kv_snapshot, "_attempt", attempt)


def _lost_positions() -> contextlib.AbstractContextManager[None]:
    """What was read before an answer was lost counts as given (a bug that was found here)."""
    return _replaced(Follower, "_step", Follower._step_from_here)


def _wide_margin() -> contextlib.AbstractContextManager[None]:
    """A leader acts for half a tenure longer than others wait."""
    return _replaced(kv_election, "MARGIN_SHARE", -0.5)


MUTATIONS: dict[str, Mutation] = {
    "appends are not fenced": _unfenced,
    "appends overwrite": _overwriting,
    "no read back": _no_read_back,
    "a lost answer is a failure": _failed_is_failed,
    "tenures count from the answer": _counted_from_the_answer,
    "standbys are impatient": _impatient,
    "elections are blind": _blind_election,
    "elections are free for all": _free_for_all,
    "leaders are deaf": _deaf,
    "leaders read old news": _old_news,
    "gaps are fine": _gaps_are_fine,
    "truncation is greedy": _greedy_truncation,
    "standbys truncate": _unfenced_truncation,
    "snapshots before their parts": _snapshot_before_its_parts,
    "positions get lost": _lost_positions,
    "leaders act for too long": _wide_margin,
}


def mutated(name: str) -> contextlib.AbstractContextManager[None]:
    """The production code with that bug, for as long as the context lasts."""
    return MUTATIONS[name]()
