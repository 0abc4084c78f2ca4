"""`cenote explain`: where a key is, or why it is not there. `cenote leases`: who holds what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_NOT_FOUND, EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    GrpcAddress,
    MasterAddress,
    NamespaceName,
    Wide,
)
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .output import Cell

__all__ = ["explain", "leases", "verdict_of"]

_EVICTED_FOR: Final = {
    "on_demand": "a put needed room",
    "ahead": "room is kept free ahead of need",
    "nearby": "free space around it was joined for a large object",
    "table_full": "the master's object table is full",
    "asked": "an administrator asked for it (cenote evict)",
    "moved_in": "what moved here from another node was used more recently",
    "ssd_full": "the SSD was full",
}
_ALIVE: Final = 1
_DRAINING: Final = 4
_SSD: Final = 2
_FATES: Final = {
    "removed": ("somebody removed it", ""),
    "lost": (
        "all of its copies were lost: with their node, in a restart that did not bring them back,"
        " or as damaged",
        "put with replicas=2 what must survive a node; see cenote status (damage) and cenote nodes",
    ),
    "reset": ("its namespace was reset", ""),
    "expired": ("the time to live that it was put with was over", "put it with a longer ttl_s"),
    "refused": (
        "a put of it found no room",
        "see cenote status: what is held by leases, grants and pins can't be evicted",
    ),
}


def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Text, or hex:0a1b... for bytes.")],
    namespace: NamespaceName = "default",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Where a key is; or why it is not: evicted (why, and how cold it was), removed, lost ...

    The master remembers the last decisions about keys since it began to lead (--decisions-max).
    Does not count as a use. Exit code 3 where the key is not there.
    """
    from .connect import open_admin
    from .output import parse_key, print_json, print_pairs, print_table

    encoded = parse_key(key)
    with open_admin(master, grpc, deadline) as admin:
        reply = admin.explain(namespace, encoded)
    verdict, remedy = verdict_of(reply)
    code = EXIT_OK if reply.state == "present" else EXIT_NOT_FOUND
    if json:
        print_json({"key": key, "verdict": verdict, "remedy": remedy} | _document(reply))
        return code
    print_pairs(
        [
            ("key", f"{key} in namespace {namespace}"),
            ("state", reply.state),
            ("why", verdict),
            *([("remedy", remedy)] if remedy else []),
            *_object_pairs(reply),
        ]
    )
    if reply.places:
        print_table(
            ["replica", "tier", "node", "state", "segment", "offset", "length"],
            (_place_cells(place) for place in reply.places),
        )
    if len(reply.decisions) > 1 or (reply.decisions and reply.state == "present"):
        print_table(
            ["what became of it", "ago", "last used before", "objects at once"],
            (_decision_cells(decision) for decision in reply.decisions),
        )
    return code


def verdict_of(reply: admin_pb2.ExplainResponse) -> tuple[str, str]:
    """(why it is there or not, in one sentence; what helps, or nothing)."""
    from cenote.runtime.units import format_duration

    if reply.state == "present":
        tiers = {place.tier for place in reply.places}
        where = " and ".join(sorted({place.node_name for place in reply.places})) or "no node"
        kinds = "on SSD alone, " if tiers == {_SSD} else ""
        return f"it can be read, {kinds}from {where}", ""
    if reply.state == "unreachable":
        return _unreachable(reply)
    if reply.state == "being put":
        return f"{reply.writer or 'a client'} is putting it just now", ""
    if reply.found_in:
        others = ", ".join(reply.found_in)
        return f"it is in another namespace: {others}", f"cenote explain -n {reply.found_in[0]} KEY"
    if reply.decisions:
        return _decided(reply, reply.decisions[0])
    known = (
        f"the last {reply.log_keys:,} decisions on keys reach {format_duration(reply.log_s)} back"
        if reply.log_keys
        else "nothing was evicted or removed"
    )
    since = f"this master leads for {format_duration(reply.tenure_s)}"
    return (
        f"it was never put, or is gone for longer than is remembered: {known}, {since}",
        "check key and namespace (cenote ls); --decisions-max of cenote-master remembers more",
    )


def _unreachable(reply: admin_pb2.ExplainResponse) -> tuple[str, str]:
    there = _ALIVE, _DRAINING
    silent = sorted(
        {p.node_name for p in reply.places if not p.attached or p.node_state not in there}
    )
    names = ", ".join(silent) or "its nodes"
    return (
        f"its copies are on nodes that are not there: {names}; it is back when one of them is",
        f"start the store daemon of {silent[0] if silent else 'the node'} again (cenote nodes); put"
        " with replicas=2 what must outlive a node",
    )


def _decided(reply: admin_pb2.ExplainResponse, decision: admin_pb2.KeyDecision) -> tuple[str, str]:
    from cenote.runtime.units import format_duration

    ago = f"{format_duration(decision.ago_s)} ago"
    if decision.fate != "evicted":
        text, remedy = _FATES.get(decision.fate, (decision.fate, ""))
        return f"{text}, {ago}", remedy
    cold = ""
    if decision.HasField("idle_s"):
        cold = f", when it had not been used for {format_duration(decision.idle_s)}"
    why = _EVICTED_FOR.get(decision.cause, "room was made")
    if reply.over_quota:
        return (
            f"it was evicted {ago}{cold}: {why}, and its namespace is over its quota",
            f"cenote namespaces set-quota {reply.namespace.name} --dram SIZE, or cenote pin KEY",
        )
    if decision.cause == "asked":
        return f"it was evicted {ago}: {why}", ""
    return (
        f"it was evicted {ago}{cold}: {why}",
        "cenote mrc says what more capacity would keep; cenote pin KEY keeps this one",
    )


def _object_pairs(reply: admin_pb2.ExplainResponse) -> list[tuple[str, Cell]]:
    from cenote.runtime.units import format_duration, format_size

    if not reply.places:
        return []
    pinned = "no"
    if reply.pinned_s:
        pinned = "until unpinned" if math.isinf(reply.pinned_s) else format_duration(reply.pinned_s)
    return [
        ("size", format_size(reply.size_bytes)),
        ("version", f"epoch {reply.version.epoch}, seq {reply.version.seq}"),
        ("last used", format_duration(reply.idle_s) + " ago"),
        ("leases", reply.leases),
        ("pinned", pinned),
    ]


def _place(place: admin_pb2.ObjectPlace) -> dict[str, Any]:
    from cenote.v1 import common_pb2

    from .output import enum_name

    return {
        "replica": place.replica,
        "tier": enum_name(common_pb2.Tier, place.tier, "TIER_"),
        "node": place.node_name,
        "node_state": enum_name(common_pb2.NodeState, place.node_state, "NODE_STATE_")
        if place.attached
        else "not attached",
        "segment_id": place.segment_id,
        "offset_bytes": place.offset_bytes,
        "length_bytes": place.length_bytes,
    }


def _place_cells(place: admin_pb2.ObjectPlace) -> list[Cell]:
    from cenote.runtime.units import format_size

    shown = _place(place)
    shown["length_bytes"] = format_size(place.length_bytes)
    return [shown[name] for name in ("replica", "tier", "node", "node_state", "segment_id",
                                     "offset_bytes", "length_bytes")]  # fmt: skip


def _decision(decision: admin_pb2.KeyDecision) -> dict[str, Any]:
    return {
        "fate": decision.fate,
        "cause": decision.cause,
        "ago_s": round(decision.ago_s, 3),
        "idle_s": round(decision.idle_s, 3) if decision.HasField("idle_s") else None,
        "batch_objects": decision.batch_objects,
        "seq": decision.seq,
    }


def _decision_cells(decision: admin_pb2.KeyDecision) -> list[Cell]:
    from cenote.runtime.units import format_duration

    what = decision.fate
    if what == "evicted":
        what = f"evicted: {_EVICTED_FOR.get(decision.cause, decision.cause)}"
    idle = format_duration(decision.idle_s) if decision.HasField("idle_s") else None
    return [what, format_duration(decision.ago_s) + " ago", idle, decision.batch_objects]


def _document(reply: admin_pb2.ExplainResponse) -> dict[str, Any]:
    return {
        "namespace": reply.namespace.name,
        "state": reply.state,
        "size_bytes": reply.size_bytes,
        "version": {"epoch": reply.version.epoch, "seq": reply.version.seq},
        "idle_s": round(reply.idle_s, 3),
        "leases": reply.leases,
        "pinned": reply.pinned_s > 0,
        "pinned_s": None if math.isinf(reply.pinned_s) else round(reply.pinned_s, 3),
        "writer": reply.writer,
        "places": [_place(place) for place in reply.places],
        "decisions": [_decision(decision) for decision in reply.decisions],
        "found_in": list(reply.found_in),
        "over_quota": reply.over_quota,
        "log_keys": reply.log_keys,
        "log_s": round(reply.log_s, 3),
        "tenure_s": round(reply.tenure_s, 3),
    }


# ---- leases ----------------------------------------------------------------------------------


def leases(
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many clients.")] = 30,
    all_sessions: Annotated[
        bool, typer.Option("--all", help="Also clients that hold nothing now.")
    ] = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    wide: Wide = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """Who keeps what from being evicted: leases of readers, grants of writers, by client.

    Views are leases that no time ends: they do when the client closes them, or is gone.
    """
    from .connect import open_admin

    def show() -> int:
        with open_admin(master, grpc, deadline) as admin:
            reply = admin.sessions(limit)
        _print_sessions(reply, json=json, wide=wide, all_sessions=all_sessions)
        return EXIT_OK

    return watched(watch, show)


def _print_sessions(
    reply: admin_pb2.ListSessionsResponse, *, json: bool, wide: bool, all_sessions: bool
) -> None:
    from cenote.runtime.units import format_duration, format_size

    from .output import counted, note, print_json, print_table

    found = [s for s in reply.sessions if all_sessions or s.leases or s.grants]
    if json:
        print_json({"sessions": [_session(s) for s in found], "clients": reply.sessions_total})
        return
    print_table(
        [
            *("client", "process", "leases", "views", "objects", "leased", "ends in"),
            *("grants", "granted", "session"),
        ],
        (
            (
                s.client_name or "(no name)",
                s.process_id,
                s.leases,
                s.holds or None,
                s.leased_objects,
                format_size(s.leased_bytes),
                format_duration(s.ends_s) if s.leases > s.holds else None,
                s.grants or None,
                format_size(s.granted_bytes) if s.granted_bytes else None,
                s.session_id.hex()[:8],
            )
            for s in found
        ),
        empty="nobody holds anything",
        spare=["session", "views", "granted", "grants"],
        wide=wide,
    )
    if reply.sessions_total > len(found):
        more = counted(reply.sessions_total - len(found), "more client")
        note(f"{more} (--all lists those that hold nothing, --limit more)")


def _session(s: admin_pb2.SessionStatus) -> dict[str, Any]:
    return {
        "session_id": s.session_id.hex(),
        "client_name": s.client_name,
        "boot_id": s.boot_id,
        "process_id": s.process_id,
        "leases": s.leases,
        "views": s.holds,
        "leased_objects": s.leased_objects,
        "leased_bytes": s.leased_bytes,
        "ends_s": round(s.ends_s, 3),
        "grants": s.grants,
        "granted_bytes": s.granted_bytes,
        "expires_s": round(s.expires_s, 3),
    }
