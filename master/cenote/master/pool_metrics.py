"""What the leader shows of the pool: `cenote_pool_*` and `cenote_namespace_*`.

Standbys show none of it, so that sums and maxima over all masters are the pool's. What is counted
begins anew with each tenure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from cenote.runtime.metrics import Kind, Metrics, Row

from .counters import Counters
from .effects import GoneReason
from .pool_look import PoolLook, PoolLooker

__all__ = ["register_pool"]

_GAUGES: Final[dict[str, tuple[str, Callable[[PoolLook], float]]]] = {
    "objects": ("Objects that are present.", lambda look: look.status.objects),
    "leases": ("Leases of readers.", lambda look: look.status.leases),
    "leased_bytes": ("Payload that leases protect.", lambda look: look.status.leased_bytes),
    "leased_bytes_max": (
        "What may be leased; beyond it lookups are answered without a lease.",
        lambda look: look.status.leased_bytes_max,
    ),
    "pinned_objects": ("Objects kept from eviction.", lambda look: look.status.pinned_objects),
    "pinned_bytes": ("Payload kept from eviction.", lambda look: look.status.pinned_bytes),
    "pinned_bytes_max": ("What may be pinned.", lambda look: look.status.pinned_bytes_max),
    "grants": ("Puts that are under way.", lambda look: look.status.grants),
    "sessions": ("Clients and daemons with a session.", lambda look: look.status.sessions),
    "quarantined_sessions": (
        "Writers that are gone, or stopped, and not cut off by all daemons yet.",
        lambda look: look.status.quarantined_sessions,
    ),
    "namespaces": ("Namespaces that exist.", lambda look: look.namespaces),
    "metadata_memory_bytes": (
        "Of the object table and its index.",
        lambda look: look.status.metadata_memory_bytes,
    ),
    "broken_slots": (
        "Slots that daemons found torn or corrupt.",
        lambda look: look.status.broken_slots,
    ),
    "unverified_slots": (
        "Contents that outlived a daemon or a leader and wait for their checksum.",
        lambda look: look.status.unverified_slots,
    ),
    "stale_objects": (
        "Of namespaces that were reset, not swept yet.",
        lambda look: look.status.stale_objects,
    ),
    "rdma_trouble": (
        "1 while a node's memory goes over TCP though it has RDMA; `cenote status` says why.",
        lambda look: float(bool(look.status.rdma_trouble)),
    ),
    "rebuilt": (
        "1 where the metadata were lost and rebuilt from daemons; `cenote status` says more.",
        lambda look: float(bool(look.status.notice)),
    ),
}

_BYTES: Final[dict[str, tuple[str, str, dict[str, Callable[[PoolLook], float]]]]] = {
    "capacity_bytes": (
        "What the nodes' segments have room for.",
        "tier",
        {
            "dram": lambda look: look.status.capacity_bytes,
            "ssd": lambda look: look.status.ssd_capacity_bytes,
        },
    ),
    "used_bytes": (
        "Of objects that are present.",
        "tier",
        {
            "dram": lambda look: look.status.used_bytes,
            "ssd": lambda look: look.status.ssd_used_bytes,
        },
    ),
    "held_bytes": (
        "Neither free nor of a present object; condemned: removed, and under a lease still.",
        "state",
        {
            "granted": lambda look: look.status.granted_bytes,
            "condemned": lambda look: look.status.condemned_bytes,
            "quarantined": lambda look: look.status.quarantined_bytes,
            "copying": lambda look: look.status.copying_bytes,
        },
    ),
}

_TOTALS: Final[dict[str, tuple[str, str]]] = {
    "unleased_hits": ("unleased_hits", "Hits without a lease, as the leased share was used up."),
    "touched_keys": ("touched_keys", "Reads from cached locations, told in batches."),
    "put_striped": ("put_striped", "Objects granted in more than one piece."),
    "committed": ("committed_objects", "Objects stored."),
    "committed_bytes": ("committed_bytes", "Payload stored."),
    "commit_lost": ("commits_lost", "Puts of which another writer was first."),
    "commit_not_granted": ("commits_not_granted", "Commits of puts whose grant had ended."),
    "aborted": ("aborted_objects", "Puts given up by their writers."),
    "unsealed": ("unsealed_objects", "Objects taken back, as too few daemons sealed them."),
    "dedup_puts": (
        "deduplicated_objects",
        "Objects stored as references to known bytes.",
    ),
    "dedup_bytes": ("deduplicated_bytes", "Payload that was neither moved nor stored for it."),
    "dedup_unproven": (
        "deduplication_refusals",
        "References refused, as their writers did not show that they have the bytes.",
    ),
    "evicted_bytes": ("evicted_bytes", "Payload evicted."),
    "evicted_to_ssd": ("evicted_to_ssd_objects", "Objects that left memory and are on an SSD."),
    "demoted": ("demoted_objects", "Copies made from memory to SSD."),
    "demoted_bytes": ("demoted_bytes", "Of copies made from memory to SSD."),
    "promoted": ("promoted_objects", "Copies made from SSD to memory."),
    "promoted_bytes": ("promoted_bytes", "Of copies made from SSD to memory."),
    "copies_failed": ("failed_copies", "Copies between tiers or nodes that came to nothing."),
    "damaged": ("damaged_replicas", "Replicas dropped, as their bytes were not what was sealed."),
    "adopted": ("adopted_objects", "Objects that daemons knew and the journal did not."),
    "leases_given": ("leases_given", "Leases given."),
    "leases_expired": ("leases_expired", "Leases whose holder did not release or renew them."),
    "sessions_opened": ("sessions_opened", "Sessions opened."),
    "sessions_expired": ("sessions_expired", "Sessions that fell silent."),
    "sessions_cut": ("sessions_cut", "Sessions that daemons were told to cut off."),
}
"""Field of `Counters`: (name, meaning)."""


def register_pool(metrics: Metrics, looker: PoolLooker) -> None:
    """Make them; `looker.refresh` is to be called before each scrape."""

    def table(
        name: str,
        text: str,
        kind: Kind,
        labels: tuple[str, ...],
        rows: Callable[[PoolLook], Iterable[Row]],
    ) -> None:
        def read() -> Iterable[Row]:
            look = looker.look
            return () if look is None else rows(look)

        metrics.table(name, text, kind, labels, read)

    def one(name: str, text: str, kind: Kind, value: Callable[[PoolLook], float]) -> None:
        table(name, text, kind, (), lambda look: [((), value(look))])

    metrics.table(
        "cenote_pool_look_age_seconds",
        "How old it is what the leader shows of the pool: above 0 where its loop was busy.",
        "gauge",
        (),
        lambda: [] if looker.look is None else [((), looker.age_s)],
    )
    for name, (text, value) in _GAUGES.items():
        one(f"cenote_pool_{name}", text, "gauge", value)
    for name, (text, label, parts) in _BYTES.items():
        table(
            f"cenote_pool_{name}",
            text,
            "gauge",
            (label,),
            lambda look, parts=parts: [((at,), of(look)) for at, of in parts.items()],  # type: ignore[misc]
        )
    table(
        "cenote_pool_nodes",
        "Nodes that the pool counts on, by state.",
        "gauge",
        ("state",),
        lambda look: [((state.name.lower(),), count) for state, count in look.nodes.items()],
    )
    for field, (name, text) in _TOTALS.items():
        one(
            f"cenote_pool_{name}_total",
            text,
            "counter",
            lambda look, field=field: getattr(look.status.counters, field),  # type: ignore[misc]
        )
    _register_counted(table)
    _register_namespaces(metrics, looker)


def _register_counted(table: Callable[..., None]) -> None:
    """Counts that are split into parts which add up."""

    def counted(
        name: str, text: str, label: str, parts: Callable[[Counters], dict[str, float]]
    ) -> None:
        table(
            f"cenote_pool_{name}_total",
            text,
            "counter",
            (label,),
            lambda look: [((at,), n) for at, n in parts(look.status.counters).items()],
        )

    counted(
        "exists_keys",
        "Keys whose presence was asked for, without reading them.",
        "result",
        lambda c: {"present": c.exists_hits, "absent": c.exists_keys - c.exists_hits},
    )
    counted(
        "acquired_keys",
        "Keys that readers asked for: where they were found.",
        "result",
        lambda c: {
            "dram": c.acquired_hits - c.acquired_hits_ssd,
            "ssd": c.acquired_hits_ssd,
            "absent": c.acquired_keys - c.acquired_hits,
        },
    )
    counted(
        "put_keys",
        "Keys that writers asked space for: what they were answered.",
        "result",
        lambda c: {
            "granted": c.put_granted,
            "exists": c.put_exists,
            "no_space": c.put_no_space,
            "refused": c.put_refused,
        },
    )
    counted(
        "evicted_objects",
        "Objects evicted: as a writer waited, ahead of need, to join free space, or otherwise.",
        "cause",
        lambda c: {
            "on_demand": c.evictions_on_demand,
            "ahead": c.evictions_ahead,
            "nearby": c.evictions_nearby,
            "other": max(
                0, c.evicted - c.evictions_on_demand - c.evictions_ahead - c.evictions_nearby
            ),
        },
    )
    counted(
        "gone_objects",
        "Objects that are no more, by reason.",
        "reason",
        lambda c: {reason.name.lower(): c.gone[reason] for reason in GoneReason},
    )
    table(
        "cenote_pool_evicted_age_seconds",
        "How long evicted objects had not been used. Those that go together count as one of them.",
        "histogram",
        (),
        lambda look: [((), look.status.counters.evicted_age_s)],
    )


def _register_namespaces(metrics: Metrics, looker: PoolLooker) -> None:
    metrics.table(
        "cenote_namespace_asked_keys_total",
        "Keys that readers asked the master for, of the busiest namespaces and all others.",
        "counter",
        ("namespace",),
        lambda: looker.counted_rows(0),
    )
    metrics.table(
        "cenote_namespace_found_keys_total",
        "Of them, those that were present, by the tier that they were found in.",
        "counter",
        ("namespace", "tier"),
        lambda: [*looker.counted_rows(1, "dram"), *looker.counted_rows(2, "ssd")],
    )
    metrics.table(
        "cenote_namespace_objects",
        "Objects that are present.",
        "gauge",
        ("namespace",),
        lambda: looker.used_rows(0),
    )
    metrics.table(
        "cenote_namespace_used_bytes",
        "Of objects that are present, all copies.",
        "gauge",
        ("namespace", "tier"),
        lambda: [*looker.used_rows(1, "dram"), *looker.used_rows(2, "ssd")],
    )
