"""The way to each node: which transport is taken, why not a better one, and back to it later.

Transports stand in their order of preference. The first that sees no obstacle and connects is
taken. Where a better one could not, it is tried again after a pause that doubles, and its channel
then replaces the other one, in which calls under way go on to their end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from cenote.api.errors import CenoteError, Unavailable
from cenote.api.types import PathObstacle, PeerPath
from cenote.transport.base import Channel, SessionIdentity, Transport
from cenote.v1 import common_pb2

__all__ = ["Ways", "name_of", "not_tried"]

PREFERENCE: Final = ("shm", "rdma", "tcp")
"""What a client would take, could it choose from all."""
PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0


def name_of(transport: Transport) -> str:
    """ "shm", "rdma", "tcp", as options name it."""
    try:
        name = common_pb2.TransportKind.Name(transport.kind)
    except ValueError:
        return str(transport.kind)
    return name.removeprefix("TRANSPORT_KIND_").lower()


def not_tried(allowed: Sequence[str], taken: str | None) -> list[PathObstacle]:
    """Ways that are better than `taken`, and that this client is told to leave or to put behind."""
    better: tuple[str, ...] = PREFERENCE
    if taken is not None:
        better = better[: better.index(taken)] if taken in better else ()
    only = f"this client is told to use only {', '.join(allowed)}"
    found = [PathObstacle(name, only) for name in better if name not in allowed]
    if taken is not None:
        behind = allowed[allowed.index(taken) + 1 :]
        rather = f"this client is told to prefer {taken}"
        found += [PathObstacle(name, rather) for name in better if name in behind]
    return found


@dataclass(slots=True)
class _Way:
    rank: int
    """Of the transport that is taken; as many as there are where none is."""
    obstacles: list[PathObstacle]
    try_at_s: float
    pause_s: float = PAUSE_MIN_S


@final
class Ways:
    """Of one client, to all nodes. Several threads may work on different nodes."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = list(transports)
        self._names = [name_of(transport) for transport in transports]
        self._ways: dict[int, _Way] = {}

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, until_s: float
    ) -> Channel:
        """A channel by the best way that there is.

        Raises the first connection's error, Unavailable where no transport can work to that node.
        """
        count = len(self._transports)
        channel, failure = self._connect(node, identity, epoch, until_s, count)
        if channel is not None:
            return channel
        if failure is not None:
            raise failure
        way = self._ways[node.node_id]
        raise Unavailable(
            f"no transport of {', '.join(self._names)} reaches node {node.name or node.node_id}: "
            + "; ".join(f"{found.path}: {found.reason}" for found in way.obstacles),
            remedy="allow another transport, e.g. transports=('shm', 'tcp')",
        )

    def _connect(
        self,
        node: common_pb2.NodeView,
        identity: SessionIdentity,
        epoch: int,
        until_s: float,
        count: int,
    ) -> tuple[Channel | None, CenoteError | None]:
        """By one of the first `count` transports: the channel, else the first failure."""
        obstacles: list[PathObstacle] = []
        failure: CenoteError | None = None
        known = self._ways.get(node.node_id)
        for rank, transport in enumerate(self._transports[:count]):
            reason = transport.obstacle(node, identity)
            if reason is None:
                try:
                    left_s = max(0.001, until_s - time.monotonic())
                    channel = transport.connect(node, identity, epoch, left_s)
                except CenoteError as error:
                    failure = failure or error
                    reason = str(error)
                else:
                    way = _Way(rank, obstacles, time.monotonic() + PAUSE_MIN_S)
                    self._ways[node.node_id] = way
                    return channel, failure
            obstacles.append(PathObstacle(self._names[rank], reason))
        if known is None or count == len(self._transports):
            self._ways[node.node_id] = _Way(count, obstacles, 0.0)
        else:
            known.obstacles = obstacles
        return None, failure

    def improvable(
        self, nodes: Mapping[int, common_pb2.NodeView], identity: SessionIdentity, now_s: float
    ) -> list[int]:
        """Nodes to which a better way is to be tried now: there is one that sees no obstacle."""
        found: list[int] = []
        for node_id, way in list(self._ways.items()):
            node = nodes.get(node_id)
            if not 0 < way.rank < len(self._transports) or now_s < way.try_at_s or node is None:
                continue
            better = self._transports[: way.rank]
            if any(transport.obstacle(node, identity) is None for transport in better):
                found.append(node_id)
            else:
                self._postpone(way, now_s)
        return found

    def _postpone(self, way: _Way, now_s: float) -> None:
        way.pause_s = min(PAUSE_MAX_S, 2 * way.pause_s)
        way.try_at_s = now_s + way.pause_s

    def improve(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, until_s: float
    ) -> Channel | None:
        """A channel by a better way than the one that is taken; None where there is none yet."""
        way = self._ways.get(node.node_id)
        if way is None:
            return None
        channel, _ = self._connect(node, identity, epoch, until_s, way.rank)
        if channel is None:
            self._postpone(way, time.monotonic())
        return channel

    def taken(self, node_id: int) -> str:
        """The transport of the channel that was made to that node last."""
        way = self._ways.get(node_id)
        known = way is not None and way.rank < len(self._names)
        return self._names[way.rank] if way is not None and known else "unknown"

    def forget_all(self) -> None:
        """The numbers of nodes mean others now."""
        self._ways.clear()

    def path(
        self,
        node: common_pb2.NodeView,
        channel: Channel | None,
        error: CenoteError | None = None,
    ) -> PeerPath:
        """The way to a node over `channel`; where there is none, why, as it was found last.

        `error`: of a connection that was just tried in vain.
        """
        way = self._ways.get(node.node_id)
        if way is None or ((error is not None or channel is None) and way.rank < len(self._names)):
            why = "it was not connected to" if error is None else str(error)
            found = [PathObstacle(name, why) for name in self._names]
            return self._peer_path(node, None, "", found)
        if channel is None or way.rank >= len(self._names):
            return self._peer_path(node, None, "", way.obstacles)
        taken = self._names[way.rank]
        if channel.obstacle and taken in PREFERENCE:
            found = [*way.obstacles, PathObstacle(taken, f"for the moment: {channel.obstacle}")]
            return self._peer_path(node, "tcp", channel.route, found)
        return self._peer_path(node, taken, channel.route, way.obstacles)

    def predicted(self, node: common_pb2.NodeView, identity: SessionIdentity) -> PeerPath:
        """The way that would be taken, as far as can be told without connecting."""
        obstacles: list[PathObstacle] = []
        for transport, name in zip(self._transports, self._names, strict=True):
            reason = transport.obstacle(node, identity)
            if reason is None:
                return self._peer_path(node, name, "", obstacles)
            obstacles.append(PathObstacle(name, reason))
        return self._peer_path(node, None, "", obstacles)

    def _peer_path(
        self,
        node: common_pb2.NodeView,
        taken: str | None,
        route: str,
        obstacles: Sequence[PathObstacle],
    ) -> PeerPath:
        order = {name: rank for rank, name in enumerate(PREFERENCE)}
        known = {obstacle.path for obstacle in obstacles}
        more = [found for found in not_tried(self._names, taken) if found.path not in known]
        found = [*obstacles, *more]
        found.sort(key=lambda obstacle: order.get(obstacle.path, -1))
        return PeerPath(node.node_id, node.name, taken, route, tuple(found))
