"""How etcd answers this process: plain numbers that a collector reads at scrape.

One for the process, as whoever wants to know asks about etcd and not about one of the connections,
which are made anew whenever a master begins to lead or ceases to.
"""

from __future__ import annotations

from typing import Final, final

from cenote.runtime.metrics import Histogram, Metrics

__all__ = ["CALLS", "KvCalls", "register_calls"]

_BOUNDS_S: Final = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
OPERATIONS: Final = ("range", "txn", "lease", "compact", "status")


@final
class KvCalls:
    """By operation. Written by any thread."""

    def __init__(self) -> None:
        self.seconds = {operation: Histogram(_BOUNDS_S) for operation in OPERATIONS}
        """Of calls that were answered, from the first attempt on."""
        self.failures = dict.fromkeys(OPERATIONS, 0)
        """Calls that nobody answered in time, or that were refused."""
        self.moves = 0
        """How often another endpoint was tried, since one did not answer."""


CALLS: Final = KvCalls()


def register_calls(metrics: Metrics, calls: KvCalls = CALLS) -> None:
    """`cenote_etcd_*`, of this process."""
    metrics.table(
        "cenote_etcd_request_seconds",
        "Answered requests to etcd, by operation.",
        "histogram",
        ("operation",),
        lambda: [((operation,), seconds) for operation, seconds in calls.seconds.items()],
    )
    metrics.table(
        "cenote_etcd_failures_total",
        "Requests to etcd without an answer, or refused, by operation.",
        "counter",
        ("operation",),
        lambda: [((operation,), failures) for operation, failures in calls.failures.items()],
    )
    metrics.counted(
        "cenote_etcd_endpoint_changes_total",
        "Times that another etcd endpoint was tried, since one did not answer.",
        lambda: calls.moves,
    )
