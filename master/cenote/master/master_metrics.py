"""What a master shows to Prometheus of itself, leader or not: `cenote_master_*`.

Gauges only read plain numbers: they run in another thread. What belongs to the pool is in
`pool_metrics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from cenote.kv.calls import register_calls
from cenote.rpc.lane_limits import LaneStats
from cenote.runtime.metrics import Histogram, Metrics, Row
from cenote.security.refusals import Refusals
from cenote.v1 import master_pb2 as pb

from .front import Front
from .pool_look import PoolLooker
from .pool_metrics import register_pool

__all__ = ["TickStats", "register_metrics", "register_refusals"]

TICK_BOUNDS_S: Final = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)
_METHODS: Final = {
    number: name.removeprefix("MASTER_METHOD_").lower()
    for name, number in pb.MasterMethod.items()
    if number
}


@dataclass(slots=True)
class TickStats:
    """How long ticks took, and how late they came."""

    ticks: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0
    late_s_max: float = 0.0
    calls: int = 0
    """Calls served at the last tick."""
    gc_seconds: float = 0.0
    histogram: Histogram | None = None

    def note(self, took_s: float, *, late_s: float) -> None:
        """One tick."""
        self.ticks += 1
        self.seconds += took_s
        self.seconds_max = max(self.seconds_max, took_s)
        self.late_s_max = max(self.late_s_max, late_s)
        if self.histogram is not None:
            self.histogram.observe(took_s)


def register_metrics(
    metrics: Metrics, front: Front, lane: LaneStats, ticks: TickStats, *, version: str = ""
) -> None:
    """Make the master's metrics, on the running loop. Those of the pool are the leader's."""
    metrics.build_info("master", version)
    _register_role(metrics, front)
    _register_journal(metrics, front)
    _register_calls(metrics, front)
    register_lane(metrics, "cenote_master_lane", lane)
    metrics.gauge(
        "cenote_master_tick_late_seconds_max",
        "How late a tick came at most since start: how long the loop was busy.",
        lambda: ticks.late_s_max,
    )
    metrics.counted(
        "cenote_master_gc_seconds_total",
        "Spent in collections of garbage.",
        lambda: ticks.gc_seconds,
    )
    ticks.histogram = metrics.histogram(
        "cenote_master_tick_seconds", "Duration of a tick, the housekeeping.", TICK_BOUNDS_S
    )
    register_calls(metrics)
    looker = PoolLooker(lambda: front.leading)
    metrics.before_collect = looker.refresh
    register_pool(metrics, looker)


def register_lane(metrics: Metrics, prefix: str, lane: LaneStats) -> None:
    """What a lane server counts."""

    def attribute(name: str) -> Callable[[], float]:
        return lambda: float(getattr(lane, name))

    texts = {
        "connections": "Connections accepted.",
        "connections_refused": "Connections refused, as there are enough.",
        "hellos_refused": "Connections refused for what their hello said.",
        "requests": "Requests taken.",
        "errors": "Requests answered by an error.",
        "protocol_errors": "Connections closed for what they sent.",
        "cut": "Connections cut, as their peer did not read.",
        "spins": "Times that the loop looked for a request before it slept.",
        "requests_spun_for": "Requests that came while it did.",
    }
    metrics.gauge(f"{prefix}_connections", "Connections that are open.", attribute("connections"))
    for field in fields(LaneStats):
        name = field.name.removesuffix("_total")
        if field.name != "connections":
            text = texts.get(name, f"{name.replace('_', ' ').capitalize()}, counted.")
            metrics.counted(f"{prefix}_{name}_total", text, attribute(field.name))


def _register_role(metrics: Metrics, front: Front) -> None:
    def refused() -> float:
        service = front.leading
        return float(service is not None and service.decider.refusal is not None)

    def epoch() -> float:
        leader = front.backend.leader
        return 0.0 if leader is None else float(leader.epoch)

    def tenure_left() -> list[Row]:
        left_s = front.backend.tenure_end_s - time.monotonic()
        return [((), max(0.0, left_s))] if math.isfinite(left_s) else []

    metrics.gauge("cenote_master_epoch", "The leader's tenure, as known here.", epoch)
    metrics.gauge(
        "cenote_master_is_leader",
        "1 where this master leads, 0 where it stands by.",
        lambda: float(front.leading is not None),
    )
    metrics.gauge(
        "cenote_master_masters",
        "Masters of this pool that are known here, the leader and this one included.",
        lambda: float(len(front.backend.masters)),
    )
    metrics.table(
        "cenote_master_tenure_left_seconds",
        "How much longer this master may lead without hearing of etcd; only where it leads by it.",
        "gauge",
        (),
        tenure_left,
    )
    metrics.gauge("cenote_master_writes_refused", "1 while the journal takes no writes.", refused)


def _register_journal(metrics: Metrics, front: Front) -> None:
    metrics.gauge(
        "cenote_master_journal_bytes",
        "Journal and snapshot; with etcd, its whole database.",
        lambda: front.backend.bytes_used,
    )
    metrics.gauge(
        "cenote_master_journal_last_entry",
        "The newest decision that is in the journal here, appended or followed.",
        lambda: front.backend.last_entry,
    )
    metrics.gauge(
        "cenote_master_journal_backlog_entries",
        "Decided and not durable yet.",
        lambda: front.backend.backlog.entries,
    )
    metrics.gauge(
        "cenote_master_journal_backlog_bytes",
        "Decided and not durable yet; 0 with `file:`.",
        lambda: front.backend.backlog.size_bytes,
    )
    metrics.gauge(
        "cenote_master_journal_backlog_age_seconds",
        "Of the oldest decision that is not durable yet.",
        lambda: front.backend.backlog.age_s,
    )


def register_refusals(metrics: Metrics, refusals: Refusals) -> None:
    """Who was refused for want of credentials."""
    for port, reason in refusals.counts:

        def read(port: str = port, reason: str = reason) -> float:
            return float(refusals.counts[port, reason])

        metrics.counted(
            "cenote_master_refusals_total",
            "For want of credentials.",
            read,
            port=port,
            reason=reason,
        )


def _register_calls(metrics: Metrics, front: Front) -> None:
    def calls() -> list[Row]:
        service = front.leading
        if service is None:
            return []
        return [((name,), service.calls[number]) for number, name in _METHODS.items()]

    def seconds() -> list[Row]:
        service = front.leading
        if service is None:
            return []
        return [((name,), service.seconds[number]) for number, name in _METHODS.items()]

    metrics.table(
        "cenote_master_calls_total",
        "Requests that this master served as the leader, by method.",
        "counter",
        ("method",),
        calls,
    )
    metrics.table(
        "cenote_master_call_seconds",
        "How long the master's loop was busy with a request, of every sixteenth over the lane.",
        "histogram",
        ("method",),
        seconds,
    )
