"""Who holds what: the cluster view, as a client's plans look things up in it."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.v1 import common_pb2

__all__ = ["Peers", "groups_by_node"]

_DOWN: Final = frozenset({common_pb2.NODE_STATE_DEAD, common_pb2.NODE_STATE_DETACHED})


class Peers:
    """The cluster view as lookups from segments to nodes. Replaced as a whole, never changed."""

    __slots__ = ("_table", "down", "node_by_segment", "nodes", "on_ssd", "view_version")

    def __init__(self, view: common_pb2.ClusterView, before: Peers | None = None) -> None:
        """`before`: the view so far. A master that was just restarted knows of nodes, and not yet
        where they serve: until they attach to it, they are where they were."""
        for node in view.nodes:
            known = None if node.endpoints or before is None else before.nodes.get(node.node_id)
            if known is not None:
                node.endpoints.extend(known.endpoints)
        self.view_version = view.view_version
        self.nodes: dict[int, common_pb2.NodeView] = {node.node_id: node for node in view.nodes}
        self.down = {node.node_id for node in view.nodes if node.state in _DOWN}
        """Nodes that the master has given up, for now."""
        self.node_by_segment: dict[int, int] = {
            segment.segment_id: segment.node_id for segment in view.segments
        }
        self.on_ssd = frozenset(
            segment.segment_id for segment in view.segments if segment.tier == common_pb2.TIER_SSD
        )
        """Segments on an SSD."""
        # Segment ids are dense. The last entry stands for all that are higher.
        self._table = np.full(max(self.node_by_segment, default=0) + 2, -1, np.int64)
        for segment_id, node_id in self.node_by_segment.items():
            self._table[segment_id] = node_id

    def nodes_of(self, segments: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The node of each segment, -1 where this view does not know the segment."""
        return self._table.take(segments, mode="clip")


def groups_by_node(nodes: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64] | None]]:
    """(node, which rows lie there; None: all of them) for each node."""
    if not len(nodes):
        return []
    first = int(nodes[0])
    if (nodes == first).all():
        return [(first, None)]
    return [(node, np.flatnonzero(nodes == node)) for node in np.unique(nodes).tolist()]
