"""What happened since start, as plain ints: a collector reads them at scrape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cenote.runtime.metrics import Histogram

__all__ = ["Counters"]

AGE_BOUNDS_S: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0)
_REASONS: Final = 8
"""More than `GoneReason` has."""


@dataclass(slots=True)
class Counters:
    exists_keys: int = 0
    exists_hits: int = 0
    acquired_keys: int = 0
    acquired_hits: int = 0
    unleased_hits: int = 0
    """Hits answered without a lease because the leased share was used up."""
    touched_keys: int = 0
    put_keys: int = 0
    put_granted: int = 0
    put_exists: int = 0
    put_no_space: int = 0
    put_refused: int = 0
    """Too large, quota, replicas, duplicates, invalid."""
    put_striped: int = 0
    """Objects granted in more than one piece."""
    committed: int = 0
    committed_bytes: int = 0
    commit_lost: int = 0
    """Another writer was first."""
    commit_not_granted: int = 0
    aborted: int = 0
    dedup_puts: int = 0
    """Objects that were stored as references to bytes that were there."""
    dedup_bytes: int = 0
    """Of these: what was neither moved nor stored again."""
    dedup_unproven: int = 0
    """References that were refused, for their writers did not show that they have the bytes."""
    evicted: int = 0
    evicted_bytes: int = 0
    evictions_on_demand: int = 0
    evictions_ahead: int = 0
    evictions_nearby: int = 0
    """Objects evicted to join free space around them."""
    evicted_to_ssd: int = 0
    """Objects that left memory, and have a copy on an SSD."""
    acquired_hits_ssd: int = 0
    """Of the hits, those on objects that are on an SSD alone."""
    demoted: int = 0
    demoted_bytes: int = 0
    """Copies made from memory to SSD."""
    promoted: int = 0
    promoted_bytes: int = 0
    copies_failed: int = 0
    """Copies between tiers that came to nothing."""
    removed: int = 0
    expired: int = 0
    swept: int = 0
    lost: int = 0
    unsealed: int = 0
    """Objects that a put decided, could not have sealed at enough nodes, and took back."""
    damaged: int = 0
    """Replicas dropped because their bytes were not what was sealed."""
    adopted: int = 0
    leases_given: int = 0
    leases_expired: int = 0
    sessions_opened: int = 0
    sessions_expired: int = 0
    sessions_cut: int = 0
    slots_grown: int = 0
    rows_moved: int = 0
    gone: list[int] = field(default_factory=lambda: [0] * _REASONS)
    """Objects that left the table, by `GoneReason`, since this master leads."""
    evicted_age_s: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS_S))
    """How long what was evicted had not been used. Objects that go together count as their middle
    one, by age."""
