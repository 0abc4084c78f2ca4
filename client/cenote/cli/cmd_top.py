"""`cenote top`: what the pool does, live."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress, Wide
from .watching import watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["Sample", "rates", "top"]

_COUNTERS: Final = (
    *("acquired_keys", "acquired_hits", "acquired_hits_ssd", "evicted_objects", "evicted_bytes"),
    *("expired_objects", "demoted_bytes", "promoted_bytes", "last_seq"),
)
_NAMESPACES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """What the pool said at one time, on this host's monotonic clock."""

    at_s: float
    status: admin_pb2.GetStatusResponse
    nodes: Sequence[admin_pb2.NodeStatus]
    namespaces: Sequence[admin_pb2.NamespaceStatus]


def rates(before: Sample | None, now: Sample) -> dict[str, float | None]:
    """Of each counter, how much a second; None where there is nothing to compare with: at first,
    and after another master took over, whose counters begin at 0."""
    if before is None or before.status.epoch != now.status.epoch:
        return dict.fromkeys((*_COUNTERS, "hit_rate"))
    passed_s = max(1e-3, now.at_s - before.at_s)
    found: dict[str, float | None] = {
        name: max(0, getattr(now.status, name) - getattr(before.status, name)) / passed_s
        for name in _COUNTERS
    }
    asked = now.status.acquired_keys - before.status.acquired_keys
    hits = now.status.acquired_hits - before.status.acquired_hits
    found["hit_rate"] = hits / asked if asked > 0 else None
    return found


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=3600, metavar="SECONDS")
    ] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-c", min=0, metavar="N", help="End after so many; 0: never.")
    ] = 0,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    wide: Wide = False,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """What the pool does, live: reads, hits, puts, evictions, each node's traffic, namespaces.

    Until Ctrl-C. Bytes over shared memory and RDMA pass no daemon, and are not in a node's traffic.
    With --json one document a line.
    """
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        board = _Board(admin, as_json=json, wide=wide)
        board.show()
        if count == 1:
            return 0
        left = count - 1 if count else None
        return watched(interval, board.show, count=left, at_once=False)


class _Board:
    def __init__(self, admin: Admin, *, as_json: bool, wide: bool) -> None:
        self._admin = admin
        self._as_json = as_json
        self._wide = wide
        self._before: Sample | None = None

    def show(self) -> None:
        from .output import print_json

        admin, before = self._admin, self._before
        status = admin.status()
        now = Sample(time.monotonic(), status, admin.nodes(), admin.namespaces())
        self._before = now
        if self._as_json:
            print_json(_document(before, now))
        else:
            _print(before, now, wide=self._wide)


def _node_rates(before: Sample | None, now: Sample) -> dict[int, tuple[float, float] | None]:
    """By node id, bytes a second that it read out and wrote."""
    known = {} if before is None else {n.view.node_id: n for n in before.nodes}
    passed_s = 1.0 if before is None else max(1e-3, now.at_s - before.at_s)
    found: dict[int, tuple[float, float] | None] = {}
    for node in now.nodes:
        was = known.get(node.view.node_id)
        if was is None or was.process_id != node.process_id:
            found[node.view.node_id] = None
        else:
            out, into = node.read_bytes - was.read_bytes, node.written_bytes - was.written_bytes
            found[node.view.node_id] = max(0, out) / passed_s, max(0, into) / passed_s
    return found


def _document(before: Sample | None, now: Sample) -> dict[str, Any]:
    status, traffic = now.status, _node_rates(before, now)
    return {
        "time_unix_s": round(time.time(), 3),
        "epoch": status.epoch,
        "objects": status.objects,
        "capacity_bytes": status.capacity_bytes,
        "used_bytes": status.used_bytes,
        "ssd_capacity_bytes": status.ssd_capacity_bytes,
        "ssd_used_bytes": status.ssd_used_bytes,
        "per_s": rates(before, now),
        "nodes": [
            {
                "name": node.view.name,
                "used_bytes": node.used_bytes - node.ssd_used_bytes,
                "capacity_bytes": node.capacity_bytes - node.ssd_capacity_bytes,
                "ssd_used_bytes": node.ssd_used_bytes,
                "ssd_capacity_bytes": node.ssd_capacity_bytes,
                "read_bytes_per_s": None if (t := traffic[node.view.node_id]) is None else t[0],
                "written_bytes_per_s": None if t is None else t[1],
            }
            for node in now.nodes
        ],
        "namespaces": [
            {
                "name": n.name,
                "objects": n.objects,
                "used_bytes": n.used_bytes - n.ssd_used_bytes,
                "ssd_used_bytes": n.ssd_used_bytes,
            }
            for n in now.namespaces
        ],
    }


def _print(before: Sample | None, now: Sample, *, wide: bool) -> None:
    from cenote.runtime.units import format_size

    from .output import counted, print_pairs

    status, found = now.status, rates(before, now)

    def per_s(name: str, unit: str = "/s") -> str:
        value = found[name]
        return "-" if value is None else f"{value:,.0f}{unit}"

    hit_rate = found["hit_rate"]
    held = f"{format_size(status.leased_bytes)} leased, {format_size(status.granted_bytes)} granted"
    pairs: list[tuple[str, str | int | float | None]] = [
        ("cluster", f"{status.cluster_name}, {status.role}, epoch {status.epoch},"
            f" {status.nodes_alive} of {status.nodes_total} nodes,"
            f" {counted(status.sessions, 'client')}"),
        ("memory", _gauge(status.used_bytes, status.capacity_bytes)),
        *([("ssd", _gauge(status.ssd_used_bytes, status.ssd_capacity_bytes))]
            if status.ssd_capacity_bytes else []),
        ("objects", f"{status.objects:,}; {held}"),
        ("reads", f"{per_s('acquired_keys', ' keys/s')}, "
            + ("no reads" if hit_rate is None else f"{100 * hit_rate:.1f} % hits")),
        ("puts", per_s("last_seq")),
        ("evicted", f"{per_s('evicted_objects', ' objects/s')},"
            f" {_size_per_s(found['evicted_bytes'])}"),
    ]  # fmt: skip
    if status.ssd_capacity_bytes:
        down, up = _size_per_s(found["demoted_bytes"]), _size_per_s(found["promoted_bytes"])
        pairs.append(("tiers", f"{down} demoted, {up} promoted"))
    if status.moving:
        pairs.append(("moving", status.moving))
    if status.writes_refused:
        pairs.append(("writes", f"refused: {status.writes_refused}"))
    print_pairs(pairs)
    _print_nodes(before, now, wide=wide)
    _print_namespaces(now)


def _size_per_s(value: float | None) -> str:
    from cenote.runtime.units import format_size

    return "-" if value is None else f"{format_size(int(value))}/s"


def _print_nodes(before: Sample | None, now: Sample, *, wide: bool) -> None:
    from .output import print_table

    status = now.status
    traffic = _node_rates(before, now)
    print_table(
        [
            *("node", "memory"),
            *(["ssd"] if status.ssd_capacity_bytes else []),
            *("tcp out", "tcp in", "sessions", "seen"),
        ],
        (
            (
                node.view.name,
                _gauge(
                    node.used_bytes - node.ssd_used_bytes,
                    node.capacity_bytes - node.ssd_capacity_bytes,
                    width=12,
                ),
                *(
                    [_gauge(node.ssd_used_bytes, node.ssd_capacity_bytes, width=12)]
                    if status.ssd_capacity_bytes
                    else []
                ),
                *map(_size_per_s, traffic[node.view.node_id] or (None, None)),
                node.sessions,
                f"{node.heartbeat_age_s:.1f} s ago",
            )
            for node in now.nodes
        ),
        empty="no store daemon has attached; start one with `cenote store`",
        spare=["sessions", "seen", "tcp in", "tcp out"],
        wide=wide,
    )


def _print_namespaces(now: Sample) -> None:
    from cenote.runtime.units import format_size

    from .output import print_table

    status = now.status
    ranked = sorted(now.namespaces, key=lambda n: -n.used_bytes)
    # Of their own sum: the pool's use was asked for a moment before.
    total = sum(n.used_bytes - n.ssd_used_bytes for n in ranked)
    has_ssd = bool(status.ssd_capacity_bytes)
    print_table(
        ["namespace", "objects", "memory", "of all", *(["ssd"] if has_ssd else [])],
        (
            (
                n.name,
                f"{n.objects:,}",
                format_size(n.used_bytes - n.ssd_used_bytes),
                f"{100 * (n.used_bytes - n.ssd_used_bytes) / max(1, total):.1f} %",
                *([format_size(n.ssd_used_bytes)] if has_ssd else []),
            )
            for n in ranked[:_NAMESPACES_SHOWN]
        ),
        empty="no namespace yet",
    )


def _gauge(part: int, whole: int, *, width: int = 24) -> str:
    from cenote.runtime.units import format_size

    share = part / whole if whole else 0.0
    full = min(width, round(width * share))
    bar = "█" * full + "·" * (width - full)
    return f"{bar} {100 * share:5.1f} % of {format_size(whole)}"
