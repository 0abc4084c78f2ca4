"""What a master shows to Prometheus. Gauges only read plain numbers: they run in another thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from cenote.rpc.lane_limits import LaneStats
from cenote.runtime.metrics import Histogram, Metrics
from cenote.security.refusals import Refusals
from cenote.v1 import master_pb2 as pb

from .counters import Counters
from .front import Front

__all__ = ["TickStats", "register_metrics", "register_refusals"]

TICK_BOUNDS_S: Final = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)


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


def register_metrics(metrics: Metrics, front: Front, lane: LaneStats, ticks: TickStats) -> None:
    """Make the master's metrics. Those of the pool are 0 on a standby, and begin anew with each
    tenure."""

    def attribute(source: object, name: str) -> Callable[[], float]:
        return lambda: float(getattr(source, name))

    def counter(name: str) -> Callable[[], float]:
        def read() -> float:
            service = front.leading
            return 0.0 if service is None else float(getattr(service.state.counters, name))

        return read

    for field in fields(Counters):
        metrics.gauge(f"cenote_master_{field.name}", "Since start.", counter(field.name))
    for field in fields(LaneStats):
        metrics.gauge(
            f"cenote_master_lane_{field.name}", "Of the lane.", attribute(lane, field.name)
        )

    def calls(number: int) -> Callable[[], float]:
        def read() -> float:
            service = front.leading
            return 0.0 if service is None else float(service.calls[number])

        return read

    for name, number in pb.MasterMethod.items():
        if number:
            method = name.removeprefix("MASTER_METHOD_").lower()
            metrics.gauge("cenote_master_calls", "Calls since start.", calls(number), method=method)
    _register_roles(metrics, front)
    metrics.gauge(
        "cenote_master_tick_late_seconds_max",
        "How late a tick came at most: how long the loop was busy.",
        attribute(ticks, "late_s_max"),
    )
    metrics.gauge(
        "cenote_master_gc_seconds",
        "Spent in collections since start.",
        attribute(ticks, "gc_seconds"),
    )
    ticks.histogram = metrics.histogram(
        "cenote_master_tick_seconds", "Duration of a tick.", TICK_BOUNDS_S
    )


def _register_roles(metrics: Metrics, front: Front) -> None:
    def refused() -> float:
        service = front.leading
        return float(service is not None and service.decider.refusal is not None)

    def epoch() -> float:
        leader = front.backend.leader
        return 0.0 if leader is None else float(leader.epoch)

    metrics.gauge("cenote_master_epoch", "The leader's tenure.", epoch)
    metrics.gauge(
        "cenote_master_is_leader",
        "1 where this master leads, 0 where it stands by.",
        lambda: float(front.leading is not None),
    )
    metrics.gauge(
        "cenote_master_journal_bytes", "Journal and snapshot.", lambda: front.backend.bytes_used
    )
    metrics.gauge("cenote_master_writes_refused", "1 while the journal takes no writes.", refused)
    metrics.gauge(
        "cenote_master_backlog_bytes",
        "Decided and not yet durable; 0 with `file:`.",
        lambda: float(front.backend.backlog.size_bytes),
    )
    metrics.gauge(
        "cenote_master_backlog_age_seconds",
        "Of the oldest decision that is not yet durable.",
        lambda: front.backend.backlog.age_s,
    )


def register_refusals(metrics: Metrics, refusals: Refusals) -> None:
    """Who was refused for want of credentials."""
    for port, reason in refusals.counts:

        def read(port: str = port, reason: str = reason) -> float:
            return float(refusals.counts[port, reason])

        metrics.gauge(
            "cenote_master_refusals_total",
            "For want of credentials.",
            read,
            port=port,
            reason=reason,
        )
