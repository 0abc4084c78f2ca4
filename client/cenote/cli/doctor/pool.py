"""The pool: masters, their metadata service, the other nodes. Nothing is left behind there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

from cenote.api.errors import CenoteError, NotLeader, Unavailable
from cenote.api.types import PeerPath
from cenote.cli.connect import Admin
from cenote.client.config import make_config
from cenote.client.session import boot_id
from cenote.client.survey import survey_from_here
from cenote.kv.etcd_options import EtcdOptions
from cenote.rpc.lane_client import LaneClient
from cenote.runtime.units import format_duration, format_size
from cenote.v1 import admin_pb2
from cenote.v1 import master_pb2 as pb

from .clock import judge_skew
from .findings import Check, Finding, Verdict

__all__ = [
    "etcd_checks",
    "judge_etcd",
    "judge_lane",
    "judge_path",
    "judge_status",
    "pool_checks",
    "quota_in",
]

ROUND_TRIP_SLOW_S: Final = 0.005
BACKLOG_OLD_S: Final = 1.0
QUOTA_SHARE_HIGH: Final = 0.8
"""Of etcd's quota, in use."""
_DB_BYTES: Final = "etcd_mvcc_db_total_size_in_bytes"
_QUOTA_BYTES: Final = "etcd_server_quota_backend_bytes"
_METRICS_BYTES_MAX: Final = 4 << 20
_ROUND_TRIPS: Final = 5
_ANSWER_BYTES_MAX: Final = 65_536
_MASTER_REMEDY: Final = "is it running? does a firewall drop its port? does --master name it?"


def pool_checks(
    addresses: Sequence[str], lanes: Sequence[str], grpc: Sequence[str], transports: Sequence[str]
) -> list[Check]:
    """Masters by lane and by gRPC, and the way to each node.

    `addresses`: what clients are told, which may be etcd's; `lanes`: the masters' own.
    """
    checks = [Check(f"master {lane}", _lane_look(lane)) for lane in lanes]
    checks.append(Check("master grpc", lambda deadline_s: _look_at_status(grpc, deadline_s)))

    def peers(deadline_s: float) -> list[Finding]:
        found = survey_from_here(addresses, transports, deadline_s)
        if not found:
            return [Finding("peers", Verdict.SKIPPED, "the master knows no store daemon")]
        return [judge_path(path) for path in found]

    return [*checks, Check("peers", peers)]


# ---- the lane ----------------------------------------------------------------------------------


def _lane_look(address: str) -> Callable[[float], list[Finding]]:
    def look(deadline_s: float) -> list[Finding]:
        try:
            reply, round_trip_s = _greet_master(address, deadline_s)
        except CenoteError as error:
            remedy = error.remedy or _MASTER_REMEDY
            return [Finding(f"master {address}", Verdict.FAIL, error.message, remedy)]
        return [judge_lane(address, reply, round_trip_s)]

    return look


def _greet_master(address: str, deadline_s: float) -> tuple[pb.HelloResponse, float]:
    """What it says in its hello, and its quickest answer. Raises Unavailable, DeadlineExceeded."""
    config = make_config(None, {})
    hello = pb.HelloRequest(
        credentials=config.credentials(),
        session_id=secrets.token_bytes(16),
        client_name="cenote-doctor",
        boot_id=boot_id(),
        process_id=os.getpid(),
        observer=True,
    )
    replies: list[bytes] = []
    quickest_s = float("inf")
    until_s = time.monotonic() + deadline_s
    ask = pb.GetClusterViewRequest(known_view_version=1 << 62).SerializeToString()
    with LaneClient(
        address,
        hello.SerializeToString(),
        on_hello=replies.append,
        connect_timeout_s=deadline_s,
        tls=config.tls(),
    ) as lane:
        for _ in range(_ROUND_TRIPS):
            began_s = time.monotonic()
            try:
                lane.call(pb.MASTER_METHOD_GET_CLUSTER_VIEW, ask, max(0.001, until_s - began_s))
            except NotLeader:
                break  # it answered the hello: a standby
            quickest_s = min(quickest_s, time.monotonic() - began_s)
        if replies:
            bye = pb.CloseSessionRequest(session_id=hello.session_id).SerializeToString()
            left_s = max(0.001, until_s - time.monotonic())
            with contextlib.suppress(CenoteError):  # it holds nothing, and runs out by itself
                lane.call(pb.MASTER_METHOD_CLOSE_SESSION, bye, left_s)
    if not replies:
        raise Unavailable(f"{address} did not answer the hello", remedy=_MASTER_REMEDY)
    return pb.HelloResponse.FromString(replies[0]), quickest_s


def judge_lane(address: str, reply: pb.HelloResponse, round_trip_s: float) -> Finding:
    """Of one master, which may lead or stand by."""
    check = f"master {address}"
    if not reply.is_leader:
        where = ", ".join(reply.leader_addresses)
        if not where:
            return Finding(
                check,
                Verdict.WARN,
                "it stands by, and knows no leader",
                "are the others running, and does etcd take writes? `cenote status`",
            )
        return Finding(check, Verdict.OK, f"it stands by; {where} leads")
    text = f"it leads, epoch {reply.epoch}, answers in {format_duration(round_trip_s)}"
    if reply.past_tenure:
        return Finding(
            check,
            Verdict.FAIL,
            f"{text}, and can't prove any more that it leads",
            "it does not reach its metadata service: check etcd",
        )
    if round_trip_s > ROUND_TRIP_SLOW_S:
        return Finding(
            check,
            Verdict.WARN,
            f"{text}: each call that asks the master takes as long",
            "look at the network between, and at the load of the master's host",
        )
    return Finding(check, Verdict.OK, text)


# ---- gRPC, and what the master says of itself --------------------------------------------------


def _look_at_status(grpc: Sequence[str], deadline_s: float) -> list[Finding]:
    with Admin(grpc, deadline_s=deadline_s) as admin:
        return judge_status(admin.status())


def judge_status(reply: admin_pb2.GetStatusResponse) -> list[Finding]:
    """What the leader says of itself, in the words of `cenote status`."""
    check = "master grpc"
    if reply.role != "leader":
        return [
            Finding(
                check,
                Verdict.FAIL,
                "masters answer, and none of them leads",
                "does etcd take writes? an election takes some seconds",
            )
        ]
    if reply.writes_refused:
        return [
            Finding(check, Verdict.FAIL, f"it takes no writes: {reply.writes_refused}", "see etcd")
        ]
    if reply.backlog_age_s > BACKLOG_OLD_S:
        return [
            Finding(
                check,
                Verdict.WARN,
                f"its metadata service is {reply.backlog_age_s:.1f} s behind",
                "etcd's disk is too slow, or busy with something else",
            )
        ]
    alive = f"{reply.nodes_alive} of {reply.nodes_total} nodes alive"
    text = f"{reply.cluster_name}, {reply.metadata_backend}, {alive}"
    if reply.nodes_alive < reply.nodes_total:
        return [Finding(check, Verdict.WARN, text, "`cenote nodes` says which")]
    return [Finding(check, Verdict.OK, text)]


def metadata_url(grpc: Sequence[str], deadline_s: float) -> str:
    """Where the master says that its metadata are; "" where it can't be asked."""
    try:
        with Admin(grpc, deadline_s=deadline_s) as admin:
            return admin.status().metadata_backend
    except CenoteError:
        return ""  # said by the check of gRPC


# ---- etcd --------------------------------------------------------------------------------------


def etcd_checks(options: EtcdOptions) -> list[Check]:
    """One for each endpoint."""
    return [
        Check(f"etcd {host}:{port}", _etcd_look(host, port, options))
        for host, port in options.endpoints
    ]


def _etcd_look(host: str, port: int, options: EtcdOptions) -> Callable[[float], list[Finding]]:
    def look(deadline_s: float) -> list[Finding]:
        check = f"etcd {host}:{port}"
        try:
            answer, skew_s, took_s = _ask_etcd(host, port, options, deadline_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return [
                Finding(
                    check,
                    Verdict.FAIL,
                    f"no answer: {error or type(error).__name__}",
                    "is it running? masters need a majority of etcd's members; for TLS, --etcd-ca",
                )
            ]
        quota = _ask_quota(host, port, options, deadline_s)
        return judge_etcd(check, answer, skew_s, took_s, quota)

    return look


def _ask_etcd(
    host: str, port: int, options: EtcdOptions, deadline_s: float
) -> tuple[object, float | None, float]:
    """(what /health says, its time of day less ours, seconds that it took)."""
    connection = _connection_to(host, port, options, deadline_s)
    try:
        began_s = time.monotonic()
        connection.request("GET", "/health")
        response = connection.getresponse()
        took_s = time.monotonic() - began_s
        body = response.read(_ANSWER_BYTES_MAX)
        date = response.getheader("Date")
    finally:
        connection.close()
    skew_s = None
    if date:
        skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - (time.time() - took_s / 2)
    return json.loads(body), skew_s, took_s


def _connection_to(
    host: str, port: int, options: EtcdOptions, deadline_s: float
) -> http.client.HTTPConnection:
    if not options.ca:
        return http.client.HTTPConnection(host, port, timeout=deadline_s)
    import ssl

    context = ssl.create_default_context(cafile=options.ca)
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return http.client.HTTPSConnection(host, port, timeout=deadline_s, context=context)


def _ask_quota(
    host: str, port: int, options: EtcdOptions, deadline_s: float
) -> tuple[int, int] | None:
    """(bytes of its database, its quota) of a member's own metrics; None where it shows none."""
    connection = _connection_to(host, port, options, deadline_s)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(_METRICS_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return quota_in(text)


def quota_in(metrics: str) -> tuple[int, int] | None:
    """(bytes of the database, the quota) in what a member of etcd shows Prometheus."""
    found = {}
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name in (_DB_BYTES, _QUOTA_BYTES):
            with contextlib.suppress(ValueError):
                found[name] = int(float(value))
    if len(found) < 2 or found[_QUOTA_BYTES] <= 0:
        return None
    return found[_DB_BYTES], found[_QUOTA_BYTES]


def judge_etcd(
    check: str,
    answer: object,
    skew_s: float | None,
    took_s: float,
    quota: tuple[int, int] | None = None,
) -> list[Finding]:
    """What a member says of itself. `quota`: bytes of its database, and how many it may have."""
    health = answer.get("health") if isinstance(answer, dict) else None
    if str(health).lower() != "true":
        reason = answer.get("reason", "") if isinstance(answer, dict) else ""
        return [
            Finding(
                check,
                Verdict.FAIL,
                f"it says that it is not healthy{': ' + str(reason) if reason else ''}",
                "etcdctl endpoint status; a majority of members is needed, and no alarm",
            )
        ]
    if skew_s is not None and (skewed := judge_skew(check, skew_s, took_s)) is not None:
        return [skewed]
    room = ""
    if quota is not None:
        used, most = quota
        room = f", its database has {format_size(used)} of {format_size(most)}"
        if used > QUOTA_SHARE_HIGH * most:
            return [
                Finding(
                    check,
                    Verdict.WARN,
                    f"healthy{room}: at its quota it takes no more writes",
                    "defragment the members one by one (etcdctl defrag); start them with a larger"
                    " --quota-backend-bytes",
                )
            ]
    clock = "" if skew_s is None else ", its time of day is this host's within seconds"
    return [
        Finding(check, Verdict.OK, f"healthy, answers in {format_duration(took_s)}{room}{clock}")
    ]


# ---- nodes -------------------------------------------------------------------------------------


def judge_path(path: PeerPath) -> Finding:
    """Of one node: how it is reached, and whether a better way should work and does not."""
    check = f"peer {path.node}"
    reasons = "; ".join(f"{o.path}: {o.reason}" for o in path.obstacles)
    if path.path is None:
        return Finding(
            check,
            Verdict.FAIL,
            f"it can't be reached: {reasons}",
            "is it running? does a firewall drop its port? does it --advertise an address that this"
            " host knows?",
        )
    found = f"over {path.path} ({path.route})"
    hidden = [o.reason for o in path.obstacles if o.path == "shm" and "can't be seen" in o.reason]
    if hidden:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: it is on this host, and {hidden[0]}",
            "give both containers the directory of its socket (--socket-dir)",
        )
    return Finding(check, Verdict.OK, found)
