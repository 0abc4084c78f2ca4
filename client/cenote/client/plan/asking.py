"""Metadata requests with what is tried again, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from google.protobuf.message import Message

from cenote.api.errors import CenoteError, DeadlineExceeded, NamespaceReset, SessionUnknown
from cenote.v1 import master_pb2 as pb

from .budgets import PROBE_WAIT_S, ask_again, backoff_s
from .state import Call
from .steps import Ask, Pause, Plan, RefreshView, Reopen

__all__ = [
    "ask_master",
    "hidden_after_report",
    "reopening",
    "report_stalled",
    "sealed_too_late",
    "too_late",
]

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_REOPENS_MAX: Final = 3


def ask_master(call: Call, method: str, request: Message, reply_type: type[M]) -> Plan[M]:
    """The reply to `request`, which is sent again while nobody answers and the deadline permits.

    Requests are idempotent (by nature, or by their request id). Raises DeadlineExceeded naming the
    last failure, NamespaceReset, and what the master refuses for good.
    """
    attempt = 0
    reopens = 0
    last: CenoteError | None = None
    while True:
        remaining_s = call.remaining_s()
        if remaining_s <= 0:
            raise too_late(method, last)
        try:
            reply: M = yield Ask(method, request, remaining_s)
            return reply
        except SessionUnknown as error:
            reopens += 1
            if reopens > _REOPENS_MAX:
                raise
            last = error
            if call.remaining_s() <= 0:
                raise too_late(method, last) from error
            yield Reopen(call.remaining_s(), session_too=True)
        except CenoteError as error:
            if not ask_again(error):
                raise
            last = error
            attempt += 1
            call.state.counters.retries += 1
            pause_s = backoff_s(attempt)
            if call.remaining_s() <= pause_s:
                raise too_late(method, last) from error
            yield Pause(pause_s)


def hidden_after_report(call: Call, node_ids: set[int]) -> Plan[set[int]]:
    """Those of these nodes, which did not answer in time, that the master gives up, too."""
    yield from report_stalled(call, node_ids)
    yield RefreshView(max(0.001, call.remaining_s()))
    return node_ids & call.state.peers.down


def report_stalled(call: Call, node_ids: set[int]) -> Plan[None]:
    """Nodes did not answer in time, and nothing else has what is wanted: have the master look at
    them, wait until it has, and let the call try them once more."""
    call.try_once_more(node_ids)
    for node_id in sorted(node_ids):
        request = pb.ReportFailureRequest(
            node_id=node_id, session_id=call.state.session_id, what="it did not answer in time"
        )
        yield from ask_master(call, "report_failure", request, pb.ReportFailureResponse)
    yield Pause(max(0.0, min(PROBE_WAIT_S, call.remaining_s())))


def too_late(method: str, last: CenoteError | None) -> CenoteError:
    """The error of a call whose time is over, naming the `last` failure."""
    if last is None:
        return DeadlineExceeded(f"the deadline passed before {method} was sent")
    late = DeadlineExceeded(f"{method} found nobody to answer before the deadline: {last.message}")
    late.remedy = last.remedy
    late.__cause__ = last
    return late


def sealed_too_late(last: CenoteError | None) -> DeadlineExceeded:
    """The error of a put that was decided, and that no node sealed in its time."""
    why = f": {last.message}" if last is not None else ""
    return DeadlineExceeded(
        f"the put was decided, but its nodes did not seal it before the deadline{why}",
        remedy="put again; `cenote nodes` shows which daemons are in trouble, and their logs why",
    )


def reopening(call: Call, start: Callable[[], Plan[T]]) -> Plan[T]:
    """A plan that begins anew, with the new generation's digests, when its namespace was reset."""
    reopens = 0
    while True:
        call.begin_anew()
        try:
            return (yield from start())
        except NamespaceReset:
            reopens += 1
            if reopens > _REOPENS_MAX:
                raise
            yield Reopen(call.remaining_s(), session_too=False)
