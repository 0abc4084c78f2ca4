"""What the state shows, as messages."""

from __future__ import annotations

from typing import Final, cast, final

from cenote.v1 import admin_pb2, common_pb2

from .decider import Decider
from .nodes import NodeState
from .task_view import TaskStatus
from .view import NamespaceStatus, NodeStatus, SegmentStatus

__all__ = [
    "ViewCache",
    "namespace_message",
    "node_message",
    "segment_message",
    "task_message",
]

_SHOWN: Final = {NodeState.SUSPECT: NodeState.ALIVE}
"""Suspicion is between one host and a node: the view that all share doesn't tell."""


def _state(state: NodeState) -> common_pb2.NodeState:
    return cast(common_pb2.NodeState, int(state))  # the numbers are the same


def _node_view(node: NodeStatus) -> common_pb2.NodeView:
    return common_pb2.NodeView(
        node_id=node.node_id,
        name=node.name,
        boot_id=node.boot_id,
        failure_domain=node.failure_domain,
        endpoints=[
            common_pb2.Endpoint(
                kind=cast(common_pb2.TransportKind, endpoint.kind),
                address=endpoint.address,
                device_info=endpoint.device_info,
            )
            for endpoint in node.endpoints
        ],
        segment_ids=node.segment_ids,
        state=_state(node.state),
    )


def _segment_view(segment: SegmentStatus) -> common_pb2.SegmentView:
    return common_pb2.SegmentView(
        segment_id=segment.segment_id,
        node_id=segment.node_id,
        node_segment_index=segment.index,
        tier=cast(common_pb2.Tier, segment.tier),
        incarnation=segment.incarnation,
        size_bytes=segment.size_bytes,
        ready_bytes=segment.ready_bytes,
        unit_bytes=segment.unit_bytes,
    )


@final
class ViewCache:
    """The cluster view, made anew when it changed."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._view = common_pb2.ClusterView()

    def view(self) -> common_pb2.ClusterView:
        """Not to be changed by the caller."""
        state = self._decider.state
        version = state.view_version
        if self._view.view_version != version:
            now_s = self._decider.clock.monotonic_s()
            view = common_pb2.ClusterView(view_version=version)
            for node in state.nodes(now_s):
                shown = _node_view(node)
                shown.state = _state(_SHOWN.get(node.state, node.state))
                view.nodes.append(shown)
            view.segments.extend(_segment_view(segment) for segment in state.segments(now_s))
            self._view = view
        return self._view


def node_message(node: NodeStatus) -> admin_pb2.NodeStatus:
    """For people."""
    return admin_pb2.NodeStatus(
        view=_node_view(node),
        capacity_bytes=node.capacity_bytes,
        used_bytes=node.used_bytes,
        heartbeat_age_s=node.heartbeat_age_s,
        read_bytes=node.read_bytes,
        written_bytes=node.written_bytes,
        sessions=node.sessions,
        process_id=node.process_id,
        server_version=node.server_version,
        drained=node.drained,
        rdma_registered_bytes=node.rdma_registered_bytes,
        rdma_queue_pairs=node.rdma_queue_pairs,
        rdma_received_bytes=node.rdma_received_bytes,
        rdma_sent_bytes=node.rdma_sent_bytes,
        rdma_trouble=node.rdma_trouble,
        ssd_write_budget_bytes=node.ssd_write_budget_bytes,
        ssd_write_allowance_bytes=node.ssd_write_allowance_bytes,
        ssd_written_day_bytes=node.ssd_written_day_bytes,
        ssd_written_total_bytes=node.ssd_written_total_bytes,
        ssd_capacity_bytes=node.ssd_capacity_bytes,
        ssd_used_bytes=node.ssd_used_bytes,
    )


def segment_message(segment: SegmentStatus) -> admin_pb2.SegmentStatus:
    """For people."""
    return admin_pb2.SegmentStatus(
        view=_segment_view(segment),
        node_name=segment.node_name,
        used_bytes=segment.used_bytes,
        objects=segment.objects,
        slots=segment.slots,
        slots_used=segment.slots_used,
        largest_free_bytes=segment.largest_free_bytes,
        free_runs=segment.free_runs,
        retired_bytes=segment.retired_bytes,
    )


def namespace_message(namespace: NamespaceStatus) -> admin_pb2.NamespaceStatus:
    """For people."""
    return admin_pb2.NamespaceStatus(
        name=namespace.name,
        namespace_id=namespace.namespace_id,
        generation=namespace.generation,
        fingerprint=namespace.fingerprint,
        durability=cast(common_pb2.Durability, namespace.durability),
        objects=namespace.objects,
        used_bytes=namespace.used_bytes,
        ssd_used_bytes=namespace.ssd_used_bytes,
        dram_quota_bytes=namespace.dram_quota_bytes,
        ssd_quota_bytes=namespace.ssd_quota_bytes,
        objects_quota=namespace.objects_quota,
        priority=cast(common_pb2.Priority, namespace.priority),
        pinned_objects=namespace.pinned_objects,
        pinned_bytes=namespace.pinned_bytes,
    )


def task_message(status: TaskStatus) -> admin_pb2.TaskStatus:
    """For people."""
    task = status.task
    return admin_pb2.TaskStatus(
        kind=task.cause.value,
        node_id=task.node_id,
        node_name=status.node_name,
        state=status.state,
        running_s=status.running_s,
        bandwidth=task.bandwidth,
        moved_objects=task.moved,
        moved_bytes=task.moved_bytes,
        dropped_objects=task.dropped,
        evicted_objects=task.evicted,
        failed_copies=task.failed,
        remaining_objects=task.remaining,
        remaining_bytes=task.remaining_bytes,
        note=status.note,
    )
