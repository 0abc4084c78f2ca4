"""The knobs of the master's state: limits, durations and shares. All durations in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["DYNAMIC", "StateConfig", "with_overrides"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Defaults suit a pool of 1 to 100 nodes."""

    policy: str = "lru"
    """Of `cenote.policy.names.POLICIES`, or `auto`: which objects go where room is needed."""
    sampling: bool = True
    """Whether the use of some keys is followed, for miss-ratio curves; `auto` needs it."""
    objects_max: int = 1 << 27
    """Rows that the object table can ever have; only touched ones take memory."""
    session_ttl_s: float = 10.0
    sessions_max: int = 100_000
    lease_ttl_default_s: float = 5.0
    """Given where a request asks for no duration."""
    lease_ttl_max_s: float = 10.0
    leased_share_max: float = 0.5
    """Leased bytes, as a share of the capacity; beyond it lookups are answered without a lease."""
    pinned_share_max: float = 0.25
    session_granted_share_max: float = 0.5
    """What one session may have granted and not yet committed, as a share of the capacity."""
    session_grants_max: int = 4096
    replies_per_session_max: int = 64
    reply_bytes_per_session_max: int = 4 * MIB
    reserve_share: float = 0.01
    """Kept free ahead of need, as a share of the capacity ..."""
    reserve_bytes_max: int = 256 * MIB
    """... and at most this."""
    tick_evict_rows_max: int = 4096
    tick_sweep_rows_max: int = 16_384
    tick_compact_rows_max: int = 4096
    tick_expire_max: int = 4096
    """Leases, sessions, expired objects and pins handled in one tick, each."""
    run_bytes: int = 1 * MIB
    """A batch is cut into runs of about this size; each run lies in one segment."""
    spares_share_max: float = 1 / 64
    """Spare extents of one grant, of the smallest segment."""
    spares_free_share_max: float = 1 / 8
    """Likewise, of what is free where they lie."""
    demote_share: float = 0.5
    """Of memory: what is used beyond the rest of it is to have a copy on an SSD, coldest first, so
    that it can go at once when its turn comes."""
    copying_bytes_max: int = 256 * MIB
    """Copies between tiers that are under way at one daemon."""
    node_dead_s: float = 5.0
    """Silence after which a node's objects are hidden."""
    node_forget_s: float = 3600.0
    """Silence after which a node's segments count as lost."""
    repair_after_s: float = 30.0
    """Silence after which objects with a replica on such a node get another one elsewhere."""
    hot_bytes_per_s: int = 256 * MIB
    """Reads of one object for each replica that it has: above this it gets another one; 0: none."""
    suspect_s: float = 5.0
    """How long a node stays suspect for a host that reported it."""
    gathering_s: float = 1.0
    """How long into an epoch puts wait for daemons that have not attached yet, where these are
    needed for as many replicas as are wanted."""
    adoption_window_s: float = 600.0
    """How long into an epoch daemons may bring objects that the journal missed."""
    tombstones_max: int = 200_000
    """Removed keys remembered meanwhile; beyond it nothing older is adopted any more."""
    instructions_per_reply_max: int = 64
    slots_grow_bytes_min: int = 256 << 10
    slots_grow_bytes_max: int = 4 * MIB
    slot_bytes: int = 192
    dedup_domains: str = ""
    """Which namespaces may hold each other's bytes: as `dedup_domains`."""
    pool_id: bytes = b""
    """Of a pool that begins now: 16 random bytes; empty where no metadata are kept."""
    namespaces_max: int = 10_000
    decisions_max: int = 1 << 16
    """Objects about whose end it is remembered why, for people who ask; 32 bytes each."""


DYNAMIC: Final[Mapping[str, tuple[type, float, float]]] = {
    "hot_bytes_per_s": (int, 0, 1 << 50),
    "leased_share_max": (float, 0, 1),
    "node_forget_s": (float, 1, 1e7),
    "pinned_share_max": (float, 0, 1),
    "repair_after_s": (float, 0.2, 1e7),
}
"""Name -> its type, the least and the most that it may be."""


def with_overrides(config: StateConfig, values: Mapping[str, float]) -> StateConfig:
    """With these values instead; names of another release do nothing."""
    known = {n: DYNAMIC[n][0](v) for n, v in values.items() if n in DYNAMIC}
    return dataclasses.replace(config, **known) if known else config
