"""The lane's client for coroutines: one connection, all calls pipelined on it.

A cancelled or late call is forgotten; its reply is dropped when it comes, since call ids tell
replies apart. So a deadline costs no connection here, unlike in the blocking client.
"""

from __future__ import annotations

import asyncio
import copy
import random
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    Unavailable,
)
from cenote.security.tls import Tls
from cenote.security.tls_errors import tls_failed

from .address import Address, parse_address
from .fork import ForkGuard
from .frames import (
    BODY_BYTES_MAX_DEFAULT,
    CALL_ID_MAX,
    DEADLINE_MS_MAX,
    ERROR,
    HEADER,
    HELLO,
    HELLO_REPLY,
    KIND_NAMES,
    REPLY,
    REQUEST,
    FrameParser,
    HelloReply,
    decode_error,
    pack_frame,
    pack_hello,
    parse_hello_reply,
)
from .lane_connect import unreachable

__all__ = ["AsyncLaneClient"]

_BACKOFF_FIRST_S = 0.01
_BACKOFF_MAX_S = 0.5
_WRITE_HIGH_BYTES = 1 << 20


class _Lane(asyncio.Protocol):
    """One connection: replies to futures by call id."""

    def __init__(self, address: Address, body_bytes_max: int) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.transport: Any = None
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.failure: CenoteError | None = None  # why it can't be used any more
        self.lost = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.greeted: asyncio.Future[HelloReply] = self.loop.create_future()
        self._parser = FrameParser(body_bytes_max)
        self._call_id = 0

    def next_call_id(self) -> int:
        while True:
            self._call_id = self._call_id + 1 if self._call_id < CALL_ID_MAX else 1
            if self._call_id not in self.waiting:
                return self._call_id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        parser.feed(data)
        try:
            while (frame := parser.next()) is not None:
                self._take(*frame)
        except CenoteError as error:
            self.fail(error)

    def _take(self, kind: int, call_id: int, _: int, word: int, body: bytes) -> None:
        if kind == REPLY:
            future = self.waiting.pop(call_id, None)
            if future is not None and not future.done():
                future.set_result(body)
        elif kind == ERROR:
            error = decode_error(word, body)
            future = self.waiting.pop(call_id, None)
            if future is not None and not future.done():
                future.set_exception(error)
            elif call_id == 0 or not self.greeted.done():
                raise error
        elif kind == HELLO_REPLY and not self.greeted.done():
            self.greeted.set_result(parse_hello_reply(body))
        else:
            raise ProtocolError(f"{self.address} sent a {KIND_NAMES[kind]} frame, which is not due")

    def fail(self, error: CenoteError) -> None:
        """Close; every call that waits ends with `error`."""
        if self.failure is None:
            self.failure = error
        if self.transport is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.failure is None and isinstance(exc, ssl.SSLError):
            self.failure = tls_failed(exc, self.address, None)
        elif self.failure is None:
            self.failure = Unavailable(
                f"the connection to {self.address} broke: {exc or 'the server closed it'}",
                remedy="send the request again if it may be executed twice or carries an id",
            )
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                error = copy.copy(self.failure)  # a traceback belongs to one raise
                error.maybe_executed = True
                future.set_exception(error)
        if not self.greeted.done():
            self.greeted.set_exception(copy.copy(self.failure))
        if not self.greeted.cancelled():
            self.greeted.exception()  # seen, whoever waits for it or not
        self.writable.set()
        self.lost.set()


class AsyncLaneClient:
    """Calls a lane server from the coroutines of one event loop.

    The arguments and errors are those of `LaneClient`; `inflight_max` calls are under way at most,
    further ones wait for their turn (within their deadline).
    """

    def __init__(
        self,
        address: str,
        hello: bytes | Callable[[], bytes],
        *,
        connect_timeout_s: float = 5.0,
        inflight_max: int = 256,
        body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
        on_hello: Callable[[bytes], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.address = parse_address(address)
        self._hello = hello
        self._on_hello = on_hello
        self._connect_timeout_s = connect_timeout_s
        self._body_bytes_max = body_bytes_max
        self._turn = asyncio.Semaphore(inflight_max)
        self._lane: _Lane | None = None
        self._opening: asyncio.Task[_Lane] | None = None
        self._closed = False
        self._fork = ForkGuard()

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    async def __aenter__(self) -> AsyncLaneClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """Send one request, return its reply's body. A cancelled call may have been executed."""
        self._check(body, deadline_s)
        until_s = time.monotonic() + deadline_s
        sent = False
        try:
            async with asyncio.timeout(deadline_s), self._turn:
                lane = self._lane
                if lane is None or lane.failure is not None:
                    lane = await self._connected()
                if not lane.writable.is_set():
                    await lane.writable.wait()
                if self._closed:
                    raise ClientClosed()
                if lane.failure is not None:
                    raise unreachable(self.address, lane.failure.message)
                deadline_ms = int((until_s - time.monotonic()) * 1000)
                call_id = lane.next_call_id()
                future: asyncio.Future[bytes] = lane.loop.create_future()
                lane.waiting[call_id] = future
                head = HEADER.pack(
                    len(body),
                    call_id,
                    method,
                    REQUEST,
                    0,
                    min(max(deadline_ms, 1), DEADLINE_MS_MAX),
                )
                lane.transport.write(head + body)
                sent = True
                try:
                    return await future
                finally:
                    lane.waiting.pop(call_id, None)
        except TimeoutError:
            late = DeadlineExceeded(f"no reply from {self.address} within {deadline_s:g} s")
            late.maybe_executed = sent
            raise late from None

    async def call_many(
        self, method: int, bodies: Sequence[bytes], deadline_s: float
    ) -> list[bytes | CenoteError]:
        """Send a request per body, all at once. A reply's body or an error for each, in order."""
        for body in bodies:
            self._check(body, deadline_s)

        async def one(body: bytes) -> bytes | CenoteError:
            try:
                return await self.call(method, body, deadline_s)
            except (ClientClosed, InvalidArgument):
                raise
            except CenoteError as error:
                return error

        # A group, so that none is left behind when this is cancelled or one of them raises.
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(body)) for body in bodies]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """End all calls with ClientClosed and close the socket."""
        self._closed = True
        if self._fork.forked:
            return
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.fail(ClientClosed())
            await lane.lost.wait()

    # --- connecting -----------------------------------------------------------------------------

    def _check(self, body: bytes, deadline_s: float) -> None:
        self._fork.check()
        if self._closed:
            raise ClientClosed()
        if len(body) > self._body_bytes_max:
            raise InvalidArgument(
                f"a request of {len(body)} bytes exceeds the limit of {self._body_bytes_max}",
                remedy="send less in one call",
            )
        if not deadline_s > 0:
            raise DeadlineExceeded(f"no time is left: deadline_s is {deadline_s}")

    async def _connected(self) -> _Lane:
        """The connection; one task makes it, however many calls wait for it."""
        if self._closed:
            raise ClientClosed()
        opening = self._opening
        if opening is None:
            opening = self._opening = asyncio.create_task(self._open_retrying())
            opening.add_done_callback(self._opened)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():  # by close(); otherwise it is this call that was cancelled
                raise ClientClosed() from None
            raise
        except CenoteError as error:
            raise copy.copy(error) from None  # others wait for the same task

    def _opened(self, task: asyncio.Task[_Lane]) -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self._lane = task.result()

    async def _open_retrying(self) -> _Lane:
        limit_s = time.monotonic() + self._connect_timeout_s
        backoff_s = _BACKOFF_FIRST_S
        while True:
            try:
                return await self._open(limit_s)
            except TimeoutError:
                raise unreachable(self.address, "nobody answered in time") from None
            except ssl.SSLError as error:
                raise tls_failed(error, self.address, self._tls and self._tls.files) from error
            except OSError as error:
                failure: CenoteError = unreachable(self.address, error)
            except Unavailable as error:
                if type(error) is not Unavailable:
                    raise  # NotLeader: the server answered, and trying again can't help
                failure = error
                failure.maybe_executed = False  # a hello is no request
            pause_s = backoff_s * random.uniform(0.5, 1.0)
            if time.monotonic() + pause_s >= limit_s:
                raise failure
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _tls_options(self, host: str) -> dict[str, Any]:
        if self._tls is None:
            return {}
        return {
            "ssl": self._tls.client_context(),
            "server_hostname": self._tls.server_name(host),
        }

    async def _open(self, limit_s: float) -> _Lane:
        loop = asyncio.get_running_loop()
        hello = self._hello if isinstance(self._hello, bytes) else self._hello()
        lane = _Lane(self.address, self._body_bytes_max)
        try:
            async with asyncio.timeout(limit_s - time.monotonic()):
                if self.address.path:
                    await loop.create_unix_connection(lambda: lane, self.address.path)
                else:
                    host = self.address.host
                    await loop.create_connection(
                        lambda: lane, host, self.address.port, **self._tls_options(host)
                    )
                lane.transport.write(pack_frame(HELLO, lane.next_call_id(), body=pack_hello(hello)))
                reply = await lane.greeted
            if self._on_hello is not None:
                self._on_hello(reply.payload)
        except BaseException:  # cancelled, refused or late: no socket may be left behind
            lane.fail(Unavailable(f"the connection to {self.address} was given up"))
            raise
        return lane
