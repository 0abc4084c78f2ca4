"""What a process finds around it, in virtual time: clock, threads, locks, queues, dice.

The production modules name these things as `time`, `threading`, `secrets` and so on; `inhabited`
puts the simulated ones in their place for as long as a simulation runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty
from typing import Any, Final

import cenote.client.client
import cenote.client.driver
import cenote.client.housekeeping
import cenote.client.master_stub
import cenote.client.session
import cenote.client.ways
import cenote.master.standby
import cenote.store.agent
import cenote.store.sessions
from sim.loop import Loop, Signal, Task

__all__ = [
    "SimEvent",
    "SimLock",
    "SimQueue",
    "SimSecrets",
    "SimThreading",
    "SimTime",
    "inhabited",
    "uncollected",
]


COLLECTIONS_MAX: Final = 5


class SimTime:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.local_clock_s()

    def sleep(self, seconds: float) -> None:
        self._loop.sleep(seconds)


class SimLock:
    """`threading.Lock`, or with `again` an RLock."""

    def __init__(self, loop: Loop, *, again: bool = False) -> None:
        self._loop = loop
        self._again = again
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Signal] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        loop = self._loop
        until_s = loop.now_s + timeout if timeout >= 0 else float("inf")
        while self._depth:
            if self._again and self._owner is loop.task:
                break
            left_s = until_s - loop.now_s
            if not blocking or left_s <= 0:
                return False
            signal = Signal(loop)
            self._waiting.append(signal)
            signal.wait(left_s)
            if not signal.is_set:  # who gave up is not to be woken in another's place
                self._waiting.remove(signal)
        self._owner = loop.task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        while not self._depth and self._waiting:
            signal = self._waiting.popleft()
            if not signal.is_set:
                signal.set()
                break

    def locked(self) -> bool:
        return self._depth > 0

    def give_up(self) -> int:
        """However often it was acquired; for `take_back`."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """`threading.Condition` of a lock."""

    def __init__(self, loop: Loop, lock: SimLock) -> None:
        self._loop = loop
        self._lock = lock
        self._waiting: deque[Signal] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        signal = Signal(self._loop)
        self._waiting.append(signal)
        depth = self._lock.give_up()
        try:
            return signal.wait(timeout)
        finally:
            if not signal.is_set:
                self._waiting.remove(signal)
            self._lock.take_back(depth)

    def notify(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()

    def notify_all(self) -> None:
        while self._waiting:
            self.notify()


class SimEvent:
    """`threading.Event`."""

    def __init__(self, loop: Loop) -> None:
        self._signal = Signal(loop)

    def set(self) -> None:
        self._signal.set()

    def is_set(self) -> bool:
        return self._signal.is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._signal.wait(timeout)


class SimThread:
    """`threading.Thread`: a task of the party that starts it."""

    def __init__(
        self,
        loop: Loop,
        target: Callable[..., None],
        name: str = "",
        args: tuple[Any, ...] = (),
        daemon: bool = False,
    ) -> None:
        self._loop = loop
        self._target = target
        self._args = args
        self.name = name
        self.ident: int | None = None
        self._ended: Signal | None = None

    def start(self) -> None:
        self.ident = 1
        party = self._loop.present_party()
        self._ended = self._loop.spawn(party, self.name, lambda: self._target(*self._args))

    def join(self, timeout: float | None = None) -> None:
        if self._ended is not None:
            self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._ended is None or not self._ended.is_set


class SimThreading:
    """The module `threading`, as far as it is used."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._main = SimThread(loop, lambda: None)

    def Lock(self) -> SimLock:
        return SimLock(self._loop)

    def RLock(self) -> SimLock:
        return SimLock(self._loop, again=True)

    def Condition(self, lock: SimLock) -> SimCondition:
        return SimCondition(self._loop, lock)

    def get_native_id(self) -> int:
        return 0

    def get_ident(self) -> int:
        """Of no account: nobody spins here."""
        return 0

    def Event(self) -> SimEvent:
        return SimEvent(self._loop)

    def Thread(self, **options: Any) -> SimThread:
        return SimThread(self._loop, **options)

    def current_thread(self) -> object:
        return self._loop.task

    def main_thread(self) -> SimThread:
        return self._main


class SimQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._signal = Signal(loop)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._signal.set()

    def get(self, timeout: float | None = None) -> Any:
        until_s = self._loop.now_s + (float("inf") if timeout is None else timeout)
        while not self._items:  # several may be woken by one item
            if self._signal.is_set:
                self._signal = Signal(self._loop)
            left_s = None if timeout is None else max(0.0, until_s - self._loop.now_s)
            if not self._signal.wait(left_s):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class SimFuture:
    """`concurrent.futures.Future`."""

    def __init__(self, loop: Loop) -> None:
        self._ended = Signal(loop)

    def done(self) -> bool:
        return self._ended.is_set

    def cancel(self) -> bool:
        return False

    def settle(self, value: Any, error: BaseException | None) -> None:
        self._ended.set((value, error))

    def result(self, timeout: float | None = None) -> Any:
        self._ended.wait(timeout)
        value, error = self._ended.value
        if error is not None:
            raise error
        return value


class SimExecutor:
    """`ThreadPoolExecutor`; as many threads as are wanted."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def submit(self, run: Callable[..., Any], *arguments: Any) -> SimFuture:
        future = SimFuture(self._loop)

        def body() -> None:
            try:
                future.settle(run(*arguments), None)
            except Exception as error:  # whatever it is goes to whoever asks for the result
                future.settle(None, error)

        self._loop.spawn(self._loop.present_party(), "pool", body)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        pass


class SimSecrets:
    """The module `secrets`, with loaded dice."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def token_bytes(self, count: int) -> bytes:
        return self._loop.dice.randbytes(count)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile, and all of it afterwards: finalizers of one run are no
    part of another, and do not depend on what ran in this process before."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that the collection goes through what the run made, and nothing else
    try:
        yield
    finally:
        for _ in range(COLLECTIONS_MAX):  # what finalizers touched is found by the next one
            if not gc.collect():
                break
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def inhabited(
    loop: Loop,
    boot_id: Callable[[], str],
    is_mapped: Callable[[Any, bytes], bool],
    lane_client: Callable[..., Any],
    open_lane: object,
    more: Sequence[tuple[Any, str, Any]] = (),
) -> Iterator[None]:
    """Production code lives in `loop` meanwhile.

    `boot_id()`: of the host that the present task runs on. `is_mapped(segment, session id)`: what
    the kernel would tell a daemon. `lane_client`, `open_lane`: how clients connect to one of
    several masters. `more`: what else is replaced, as (module, name, by what).
    """
    clock, threads = SimTime(loop), SimThreading(loop)
    session, store_sessions = cenote.client.session, cenote.store.sessions
    keeping, agent = cenote.client.housekeeping, cenote.store.agent
    ways = cenote.client.ways
    stub, standby = cenote.client.master_stub, cenote.master.standby
    places: list[tuple[Any, str, Any]] = [
        (module, "time", clock)
        for module in (
            cenote.client.client,
            cenote.client.driver,
            keeping,
            session,
            ways,
            agent,
            stub,
            standby,
        )
    ]
    places += [
        (module, "threading", threads) for module in (keeping, session, agent, stub, standby)
    ]
    places += [
        (keeping, "SimpleQueue", lambda: SimQueue(loop)),
        (session, "ThreadPoolExecutor", lambda *_, **__: SimExecutor(loop)),
        (cenote.client.driver, "wait", lambda *_: None),  # only where its process dies
        (session, "secrets", SimSecrets(loop)),
        (stub, "random", loop.dice),
        (stub, "LaneClient", lane_client),
        (stub, "open_lane", open_lane),
        (session, "boot_id", boot_id),
        (session, "clock_id", boot_id),
        (store_sessions, "monotonic", clock.monotonic),
        (store_sessions, "is_mapped", is_mapped),
        *more,
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        logging.disable(level)
