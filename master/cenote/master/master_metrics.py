"""What a master shows to Prometheus. Gauges only read plain numbers: they run in another thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from cenote.rpc.lane_limits import LaneStats
from cenote.runtime.metrics import Histogram, Metrics
from cenote.v1 import master_pb2 as pb

from .counters import Counters
from .service import MasterService

__all__ = ["TickStats", "register_metrics"]

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


def register_metrics(
    metrics: Metrics, service: MasterService, lane: LaneStats, ticks: TickStats
) -> None:
    """Make the master's metrics."""
    state, decider = service.state, service.decider

    def attribute(source: object, name: str) -> Callable[[], float]:
        return lambda: float(getattr(source, name))

    for field in fields(Counters):
        metrics.gauge(
            f"cenote_master_{field.name}",
            "Since start.",
            attribute(state.counters, field.name),
        )
    for field in fields(LaneStats):
        metrics.gauge(
            f"cenote_master_lane_{field.name}", "Of the lane.", attribute(lane, field.name)
        )

    def calls(number: int) -> Callable[[], float]:
        return lambda: float(service.calls[number])

    for name, number in pb.MasterMethod.items():
        if number:
            method = name.removeprefix("MASTER_METHOD_").lower()
            metrics.gauge("cenote_master_calls", "Calls since start.", calls(number), method=method)
    metrics.gauge("cenote_master_epoch", "The leader's tenure.", lambda: float(decider.epoch))
    metrics.gauge(
        "cenote_master_journal_bytes", "Journal and snapshot.", lambda: decider.backend.bytes_used
    )
    metrics.gauge(
        "cenote_master_writes_refused",
        "1 while the journal takes no writes.",
        lambda: float(decider.refusal is not None),
    )
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
