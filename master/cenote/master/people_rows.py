"""What the pool looks like, as rows that people read with the metadata service's own tools.

    config            the cluster's name and the limits that it was started with
    nodes/ID          a store daemon: name, state, where it listens
    segments/ID       its memory: size, incarnation
    namespaces/ID     a key space: name, generation, fingerprint
    pins              how much is pinned

Nothing is read back from them: the journal is the truth. A row is written when it changed.
"""

from __future__ import annotations

import json
from typing import Final, final

from .decider import Decider
from .operations import Settings

__all__ = ["PeopleRows", "rows_of"]

INTERVAL_S: Final = 2.0


def rows_of(decider: Decider, settings: Settings) -> dict[str, str]:
    """All rows, as JSON."""
    state, config = decider.state, decider.config
    now_s = decider.clock.monotonic_s()
    status = state.status(now_s)
    rows: dict[str, object] = {
        "config": {
            "cluster_name": settings.cluster_name,
            "lease_ttl_max_s": config.lease_ttl_max_s,
            "session_ttl_s": config.session_ttl_s,
            "node_dead_s": config.node_dead_s,
            "node_forget_s": config.node_forget_s,
            "leased_share_max": config.leased_share_max,
            "pinned_share_max": config.pinned_share_max,
        },
        "pins": {"objects": status.pinned_objects, "bytes": status.pinned_bytes},
    }
    for node in state.nodes(now_s):
        rows[f"nodes/{node.node_id}"] = {
            "name": node.name,
            "state": node.state.name.lower() if node.attached else "not attached",
            "uuid": node.uuid.hex(),
            "boot_id": node.boot_id,
            "failure_domain": node.failure_domain,
            "endpoints": [endpoint.address for endpoint in node.endpoints],
            "segments": node.segment_ids,
            "version": node.server_version,
        }
    for segment in state.segments(now_s):
        rows[f"segments/{segment.segment_id}"] = {
            "node": segment.node_name,
            "index": segment.index,
            "tier": segment.tier,
            "incarnation": segment.incarnation.hex(),
            "size_bytes": segment.size_bytes,
        }
    for namespace in state.namespaces():
        rows[f"namespaces/{namespace.namespace_id}"] = {
            "name": namespace.name,
            "generation": namespace.generation,
            "fingerprint": namespace.fingerprint.decode("utf-8", "backslashreplace"),
            "durability": namespace.durability,
            "dram_quota_bytes": namespace.dram_quota_bytes,
            "ssd_quota_bytes": namespace.ssd_quota_bytes,
            "objects_quota": namespace.objects_quota,
            "priority": namespace.priority,
        }
    return {path: json.dumps(row) for path, row in rows.items()}


@final
class PeopleRows:
    """Publishes the rows of one tenure as they change; `look` is called with each tick."""

    def __init__(self, decider: Decider, settings: Settings) -> None:
        self._decider = decider
        self._settings = settings
        self._published: dict[str, str] = {}
        self._next_s = 0.0
        self._seen: tuple[int, ...] = ()

    def look(self) -> None:
        """Does something every two seconds at most, and only where something changed."""
        decider = self._decider
        now_s = decider.clock.monotonic_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        state = decider.state
        pinned = state.pinned_objects
        seen = (state.view_version, state.namespaces_version, pinned)
        if seen == self._seen:
            return
        self._seen = seen
        rows = rows_of(decider, self._settings)
        changed: dict[str, str | None] = {
            path: row for path, row in rows.items() if self._published.get(path) != row
        }
        changed.update(dict.fromkeys(self._published.keys() - rows.keys()))
        if changed:
            decider.backend.publish(changed)
            self._published = rows
