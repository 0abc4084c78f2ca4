"""What the tests ask of a cluster's administration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from cenote.api.errors import CenoteError, Unavailable
from cenote.cli import connect as cli
from cenote.v1 import admin_pb2, admin_pb2_grpc
from cluster import Cluster
from waiting import wait_until

__all__ = ["Admin", "admin_of"]

T = TypeVar("T")
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


class _Leaders(Admin):
    """Of whichever of several masters leads; waits where none does."""

    def __init__(self, admin: cli.Admin) -> None:
        self._admin = admin

    def _wait(self, ask: Callable[[], T]) -> T:
        found: list[T] = []

        def asked() -> bool:
            with contextlib.suppress(CenoteError):
                found.append(ask())
            return bool(found)

        wait_until(asked, 2 * _TIMEOUT_S, what="a master to lead")
        return found[0]

    def _status(self) -> admin_pb2.GetStatusResponse:
        status = self._admin.status()
        if status.role != "leader":
            raise Unavailable("no master leads")
        return status

    def status(self) -> admin_pb2.GetStatusResponse:
        return self._wait(self._status)

    def nodes(self) -> dict[str, admin_pb2.NodeStatus]:
        return {node.view.name: node for node in self._wait(self._admin.nodes)}


@contextmanager
def admin_of(cluster: Cluster) -> Iterator[Admin]:
    """The administration of a running cluster."""
    if len(cluster.masters) > 1:
        with cli.Admin(cluster.grpc.split(","), deadline_s=_TIMEOUT_S / 5) as admin:
            yield _Leaders(admin)
        return
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield Admin(channel)
