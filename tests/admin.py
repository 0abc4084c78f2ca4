"""What the tests ask of a cluster's administration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from cenote.v1 import admin_pb2, admin_pb2_grpc
from cluster import Cluster

__all__ = ["Admin", "admin_of"]

_TIMEOUT_S = 10.0


class Admin:
    """AdminService of a cluster's master."""

    def __init__(self, channel: grpc.Channel) -> None:
        make_stub: Any = admin_pb2_grpc.AdminServiceStub
        self._stub = make_stub(channel)

    def status(self) -> admin_pb2.GetStatusResponse:
        status: admin_pb2.GetStatusResponse = self._stub.GetStatus(
            admin_pb2.GetStatusRequest(), timeout=_TIMEOUT_S, wait_for_ready=True
        )
        return status

    def nodes(self) -> dict[str, admin_pb2.NodeStatus]:
        """By name."""
        reply = self._stub.ListNodes(
            admin_pb2.ListNodesRequest(), timeout=_TIMEOUT_S, wait_for_ready=True
        )
        return {node.view.name: node for node in reply.nodes}

    def node_of_segments(self) -> dict[int, str]:
        """Names of nodes by segment id."""
        reply = self._stub.ListSegments(
            admin_pb2.ListSegmentsRequest(), timeout=_TIMEOUT_S, wait_for_ready=True
        )
        return {segment.view.segment_id: segment.node_name for segment in reply.segments}

    def fill_ratios(self) -> dict[str, float]:
        """By node's name: the share of its capacity that is used."""
        return {name: n.used_bytes / n.capacity_bytes for name, n in self.nodes().items()}


@contextmanager
def admin_of(cluster: Cluster) -> Iterator[Admin]:
    """The administration of a running cluster."""
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield Admin(channel)
