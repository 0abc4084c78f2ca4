"""What a client counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Plain counters; see `cenote.api.types.ClientStats`."""

    hits: int = 0
    ssd_hits: int = 0
    misses: int = 0
    stored: int = 0
    existed: int = 0
    failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    cached_reads: int = 0
    stale_locations: int = 0
    node_failures: int = 0
    unreachable_misses: int = 0
    misreads: int = 0
    retries: int = 0
