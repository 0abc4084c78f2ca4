"""What a replay found, as a table for people and as a document for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .replay.fleet import Outcome
from .replay.player import OPERATIONS
from .replay.trace import Trace

__all__ = ["Evictions", "print_report", "report_of"]

_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Evictions:
    """What the pool evicted meanwhile, for whomever; None: it did not say."""

    objects: int | None
    size_bytes: int | None
    demoted_objects: int = 0
    demoted_bytes: int = 0
    promoted_objects: int = 0
    """Copies from memory to SSDs, and back."""
    ssd_budget_bytes: int = 0
    ssd_charged_bytes: int = 0
    """What all SSDs could be written in a short time, and what of it was; 0: no budget."""


def report_of(
    trace: Trace, outcome: Outcome, evictions: Evictions, *, block_bytes: int, clients: int
) -> dict[str, Any]:
    """Everything there is to tell. Rates in GB/s (10^9 bytes), shares between 0 and 1."""
    tally = outcome.tally
    wall_s = outcome.wall_s
    # Calls of several clients run at the same time, so their time is shared out.
    reading_s = sum(tally.latencies_s["get"]) / clients
    writing_s = sum(tally.latencies_s["put"]) / clients
    return {
        "trace": trace.name,
        "requests": tally.requests,
        "blocks": tally.blocks,
        "tokens": tally.tokens,
        "block_bytes": block_bytes,
        "clients": clients,
        "hit_blocks": tally.hit_blocks,
        "ssd_hit_blocks": tally.ssd_hit_blocks,
        "hit_tokens": tally.hit_tokens,
        "hit_rate_blocks": _ratio(tally.hit_blocks, tally.blocks),
        "hit_rate_blocks_dram": _ratio(tally.hit_blocks - tally.ssd_hit_blocks, tally.blocks),
        "hit_rate_blocks_ssd": _ratio(tally.ssd_hit_blocks, tally.blocks),
        "hit_rate_tokens": _ratio(tally.hit_tokens, tally.tokens),
        "read_bytes": tally.read_bytes,
        "written_bytes": tally.written_bytes,
        "wall_s": wall_s,
        "requests_per_s": _ratio(tally.requests, wall_s),
        "read_gb_per_s": _ratio(tally.read_bytes / _GB, reading_s),
        "write_gb_per_s": _ratio(tally.written_bytes / _GB, writing_s),
        "moved_gb_per_s": _ratio((tally.read_bytes + tally.written_bytes) / _GB, wall_s),
        "operations": {name: _latency(tally.latencies_s[name]) for name in OPERATIONS},
        "demoted_objects": evictions.demoted_objects,
        "demoted_bytes": evictions.demoted_bytes,
        "demoted_share": _ratio(evictions.demoted_bytes, tally.written_bytes),
        "promoted_objects": evictions.promoted_objects,
        "ssd_budget_bytes": evictions.ssd_budget_bytes,
        "ssd_charged_bytes": evictions.ssd_charged_bytes,
        "evicted_objects": evictions.objects,
        "evicted_bytes": evictions.size_bytes,
        "existed_blocks": tally.existed_blocks,
        "vanished_blocks": tally.vanished_blocks,
        "errors": tally.errors,
        "error_examples": tally.examples,
        "wrong_bytes": tally.wrong_bytes,
        "interrupted": outcome.interrupted or evictions.objects is None,
        "unheard_clients": outcome.unheard_clients,
        "gave_up_clients": tally.gave_up,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _latency(values_s: Sequence[float]) -> dict[str, float | int | None]:
    if not values_s:
        return {"calls": 0, "p50_us": None, "p99_us": None}
    p50, p99 = np.percentile(np.array(values_s), (50, 99)) * 1e6
    return {"calls": len(values_s), "p50_us": float(p50), "p99_us": float(p99)}


def print_report(report: dict[str, Any]) -> None:
    """The table."""
    from cenote.runtime.units import format_duration, format_size

    from .output import counted, print_pairs, print_table

    clients = counted(report["clients"], "client")
    print_pairs(
        [
            ("trace", f"{report['trace']}: {report['requests']} requests, {report['blocks']} blocks"
                f" of {format_size(report['block_bytes'])}"),
            ("hit rate", f"{_percent(report['hit_rate_blocks'])} of blocks,"
                f" {_percent(report['hit_rate_tokens'])} of tokens"),
            *_tier_pairs(report),
            ("read", _moved(report["read_bytes"], report["read_gb_per_s"])),
            ("written", _moved(report["written_bytes"], report["write_gb_per_s"])),
            ("time", f"{format_duration(report['wall_s'])} with {clients}:"
                f" {_number(report['requests_per_s'])} requests/s,"
                f" {_number(report['moved_gb_per_s'])} GB/s in all"),
            ("evicted", "-" if report["evicted_objects"] is None else
                f"{counted(report['evicted_objects'], 'object')},"
                f" {format_size(report['evicted_bytes'])}"),
            ("errors", report["errors"]),
            ("wrong bytes", report["wrong_bytes"]),
        ]
    )  # fmt: skip
    print_table(
        ["operation", "calls", "p50", "p99"],
        (
            (name, seen["calls"], _duration(seen["p50_us"]), _duration(seen["p99_us"]))
            for name, seen in report["operations"].items()
        ),
    )


def _tier_pairs(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Hits by tier, and copies; nothing where no SSD took part."""
    if not report["ssd_hit_blocks"] and not report["demoted_objects"]:
        return []
    from cenote.runtime.units import format_size

    return [
        ("by tier", f"{_percent(report['hit_rate_blocks_dram'])} of blocks in memory,"
            f" {_percent(report['hit_rate_blocks_ssd'])} on SSD"),
        ("copies", f"{report['demoted_objects']} to SSD ({format_size(report['demoted_bytes'])},"
            f" {_percent(report['demoted_share'])} of what was written),"
            f" {report['promoted_objects']} back"),
        *([("ssd writes", f"{format_size(report['ssd_charged_bytes'])} of a budget of"
            f" {format_size(report['ssd_budget_bytes'])}")] if report["ssd_budget_bytes"] else []),
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _duration(value_us: float | None) -> str | None:
    from cenote.runtime.units import format_duration

    return None if value_us is None else format_duration(value_us / 1e6)


def _moved(size_bytes: int, gb_per_s: float | None) -> str:
    from cenote.runtime.units import format_size

    return f"{format_size(size_bytes)} at {_number(gb_per_s)} GB/s"
