"""How long, how often, what next: the constants and small formulas of the plans."""

from __future__ import annotations

from typing import Final

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    NotLeader,
    StaleEpoch,
    Unavailable,
)

__all__ = [
    "DECIDED_ATTEMPTS_MAX",
    "LEASE_SHARE",
    "OVERSLEPT_S",
    "PROBE_WAIT_S",
    "PUT_ATTEMPTS_MAX",
    "READ_ATTEMPTS_MAX",
    "SEAL_ATTEMPTS_MAX",
    "SEAL_FAILURES_MAX",
    "attempt_budget_s",
    "backoff_s",
    "lease_ttl_ms",
    "node_failed",
    "seal_budget_s",
    "transfer_s",
]

LEASE_SHARE: Final = 0.9
"""Of a lease's time, counted from before the request was sent, that a reader may rely on."""

READ_ATTEMPTS_MAX: Final = 5
"""How often one read asks the master for an object that is not where it was said to be."""

PUT_ATTEMPTS_MAX: Final = 5
"""How often one put asks for new space, after failed nodes and lost grants."""

SEAL_ATTEMPTS_MAX: Final = 200
"""How often a seal is sent again while a slot table grows; the deadline ends it earlier."""

SEAL_FAILURES_MAX: Final = 2
"""How often a daemon may leave a seal unanswered. The decision stands, so it is asked twice."""

DECIDED_ATTEMPTS_MAX: Final = 12
"""How often a put that was decided, but sealed nowhere, asks for new space: for about 2.5 s, until
the master has seen that the node is gone and gives the key another place."""

PROBE_WAIT_S: Final = 0.35
"""After a report, until the master has seen whether the node answers it, and has hidden it if not.
It waits 300 ms for that."""

OVERSLEPT_S: Final = 0.5
"""A step that ends so much later than it was to says nothing about the node: this process stood
still (it was stopped, or its machine was), or its connection was closed meanwhile."""

_SEAL_BUDGET_S: Final = 0.5
_SEAL_BUDGET_PER_ROW_S: Final = 20e-6
_ALONE_SHARE: Final = 0.9
_SHARE_MAX: Final = 0.4
_ATTEMPT_FLOOR_S: Final = 0.3
_ATTEMPT_BYTES_PER_S: Final = 20e6
_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25
_TTL_SLACK_S: Final = 0.5


def attempt_budget_s(
    remaining_s: float, size_bytes: int, *, alternatives: bool, last: bool = False
) -> float:
    """Time for one try at one node: what a healthy node on a busy machine needs (300 ms, 20 MB/s).

    With something else to turn to, a frozen node leaves time for that: it gets two fifths of what
    there is at most. With nothing else, it leaves time to have the master look, and for a `last`
    try, which gets nearly all there is; the rest serves to answer.
    """
    wanted_s = transfer_s(size_bytes)
    if last:
        return remaining_s * _ALONE_SHARE
    if alternatives:
        return min(remaining_s * _SHARE_MAX, wanted_s)
    return wanted_s if 2 * wanted_s + PROBE_WAIT_S < remaining_s else remaining_s * _ALONE_SHARE


def transfer_s(size_bytes: int) -> float:
    """What a healthy node on a busy machine may take to move so many bytes."""
    return _ATTEMPT_FLOOR_S + size_bytes / _ATTEMPT_BYTES_PER_S


def seal_budget_s(remaining_s: float, rows: int, failures: int) -> float:
    """Time for one try at one daemon, which has failed so often before."""
    wanted_s = (_SEAL_BUDGET_S + rows * _SEAL_BUDGET_PER_ROW_S) * (1 + failures)
    return max(min(remaining_s, wanted_s), 0.001)


def backoff_s(attempt: int) -> float:
    """Pause before trying again for the `attempt`-th time: 2 ms, doubling to 250."""
    return min(_BACKOFF_FIRST_S * 2.0 ** min(attempt - 1, 10), _BACKOFF_MAX_S)


def lease_ttl_ms(remaining_s: float, ttl_max_ms: int) -> int:
    """A lease that outlasts the call, as far as the master gives one."""
    wanted_ms = int((max(0.0, remaining_s) + _TTL_SLACK_S) / LEASE_SHARE * 1000) + 1
    return min(wanted_ms, ttl_max_ms) if ttl_max_ms else wanted_ms


def node_failed(error: CenoteError) -> bool:
    """Whether this says that the node, not the request, is in trouble."""
    return isinstance(error, Unavailable | DeadlineExceeded) and not isinstance(error, NotLeader)


def ask_again(error: CenoteError) -> bool:
    """Whether the same metadata request may be answered if it is sent again after a moment."""
    return isinstance(error, Unavailable | StaleEpoch)
