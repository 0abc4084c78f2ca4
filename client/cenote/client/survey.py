"""Asking which way a client's bytes take to each node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from cenote.api.errors import CenoteError, DeadlineExceeded, Unavailable
from cenote.api.types import PeerPath
from cenote.v1 import common_pb2

from .config import make_config
from .reaching import reach_masters
from .session import Session
from .transports import make_transports

__all__ = ["survey", "survey_from_here"]


def survey_from_here(
    addresses: Sequence[str], transports: Sequence[str], deadline_s: float
) -> list[PeerPath]:
    """As a client of these masters that is told to use these transports would find it.

    Opens no namespace and leaves nothing behind. Raises as `Client` does.
    """
    until_s = time.monotonic() + deadline_s
    options: dict[str, object] = {"transports": list(transports), "name": "cenote-paths"}
    config = make_config(addresses, options)
    tls = config.tls()
    session = Session(
        config,
        lambda hello, greeted: reach_masters(config, hello, greeted, tls),
        make_transports(config, tls),
    )
    try:
        session.open(deadline_s)
        return survey(session, max(0.001, until_s - time.monotonic()))
    finally:
        session.close()


def survey(session: Session, deadline_s: float) -> list[PeerPath]:
    """The way to each node of the pool, by name; those not talked to yet are connected to.

    Raises what fetching the view of the pool raises.
    """
    until_s = time.monotonic() + deadline_s
    session.refresh_view(deadline_s)
    peers = session.state.peers
    nodes = sorted(peers.nodes.values(), key=lambda node: (node.name, node.node_id))
    errors: dict[int, CenoteError] = {
        node.node_id: Unavailable("the master does not count on this node now")
        for node in nodes
        if node.node_id in peers.down
    }
    asked: dict[int, Future[CenoteError | None]] = {
        node.node_id: session.pool().submit(_connect, session, node.node_id, until_s)
        for node in nodes
        if node.node_id not in errors and node.node_id not in session.channels
    }
    wait_for(asked.values(), max(0.0, until_s - time.monotonic()))
    for node_id, future in asked.items():
        if future.cancel() or not future.done():
            errors[node_id] = DeadlineExceeded("no connection before the deadline")
        elif (error := future.result()) is not None:
            errors[node_id] = error
    return [_path(session, node, errors.get(node.node_id)) for node in nodes]


def _connect(session: Session, node_id: int, until_s: float) -> CenoteError | None:
    left_s = until_s - time.monotonic()
    try:
        if left_s <= 0:
            raise DeadlineExceeded("no time was left to connect to it")
        session.channel(node_id, left_s)
    except CenoteError as error:
        return error
    return None


def _path(session: Session, node: common_pb2.NodeView, error: CenoteError | None) -> PeerPath:
    return session.ways.path(node, session.channels.get(node.node_id), error)
