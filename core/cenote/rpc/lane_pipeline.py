"""Several requests on one connection without waiting for each reply.

Neither side can deadlock on full socket buffers: this side never waits for room to send without
also reading what arrives. The window bounds what the server has to hold for us.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence

from cenote.api.errors import CenoteError, ProtocolError

from .frames import (
    DEADLINE_MS_MAX,
    ERROR,
    HEADER,
    KIND_NAMES,
    REPLY,
    REQUEST,
    FrameParser,
    decode_error,
)
from .lane_socket import LaneSocket

__all__ = ["Pipeline"]

_WINDOW_CALLS = 64  # requests without a reply
_WINDOW_BYTES = 1 << 20  # likewise, unless a single one is larger
_SEND_BYTES = 128 << 10  # joined into one piece


class Pipeline:
    """One batch of calls of `method`, one per body.

    `run` fills `results` with each call's reply, or the error that the server raised for it. It
    raises Unavailable, DeadlineExceeded, ProtocolError or NotSent when the connection can't go on;
    entries without a reply are then None, and of the first `begun` requests some bytes have left.
    """

    __slots__ = (
        "_answered",
        "_bodies",
        "_clock",
        "_first_id",
        "_lane",
        "_method",
        "_next",
        "_out",
        "_parser",
        "_refused",
        "_spin_polls",
        "_unanswered_bytes",
        "_until_s",
        "begun",
        "results",
    )

    def __init__(
        self,
        lane: LaneSocket,
        method: int,
        bodies: Sequence[bytes],
        until_s: float,
        *,
        clock: Callable[[], float],
        spin_polls: int = 0,
    ) -> None:
        self._lane = lane
        self._method = method
        self._bodies = bodies
        self._until_s = until_s
        self._clock = clock
        self._spin_polls = spin_polls
        self._parser = FrameParser(lane.body_bytes_max)
        self._first_id = 0
        self._next = 0  # the first request that is not packed yet
        self._answered = 0
        self._unanswered_bytes = 0
        self._refused = False  # a ProtocolError came: the server closes the connection
        self._out = memoryview(b"")
        self.begun = 0
        self.results: list[bytes | CenoteError | None] = [None] * len(bodies)

    def run(self) -> None:
        """Send all, receive all."""
        lane, total = self._lane, len(self._bodies)
        self._first_id = lane.begin(self._until_s, total)
        spins_left = self._spin_polls
        while self._answered < total:
            moved = self._send()
            chunk = lane.recv_now()
            if chunk is not None:
                self._take(chunk)
                spins_left = self._spin_polls
            elif spins_left and not self._out:
                spins_left -= 1
            elif not moved:
                lane.wait(select.POLLIN | select.POLLOUT if self._out else select.POLLIN)
        if not self._parser.idle:
            raise lane.broken_protocol("more than the replies that are due")
        lane.clean = not self._refused

    def _send(self) -> bool:
        """Send what fits; True when something more may be sent at once."""
        if not self._out:
            if self._next == len(self._bodies) or not self._window_open():
                return False
            self._out = memoryview(self._pack())
        sent = self._lane.send_now(self._out, self.begun > 0)
        if not sent:
            return False
        self.begun = self._next
        self._out = self._out[sent:]
        return True

    def _window_open(self) -> bool:
        return self._next - self._answered < _WINDOW_CALLS and (
            self._unanswered_bytes < _WINDOW_BYTES
        )

    def _pack(self) -> bytes:
        left_ms = int((self._until_s - self._clock()) * 1000)
        deadline_ms = min(max(left_ms, 1), DEADLINE_MS_MAX)
        parts: list[bytes] = []
        size = 0
        while self._next < len(self._bodies) and size < _SEND_BYTES and self._window_open():
            body = self._bodies[self._next]
            call_id = self._first_id + self._next
            parts.append(HEADER.pack(len(body), call_id, self._method, REQUEST, 0, deadline_ms))
            parts.append(body)
            size += len(body)
            self._unanswered_bytes += len(body)
            self._next += 1
        return b"".join(parts)

    def _take(self, chunk: bytes) -> None:
        parser = self._parser
        parser.feed(chunk)
        while True:
            try:
                frame = parser.next()
            except ProtocolError as error:
                error.maybe_executed = True
                raise
            if frame is None:
                return
            kind, call_id, _, word, body = frame
            if kind == ERROR and call_id == 0:
                raise decode_error(word, body)  # about the connection, which the server closes
            index = call_id - self._first_id
            if not 0 <= index < self.begun or self.results[index] is not None:
                raise self._lane.broken_protocol(f"a reply to call {call_id}, nobody waits for it")
            if kind == REPLY:
                self.results[index] = body
            elif kind == ERROR:
                refusal = decode_error(word, body)
                self.results[index] = refusal
                self._refused |= isinstance(refusal, ProtocolError)
            else:
                raise self._lane.broken_protocol(f"{KIND_NAMES[kind]} frame instead of REPLY")
            self._answered += 1
            self._unanswered_bytes -= len(self._bodies[index])
