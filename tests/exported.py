"""Every metric that the programs and the SDK show, as they make them, without running any.

    python tests/exported.py        # writes the table in docs/operating/monitoring.md anew

tests/test_monitoring.py holds the table, the rules and the dashboard to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector

from cenote.client.metrics import client_metrics
from cenote.client.tally import Tally
from cenote.kv.calls import register_calls
from cenote.master.front import Front
from cenote.master.master_metrics import TickStats
from cenote.master.master_metrics import register_metrics as register_master
from cenote.master.memory_backend import MemoryBackend
from cenote.master.operations import Settings
from cenote.rpc.lane_limits import LaneStats
from cenote.runtime.metrics import Family, Metrics
from cenote.store.serving import served_times
from cenote.store.store_metrics import (
    register_copies,
    register_endurance,
    register_rdma,
    register_verifier,
)
from cenote.store.store_metrics import register_metrics as register_store
from cenote.v1 import common_pb2

__all__ = ["BEGIN", "END", "PAGE", "Exported", "exported", "process_names", "table"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operating" / "monitoring.md"
BEGIN = "<!-- metrics: made by tests/exported.py -->"
END = "<!-- end of metrics -->"


@dataclass(slots=True)
class Exported:
    """A metric, and who shows it."""

    family: Family
    programs: list[str]

    @property
    def names(self) -> list[str]:
        """Of its series."""
        name = self.family.name
        if self.family.kind != "histogram":
            return [name]
        return [f"{name}_bucket", f"{name}_sum", f"{name}_count"]

    @property
    def labels(self) -> set[str]:
        """Label names that its series have, but for those that a scrape adds."""
        le = {"le"} if self.family.kind == "histogram" else set()
        return set(self.family.label_names) | le


def _master() -> Metrics:
    async def make() -> Metrics:
        metrics = Metrics()
        front = Front(MemoryBackend(), Settings())
        register_master(metrics, front, LaneStats(), TickStats(), version="0")
        return metrics

    return asyncio.run(make())


def _store() -> Metrics:
    metrics = Metrics()
    segment = SimpleNamespace(index=0, tier=common_pb2.TIER_DRAM)
    disk = SimpleNamespace(counters=None)
    segments = cast("Any", SimpleNamespace(all=lambda: [segment], disk=disk, ssd=tuple))
    server = cast("Any", SimpleNamespace(counters=None, times=served_times()))
    anything = cast("Any", SimpleNamespace())
    metrics.build_info("store", "0")
    register_store(metrics, segments, server, anything, anything)
    register_verifier(metrics, anything)
    register_copies(metrics, None, None)
    register_endurance(metrics, anything)
    register_rdma(metrics, anything)
    register_calls(metrics)
    return metrics


def exported() -> dict[str, Exported]:
    """By name, in the order of the programs."""
    found: dict[str, Exported] = {}
    for program, metrics in (
        ("master", _master()),
        ("store", _store()),
        ("SDK", client_metrics(Tally())),
    ):
        metrics.before_collect = None
        for family in metrics.collect():
            known = found.setdefault(family.name, Exported(family, []))
            assert known.family.kind == family.kind, family.name
            known.programs.append(program)
    return found


def process_names() -> Iterator[str]:
    """What prometheus_client adds of each process."""
    registry = CollectorRegistry()
    for family in ProcessCollector(registry=registry).collect():
        for sample in family.samples:
            yield sample.name


def table(metrics: dict[str, Exported]) -> str:
    """Markdown."""
    lines = ["| metric | kind | labels | by | what it is |", "|---|---|---|---|---|"]
    for name in sorted(metrics):
        family, programs = metrics[name].family, metrics[name].programs
        labels = ", ".join(f"`{label}`" for label in sorted(family.label_names))
        lines.append(
            f"| `{name}` | {family.kind} | {labels} | {', '.join(programs)} | {family.help} |"
        )
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with the table of today."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} has lost its markers"
    assert end, f"{PAGE} has lost its markers"
    return f"{before}{BEGIN}\n\n{table(exported())}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
