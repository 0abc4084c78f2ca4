"""The sending half of a lane server's connection: replies gathered, awaited, flushed.

Replies of one batch of requests are gathered in a list and written in one piece by `_flush`, after
the server's `before_flush` hook ran: what the replies promise (a journal record, say) is made true
there. If the hook fails, nothing of the batch is sent and the connection is cut: the client then
learns that the outcome is unknown, which is the truth. `after_flush` runs when they are written,
for what need not keep them waiting.

A handler may return an awaitable. Its reply goes out when it is done, in any order with others. A
coroutine becomes a task of ours: cancelled at its deadline and when the client is gone. A future
belongs to the handler, who may share it between requests: it is never cancelled here, only no
longer waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    Unavailable,
)

from .frames import HEADER, HEADER_BYTES, REPLY, pack_error

if TYPE_CHECKING:
    from .lane_server import LaneServer

__all__ = ["LaneOutput", "ReplyBody"]

ReplyBody: TypeAlias = bytes | list[bytes]

_log = logging.getLogger(__name__)

_JOIN_BELOW_BYTES: Final = 64 << 10  # one copy is cheaper than a scatter list below this


class _Pending:
    """A request whose reply is awaited."""

    __slots__ = ("answered", "call_id", "future", "method", "owned", "timer")

    def __init__(
        self, call_id: int, method: int, future: asyncio.Future[ReplyBody], owned: bool
    ) -> None:
        self.call_id = call_id
        self.method = method
        self.future = future
        self.owned = owned  # the task is ours to cancel, a future of the handler's is not
        self.answered = False
        self.timer: asyncio.TimerHandle | None = None


class LaneOutput(asyncio.Protocol):
    """See the module's docstring. A subclass says in `_settle` what follows a flush."""

    __slots__ = (
        "_after_flush",
        "_before_flush",
        "_flush_due",
        "_inflight",
        "_limits",
        "_loop",
        "_out",
        "_out_bytes",
        "_server",
        "_stats",
        "_transport",
        "_write_paused",
        "peer",
    )

    def __init__(self, server: LaneServer) -> None:
        self._server = server
        self._stats = server.stats
        self._limits = server.limits
        self._before_flush: Callable[[], None] | None = server.before_flush
        self._after_flush: Callable[[], None] | None = server.after_flush
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # None before it is made and once it is lost
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_due = False
        self._write_paused = False
        self._inflight: set[_Pending] = set()
        self.peer = ""

    def _settle(self) -> None:
        """Called on the loop after awaited replies went out."""
        raise NotImplementedError

    # --- replies --------------------------------------------------------------------------------

    def _reply(self, call_id: int, method: int, reply: ReplyBody) -> None:
        if type(reply) is bytes:
            size = len(reply)
            if size < _JOIN_BELOW_BYTES and size <= self._limits.body_bytes_max:
                self._out.append(HEADER.pack(size, call_id, method, REPLY, 0, 0) + reply)
                self._out_bytes += size + HEADER_BYTES
                return
            parts = [reply]
        elif type(reply) is list:
            parts = reply
        else:
            wrong = TypeError(f"the handler's result is {type(reply).__name__}, not bytes or list")
            self._reply_bug(call_id, method, wrong)
            return
        size = sum(map(len, parts))
        limit = self._limits.body_bytes_max
        if size > limit:
            too_long = InvalidArgument(
                f"the reply would have {size} bytes, the limit is {limit}",
                remedy="ask for less in one call",
            )
            self._reply_error(call_id, method, too_long)
            return
        self._out.append(HEADER.pack(size, call_id, method, REPLY, 0, 0))
        self._out.extend(parts)
        self._out_bytes += size + HEADER_BYTES

    def _reply_error(self, call_id: int, method: int, error: CenoteError) -> None:
        self._stats.errors += 1
        self._append(pack_error(call_id, error, method))

    def _reply_bug(self, call_id: int, method: int, error: BaseException) -> None:
        _log.error("method %d, call %d from %s failed", method, call_id, self.peer, exc_info=error)
        text = f"method {method} failed: {type(error).__name__}: {error}"
        self._reply_error(call_id, method, InternalError(text))

    def _append(self, frame: bytes) -> None:
        self._out.append(frame)
        self._out_bytes += len(frame)

    # --- awaited replies ------------------------------------------------------------------------

    def _await(
        self, call_id: int, method: int, reply: Awaitable[ReplyBody], deadline_ms: int
    ) -> None:
        owned = not asyncio.isfuture(reply)
        try:
            future: asyncio.Future[ReplyBody] = asyncio.ensure_future(reply, loop=self._loop)
        except TypeError:
            wrong = TypeError(f"the handler returned {type(reply).__name__}")
            self._reply_bug(call_id, method, wrong)
            return
        pending = _Pending(call_id, method, future, owned)
        self._inflight.add(pending)
        if owned:
            self._server.tasks.add(future)
        pending.timer = self._loop.call_later(deadline_ms / 1000, self._expired, pending)
        future.add_done_callback(lambda _: self._finished(pending))

    def _expired(self, pending: _Pending) -> None:
        pending.answered = True
        self._inflight.discard(pending)
        late = DeadlineExceeded(f"method {pending.method} did not finish within its deadline")
        late.maybe_executed = True
        self._reply_error(pending.call_id, pending.method, late)
        if pending.owned:
            pending.future.cancel()
        self._flush_soon()

    def _finished(self, pending: _Pending) -> None:
        self._inflight.discard(pending)
        future = pending.future
        self._server.tasks.discard(future)
        if pending.timer is not None:
            pending.timer.cancel()
        error: BaseException | None
        if future.cancelled():
            error = Unavailable("the server ended this request", remedy="send it again")
            error.maybe_executed = True
        else:
            error = future.exception()  # asking also keeps asyncio from complaining
        if pending.answered or self._transport is None:
            return
        if error is None:
            self._reply(pending.call_id, pending.method, future.result())
        elif isinstance(error, CenoteError):
            self._reply_error(pending.call_id, pending.method, error)
        else:
            self._reply_bug(pending.call_id, pending.method, error)
        self._flush_soon()

    def _drop_inflight(self) -> None:
        """Nobody is left to reply to."""
        for pending in self._inflight:
            pending.answered = True
            if pending.timer is not None:
                pending.timer.cancel()
            if pending.owned:
                pending.future.cancel()
        self._inflight.clear()

    # --- writing --------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Flush at the end of this tick, so that replies that get ready together go together."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        if self._transport is not None:
            self._flush()
            self._settle()

    def _flush(self) -> None:
        out = self._out
        if not out:
            return
        out_bytes = self._out_bytes
        self._out = []
        self._out_bytes = 0
        if self._before_flush is not None:
            try:
                self._before_flush()
            except Exception:  # any failure: what these replies promise did not become true
                _log.exception("before_flush failed, cutting %s", self.peer)
                self._transport.abort()
                return
        if len(out) == 1:
            self._transport.write(out[0])
        elif out_bytes < _JOIN_BELOW_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)
        if self._after_flush is not None:
            try:
                self._after_flush()
            except Exception:  # the replies are out; whose hook it is refuses what rests on it
                _log.exception("after_flush failed")
        if self._write_paused:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes > self._limits.write_buffer_bytes_max:
                self._cut(f"{unsent_bytes} bytes of replies are unsent")

    def _cut(self, why: str) -> None:
        self._stats.cut += 1
        _log.info("cutting %s: %s", self.peer, why)
        self.abort()

    def abort(self) -> None:
        """Close now; what is unsent is lost."""
        if self._transport is not None:
            self._transport.abort()
