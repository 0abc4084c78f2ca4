"""Requests over the lane that were slow, or failed: a line in the log each, with whose they are.

`session` is what a client's spans call `cenote.session`, `client` its name, `request` its number of
the request, where it has one. What clients are told every day (that a session or a leader is
another one by now) is no failure. Some lines a second at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, final

from google.protobuf.message import Message

from cenote.api.errors import (
    CenoteError,
    NamespaceReset,
    NotLeader,
    SessionUnknown,
    StaleEpoch,
)
from cenote.rpc.lane_server import LaneConnection
from cenote.runtime.log import get_logger
from cenote.security.refusals import is_refusal
from cenote.v1 import master_pb2 as pb

__all__ = ["SLOW_S", "RequestLog", "log_lane_drain"]

SLOW_S: Final = 0.2
"""A request that takes longer has a line: on the loop, where it holds up all others, or until the
journal has it."""
LINES_PER_S: Final = 5.0
LINES_AT_ONCE: Final = 20.0
_EVERY_DAY: Final = (NotLeader, SessionUnknown, NamespaceReset, StaleEpoch)
_NAMES: Final = {
    number: name.removeprefix("MASTER_METHOD_").lower() for name, number in pb.MasterMethod.items()
}
_log: Final = get_logger("cenote.master.requests")
_audit: Final = get_logger("cenote.audit")


@final
class RequestLog:
    """Of one service. `client_of`: the name of a session's client. One thread."""

    def __init__(
        self,
        client_of: Callable[[bytes], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client_of = client_of
        self._clock = clock
        self._allowance = LINES_AT_ONCE
        self._since_s = clock()
        self._unsaid = 0

    def failed(
        self, connection: LaneConnection, method: int, request: Message, error: CenoteError
    ) -> None:
        """It was answered with an error. (Refusals have lines of their own.)"""
        if isinstance(error, _EVERY_DAY) or is_refusal(error) or not self._may_say():
            return
        _log.warning(
            "request failed",
            **self._whose(connection, method, request),
            reason=error.reason,
            why=error.message,
        )

    def slow(
        self, connection: LaneConnection, method: int, request: Message, seconds: float, what: str
    ) -> None:
        """It took so long, for what `what` says."""
        if self._may_say():
            _log.warning(
                "slow request",
                **self._whose(connection, method, request),
                seconds=round(seconds, 3),
                waited_for=what,
            )

    def _whose(self, connection: LaneConnection, method: int, request: Any) -> dict[str, object]:
        session = getattr(request, "session_id", b"") or connection.session
        found: dict[str, object] = {
            "method": _NAMES.get(method, method),
            "session": session.hex(),
            "client": self._client_of(session),
            "peer": connection.peer,
        }
        number = getattr(request, "request_id", 0)
        if number:
            found["request"] = number
        unsaid, self._unsaid = self._unsaid, 0
        if unsaid:
            found["unsaid_before"] = unsaid
        return found

    def _may_say(self) -> bool:
        now_s = self._clock()
        earned = (now_s - self._since_s) * LINES_PER_S
        self._allowance = min(self._allowance + earned, LINES_AT_ONCE)
        self._since_s = now_s
        if self._allowance < 1:
            self._unsaid += 1
            return False
        self._allowance -= 1
        return True


def log_lane_drain(connection: LaneConnection, request: Message) -> None:
    """The one thing of an administrator's that the lane takes: see `audit`."""
    assert isinstance(request, pb.DrainRequest)
    caller = connection.principal
    who = {} if caller is None else {"holder": caller.name, "token": caller.token_id}
    _audit.info(
        "drain", peer=connection.peer, **who, node_id=request.node_id, cancel=request.cancel
    )
