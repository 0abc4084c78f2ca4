"""What a node's daemon counts and tells with each heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NodeCounters"]


@dataclass(slots=True)
class NodeCounters:
    """Since the daemon's start; see NodeStats in the schema."""

    read_bytes: int = 0
    written_bytes: int = 0
    seals: int = 0
    sessions: int = 0
    connections: int = 0
    broken_slots: int = 0
    unverified_slots: int = 0
    rdma_registered_bytes: int = 0
    rdma_queue_pairs: int = 0
    rdma_received_bytes: int = 0
    rdma_sent_bytes: int = 0
    rdma_trouble: str = ""
    """Why memory there goes over TCP; empty where nothing is wrong."""
    ssd_write_budget_bytes: int = 0
    """For any 24 hours; 0: none."""
    ssd_write_allowance_bytes: int = 0
    ssd_written_day_bytes: int = 0
    ssd_written_total_bytes: int = 0
