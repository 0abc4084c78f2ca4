"""What of the master's state changes with every command that matters."""

from __future__ import annotations

from typing import Any

from cenote.master.pool import Pool

__all__ = ["fingerprint"]


def fingerprint(pool: Pool) -> tuple[Any, ...]:
    """Cheap, and different whenever a command did something that matters."""
    return (
        pool.objects.live_count,
        pool.objects.used_rows,
        pool.last_seq,
        tuple((s.free_units, s.slots.free, s.slots.total) for s in pool.segments.by_id.values()),
        len(pool.leases),
        pool.leased_bytes,
        len(pool.grants),
        pool.grants.units,
        pool.grants.keys,
        len(pool.sessions.by_id),
        len(pool.orphans),
        pool.orphans.units,
        pool.pinned_bytes,
        pool.condemned_rows,
        len(pool.namespaces.by_id),
        pool.view_counter,
        len(pool.effects),
    )
