"""What a store daemon shows to Prometheus. Gauges only read: they run in another thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from cenote.runtime.metrics import Metrics
from cenote.security.refusals import Refusals
from cenote.v1 import master_pb2 as pb

from .agent_core import Stage
from .dram import DramSegment
from .rdma_serving import RdmaServing
from .segments import LocalSegments
from .server import DataCounters
from .ssd import SsdSegment
from .verifying import Verifier

__all__ = ["register_metrics", "register_rdma", "register_refusals", "register_verifier"]


def register_metrics(
    metrics: Metrics,
    segments: LocalSegments,
    counters: Callable[[], DataCounters],
    session_count: Callable[[], int],
    stage: Callable[[], Stage],
) -> None:
    """Make the daemon's metrics."""

    def counted(name: str) -> Callable[[], float]:
        return lambda: float(getattr(counters(), name))

    for field in fields(DataCounters):
        metrics.gauge(f"cenote_store_{field.name}", "Of the data server.", counted(field.name))
    metrics.gauge("cenote_store_sessions", "With a connection.", lambda: float(session_count()))
    metrics.gauge(
        "cenote_store_attached",
        "1 while a master knows this daemon.",
        lambda: float(stage() is Stage.ATTACHED),
    )
    metrics.gauge(
        "cenote_store_epoch", "Of the leader that is followed.", lambda: float(segments.epoch)
    )
    for segment in segments.all():
        _register_segment(metrics, segment)


def register_refusals(metrics: Metrics, refusals: Refusals) -> None:
    """Who was refused for want of credentials."""
    for port, reason in refusals.counts:

        def read(port: str = port, reason: str = reason) -> float:
            return float(refusals.counts[port, reason])

        metrics.gauge(
            "cenote_store_refusals_total",
            "For want of credentials.",
            read,
            port=port,
            reason=reason,
        )


def register_verifier(metrics: Metrics, verifier: Verifier) -> None:
    """What was found of contents that outlived a daemon or a leader."""

    def counted(name: str) -> Callable[[], float]:
        return lambda: float(getattr(verifier, name))

    for name, text in (
        ("verified_slots", "Whose payload was what had been sealed."),
        ("damaged_slots", "Whose payload was not: damaged, or stale."),
        ("unverified_slots", "That wait for their turn."),
    ):
        metrics.gauge(f"cenote_store_{name}", text, counted(name))


def register_rdma(metrics: Metrics, rdma: RdmaServing) -> None:
    """The RDMA end, as the master is told of it. Bytes are the devices' own count, of all that used
    these ports since the daemon's start; software devices count none."""

    def told(read: Callable[[pb.NodeStats], float]) -> Callable[[], float]:
        def ask() -> float:
            stats = pb.NodeStats()
            rdma.tell(stats)
            return float(read(stats))

        return ask

    by_device = "Over the ports that are served, as their devices count."
    values: dict[str, tuple[str, Callable[[pb.NodeStats], float]]] = {
        "registered_bytes": (
            "Of the segments, with at least one device.",
            lambda stats: stats.rdma_registered_bytes,
        ),
        "queue_pairs": ("Of clients.", lambda stats: stats.rdma_queue_pairs),
        "received_bytes": (by_device, lambda stats: stats.rdma_received_bytes),
        "sent_bytes": (by_device, lambda stats: stats.rdma_sent_bytes),
        "trouble": (
            "1 while what could go over RDMA goes over TCP; `cenote status` says why.",
            lambda stats: bool(stats.rdma_trouble),
        ),
    }
    for name, (text, read) in values.items():
        metrics.gauge(f"cenote_store_rdma_{name}", text, told(read))


def _register_segment(metrics: Metrics, segment: DramSegment | SsdSegment) -> None:
    values: dict[str, tuple[str, Callable[[], float]]] = {
        "size_bytes": ("Of the data area.", lambda: segment.size_bytes),
        "ready_bytes": ("Backed by memory so far.", lambda: segment.ready_bytes),
        "retired_bytes": ("Given up for slots.", lambda: segment.retired_bytes),
        "slots": ("In the table.", lambda: segment.table.slots),
        "sealed_slots": ("In use.", lambda: segment.table.sealed),
        "seals": ("Since start.", lambda: segment.table.seals),
        "broken_slots": ("Found torn or corrupt.", lambda: segment.table.broken),
    }
    for name, (text, read) in values.items():
        index = str(segment.index)
        metrics.gauge(f"cenote_store_segment_{name}", text, read, segment=index)
