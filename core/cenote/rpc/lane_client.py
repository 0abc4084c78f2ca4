"""The lane's blocking client: what threads call."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    Unavailable,
)
from cenote.security.tls import Tls

from .address import parse_address
from .fork import ForkGuard
from .frames import BODY_BYTES_MAX_DEFAULT, DEADLINE_MS_MAX
from .lane_connect import unreachable
from .lane_pipeline import Pipeline
from .lane_pool import LanePool
from .lane_socket import LaneSocket, NotSent
from .lane_tls_client import open_lane

__all__ = ["LaneClient"]

SPIN_POLLS_DEFAULT = 1500
_ATTEMPTS_MAX = 3
_PROBE_IDLE_S = 1.0  # a connection idle for longer may have been closed by the server meanwhile


class LaneClient:
    """Calls a lane server from any number of threads.

    `hello` is the opaque part of the client's hello, or a function that gives it anew for each
    connection (a session's later connections may have more to say than the first). `on_hello` gets
    the opaque part of each reply, in the thread that connected, before the connection is used.
    `spin_polls` is how often a call looks for its reply before it sleeps (0: not at all). `tls`:
    how to speak TLS to a server that is reached over TCP.

    Nothing is connected before the first call. Every call ends by its deadline. Besides what the
    server raises, calls raise Unavailable (nobody there, or gone before the reply: then its
    `maybe_executed` is true), DeadlineExceeded (likewise), ProtocolError, InvalidArgument,
    ClientClosed and ForkedClient.
    """

    def __init__(
        self,
        address: str,
        hello: bytes | Callable[[], bytes],
        *,
        connect_timeout_s: float = 5.0,
        connections_max: int = 8,
        spin_polls: int = SPIN_POLLS_DEFAULT,
        body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
        on_hello: Callable[[bytes], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.address = parse_address(address)
        self._hello = hello
        self._on_hello = on_hello
        self._spin_polls = spin_polls
        self._body_bytes_max = body_bytes_max
        self._clock = clock
        self._fork = ForkGuard()
        self._pool = LanePool(
            self.address,
            self._open,
            connections_max=connections_max,
            connect_timeout_s=connect_timeout_s,
            clock=clock,
        )
        self._idle_pop = self._pool.idle.pop  # the fast path
        self._idle_push = self._pool.idle.append

    @property
    def connections(self) -> int:
        """How many sockets are open now."""
        return self._pool.connections

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._pool.closed

    def close(self) -> None:
        """End all calls with ClientClosed and close all sockets. Any thread may call it, twice."""
        self._pool.close()

    def __enter__(self) -> LaneClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """Send one request, return its reply's body."""
        now_s = self._clock()
        until_s = now_s + deadline_s
        if len(body) > self._body_bytes_max or not 0.001 <= deadline_s <= 4e6:
            deadline_s = self._check(body, deadline_s)
        deadline_ms = int(deadline_s * 1000)
        if self._fork.forked:
            self._fork.check()
        pool = self._pool
        attempts_left = _ATTEMPTS_MAX
        while True:
            try:
                lane = self._idle_pop()
            except IndexError:
                lane = pool.take(until_s)
                deadline_ms = self._left_ms(until_s)
            else:
                if (
                    now_s - lane.used_s > _PROBE_IDLE_S or lane.generation != pool.generation
                ) and not pool.probe(lane):
                    pool.discard(lane)
                    continue
            try:
                reply = lane.call(method, body, deadline_ms, until_s)
            except NotSent as error:
                attempts_left -= 1
                self._not_sent(lane, error, attempts_left)
            except BaseException as error:  # also KeyboardInterrupt: the stream is in mid-frame
                self._failed(lane, error)
                raise
            else:
                if not lane.clean:
                    pool.discard(lane)
                    return reply
                lane.used_s = now_s
                self._idle_push(lane)
                if pool.waiting or pool.closed:
                    pool.settle()
                return reply

    def call_many(
        self, method: int, bodies: Sequence[bytes], deadline_s: float
    ) -> list[bytes | CenoteError]:
        """Send a request per body on one connection without waiting in between (pipelined).

        Returns a reply's body or an error per request, in their order; an error that ended all of
        them (connection lost, deadline) stands for each that has no reply. Raises only
        ClientClosed, ForkedClient, InvalidArgument and what connecting raises.
        """
        until_s = self._clock() + deadline_s
        for body in bodies:
            if len(body) > self._body_bytes_max:
                self._check(body, deadline_s)
        self._check(b"", deadline_s)
        self._fork.check()
        if not bodies:
            return []
        attempts_left = _ATTEMPTS_MAX
        while True:
            lane = self._pool.take(until_s)
            batch = Pipeline(
                lane, method, bodies, until_s, clock=self._clock, spin_polls=self._spin_polls
            )
            try:
                batch.run()
            except NotSent as error:
                attempts_left -= 1
                self._not_sent(lane, error, attempts_left)
                continue
            except CenoteError as error:
                self._failed(lane, error)
                return _filled(batch, error)
            except BaseException as error:  # also KeyboardInterrupt: the stream is in mid-frame
                self._failed(lane, error)
                raise
            if lane.clean:
                lane.used_s = self._clock()
                self._pool.give_back(lane)
            else:
                self._pool.discard(lane)
            return _filled(batch, None)

    # --- slow paths -----------------------------------------------------------------------------

    def _open(self, until_s: float) -> LaneSocket:
        hello = self._hello if isinstance(self._hello, bytes) else self._hello()
        lane = open_lane(
            self.address,
            hello,
            until_s,
            spin_polls=self._spin_polls,
            clock=self._clock,
            cancelled=lambda: self._pool.closed,
            body_bytes_max=self._body_bytes_max,
            tls=self._tls,
        )
        if self._on_hello is not None:
            try:
                self._on_hello(lane.hello_reply)
            except BaseException:  # the caller's affair, but the socket is ours
                lane.close()
                raise
        lane.used_s = self._clock()
        return lane

    def _check(self, body: bytes, deadline_s: float) -> float:
        """The deadline to use for a request with an unusual one. Raises InvalidArgument."""
        if len(body) > self._body_bytes_max:
            raise InvalidArgument(
                f"a request of {len(body)} bytes exceeds the limit of {self._body_bytes_max}",
                remedy="send less in one call",
            )
        if not deadline_s > 0:
            raise DeadlineExceeded(f"no time is left: deadline_s is {deadline_s}")
        return min(max(deadline_s, 0.001), DEADLINE_MS_MAX / 1000)

    def _left_ms(self, until_s: float) -> int:
        return min(max(1, int((until_s - self._clock()) * 1000)), DEADLINE_MS_MAX)

    def _not_sent(self, lane: LaneSocket, error: NotSent, attempts_left: int) -> None:
        """The server closed this connection before the request left: another may do."""
        self._pool.discard(lane)
        self._pool.suspect_all()
        if self._pool.closed:
            raise ClientClosed() from error
        if not attempts_left:
            raise unreachable(self.address, f"it closes connections at once ({error})") from error

    def _failed(self, lane: LaneSocket, error: BaseException) -> None:
        """Deal with the connection of a call that failed. Raises ClientClosed if that is why."""
        if lane.clean:
            lane.used_s = self._clock()
            self._pool.give_back(lane)
            return
        self._pool.discard(lane)
        if isinstance(error, Unavailable):
            self._pool.suspect_all()
            if self._pool.closed:
                closed = ClientClosed()
                closed.maybe_executed = error.maybe_executed
                raise closed from error


def _filled(batch: Pipeline, error: CenoteError | None) -> list[bytes | CenoteError]:
    """The results, with an error of its own for each request without a reply."""
    results: list[bytes | CenoteError] = []
    for index, result in enumerate(batch.results):
        if result is None:
            assert error is not None
            result = copy.copy(error)
            result.maybe_executed = index < batch.begun
        results.append(result)
    return results
