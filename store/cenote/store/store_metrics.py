"""What a store daemon shows to Prometheus. Gauges only read: they run in another thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from cenote.kv.calls import register_calls
from cenote.runtime.metrics import Histogram, Metrics, Row
from cenote.security.refusals import Refusals
from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.sysfs import (
    SYS,
    read_loss_counters,
    read_port_state,
    read_traffic_bytes,
)
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .agent_core import Stage
from .copier import Copier
from .copy_outcomes import CopierCounters
from .disk_io import DiskIo
from .dram import DramSegment
from .endurance import Endurance
from .puller import Puller, PullerCounters
from .rdma_serving import RdmaServing
from .segments import LocalSegments
from .server import DataCounters, DataServer
from .serving import SERVED
from .sessions import SessionTable
from .ssd import SsdSegment
from .verifying import Verifier

__all__ = [
    "register_copies",
    "register_disk",
    "register_endurance",
    "register_metrics",
    "register_nics",
    "register_parts",
    "register_rdma",
    "register_refusals",
    "register_verifier",
]

_TIERS: Final[dict[int, str]] = {common_pb2.TIER_DRAM: "dram", common_pb2.TIER_SSD: "ssd"}


class _Agent(Protocol):
    @property
    def stage(self) -> Stage: ...

    @property
    def beaten_s(self) -> float: ...


def register_metrics(
    metrics: Metrics,
    segments: LocalSegments,
    server: DataServer,
    sessions: SessionTable,
    agent: _Agent,
) -> None:
    """Make the daemon's metrics."""
    _register_served(metrics, server.counters, server.times)
    metrics.gauge(
        "cenote_store_sessions",
        "Sessions with a connection.",
        lambda: float(sessions.session_count()),
    )
    metrics.gauge(
        "cenote_store_quarantined_sessions",
        "Writers that were to be cut off, and still have this daemon's memory mapped.",
        lambda: float(len(sessions.quarantined())),
    )
    metrics.gauge(
        "cenote_store_attached",
        "1 while a master knows this daemon.",
        lambda: float(agent.stage is Stage.ATTACHED),
    )
    metrics.table(
        "cenote_store_heartbeat_age_seconds",
        "Since a master answered a heartbeat last; nothing before the first one.",
        "gauge",
        (),
        lambda: (
            []
            if math.isnan(agent.beaten_s)
            else [((), max(0.0, time.monotonic() - agent.beaten_s))]
        ),
    )
    metrics.gauge(
        "cenote_store_epoch", "Of the leader that is followed.", lambda: float(segments.epoch)
    )
    for segment in segments.all():
        _register_segment(metrics, segment)
    if segments.disk is not None:
        register_disk(metrics, segments.disk, segments.ssd())


def register_refusals(metrics: Metrics, refusals: Refusals) -> None:
    """Who was refused for want of credentials."""
    for port, reason in refusals.counts:

        def read(port: str = port, reason: str = reason) -> float:
            return float(refusals.counts[port, reason])

        metrics.counted(
            "cenote_store_refusals_total",
            "For want of credentials.",
            read,
            port=port,
            reason=reason,
        )


def _register_served(
    metrics: Metrics, counters: Callable[[], DataCounters], times: dict[int, Histogram]
) -> None:
    def bytes_served() -> list[Row]:
        now = counters()
        return [
            (("tcp", "read"), now.read_bytes - now.unix_read_bytes),
            (("tcp", "written"), now.written_bytes - now.unix_written_bytes),
            (("unix", "read"), now.unix_read_bytes),
            (("unix", "written"), now.unix_written_bytes),
        ]

    metrics.table(
        "cenote_store_served_bytes_total",
        "Payload over this daemon's sockets; shared memory and RDMA pass it by.",
        "counter",
        ("transport", "direction"),
        bytes_served,
    )
    metrics.table(
        "cenote_store_served_seconds",
        "How long a request was served, its bytes included, of every sixteenth.",
        "histogram",
        ("operation",),
        lambda: [((name,), times[number]) for number, name in SERVED.items()],
    )
    metrics.gauge(
        "cenote_store_connections",
        "Data connections that are open.",
        lambda: counters().connections,
    )
    for name, text in (
        ("accepted", "Data connections accepted."),
        ("refused", "Data connections refused, as there are enough."),
        ("requests", "Requests over data connections."),
        ("errors", "Data connections ended by a refusal: no rights, no sense, or a bug."),
        ("seals", "Slots written for clients."),
    ):
        plural = {"accepted": "connections_accepted", "refused": "connections_refused"}
        metrics.counted(
            f"cenote_store_{plural.get(name, name)}_total",
            text,
            lambda name=name: float(getattr(counters(), name)),  # type: ignore[misc]
        )


def register_verifier(metrics: Metrics, verifier: Verifier) -> None:
    """What was found of contents that outlived a daemon or a leader."""

    def counted(name: str) -> Callable[[], float]:
        return lambda: float(getattr(verifier, name))

    for name, text in (
        ("verified_slots", "Survived contents whose payload was what had been sealed."),
        ("damaged_slots", "Survived contents whose payload was not: damaged, or stale."),
    ):
        metrics.counted(f"cenote_store_{name}_total", text, counted(name))
    metrics.gauge(
        "cenote_store_unverified_slots",
        "Survived contents that wait for their checksum.",
        counted("unverified_slots"),
    )


def register_copies(
    metrics: Metrics, copier: CopierCounters | None, puller: PullerCounters | None
) -> None:
    """Copies that the master planned: between this node's tiers, and from other nodes."""

    def rows(bytes_: bool) -> list[Row]:
        found: list[Row] = []
        if copier is not None:
            found += [
                (("demoted",), copier.demoted_bytes if bytes_ else copier.demoted),
                (("promoted",), copier.promoted_bytes if bytes_ else copier.promoted),
            ]
        if puller is not None:
            found.append((("pulled",), puller.pulled_bytes if bytes_ else puller.pulled))
        return found

    metrics.table(
        "cenote_store_copies_total",
        "Copies made: memory to SSD, SSD to memory, from another node.",
        "counter",
        ("kind",),
        lambda: rows(False),
    )
    metrics.table(
        "cenote_store_copied_bytes_total",
        "Of these copies.",
        "counter",
        ("kind",),
        lambda: rows(True),
    )
    metrics.counted(
        "cenote_store_failed_copies_total",
        "Copies that came to nothing, for whatever reason.",
        lambda: sum(one.failed for one in (copier, puller) if one is not None),
    )


def register_parts(
    metrics: Metrics,
    refusals: Refusals | None,
    copier: Copier | None,
    puller: Puller | None,
    rdma: RdmaServing | None,
    endurance: Endurance | None,
) -> None:
    """What only some daemons have."""
    if refusals is not None:
        register_refusals(metrics, refusals)
    register_copies(
        metrics,
        None if copier is None else copier.counters,
        None if puller is None else puller.counters,
    )
    register_calls(metrics)
    if rdma is not None:
        register_rdma(metrics, rdma)
    if endurance is not None:
        register_endurance(metrics, endurance)


def register_disk(metrics: Metrics, disk: DiskIo, segments: Sequence[SsdSegment]) -> None:
    """The SSD as a device: what was asked of it. `segments`: those that lie on it."""
    counters = disk.counters
    metrics.table(
        "cenote_store_ssd_requests_total",
        "Requests to the SSD that succeeded, table and header included.",
        "counter",
        ("operation",),
        lambda: [
            (("read",), counters.reads),
            (("write",), counters.writes),
            (("flush",), counters.flushes),
        ],
    )
    metrics.table(
        "cenote_store_ssd_bytes_total",
        "Of these requests.",
        "counter",
        ("operation",),
        lambda: [(("read",), counters.read_bytes), (("write",), counters.written_bytes)],
    )
    metrics.counted(
        "cenote_store_ssd_errors_total",
        "Reads, writes and flushes of the SSD that failed.",
        lambda: float(counters.errors),
    )
    metrics.gauge(
        "cenote_store_ssd_waiting_requests",
        "Requests that wait for one of the threads that use the SSD.",
        lambda: float(disk.backlog),
    )
    metrics.gauge(
        "cenote_store_ssd_given_up",
        "1 where the SSD failed so often that it is not used until the daemon is started again.",
        lambda: float(any(segment.failed for segment in segments)),
    )


def register_endurance(metrics: Metrics, endurance: Endurance) -> None:
    """What the SSD may be written, and was, where its writes have a budget."""

    def told(name: str) -> Callable[[], float]:
        def ask() -> float:
            stats = pb.NodeStats()
            endurance.tell(stats)
            return float(getattr(stats, name))

        return ask

    for name, text in (
        ("ssd_write_budget_bytes", "The SSD may be written in any 24 hours (--ssd-daily-writes)."),
        ("ssd_write_allowance_bytes", "What of the SSD's budget may be written now."),
        ("ssd_written_day_bytes", "Written to the SSD in this hour and the 23 before it."),
    ):
        metrics.gauge(f"cenote_store_{name}", text, told(name))
    metrics.counted(
        "cenote_store_ssd_written_bytes_total",
        "Written to the SSD since it was given a budget first.",
        told("ssd_written_total_bytes"),
    )


def register_rdma(metrics: Metrics, rdma: RdmaServing) -> None:
    """The RDMA end, as the master is told of it, and the NICs' own counts."""

    def told(read: Callable[[pb.NodeStats], float]) -> Callable[[], float]:
        def ask() -> float:
            stats = pb.NodeStats()
            rdma.tell(stats)
            return float(read(stats))

        return ask

    values: dict[str, tuple[str, Callable[[pb.NodeStats], float]]] = {
        "registered_bytes": (
            "Of the segments, registered with at least one NIC.",
            lambda stats: stats.rdma_registered_bytes,
        ),
        "queue_pairs": ("Queue pairs of clients.", lambda stats: stats.rdma_queue_pairs),
        "trouble": (
            "1 while what could go over RDMA goes over TCP; `cenote status` says why.",
            lambda stats: bool(stats.rdma_trouble),
        ),
    }
    for name, (text, read) in values.items():
        metrics.gauge(f"cenote_store_rdma_{name}", text, told(read))
    register_nics(metrics, lambda: () if rdma.host is None else rdma.host.nics.ports)


def register_nics(
    metrics: Metrics, ports: Callable[[], tuple[NicPort, ...]], root: Path = SYS
) -> None:
    """Of the ports that are served: some dozen small files are read at each scrape."""

    def traffic() -> list[Row]:
        found: list[Row] = []
        for port in ports():
            received, sent = read_traffic_bytes(port, root)
            found += [((port.name, "received"), received), ((port.name, "sent"), sent)]
        return found

    metrics.table(
        "cenote_store_nic_bytes_total",
        "Over served ports, of all programs, as NICs count; software devices count none.",
        "counter",
        ("port", "direction"),
        traffic,
    )
    metrics.table(
        "cenote_store_nic_up",
        "1 where a port that is served is active.",
        "gauge",
        ("port",),
        lambda: [
            ((port.name,), float(read_port_state(port, root) == "ACTIVE")) for port in ports()
        ],
    )
    metrics.table(
        "cenote_store_nic_errors_total",
        "What NICs count of bytes sent once more and of lost links, by the kernel's name for it.",
        "counter",
        ("port", "counter"),
        lambda: [
            ((port.name, name), count)
            for port in ports()
            for name, count in read_loss_counters(port, root).items()
        ],
    )


def _register_segment(metrics: Metrics, segment: DramSegment | SsdSegment) -> None:
    labels = {"segment": str(segment.index), "tier": _TIERS.get(segment.tier, "unknown")}
    values: dict[str, tuple[str, Callable[[], float]]] = {
        "size_bytes": ("Of a segment's data area.", lambda: segment.size_bytes),
        "ready_bytes": ("Backed by memory, or by the device, so far.", lambda: segment.ready_bytes),
        "retired_bytes": ("Given up for slots.", lambda: segment.retired_bytes),
        "slots": ("In the segment's slot table.", lambda: segment.table.slots),
        "sealed_slots": ("Slots in use.", lambda: segment.table.sealed),
    }
    if not isinstance(segment, SsdSegment):
        values["huge_bytes"] = (
            "Of a segment's data area, on huge pages; what system settings add is not counted.",
            lambda: segment.huge_bytes,
        )
    for name, (text, read) in values.items():
        metrics.gauge(f"cenote_store_segment_{name}", text, read, **labels)
    counts: dict[str, tuple[str, Callable[[], float]]] = {
        "seals": ("Slots written since start.", lambda: segment.table.seals),
        "broken_slots": ("Slots found torn or corrupt.", lambda: segment.table.broken),
    }
    for name, (text, read) in counts.items():
        metrics.counted(f"cenote_store_segment_{name}_total", text, read, **labels)
