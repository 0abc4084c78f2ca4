"""A bounded pool of blocking lane connections, shared by threads.

Taking and giving back is one `deque` operation each, which is atomic, so a thread that finds an
idle connection takes no lock; and since the last one given back is taken first, a thread that is
alone always has the same one. The lock is for what is rare: making one, waiting for one, closing.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable

from cenote.api.errors import CenoteError, ClientClosed, DeadlineExceeded, Unavailable

from .address import Address
from .fork import ForkGuard
from .lane_connect import unreachable
from .lane_socket import LaneSocket

__all__ = ["LanePool", "Opener"]

# open(until_s) makes one connection or raises
Opener = Callable[[float], LaneSocket]

_BACKOFF_FIRST_S = 0.01
_BACKOFF_MAX_S = 0.5
_CLOSE_WAIT_S = 1.0
_WAIT_SLICE_S = 0.1  # a wake-up can go to a thread that gives up just then


class LanePool:
    """See the module's docstring. `idle` is the deque itself: for the client's fast path."""

    def __init__(
        self,
        address: Address,
        opener: Opener,
        *,
        connections_max: int,
        connect_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.idle: deque[LaneSocket] = deque()
        self.waiting = 0  # threads that wait for a connection; give_back looks at it
        self.closed = False
        self._closed_event = threading.Event()  # `closed`, to wait for
        self._opener = opener
        self._connections_max = connections_max
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self.generation = 0  # raised by a broken connection: the idle ones are probed, too
        self._all: set[LaneSocket] = set()
        self._opening = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fork = ForkGuard()

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._all)

    def take(self, until_s: float) -> LaneSocket:
        """A connection that nobody else uses until it is given back or discarded.

        Raises DeadlineExceeded when all stay in use, ClientClosed, and what opening one raises.
        """
        self._fork.check()
        while True:
            try:
                lane = self.idle.pop()
            except IndexError:
                with self._lock:
                    if self.closed:
                        raise ClientClosed() from None
                    if len(self._all) + self._opening < self._connections_max:
                        self._opening += 1
                        break
                    self._wait_for_idle(until_s)
                continue
            if self.probe(lane):
                return lane
            self.discard(lane)
        return self._open(until_s)

    def probe(self, lane: LaneSocket) -> bool:
        """Whether an idle connection still is one, as far as can be told without a round trip."""
        if not lane.usable():
            return False
        lane.generation = self.generation
        return True

    def give_back(self, lane: LaneSocket) -> None:
        """Return one that may be used again."""
        self.idle.append(lane)
        if self.waiting or self.closed:
            self.settle()

    def settle(self) -> None:
        """After one was returned: somebody waits for it, or all of them are to be closed."""
        with self._lock:
            self._changed.notify()
        if self.closed:
            self._close_idle()

    def discard(self, lane: LaneSocket) -> None:
        """Close one that can't be used again."""
        lane.close()
        with self._lock:
            self._all.discard(lane)
            self._changed.notify_all()

    def suspect_all(self) -> None:
        """A connection broke: look at the idle ones before they are used again."""
        self.generation += 1

    def close(self) -> None:
        """Interrupt what waits, close all sockets, wait a moment until threads have let go."""
        self.closed = True
        self._closed_event.set()
        if self._fork.forked:
            # The parent's connections: no shutdown, which would end them for the parent, too, and
            # no lock, which a thread that does not exist here may hold.
            for lane in list(self._all):
                lane.close_in_child()
            self.idle.clear()
            return
        with self._lock:
            self._changed.notify_all()
            in_use = list(self._all)
        for lane in in_use:
            lane.interrupt()
        self._close_idle()
        with self._lock:
            self._changed.wait_for(lambda: not self._all and not self._opening, _CLOSE_WAIT_S)

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.discard(self.idle.pop())

    def _wait_for_idle(self, until_s: float) -> None:
        left_s = until_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded(
                f"all {self._connections_max} connections to {self.address} were in use",
                remedy="raise connections_max, or the deadline",
            )
        self.waiting += 1
        try:
            # Given back between our look and `waiting`: nobody would wake us.
            if not self.idle:
                self._changed.wait(min(left_s, _WAIT_SLICE_S))
        finally:
            self.waiting -= 1

    def _open(self, until_s: float) -> LaneSocket:
        """Make one of the connections that `take` has counted already."""
        try:
            lane = self._open_retrying(until_s)
        except BaseException:
            with self._lock:
                self._opening -= 1
                self._changed.notify_all()
            raise
        lane.generation = self.generation
        with self._lock:
            self._opening -= 1
            self._all.add(lane)
        if self.closed:
            self.discard(lane)
            raise ClientClosed()
        return lane

    def _open_retrying(self, until_s: float) -> LaneSocket:
        limit_s = min(until_s, self._clock() + self._connect_timeout_s)
        backoff_s = _BACKOFF_FIRST_S
        while True:
            failure: CenoteError
            try:
                return self._opener(limit_s)
            except DeadlineExceeded as error:
                if limit_s == until_s:
                    raise DeadlineExceeded(
                        f"no connection to {self.address} within the call's deadline"
                    ) from error
                failure = unreachable(self.address, "nobody answered in time")
            except Unavailable as error:
                if type(error) is not Unavailable:
                    raise  # NotLeader: the server answered, and trying again can't help
                failure = error
                failure.maybe_executed = False  # a hello is no request
            pause_s = backoff_s * random.uniform(0.5, 1.0)
            if self._clock() + pause_s >= limit_s:
                raise failure
            if self._closed_event.wait(pause_s):
                raise ClientClosed() from failure
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
