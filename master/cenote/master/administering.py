"""What an administrator has the pool do to its objects: evict some, delete a namespace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cenote.api.rows import UNIT_BYTES
from cenote.policy.lru import oldest_first

from .admin_commands import DeleteNamespace, Evict, EvictReply
from .commands import ResetNamespace
from .decisions import Why
from .digest_checks import check_digests
from .effects import NamespaceGone
from .eviction import evict
from .namespaces import Namespace
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import NO_QUOTA
from .removal import reset_namespace
from .spans import distinct

__all__ = ["delete_namespace", "evict_objects"]


def delete_namespace(pool: Pool, command: DeleteNamespace, now_s: float) -> int:
    """How many objects it had: they are gone at once, their space soon.

    Daemons learn of a new generation, so that metadata rebuilt from what these hold bring it back
    empty at most. Raises NamespaceNotFound.
    """
    namespace = pool.namespaces.named(command.name)
    objects = int(pool.namespaces.objects[namespace.incarnation])
    reset_namespace(pool, ResetNamespace(command.name, command.seed_if_new), now_s)
    pool.namespaces.delete(namespace.namespace_id)
    pool.quotas.apply(replace(NO_QUOTA, namespace_id=namespace.namespace_id))
    pool.effects.append(NamespaceGone(namespace.namespace_id))
    return objects


def evict_objects(pool: Pool, command: Evict, now_s: float) -> EvictReply:
    """Bounded by `rows_max`: asked again, it goes on. Raises NamespaceReset, InvalidKey."""
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    reply = EvictReply(0, 0, 0, 0, 0)
    if command.digests is not None:
        rows = _named(pool, command, namespace, reply)
    else:
        rows = _coldest(pool, command, namespace, now_s)
    rows = rows[: command.rows_max]
    if len(rows):
        reply.objects = len(rows)
        reply.size_bytes = evict(pool, rows, why=Why.ASKED) * UNIT_BYTES
    return reply


def _named(pool: Pool, command: Evict, namespace: Namespace, reply: EvictReply) -> Rows:
    digests = command.digests
    assert digests is not None
    check_digests(digests)
    rows = pool.objects.lookup(np.ascontiguousarray(digests))
    found = rows >= 0
    found[found] = pool.incarnations_of(rows[found]) == namespace.incarnation
    reply.absent = int(np.count_nonzero(~found))
    rows = distinct(rows[found])
    pinned = pool.pin.take(rows) != 0
    leased = (pool.lease_count.take(rows) != 0) & ~pinned
    reply.pinned, reply.leased = int(np.count_nonzero(pinned)), int(np.count_nonzero(leased))
    kept: Rows = rows[~(pinned | leased)]
    return kept


def _coldest(pool: Pool, command: Evict, namespace: Namespace, now_s: float) -> Rows:
    end = pool.objects.high_water
    mask = (pool.state[:end] & LIVE).view(np.bool_)
    mask = mask & (pool.lease_count[:end] == 0) & (pool.pin[:end] == 0)
    mask &= pool.objects.namespace[:end] == namespace.incarnation
    rows = oldest_first(pool.stamp[:end], np.flatnonzero(mask), command.rows_max)
    if command.idle_s > 0 and len(rows):
        # Stamps rise, so how long something was idle falls along the rows.
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            if pool.idle_s(int(pool.stamp[rows[middle]]), now_s) >= command.idle_s:
                low = middle + 1
            else:
                high = middle
        rows = rows[:low]
    if command.size_bytes and len(rows):
        sums = np.cumsum(pool.units_of_rows(rows), dtype=np.int64) * UNIT_BYTES
        rows = rows[: int(np.searchsorted(sums, command.size_bytes)) + 1]
    return rows
