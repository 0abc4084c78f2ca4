"""`cenote paths`: which way bytes take from here to each node, and why not a better one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_ERROR, EXIT_OK
from .options import MASTER_DEFAULT, AsJson, DeadlineS, MasterAddress, Wide

if TYPE_CHECKING:
    from cenote.api.types import PeerPath
    from cenote.v1 import common_pb2

__all__ = ["TRANSPORTS_DEFAULT", "Transports", "paths", "predicted_paths", "split_transports"]

TRANSPORTS_DEFAULT: Final = "shm,rdma,tcp"

Transports = Annotated[
    str,
    typer.Option(
        "--transports",
        envvar="CENOTE_CLIENT_TRANSPORTS",
        metavar="LIST",
        help="Ways that may be taken, in order of preference; one alone is forced.",
    ),
]


def split_transports(text: str) -> tuple[str, ...]:
    """("shm", "tcp") of "shm,tcp". Raises InvalidArgument where there is none."""
    from cenote.api.errors import InvalidArgument

    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument("no transport is named", remedy="--transports shm,tcp")
    return found


def paths(
    master: MasterAddress = MASTER_DEFAULT,
    transports: Transports = TRANSPORTS_DEFAULT,
    json: AsJson = False,
    wide: Wide = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Which way bytes take from this host to each node, and why not a better one.

    Connects to each of them as a client would. Exit code 1 where a node can't be reached.
    """
    from cenote.client.survey import survey_from_here

    from .output import print_json, print_table

    found = survey_from_here(master.split(","), split_transports(transports), deadline)
    if json:
        print_json([_document(path) for path in found])
    else:
        print_table(
            ["node", "id", "path", "over", "why not a better one"],
            ((p.node, p.node_id, p.path or "none", p.route or None, why(p)) for p in found),
            empty="no node: start one with `cenote store`",
            spare=["id", "over"],
            wide=wide,
        )
    return EXIT_OK if all(path.path for path in found) else EXIT_ERROR


def why(path: PeerPath) -> str | None:
    """The obstacles, those with the same reason together; None where there is none."""
    by_reason: dict[str, list[str]] = {}
    for obstacle in path.obstacles:
        by_reason.setdefault(obstacle.reason, []).append(obstacle.path)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items()) or None


def _document(path: PeerPath) -> dict[str, Any]:
    return {
        "node": path.node,
        "node_id": path.node_id,
        "path": path.path,
        "over": path.route,
        "obstacles": [{"path": o.path, "reason": o.reason} for o in path.obstacles],
    }


def predicted_paths(
    nodes: Sequence[common_pb2.NodeView], transports: Sequence[str]
) -> dict[int, PeerPath]:
    """By node: the way that a client on this host would take, as far as can be told without
    connecting. Raises ConfigError for a transport that there is not."""
    import os

    from cenote.client.config import make_config
    from cenote.client.session import boot_id
    from cenote.client.transports import make_transports
    from cenote.client.ways import Ways
    from cenote.transport.base import SessionIdentity
    from cenote.v1 import common_pb2

    made = make_transports(make_config(None, {"transports": list(transports)}))
    try:
        identity = SessionIdentity(b"", boot_id(), os.getpid(), common_pb2.Credentials())
        ways = Ways(made)
        return {node.node_id: ways.predicted(node, identity) for node in nodes}
    finally:
        for transport in made:
            transport.close()
