"""Virtual time: a heap of events, parties that can be stopped and killed, tasks that can wait.

A *task* is a greenlet: production code that blocks (a client's call, a daemon's agent) runs in one
unchanged, and where it would block it goes back to the loop. Everything else (what a master or a
data server does with a message) are events: functions that don't wait. One event runs at a time,
and between two waits nothing else happens, so that a seed gives the same run, always.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

import greenlet

T = TypeVar("T")

START_S = 1_000.0


class Killed(greenlet.GreenletExit):  # type: ignore[misc]
    """Thrown into the tasks of a party that dies: their `finally` blocks run and reach nobody."""


class Violation(BaseException):
    """Something that must never happen. No production code may keep it to itself."""


class Party:
    """A process. Another one takes its place after a crash; this one stays dead."""

    def __init__(self, name: str, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.held_back: list[Callable[[], None]] = []
        """What would have happened while it was paused."""
        self.tasks: dict[Task, None] = {}
        self.on_death: list[Callable[[], None]] = []
        self.rate = rate
        self._offset_s = offset_s

    def clock_s(self, now_s: float) -> float:
        """The party's own monotonic clock: another zero, and not quite the same pace."""
        return now_s * self.rate + self._offset_s


class Task:
    """A greenlet of a party, and which of its waits is the present one."""

    def __init__(self, party: Party, name: str, run: Callable[[], None]) -> None:
        self.party = party
        self.name = name
        self.wait_number = 0
        self.done = False
        self.greenlet = greenlet.greenlet(run)


class Signal:
    """Set once; any number of tasks wait for it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Task, int]] = []
        self.is_set = False
        self.value: Any = None

    def set(self, value: Any = None) -> None:
        if self.is_set:
            return
        self.is_set = True
        self.value = value
        for task, number in self._waiting:
            self._loop.resume_soon(task, number)
        self._waiting.clear()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was set in time. In a task only, unless it is set already."""
        if not self.is_set:
            loop = self._loop
            task = loop.task
            assert task is not None, "an event waits"
            self._waiting.append((task, task.wait_number))
            loop.suspend(timeout_s)
        return self.is_set


class Loop:
    """See the module. `dice` is the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now_s = START_S
        self.task: Task | None = None
        self.events = 0
        self.log: deque[str] = deque(maxlen=400)
        """What happened last, for people."""
        self._heap: list[tuple[float, int, Party | None, Callable[[], None]]] = []
        self._order = 0
        self._hub = greenlet.getcurrent()
        self.fingerprint = 0
        """Of all that happened: equal in two runs of a seed."""

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        line = f"{self.now_s - START_S:9.4f} {who:<10} {what}"
        self.log.append(line)
        self.fingerprint = hash((self.fingerprint, self.events, len(line), sum(line.encode())))

    # ---- events -------------------------------------------------------------------------------

    def after(self, delay_s: float, run: Callable[[], None], party: Party | None = None) -> None:
        """Call `run` in so many seconds; for a party's sake not when it is dead, and later when it
        is paused."""
        self._order += 1
        heappush(self._heap, (self.now_s + max(0.0, delay_s), self._order, party, run))

    def run(self, until_s: float = float("inf"), events_max: int = 1 << 60) -> None:
        """Run events up to a point in time, or so many in all, or until there are none left."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and self.events < events_max:
            at_s, _, party, run = heappop(heap)
            self.now_s = max(self.now_s, at_s)
            if party is not None:
                if not party.alive:
                    continue
                if party.paused:
                    party.held_back.append(run)
                    continue
            self.events += 1
            run()
        if not heap or heap[0][0] > until_s:
            self.now_s = max(self.now_s, min(until_s, 1e12))

    # ---- parties ------------------------------------------------------------------------------

    def pause(self, party: Party) -> None:
        party.paused = True

    def unpause(self, party: Party) -> None:
        """What was held back happens now, in its order."""
        if not party.paused:
            return
        party.paused = False
        waiting, party.held_back = party.held_back, []
        for run in waiting:
            self.after(0.0, run, party)

    def kill(self, party: Party) -> None:
        """The process is gone, between two steps of whatever it was doing."""
        if not party.alive:
            return
        party.alive = False
        party.held_back.clear()
        for task in list(party.tasks):
            self._throw(task)
        party.tasks.clear()
        for run in party.on_death:
            run()

    def _throw(self, task: Task) -> None:
        if task.greenlet is greenlet.getcurrent() or not task.greenlet:
            return  # never started, ended, or the one that kills its own process
        before, self.task = self.task, task
        try:
            task.greenlet.parent = greenlet.getcurrent()
            task.greenlet.throw(Killed)
        finally:
            self.task = before

    # ---- tasks --------------------------------------------------------------------------------

    def spawn(self, party: Party, name: str, run: Callable[[], None]) -> Signal:
        """Begin a task soon; the signal is set when it ended."""
        ended = Signal(self)

        def body() -> None:
            try:
                run()
            finally:
                task.done = True
                party.tasks.pop(task, None)
                ended.set()

        task = Task(party, name, body)
        party.tasks[task] = None
        self.after(self.jitter_s(), lambda: self._switch(task), party)
        return ended

    def jitter_s(self) -> float:
        """So short that it only shuffles what happens at the same time."""
        return self.dice.random() * 50e-6

    def suspend(self, timeout_s: float | None = None) -> None:
        """Leave the present task until `resume_soon`, or until so much of its party's time."""
        task = self.task
        assert task is not None, "an event waits"
        if not task.party.alive:
            raise Killed
        number = task.wait_number
        if timeout_s is not None and timeout_s < 1e6:
            # Never nothing: who waits until a point in time gets there.
            self.after(
                max(timeout_s, 0.0) / task.party.rate + 1e-6,
                lambda: self._resume(task, number),
                task.party,
            )
        self._hub.switch()

    def resume_soon(self, task: Task, number: int) -> None:
        self.after(self.jitter_s(), lambda: self._resume(task, number), task.party)

    def _resume(self, task: Task, number: int) -> None:
        if task.wait_number == number and not task.done:
            task.wait_number += 1
            self._switch(task)

    def _switch(self, task: Task) -> None:
        self.task = task
        try:
            task.greenlet.parent = self._hub
            task.greenlet.switch()
        finally:
            self.task = None

    def sleep(self, seconds: float) -> None:
        """In a task."""
        self.suspend(max(0.0, seconds))

    def present_party(self) -> Party:
        """Whose task this is."""
        assert self.task is not None, "no task runs"
        return self.task.party

    def local_clock_s(self) -> float:
        """Of the party whose task this is."""
        return self.now_s if self.task is None else self.task.party.clock_s(self.now_s)
