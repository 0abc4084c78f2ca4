"""Sessions open, renew, close and run out."""

from __future__ import annotations

import numpy as np

from .commands import (
    AcquireReply,
    CloseSession,
    CutSession,
    OpenSession,
    RenewSession,
    RenewSessionReply,
)
from .commits import end_grant, quarantine
from .leases import Lease
from .lookups import hold_key, lease_ttl_s
from .pool import Pool
from .sealing import forget, told
from .sessions import Session
from .spans import segment_ids_of

__all__ = [
    "abandon_session",
    "close_session",
    "cut_session",
    "node_cut_session",
    "open_session",
    "renew_session",
]


def open_session(pool: Pool, command: OpenSession, now_s: float) -> None:
    """Open a session, or go on with a known one."""
    session = Session(
        command.session_id,
        command.client_name,
        command.boot_id,
        command.process_id,
        command.observer,
        now_s + pool.config.session_ttl_s,
    )
    if pool.sessions.open(session, pool.config.sessions_max) is session:
        pool.counters.sessions_opened += 1


def renew_session(pool: Pool, command: RenewSession, now_s: float) -> RenewSessionReply:
    """Keep a session, its grants and holds, and the leases that are named.

    `lost_lease_ids` are those that had ended.
    """
    session = pool.sessions.get(command.session_id)
    session.expires_s = now_s + pool.config.session_ttl_s
    if len(command.cancelled_request_ids):
        _cancel(pool, session, command.cancelled_request_ids.tolist())
    told(pool, session, command.sealed_through)
    deadline_s = now_s + lease_ttl_s(pool, command.lease_ttl_ms, now_s)
    renew = pool.leases.renew
    lost = [lease_id for lease_id in command.lease_ids.tolist() if not renew(lease_id, deadline_s)]
    return RenewSessionReply(pool.view_version, np.array(lost, np.uint64))


def _cancel(pool: Pool, session: Session, request_ids: list[int]) -> None:
    """The session never saw the answers to these requests: it can't have used what it was given.

    A grant knows its request: in a busy session the reply is forgotten soon.
    """
    forget(session, request_ids)
    for request_id in request_ids:
        session.cancel(request_id)
        held, _ = session.replies.get(hold_key(request_id), (None, 0))
        if isinstance(held, AcquireReply):
            lease = pool.leases.by_id.get(held.lease_id)
            if lease is not None:
                pool.drop_lease(lease)
    cancelled = set(request_ids) - {0}
    for grant in list(session.grants.values()):
        if grant.request_id in cancelled:
            pool.counters.aborted += grant.pending_count
            end_grant(pool, session, grant, free=True)


def close_session(pool: Pool, command: CloseSession, now_s: float) -> None:
    """The client said goodbye: nothing of it reads or writes any more, so all of it is free."""
    session = pool.sessions.close(command.session_id)
    if session is None:
        return
    told(pool, session, command.sealed_through)
    for grant in list(session.grants.values()):
        end_grant(pool, session, grant, free=True)
    for lease in list(session.leases):
        pool.drop_lease(lease)


def abandon_session(pool: Pool, session: Session) -> None:
    """A session fell silent (it is out of the table already).

    What it may be writing into, or reading in place, waits for the daemons to cut it off. Its
    leases run out by themselves: a reader under one may still be at it, in another process even.
    """
    pool.counters.sessions_expired += 1
    for grant in list(session.grants.values()):
        if grant.checksums is None:
            quarantine(pool, session.session_id, grant.pending_spans())
        # Nothing is written to aliases.
        end_grant(pool, session, grant, free=grant.checksums is not None)
    for lease in list(session.leases):
        if lease.is_hold:
            _orphan_hold(pool, session.session_id, lease)


def cut_session(pool: Pool, command: CutSession, now_s: float) -> None:
    """As if it had fallen silent, and every daemon is told not to let it in."""
    session = pool.sessions.close(command.session_id)
    if session is not None:
        abandon_session(pool, session)
    for node in pool.nodes.by_id.values():
        pool.cut_off(node, command.session_id)


def _orphan_hold(pool: Pool, session_id: bytes, hold: Lease) -> None:
    rows = np.atleast_1d(np.asarray(hold.rows, np.int64))
    _, spans = pool.spans_of(rows)
    node_ids = {
        segment.node.node_id
        for segment_id in segment_ids_of(spans)
        if (segment := pool.segments.by_id.get(segment_id)) is not None
    }
    if not node_ids:
        pool.drop_lease(hold)
        return
    waiting = pool.orphans.nodes_of(session_id)
    pool.orphans.add_hold(session_id, hold, node_ids)
    for node_id in sorted(node_ids - waiting):
        pool.cut_off(pool.nodes.by_id[node_id], session_id)


def node_cut_session(pool: Pool, session_id: bytes, node_id: int) -> None:
    """This node proved that the session can't touch its segments any more."""
    spans, holds = pool.orphans.cut(session_id, node_id)
    if spans or holds:
        pool.counters.sessions_cut += 1
    for part in spans:
        pool.segments.give(part)
    for hold in holds:
        pool.drop_lease(hold)
