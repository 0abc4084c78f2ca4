"""The model of etcd in virtual time: connections of parties, whose messages are slow, lost, late or
doubled; threads that are tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from cenote.api.errors import CenoteError
from cenote.kv.service import (
    Condition,
    KvCompacted,
    KvEvent,
    KvUnavailable,
    Operation,
    RangeReply,
    TxnReply,
)
from cenote.master.workers import Waker, Worker
from kv_model import KvModel
from sim.loop import Loop, Party, Signal

__all__ = ["KvWeather", "PartyClock", "SimKv", "SimWorkers"]

T = TypeVar("T")
LATENCY_S = 0.002
LATE_S = 3.0


class PartyClock:
    """A `Clock` of one process."""

    def __init__(self, loop: Loop, party: Party) -> None:
        self._loop = loop
        self._party = party

    def monotonic_s(self) -> float:
        return self._party.clock_s(self._loop.now_s)

    def monotonic_ns(self) -> int:
        return round(self.monotonic_s() * 1e9)

    def unix_s(self) -> float:
        return self._loop.now_s


class _SimWaker:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._signal = Signal(loop)

    def wake(self) -> None:
        self._signal.set()

    def wait(self, timeout_s: float) -> bool:
        signal = self._signal
        woken = signal.wait(max(timeout_s, 0.0))
        if woken and self._signal is signal:
            self._signal = Signal(self._loop)
        return woken


class _SimWorker:
    def __init__(self, ended: Signal) -> None:
        self._ended = ended

    def join(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)


class SimWorkers:
    """See `cenote.master.workers.Workers`: threads of a party."""

    def __init__(self, loop: Loop, party: Party) -> None:
        self._loop = loop
        self._party = party

    def spawn(self, name: str, run: Callable[[], None]) -> Worker:
        return _SimWorker(self._loop.spawn(self._party, name, run))

    def waker(self) -> Waker:
        return _SimWaker(self._loop)


class KvWeather:
    """What goes wrong between parties and the service."""

    def __init__(self, loop: Loop, service: KvModel) -> None:
        self.loop = loop
        self.service = service
        self.lost = self.unknown = self.late = self.twice = 0.0
        """Share of calls."""
        self.cut_off: set[str] = set()
        """Names of parties that nothing gets to."""
        self.latency_s = LATENCY_S
        self.watchers: list[_SimWatch] = []
        service.changed = self._changed

    def _changed(self) -> None:
        for watch in list(self.watchers):
            watch.notice()

    def calm(self) -> None:
        """All is as it should be."""
        self.lost = self.unknown = self.late = self.twice = 0.0
        self.latency_s = LATENCY_S
        self.cut_off.clear()
        self.service.reachable = True

    def latency(self) -> float:
        return self.loop.dice.expovariate(1 / self.latency_s)

    def reaches(self, party: Party) -> bool:
        return self.service.reachable and party.name not in self.cut_off

    def drop_watches(self, party: Party | None = None) -> None:
        """Their connections are cut; they are told, sooner or later."""
        for watch in list(self.watchers):
            if party is None or watch.party is party:
                watch.cut()


class SimKv:
    """See `cenote.kv.service.Kv`: the connection of a party."""

    def __init__(self, weather: KvWeather, party: Party) -> None:
        self._weather = weather
        self._party = party
        self._closed = False

    def _call(self, run: Callable[[], T], timeout_s: float) -> T:
        weather, loop, service = self._weather, self._weather.loop, self._weather.service
        if self._closed:
            raise KvUnavailable("closed")
        answered = Signal(loop)
        luck = loop.dice.random()
        is_lost = luck < weather.lost
        is_unknown = weather.lost <= luck < weather.lost + weather.unknown
        is_late = loop.dice.random() < weather.late
        times = 2 if loop.dice.random() < weather.twice else 1

        def arrive() -> None:
            if not weather.reaches(self._party) and not is_late:
                return
            service.advance_to(loop.now_s)
            answer: Any = None
            for _ in range(times):
                try:
                    answer = run()
                except CenoteError as error:
                    answer = error
            if not is_unknown and not is_late:
                loop.after(weather.latency(), partial(deliver, answer), self._party)

        def deliver(answer: Any) -> None:
            if weather.reaches(self._party):
                answered.set(answer)

        if not is_lost:
            delay_s = weather.latency() if not is_late else loop.dice.uniform(0, LATE_S)
            loop.after(delay_s, arrive)  # whether or not the caller lives to see it
        if not answered.wait(timeout_s):
            raise KvUnavailable("no answer")
        if isinstance(answered.value, CenoteError):
            raise answered.value
        return cast(T, answered.value)

    def range(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        limit: int = 0,
        keys_only: bool = False,
        timeout_s: float,
    ) -> RangeReply:
        return self._call(
            lambda: self._weather.service.range(key, end, limit, keys_only), timeout_s
        )

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float,
    ) -> TxnReply:
        conditions, then, otherwise = list(conditions), list(then), list(otherwise)
        return self._call(lambda: self._weather.service.txn(conditions, then, otherwise), timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float) -> int:
        return self._call(lambda: self._weather.service.grant(ttl_s), timeout_s)

    def keep_alive(self, lease: int, *, timeout_s: float) -> bool:
        return self._call(lambda: self._weather.service.keep_alive(lease), timeout_s)

    def revoke(self, lease: int, *, timeout_s: float) -> None:
        self._call(lambda: self._weather.service.revoke(lease), timeout_s)

    def watch(self, key: bytes, end: bytes, *, revision: int) -> _SimWatch:
        return _SimWatch(self._weather, self._party, key, end, revision)

    def compact(self, revision: int, *, timeout_s: float) -> None:
        self._call(lambda: self._weather.service.compact(revision), timeout_s)

    def size_bytes(self, *, timeout_s: float) -> int:
        return self._call(self._weather.service.size_bytes, timeout_s)

    def distrust(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True


class _SimWatch:
    """See `cenote.kv.service.Watch`."""

    def __init__(
        self, weather: KvWeather, party: Party, key: bytes, end: bytes, revision: int
    ) -> None:
        self.party = party
        self._weather = weather
        self._key, self._end, self._next = key, end, revision
        self._events: list[KvEvent] = []
        self._failure: CenoteError | None = None
        self._signal = Signal(weather.loop)
        self._woken = False
        self.silent = False
        """Cut without being told."""
        weather.watchers.append(self)
        self.notice()

    def notice(self) -> None:
        """Something has changed: it is told after a while."""
        loop = self._weather.loop
        loop.after(self._weather.latency(), self._arrive, self.party)

    def _arrive(self) -> None:
        if self.silent or self._failure is not None or not self._weather.reaches(self.party):
            return
        try:
            events = self._weather.service.events(self._key, self._end, self._next)
        except KvCompacted as error:
            self._fail(error)
            return
        if events:
            self._next = events[-1].revision + 1
            self._events += events
            self._signal.set()

    def cut(self) -> None:
        if self._weather.loop.dice.random() < 0.3:
            self.silent = True
        else:
            self._fail(KvUnavailable("the watch was cut"))

    def _fail(self, error: CenoteError) -> None:
        self._failure = error
        self._signal.set()

    def poll(self, timeout_s: float) -> list[KvEvent]:
        if not self._events and self._failure is None and not self._woken:
            self._signal = Signal(self._weather.loop)
            self._signal.wait(timeout_s)
        self._woken = False
        events, self._events = self._events, []
        if not events and self._failure is not None:
            self.close()
            raise self._failure
        return events

    def wake(self) -> None:
        self._woken = True
        self._signal.set()

    def close(self) -> None:
        if self in self._weather.watchers:
            self._weather.watchers.remove(self)
