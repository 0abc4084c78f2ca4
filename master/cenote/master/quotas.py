"""Who is to make room: quotas and priorities of namespaces, as ranks. Pure.

A quota is what a namespace has for sure, not the most that it may use: it may go beyond while
there is room. Where room is needed, objects go in the order of their namespace's rank, lowest
first, and within a rank in the order of the eviction policy:

    0  1  2   low, normal, high: of namespaces without a quota, or beyond theirs
    3  4  5   the same, of namespaces within their quota

Beyond its quota a namespace ranks as normal at most: a quota bounds what its priority reaches.
Ranks from 3 on (*kept*) are given up for nothing but a put of a namespace that is within its own
quota and asks for room: where quotas promise more than there is, priority and age decide. A put
that takes its namespace beyond its quota counts it as being beyond, so it gives its own objects
before anybody's that are kept.

A namespace counts as beyond where it is beyond any of its limits. Bytes are those of all copies,
with what is granted to writers, or held for copies to SSDs under way; those in memory and those on
SSDs have limits of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

from .effects import QuotaSet
from .namespaces import Namespaces

if TYPE_CHECKING:
    from .pool import Pool, Rows

__all__ = [
    "KEPT",
    "NO_LIMIT",
    "NO_QUOTA",
    "PRIORITY_NORMAL",
    "Quotas",
    "Ranks",
    "lowest_of",
    "may_go",
]

PRIORITY_LOW: Final = 1
PRIORITY_NORMAL: Final = 2
PRIORITY_HIGH: Final = 3
KEPT: Final = 3
_NORMAL_RANK: Final = PRIORITY_NORMAL - 1
NO_LIMIT: Final = 1 << 62

Ranks = NDArray[np.int8]


@dataclass(slots=True)
class _Claim:
    """A put that is being placed, or a copy."""

    incarnation: int
    units: int
    objects: int
    on_ssd: bool


NO_QUOTA: Final = QuotaSet(0, 0, 0, 0, PRIORITY_NORMAL)
_NO_CLAIM: Final = _Claim(0, 0, 0, False)


@final
class Quotas:
    """Of all namespaces, by their ids; a reset changes nothing of them."""

    __slots__ = ("_columns", "_columns_of", "by_id", "claim", "version")

    def __init__(self) -> None:
        self.by_id: dict[int, QuotaSet] = {}
        """Those that differ from none."""
        self.version = 0
        self.claim = _NO_CLAIM
        self._columns = np.zeros((4, 1), np.int64)
        self._columns_of: tuple[int, int, int] = (-1, -1, -1)

    @property
    def active(self) -> bool:
        """Whether any namespace has one: else all are alike, and batches need not look."""
        return bool(self.by_id)

    def of(self, namespace_id: int) -> QuotaSet:
        return self.by_id.get(namespace_id, NO_QUOTA)

    def knows(self, quota: QuotaSet) -> bool:
        """Whether something is known of this namespace."""
        return quota.namespace_id in self.by_id

    def apply(self, quota: QuotaSet) -> None:
        """Set, or take away where nothing of it differs from none."""
        self.version += 1
        if (quota.dram_bytes, quota.ssd_bytes, quota.objects, quota.priority) == (
            *(0, 0, 0),
            PRIORITY_NORMAL,
        ):
            self.by_id.pop(quota.namespace_id, None)
        else:
            self.by_id[quota.namespace_id] = quota

    def begin_claim(
        self, incarnation: int, units: int, objects: int, *, on_ssd: bool = False
    ) -> None:
        """Room is wanted for a namespace until `end_claim`."""
        self.claim = _Claim(incarnation, units, objects, on_ssd)

    def end_claim(self) -> None:
        self.claim = _NO_CLAIM

    def claim_units_max(self, namespaces: Namespaces) -> int:
        """What whoever claims room now has in memory for sure; as good as endless without that."""
        return int(self.limits(namespaces)[0, self.claim.incarnation])

    def claim_ssd_units_max(self, namespaces: Namespaces) -> int:
        """The same, on SSDs."""
        return int(self.limits(namespaces)[1, self.claim.incarnation])

    def limits(self, namespaces: Namespaces) -> NDArray[np.int64]:
        """int64[4, incarnations]: units in memory, units on SSDs, objects, priority's rank."""
        state = (namespaces.version, namespaces.count, self.version)
        if state != self._columns_of:
            columns = np.full((4, namespaces.count), NO_LIMIT, np.int64)
            columns[3] = _NORMAL_RANK
            for namespace_id, quota in self.by_id.items():
                namespace = namespaces.by_id.get(namespace_id)
                if namespace is not None:
                    columns[:, namespace.incarnation] = (
                        quota.dram_bytes // UNIT_BYTES or NO_LIMIT,
                        quota.ssd_bytes // UNIT_BYTES or NO_LIMIT,
                        quota.objects or NO_LIMIT,
                        quota.priority - 1,
                    )
            self._columns, self._columns_of = columns, state
        return self._columns

    def has_limit(self, namespaces: Namespaces) -> NDArray[np.bool_]:
        """By incarnation: whether what it has on SSDs is limited."""
        has: NDArray[np.bool_] = (self.limits(namespaces)[1:3] != NO_LIMIT).any(0)
        return has

    def alike(self, namespaces: Namespaces, incarnation: int) -> list[int]:
        """Incarnations that get room on SSDs where this one does: itself, and where it has no limit
        all others that have none."""
        has_limit = self.has_limit(namespaces)
        if has_limit[incarnation]:
            return [incarnation]
        found: list[int] = np.flatnonzero(~has_limit).tolist()
        return found

    def excess(self, pool: Pool, *, on_ssd: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(units, objects) by incarnation that it is beyond its quota; far below 0 without one."""
        namespaces, claim = pool.namespaces, self.claim
        limits, count = self.limits(namespaces), namespaces.count
        objects = namespaces.objects[:count].copy()
        if on_ssd:
            used = namespaces.ssd_units[:count].copy()
            under_way = pool.copies.ssd_units_by_owner
        else:
            used = namespaces.units[:count] - namespaces.ssd_units[:count]
            under_way = pool.grants.units_by_incarnation
        for incarnation, units in under_way.items():
            used[incarnation] += units
        if claim.on_ssd == on_ssd:
            used[claim.incarnation] += claim.units
            objects[claim.incarnation] += claim.objects
        return used - limits[int(on_ssd)], objects - limits[2]

    def is_beyond_by_claim(self, pool: Pool) -> bool:
        """Whether whoever claims room is within its quota without that, and beyond with it."""
        units, objects = self.excess(pool, on_ssd=self.claim.on_ssd)
        over = int(units[self.claim.incarnation]), int(objects[self.claim.incarnation])
        before = over[0] - self.claim.units, over[1] - self.claim.objects
        return max(before) <= 0 < max(over)

    def ranks(self, pool: Pool, *, on_ssd: bool = False) -> Ranks:
        """By incarnation."""
        limits = self.limits(pool.namespaces)
        over_units, over_objects = self.excess(pool, on_ssd=on_ssd)
        priority = limits[3]
        limited = (limits[int(on_ssd)] != NO_LIMIT) | (limits[2] != NO_LIMIT)
        beyond = (over_units > 0) | (over_objects > 0)
        found = np.where(beyond, np.minimum(priority, _NORMAL_RANK), KEPT + priority)
        ranks: Ranks = np.where(limited, found, priority).astype(np.int8)
        ranks[~pool.namespaces.alive[: len(ranks)]] = 0
        return ranks

    def reach(self, ranks: Ranks, *, on_ssd: bool = False) -> int:
        """Ranks below this may be given up for what claims room now."""
        claim = self.claim
        if claim is _NO_CLAIM or claim.on_ssd != on_ssd:
            return KEPT
        return int(ranks.max()) + 1 if ranks[claim.incarnation] >= KEPT else KEPT


def may_go(pool: Pool, rows: Rows, *, on_ssd: bool, kept: bool = True) -> NDArray[np.bool_]:
    """Which rows may be given up for what claims room now; not `kept`: none that is."""
    quotas = pool.quotas
    if not quotas.active:
        return np.ones(len(rows), np.bool_)
    ranks = quotas.ranks(pool, on_ssd=on_ssd)
    reach = quotas.reach(ranks, on_ssd=on_ssd) if kept else KEPT
    may: NDArray[np.bool_] = ranks[pool.incarnations_of(rows)] < reach
    return may


def lowest_of(pool: Pool, rows: Rows, *, on_ssd: bool) -> Rows:
    """Of these rows those of the lowest rank among them; all where nobody has a quota."""
    quotas = pool.quotas
    if not quotas.active or not len(rows):
        return rows
    ranks = quotas.ranks(pool, on_ssd=on_ssd)[pool.incarnations_of(rows)]
    lowest: Rows = rows[ranks == ranks.min()]
    return lowest
