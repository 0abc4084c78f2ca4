"""Remove, pin, unpin, quotas, and the reset of a namespace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import QuotaExceeded
from cenote.runtime.units import format_size

from .commands import (
    NamespaceReply,
    OpenNamespace,
    Pin,
    Remove,
    ResetNamespace,
    SetQuota,
    Unpin,
)
from .digest_checks import check_digests
from .effects import Gone, GoneReason, NamespaceOpened, Pinned, QuotaSet
from .lifetimes import set_pins
from .namespaces import Namespace
from .pool import Pool, Rows
from .rebuilding import refuse_while_blank, tell_namespace
from .sessions import commit_key
from .spans import distinct
from .tenure import check_tenure

__all__ = [
    "namespace_reply",
    "open_namespace",
    "pin",
    "remove",
    "reset_namespace",
    "set_quota",
    "unpin",
]


def _rows_of(
    pool: Pool, namespace: Namespace, digests: NDArray[np.uint64]
) -> tuple[NDArray[np.bool_], Rows]:
    """(which keys are there, readable or not; their rows, each once)."""
    check_digests(digests)
    rows = pool.objects.lookup(digests)
    found = rows >= 0
    found[found] = pool.incarnations_of(rows[found]) == namespace.incarnation
    return found, distinct(rows[found])


def remove(pool: Pool, command: Remove, now_s: float) -> NDArray[np.uint8]:
    """uint8[n]: 1 removed, 0 was not there. They are unfindable at once; readers keep their leases.

    A request that came before is answered as it was: what was put since is not removed.
    """
    session = pool.sessions.by_id.get(command.session_id) if command.request_id else None
    if session is None:
        return _remove(pool, command)
    key = commit_key(command.request_id)
    known = session.replies.get(key)
    if known is not None:
        assert isinstance(known[0], np.ndarray)
        return known[0]
    removed = _remove(pool, command)
    config = pool.config
    session.remember(
        key,
        removed,
        removed.nbytes + 200,
        config.replies_per_session_max,
        config.reply_bytes_per_session_max,
    )
    return removed


def _remove(pool: Pool, command: Remove) -> NDArray[np.uint8]:
    """Keys that are not there are named in the effects, too: a daemon may yet bring them."""
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    refuse_while_blank(pool)
    digests = command.digests
    found, rows = _rows_of(pool, namespace, digests)
    if not found.all():
        absent = digests[~found]
        seqs = np.zeros(len(absent), np.uint64)
        pool.effects.append(Gone(namespace.namespace_id, absent, seqs, GoneReason.REMOVED))
    pool.unlink(rows, GoneReason.REMOVED)
    pool.counters.removed += len(rows)
    if pool.adoption_open:
        raw = np.ascontiguousarray(digests).tobytes()
        pool.adoption.removed((raw[i : i + 16] for i in range(0, len(raw), 16)), pool.epoch)
    return found.view(np.uint8)


def pin(pool: Pool, command: Pin, now_s: float) -> NDArray[np.uint8]:
    """uint8[n]: 1 pinned, 0 not there. With a ttl the pin ends by itself.

    Raises QuotaExceeded, having pinned nothing, when pins would hold more than their share.
    """
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    found, rows = _rows_of(pool, namespace, command.digests)
    fresh = rows[pool.pin.take(rows) == 0]
    fresh_bytes = int(pool.sizes_of(fresh).sum())
    if len(fresh):
        _check_budget(pool, namespace, fresh_bytes)
    tag = set_pins(pool, rows, timed=command.ttl_ms > 0)
    if len(rows):
        digests = pool.digests_of(rows)
        pool.effects.append(Pinned(namespace.namespace_id, digests, True, command.ttl_ms))
        if command.ttl_ms:
            pool.unpins.add(now_s + command.ttl_ms / 1000, digests, pool.seqs_of(rows), tag)
    return found.view(np.uint8)


def _check_budget(pool: Pool, namespace: Namespace, fresh_bytes: int) -> None:
    """Pins must not starve the pool, nor what is promised to others. Raises QuotaExceeded."""
    share = pool.config.pinned_share_max
    budget = int(pool.capacity_bytes * share)
    if pool.pinned_bytes + fresh_bytes > budget:
        raise QuotaExceeded(
            f"{format_size(pool.pinned_bytes + fresh_bytes)} would be pinned, "
            f"{format_size(budget)} is the most ({share:.0%} of the capacity)",
            remedy="unpin something or add capacity",
        )
    if not pool.quotas.active:
        return
    own = pool.quotas.of(namespace.namespace_id).dram_bytes
    promised = sum(quota.dram_bytes for quota in pool.quotas.by_id.values())
    budget = own or int(max(0, pool.capacity_bytes - promised) * share)
    end = pool.objects.high_water
    pinned = np.flatnonzero(pool.pin[:end])
    pinned = pinned[pool.incarnations_of(pinned) == namespace.incarnation]
    would_be = int(pool.sizes_of(pinned).sum()) + fresh_bytes
    if would_be > budget:
        what = "its quota" if own else f"{share:.0%} of what no quota promises"
        raise QuotaExceeded(
            f"{format_size(would_be)} of namespace {namespace.name!r} would be pinned, "
            f"{format_size(budget)} is the most ({what})",
            remedy="unpin something, or `cenote namespaces set-quota`",
        )


def set_quota(pool: Pool, command: SetQuota, now_s: float) -> QuotaSet:
    """What a namespace has for sure, from now on. Raises NamespaceNotFound."""
    namespace = pool.namespaces.named(command.name)
    known = pool.quotas.of(namespace.namespace_id)
    quota = QuotaSet(
        namespace.namespace_id,
        known.dram_bytes if command.dram_bytes is None else command.dram_bytes,
        known.ssd_bytes if command.ssd_bytes is None else command.ssd_bytes,
        known.objects if command.objects is None else command.objects,
        known.priority if command.priority is None else command.priority,
    )
    pool.quotas.apply(quota)
    pool.namespaces.version += 1
    pool.effects.append(quota)
    tell_namespace(pool, namespace.opened())
    return quota


def unpin(pool: Pool, command: Unpin, now_s: float) -> NDArray[np.uint8]:
    """uint8[n]: 1 there (and not pinned any more), 0 not there."""
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    found, rows = _rows_of(pool, namespace, command.digests)
    rows = pool.clear_pins(rows)
    if len(rows):
        digests = pool.digests_of(rows)
        pool.effects.append(Pinned(namespace.namespace_id, digests, False, 0))
    return found.view(np.uint8)


def namespace_reply(namespace: Namespace, created: bool) -> NamespaceReply:
    return NamespaceReply(
        namespace.name,
        namespace.namespace_id,
        namespace.generation,
        namespace.digest_seed,
        namespace.fingerprint,
        namespace.durability,
        created,
    )


def open_namespace(pool: Pool, command: OpenNamespace, now_s: float) -> NamespaceReply:
    """Open a namespace by name, or create it.

    Raises FingerprintMismatch, NamespaceNotFound, InvalidArgument, ResourceUnavailable.
    """
    if command.create and command.name not in pool.namespaces.by_name:
        check_tenure(pool, now_s)
    namespace, created = pool.namespaces.open(
        command.name,
        command.fingerprint,
        command.create,
        command.durability,
        command.seed_if_new,
        pool.config.namespaces_max,
    )
    if created:
        pool.effects.append(namespace.opened())
        tell_namespace(pool, namespace.opened())
    return namespace_reply(namespace, created)


def reset_namespace(pool: Pool, command: ResetNamespace, now_s: float) -> NamespaceReply:
    """A new generation and seed: all keys of the old one are gone at once, their space soon."""
    known = pool.namespaces.named(command.name)
    refuse_while_blank(pool)
    opened = NamespaceOpened(
        known.name,
        known.namespace_id,
        known.generation + 1,
        known.fingerprint,
        command.seed_if_new,
        known.durability,
    )
    namespace = pool.namespaces.apply(opened)
    pool.effects.append(opened)
    tell_namespace(pool, opened)
    # The sweep starts over: rows before its place may be stale now.
    pool.sweep_at = 1
    return namespace_reply(namespace, True)
