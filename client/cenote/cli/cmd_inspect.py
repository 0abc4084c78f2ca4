"""`cenote status`, `nodes`, `segments`: what the master knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cmd_paths import TRANSPORTS_DEFAULT, Transports, predicted_paths, split_transports
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress, Wide
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["nodes", "segments", "show_status", "status"]

_MASTER_SILENT_S = 4.0
"""Signs of life come once a second, and are looked for as often."""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


# ---- status ----------------------------------------------------------------------------------


def status(
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """The pool at a glance: capacity, use, hits, what holds space."""
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: show_status(admin, as_json=json))


def show_status(admin: Admin, *, as_json: bool) -> None:
    """Print the status of the pool."""
    from .output import print_json, print_pairs

    reply = admin.status()
    if as_json:
        print_json(
            {f.name: getattr(reply, f.name) for f in reply.DESCRIPTOR.fields if f.name != "masters"}
            | {"hit_rate": _hit_rate(reply), "masters": [_master(m) for m in reply.masters]}
        )
        return
    print_pairs((name, value) for name, value in _status_pairs(reply) if value is not None)


def _damage(reply: admin_pb2.GetStatusResponse) -> str:
    """What was found damaged, and what is still to be looked at."""
    from .output import counted

    found = [
        (f"{counted(reply.damaged_replicas, 'replica')} dropped", reply.damaged_replicas),
        (f"{counted(reply.broken_slots, 'slot')} torn", reply.broken_slots),
        (f"{counted(reply.lost_objects, 'object')} not brought back", reply.lost_objects),
        (f"{counted(reply.unverified_slots, 'slot')} to verify", reply.unverified_slots),
    ]
    return ", ".join(text for text, some in found if some) or "none"


def _hit_rate(reply: admin_pb2.GetStatusResponse) -> float | None:
    """Of keys asked for by reads since the master's start; None where none was."""
    return reply.acquired_hits / reply.acquired_keys if reply.acquired_keys else None


def _master(master: admin_pb2.MasterInfo) -> dict[str, Any]:
    return {
        "name": master.name,
        "role": master.role,
        "addresses": list(master.addresses),
        "grpc": master.grpc,
        "silent_s": round(master.silent_s, 3),
    }


def _role(master: admin_pb2.MasterInfo) -> str:
    """`standby`, or for one that has gone silent how long ago it was seen."""
    if master.silent_s < _MASTER_SILENT_S:
        return str(master.role)
    return f"{master.role}, last seen {master.silent_s:.0f} s ago"


def _quotas(reply: admin_pb2.GetStatusResponse) -> str | None:
    """What all of them promise together."""
    from cenote.runtime.units import format_size

    promised = [
        f"{format_size(size_bytes)} {where}"
        for size_bytes, where in (
            (reply.dram_quota_bytes, "in memory"),
            (reply.ssd_quota_bytes, "on SSDs"),
        )
        if size_bytes
    ]
    return " and ".join(promised) + " promised to namespaces" if promised else None


def _policy(reply: admin_pb2.GetStatusResponse) -> str | None:
    """Which objects go where room is needed."""
    from .output import counted

    if reply.eviction_policy_wanted in ("", reply.eviction_policy):
        return reply.eviction_policy or None
    switches = counted(reply.eviction_policy_switches, "change")
    return f"{reply.eviction_policy_wanted}: {reply.eviction_policy} now, {switches}"


def _masters(reply: admin_pb2.GetStatusResponse) -> str | None:
    """All masters by role; None where there is only the one that answers."""
    if len(reply.masters) < 2 and reply.role == "leader":
        return None
    ordered = sorted(reply.masters, key=lambda master: (master.role != "leader", master.name))
    return ", ".join(f"{master.name} ({_role(master)})" for master in ordered) or "none is known"


def _journal_state(reply: admin_pb2.GetStatusResponse) -> str | None:
    """How far the metadata service is behind, and whether it takes writes."""
    if reply.writes_refused:
        return f"takes no writes: {reply.writes_refused}"
    if reply.backlog_age_s >= 0.1:
        return f"{reply.backlog_entries} decisions behind, for {reply.backlog_age_s:.1f} s"
    return None


def _standby_pairs(reply: admin_pb2.GetStatusResponse) -> list[tuple[str, str | int | None]]:
    from cenote.runtime.units import format_duration, format_size

    leader = f"epoch {reply.epoch}" if reply.epoch else "nobody leads that it knows of"
    return [
        ("cluster", f"{reply.cluster_name}, asked a {reply.role}, {leader}"),
        ("masters", _masters(reply)),
        ("version", reply.server_version or None),
        ("up", format_duration(reply.uptime_s)),
        (
            "metadata",
            f"{reply.metadata_backend}, {format_size(reply.journal_bytes)} of journal, followed"
            f" to entry {reply.last_entry}",
        ),
        ("journal", _journal_state(reply)),
    ]


def _dedup_pairs(
    reply: admin_pb2.GetStatusResponse,
) -> list[tuple[str, str | int | None]]:
    from cenote.runtime.units import format_size

    from .output import counted

    if not reply.dedup_objects and reply.logical_bytes <= reply.used_bytes:
        return []
    text = f"{format_size(reply.logical_bytes)} of objects in {format_size(reply.used_bytes)}"
    saved = counted(reply.dedup_objects, "transfer"), format_size(reply.dedup_bytes)
    return [("dedup", f"{text}; {saved[0]} saved, {saved[1]}")]


def _status_pairs(reply: admin_pb2.GetStatusResponse) -> list[tuple[str, str | int | None]]:
    from cenote.runtime.units import format_duration, format_size

    from .output import counted

    if reply.role != "leader":
        return _standby_pairs(reply)
    rate = _hit_rate(reply)
    pinned = counted(reply.pinned_objects, "pinned object")
    held = [
        (f"{format_size(reply.leased_bytes)} in {counted(reply.leases, 'lease')}", reply.leases),
        (f"{format_size(reply.granted_bytes)} in {counted(reply.grants, 'grant')}", reply.grants),
        (f"{format_size(reply.pinned_bytes)} in {pinned}", reply.pinned_objects),
        (f"{format_size(reply.condemned_bytes)} removed, still read", reply.condemned_bytes),
        (f"{format_size(reply.quarantined_bytes)} in quarantine", reply.quarantined_bytes),
    ]
    return [
        ("cluster", f"{reply.cluster_name}, {reply.role}, epoch {reply.epoch}"),
        ("masters", _masters(reply)),
        ("version", reply.server_version or None),
        ("up", format_duration(reply.uptime_s)),
        ("nodes", f"{reply.nodes_alive} of {reply.nodes_total} alive"),
        ("capacity", format_size(reply.capacity_bytes)),
        (
            "used",
            f"{format_size(reply.used_bytes)} ({_share(reply.used_bytes, reply.capacity_bytes)})",
        ),
        *_dedup_pairs(reply),
        *_ssd_pairs(reply),
        ("objects", f"{reply.objects:,}"),
        ("quotas", _quotas(reply)),
        *([("moving", reply.moving)] if reply.moving else []),
        ("held", ", ".join(text for text, some in held if some) or "nothing"),
        ("sessions", reply.sessions),
        (
            "reads",
            counted(reply.acquired_keys, "key")
            + ("" if rate is None else f", {100 * rate:.1f} % hits")
            + (_of_them_on_ssd(reply) if reply.ssd_capacity_bytes else ""),
        ),
        (
            "evicted",
            f"{counted(reply.evicted_objects, 'object')}, {format_size(reply.evicted_bytes)}",
        ),
        ("eviction", _policy(reply)),
        ("damage", _damage(reply)),
        ("rdma", reply.rdma_trouble or None),
        (
            "metadata",
            f"{reply.metadata_backend}, {format_size(reply.metadata_memory_bytes)} in memory,"
            f" {format_size(reply.journal_bytes)} of journal",
        ),
        ("journal", _journal_state(reply)),
        *([("notice", reply.notice)] if reply.notice else []),
    ]


def _of_them_on_ssd(reply: admin_pb2.GetStatusResponse) -> str:
    if not reply.acquired_keys:
        return ""
    memory = (reply.acquired_hits - reply.acquired_hits_ssd) / reply.acquired_keys
    ssd = reply.acquired_hits_ssd / reply.acquired_keys
    return f" ({100 * memory:.1f} % in memory, {100 * ssd:.1f} % on SSD)"


def _ssd_pairs(reply: admin_pb2.GetStatusResponse) -> list[tuple[str, str | int | None]]:
    """Capacity and use of the SSDs, and what went there and back; nothing where there are none."""
    from cenote.runtime.units import format_size

    if not reply.ssd_capacity_bytes:
        return []
    share = _share(reply.ssd_used_bytes, reply.ssd_capacity_bytes)
    copies = [
        (f"{format_size(reply.demoted_bytes)} demoted", True),
        (f"{format_size(reply.promoted_bytes)} promoted", True),
        (f"{format_size(reply.copying_bytes)} under way", reply.copying_bytes),
        (f"{reply.failed_copies} failed", reply.failed_copies),
    ]
    return [
        ("ssd", f"{format_size(reply.ssd_used_bytes)} of {format_size(reply.ssd_capacity_bytes)}"
            f" ({share})"),
        ("copies", ", ".join(text for text, some in copies if some)),
        *([("ssd writes", f"{format_size(reply.ssd_written_day_bytes)} in 24 h, of a budget of"
            f" {format_size(reply.ssd_write_budget_bytes)}"
            f" ({_share(reply.ssd_written_day_bytes, reply.ssd_write_budget_bytes)})")]
          if reply.ssd_write_budget_bytes else []),
    ]  # fmt: skip


# ---- nodes and segments ----------------------------------------------------------------------


def nodes(
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    transports: Transports = TRANSPORTS_DEFAULT,
    json: AsJson = False,
    wide: Wide = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """The store daemons: state, use, traffic, addresses.

    Bytes that move over shared memory pass no daemon, so only those over TCP are counted, and over
    RDMA (in --json) what the devices count. The path is what a client on this host would take,
    without trying it: `cenote paths` does.
    """
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: _show_nodes(admin, transports, json=json, wide=wide))


def _show_nodes(admin: Admin, transports: str, *, json: bool, wide: bool) -> None:
    from .output import print_json, print_table

    listed = admin.nodes()
    ways = predicted_paths([node.view for node in listed], split_transports(transports))
    found = [_node(node) | {"path": ways[node.view.node_id].path} for node in listed]
    if json:
        print_json(found)
        return
    from cenote.runtime.units import format_duration, format_size

    have_ssds = any(node["ssd_capacity_bytes"] for node in found)
    print_table(
        [
            "node",
            "id",
            "state",
            "path",
            "used",
            "capacity",
            *(["ssd used", "ssd"] if have_ssds else []),
            "tcp out",
            "tcp in",
            "sessions",
            "seen",
            "at",
        ],
        (
            (
                node["name"],
                node["node_id"],
                node["state"],
                node["path"] or "none",
                _share(node["used_bytes"], node["capacity_bytes"]),
                format_size(node["capacity_bytes"]),
                *_ssd_cells(node, have_ssds),
                format_size(node["read_bytes"]),
                format_size(node["written_bytes"]),
                node["sessions"],
                format_duration(node["heartbeat_age_s"]) + " ago",
                next((e["address"] for e in node["endpoints"] if e["kind"] == "tcp"), None),
            )
            for node in found
        ),
        empty="no store daemon has attached; start one with `cenote store`",
        spare=["id", "sessions", "at", "capacity", "ssd"],
        wide=wide,
    )


def _ssd_cells(node: dict[str, Any], have_ssds: bool) -> list[str]:
    """Of a table in which any node has one."""
    from cenote.runtime.units import format_size

    if not have_ssds:
        return []
    whole = node["ssd_capacity_bytes"]
    return [_share(node["ssd_used_bytes"], whole), format_size(whole) if whole else "-"]


def _node(node: admin_pb2.NodeStatus) -> dict[str, Any]:
    from cenote.v1 import common_pb2

    from .output import enum_name

    view = node.view
    return {
        "name": view.name,
        "node_id": view.node_id,
        "state": "drained"
        if node.drained and view.state == common_pb2.NODE_STATE_DRAINING
        else enum_name(common_pb2.NodeState, view.state, "NODE_STATE_"),
        "failure_domain": view.failure_domain,
        "boot_id": view.boot_id,
        "endpoints": [
            {
                "kind": enum_name(common_pb2.TransportKind, e.kind, "TRANSPORT_KIND_"),
                "address": e.address,
            }
            for e in view.endpoints
        ],
        "segment_ids": list(view.segment_ids),
        "capacity_bytes": node.capacity_bytes - node.ssd_capacity_bytes,
        "used_bytes": node.used_bytes - node.ssd_used_bytes,
        "ssd_capacity_bytes": node.ssd_capacity_bytes,
        "ssd_used_bytes": node.ssd_used_bytes,
        "read_bytes": node.read_bytes,
        "written_bytes": node.written_bytes,
        "sessions": node.sessions,
        "heartbeat_age_s": node.heartbeat_age_s,
        "process_id": node.process_id,
        "server_version": node.server_version,
        "rdma_registered_bytes": node.rdma_registered_bytes,
        "rdma_queue_pairs": node.rdma_queue_pairs,
        "rdma_received_bytes": node.rdma_received_bytes,
        "rdma_sent_bytes": node.rdma_sent_bytes,
        "rdma_trouble": node.rdma_trouble,
        "ssd_write_budget_bytes": node.ssd_write_budget_bytes,
        "ssd_write_allowance_bytes": node.ssd_write_allowance_bytes,
        "ssd_written_day_bytes": node.ssd_written_day_bytes,
        "ssd_written_total_bytes": node.ssd_written_total_bytes,
    }


def segments(
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    wide: Wide = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """The memory and SSDs that the nodes contribute: use, fragmentation, slots."""
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: _show_segments(admin, json=json, wide=wide))


def _show_segments(admin: Admin, *, json: bool, wide: bool) -> None:
    from .output import print_json, print_table

    found = [_segment(segment) for segment in admin.segments()]
    if json:
        print_json(found)
        return
    from cenote.runtime.units import format_size

    print_table(
        [
            "segment",
            "node",
            "tier",
            "size",
            "ready",
            "used",
            "objects",
            "slots",
            "free runs",
            "largest",
        ],
        (
            (
                segment["segment_id"],
                segment["node_name"],
                segment["tier"],
                format_size(segment["size_bytes"]),
                format_size(segment["ready_bytes"]),
                _share(segment["used_bytes"], segment["ready_bytes"]),
                segment["objects"],
                f"{segment['slots_used']} / {segment['slots']}",
                segment["free_runs"],
                format_size(segment["largest_free_bytes"]),
            )
            for segment in found
        ),
        empty="no segment: no store daemon has attached",
        spare=["free runs", "largest", "tier", "ready"],
        wide=wide,
    )


def _segment(segment: admin_pb2.SegmentStatus) -> dict[str, Any]:
    from cenote.v1 import common_pb2

    from .output import enum_name

    view = segment.view
    return {
        "segment_id": view.segment_id,
        "node_id": view.node_id,
        "node_name": segment.node_name,
        "node_segment_index": view.node_segment_index,
        "tier": enum_name(common_pb2.Tier, view.tier, "TIER_"),
        "incarnation": view.incarnation.hex(),
        "size_bytes": view.size_bytes,
        "ready_bytes": view.ready_bytes,
        "used_bytes": segment.used_bytes,
        "objects": segment.objects,
        "slots": segment.slots,
        "slots_used": segment.slots_used,
        "largest_free_bytes": segment.largest_free_bytes,
        "free_runs": segment.free_runs,
        "retired_bytes": segment.retired_bytes,
    }
