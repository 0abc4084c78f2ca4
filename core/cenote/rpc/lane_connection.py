"""One accepted connection of a lane server: bytes in, dispatch, and every limit on the way.

The hot path is `data_received` with exactly one whole request in it: unpack, dispatch, write. All
else (pipelined, split, oversized, garbage, hello) goes through the parser in `_work`.

What a peer can make us hold is bounded: one unfinished frame (for `frame_timeout_s`, and all of
them together `partial_bytes_max`), what was read in one go while requests are held back (reading is
then paused), `inflight_max` unanswered requests, and replies up to the high-water mark, after which
its requests are not parsed until it reads, and after `slow_reader_timeout_s` it is cut.

A connection that gets a final ERROR frame lingers: we shut down our sending side and read on
without looking until the peer closes or `linger_s` is over. Closing at once with unread bytes in
the socket would reset the connection, and a reset can overtake the frame that says what was wrong.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    ResourceUnavailable,
    Unavailable,
)

from .frames import (
    HEADER,
    HEADER_BYTES,
    HELLO,
    HELLO_REPLY,
    KIND_NAMES,
    REQUEST,
    Frame,
    FrameParser,
    choose_version,
    pack_error,
    pack_frame,
    pack_hello_reply,
    parse_hello,
)
from .lane_output import LaneOutput, ReplyBody

if TYPE_CHECKING:
    from .lane_server import LaneServer

__all__ = ["Dispatch", "HelloHandler", "LaneConnection", "peer_name"]

Dispatch: TypeAlias = Callable[
    ["LaneConnection", int, bytes, int], "ReplyBody | Awaitable[ReplyBody]"
]
HelloHandler: TypeAlias = Callable[["LaneConnection", bytes], "bytes | Awaitable[bytes]"]

_log = logging.getLogger(__name__)

_WAIT_HELLO: Final = 0
_IN_HELLO: Final = 1  # the hello handler is at work
_READY: Final = 2
_ENDING: Final = 3  # no further request is looked at; replies still go out
_LINGERING: Final = 4  # our side is shut down
_GONE: Final = 5

_LINGER_WORDLESS_S: Final = 0.1

_UCRED: Final = struct.Struct("3i")


class LaneConnection(LaneOutput):
    """What handlers see of a client: `peer`, `session`, `principal` (theirs to fill), `close()`."""

    __slots__ = (
        "_again_due",
        "_buffered_bytes",
        "_deadline_ms_default",
        "_dispatch",
        "_fed_at_s",
        "_hello_task",
        "_last_words",
        "_parser",
        "_read_paused",
        "_read_timer",
        "_state",
        "_write_timer",
        "identities",
        "over_tls",
        "principal",
        "protocol_version",
        "session",
    )

    def __init__(self, server: LaneServer) -> None:
        super().__init__(server)
        self._dispatch = server.dispatch
        self._deadline_ms_default = server.limits.deadline_ms_default
        self._parser = FrameParser(server.limits.body_bytes_max)
        self._state = _WAIT_HELLO
        self._again_due = False  # _work was rescheduled: frames may be in the parser
        self._fed_at_s = 0.0
        self._read_paused = False
        self._buffered_bytes = 0  # as accounted with the server
        self._read_timer: asyncio.TimerHandle | None = None  # hello, or an unfinished frame
        self._write_timer: asyncio.TimerHandle | None = None  # slow reader, or lingering
        self._hello_task: asyncio.Future[bytes] | None = None
        self._last_words = b""  # an ERROR frame that goes out after all replies
        self.protocol_version = 0  # settled by hello
        self.session: Any = None
        self.identities: tuple[str, ...] = ()  # of the client's certificate, where it showed one
        self.over_tls = False
        self.principal: Any = None  # likewise: who has said hello, where that matters

    def __repr__(self) -> str:
        return f"<LaneConnection {self.peer}>"

    @property
    def closed(self) -> bool:
        """No reply can reach this client any more."""
        return self._state >= _LINGERING

    def close(self, error: CenoteError | None = None) -> None:
        """End the connection after the replies in flight; `error` is sent as its last frame."""
        self._end(error)

    # --- transport callbacks --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.peer = peer_name(transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_high_bytes)
        self._read_timer = self._loop.call_later(self._limits.hello_timeout_s, self._hello_late)
        refusal = self._server.admit(self)
        if refusal is not None:
            self._end(refusal)

    def data_received(self, data: bytes) -> None:
        if self._state == _READY and not self._read_paused and self._parser.idle:
            size = len(data) - HEADER_BYTES
            if 0 <= size <= self._limits.body_bytes_max:
                length, call_id, method, kind, flags, word = HEADER.unpack_from(data)
                if length == size and kind == REQUEST and not flags:
                    self._serve(call_id, method, data[HEADER_BYTES:], word)
                    if self._out:
                        self._flush()
                    self._server.spinner.served()
                    if len(self._inflight) >= self._limits.inflight_max:
                        self._pause_reading()
                    return
        if self._state >= _ENDING:
            return
        if self._parser.idle:
            self._fed_at_s = time.monotonic()
        self._parser.feed(data)
        if not self._again_due:
            self._work()

    # eof_received is asyncio's default, which closes: lane clients never close half a connection,
    # so nobody is left to read awaited replies.

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _GONE
        self._transport = None
        self._out.clear()
        self._drop_input()
        self._drop_inflight()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._state < _ENDING:
            self._pause_reading()
            self._write_timer = self._loop.call_later(
                self._limits.slow_reader_timeout_s, self._slow_reader
            )

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._state < _ENDING:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            self._work_soon()

    # --- requests -------------------------------------------------------------------------------

    def _work_soon(self) -> None:
        if not self._again_due:
            self._again_due = True
            self._loop.call_soon(self._work_again)

    def _work_again(self) -> None:
        self._again_due = False
        if self._state < _ENDING:
            self._work()

    def _work(self) -> None:
        """Serve parsed frames until none is left, something blocks, or the tick's share is used."""
        limits = self._limits
        parser = self._parser
        frames_left = limits.frames_per_tick_max
        now_s = time.monotonic()
        until_s = now_s + limits.tick_ms_max / 1000
        try:
            while not self._blocked():
                frame = parser.next()
                if frame is None:
                    break
                self._take(frame, now_s)
                frames_left -= 1
                now_s = time.monotonic()
                if (
                    frames_left <= 0
                    or self._out_bytes >= limits.write_buffer_high_bytes
                    or now_s >= until_s
                ):
                    if not parser.idle:
                        self._work_soon()
                    break
        except ProtocolError as error:
            self._stats.protocol_errors += 1
            _log.info("closing %s: %s", self.peer, error)
            self._end(error, parser.rejected_call_id)
            return
        self._flush()
        self._server.spinner.served()
        self._settle_reading()

    def _blocked(self) -> bool:
        return (
            self._write_paused
            or self._state == _IN_HELLO
            or self._state >= _ENDING
            or len(self._inflight) >= self._limits.inflight_max
        )

    def _take(self, frame: Frame, now_s: float) -> None:
        kind, call_id, method, word, body = frame
        if self._state == _READY and kind == REQUEST:
            waited_ms = (now_s - self._fed_at_s) * 1000
            if waited_ms <= (word or self._deadline_ms_default):
                self._serve(call_id, method, body, word)
            else:
                late = DeadlineExceeded(
                    f"the request waited {waited_ms:.0f} ms and was not executed"
                )
                self._reply_error(call_id, method, late)
        elif self._state == _WAIT_HELLO and kind == HELLO:
            self._greet(call_id, body)
        else:
            what = "the first frame must be HELLO" if self._state == _WAIT_HELLO else "not due here"
            raise ProtocolError(f"{KIND_NAMES[kind]} frame: {what}")

    def _serve(self, call_id: int, method: int, body: bytes, word: int) -> None:
        """Dispatch one request; its reply is appended to what is to be written, or awaited."""
        self._stats.requests += 1
        deadline_ms = word or self._deadline_ms_default
        try:
            reply = self._dispatch(self, method, body, deadline_ms)
        except CenoteError as error:
            self._reply_error(call_id, method, error)
            return
        except Exception as error:  # the border: a handler's bug must not end the daemon
            self._reply_bug(call_id, method, error)
            return
        if isinstance(reply, (bytes, list)):
            self._reply(call_id, method, reply)
        else:
            self._await(call_id, method, reply, deadline_ms)

    # --- reading --------------------------------------------------------------------------------

    def _settle_reading(self) -> None:
        """Read on if all that was read is served; watch over a frame that is still incomplete."""
        if self._state >= _ENDING:
            return
        held_bytes = self._parser.buffered_bytes
        if self._again_due or self._blocked():
            self._pause_reading()
        else:
            self._resume_reading()
            if self._state == _READY:
                if held_bytes and self._read_timer is None:
                    self._read_timer = self._loop.call_later(
                        self._limits.frame_timeout_s, self._frame_late
                    )
                elif not held_bytes and self._read_timer is not None:
                    self._read_timer.cancel()
                    self._read_timer = None
        if held_bytes != self._buffered_bytes:
            self._account(held_bytes)

    def _account(self, held_bytes: int) -> None:
        server = self._server
        server.partial_bytes += held_bytes - self._buffered_bytes
        grown = held_bytes > self._buffered_bytes
        self._buffered_bytes = held_bytes
        limit = self._limits.partial_bytes_max
        if grown and server.partial_bytes > limit:
            full = ResourceUnavailable(
                f"unfinished requests of all clients exceed {limit} bytes",
                remedy="send less in one call, or later",
            )
            self._end(full)

    def _pause_reading(self) -> None:
        if not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    # --- hello ----------------------------------------------------------------------------------

    def _greet(self, call_id: int, body: bytes) -> None:
        try:
            hello = parse_hello(body)
            self.protocol_version = choose_version(hello)
            reply = self._server.hello(self, hello.payload)
        except Exception as error:  # the border: a handler's bug must not end the daemon
            self._refuse_hello(call_id, error)
            return
        if isinstance(reply, bytes):
            self._welcome(call_id, reply)
            return
        self._state = _IN_HELLO
        task = self._hello_task = asyncio.ensure_future(reply, loop=self._loop)
        self._server.tasks.add(task)
        task.add_done_callback(lambda _: self._hello_done(call_id, task))

    def _hello_done(self, call_id: int, task: asyncio.Future[bytes]) -> None:
        self._server.tasks.discard(task)
        if task.cancelled():
            error: BaseException | None = Unavailable("the server is closing")
        else:
            error = task.exception()  # asking also keeps asyncio from complaining
        if self._state != _IN_HELLO:
            return
        self._hello_task = None
        if error is not None:
            self._refuse_hello(call_id, error)
            return
        self._welcome(call_id, task.result())
        self._flush()
        self._work_soon()  # also resumes reading

    def _welcome(self, call_id: int, payload: bytes) -> None:
        self._state = _READY
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        body = pack_hello_reply(self.protocol_version, payload)
        self._append(pack_frame(HELLO_REPLY, call_id, body=body))

    def _refuse_hello(self, call_id: int, error: BaseException) -> None:
        self._stats.hellos_refused += 1
        if not isinstance(error, CenoteError):
            _log.error("hello from %s failed", self.peer, exc_info=error)
            error = InternalError(f"hello failed: {type(error).__name__}: {error}")
        else:
            _log.info("hello from %s refused: %s", self.peer, error)
        self._end(error, call_id)

    # --- ends -----------------------------------------------------------------------------------

    def _hello_late(self) -> None:
        limit_s = self._limits.hello_timeout_s
        self._end(ProtocolError(f"no complete HELLO within {limit_s:g} s"))

    def _frame_late(self) -> None:
        self._read_timer = None
        if not self._read_paused:  # else it is us who keep it from arriving
            limit_s = self._limits.frame_timeout_s
            self._end(ProtocolError(f"a frame did not arrive whole within {limit_s:g} s"))

    def _slow_reader(self) -> None:
        self._cut(f"it left replies unread for {self._limits.slow_reader_timeout_s:g} s")

    def _end(self, error: CenoteError | None, call_id: int = 0) -> None:
        """Take no more requests; close after the replies in flight, with `error` as last frame."""
        if self._state >= _ENDING:
            return
        self._state = _ENDING
        self._drop_input()
        if error is not None:
            self._stats.errors += 1
            self._last_words = pack_error(call_id, error)
        # Not at once: a handler may call close() and then return the reply of that same request.
        self._flush_soon()

    def _drop_input(self) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._read_timer = self._write_timer = None
        self._server.partial_bytes -= self._buffered_bytes
        self._buffered_bytes = 0
        self._parser = FrameParser(0)
        if self._hello_task is not None:
            self._hello_task.cancel()
            self._hello_task = None

    def _settle(self) -> None:
        if self._state < _ENDING:
            if self._read_paused:
                self._work_soon()
            return
        if self._state != _ENDING or self._inflight or self._transport is None:
            return
        if self._last_words:
            self._append(self._last_words)
            self._flush()
        self._state = _LINGERING
        if self._transport.is_closing():
            return
        self._transport.write_eof()
        self._resume_reading()
        # Without last words there is less to lose, and a server that ends must not be held up.
        linger_s = self._limits.linger_s if self._last_words else _LINGER_WORDLESS_S
        self._write_timer = self._loop.call_later(linger_s, self.abort)


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Who is at the other end, for people."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        except OSError:
            return "unix:?"
        pid, uid, _ = _UCRED.unpack(raw)
        return f"unix:pid={pid},uid={uid}"
    name = transport.get_extra_info("peername")
    if not name:
        return "tcp:?"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"
