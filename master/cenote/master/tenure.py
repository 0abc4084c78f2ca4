"""How long this master may decide: the tenure that its metadata service has granted it.

Until `tenure_end_s` nobody else can be the leader. No lease and no grant given by time ends later,
so that a successor, which is elected afterwards, inherits none. Past the end there may be another
leader: lookups are answered, without leases, and all that would change something is refused. The
tenure may go on after a gap, when the service answers again before it has elected another: then
whoever could not be heard meanwhile is given time to speak.
"""

from __future__ import annotations

from typing import Any, Final

from cenote.api.errors import TenureEnded

from . import commands as c
from .admin_commands import Configure, DeleteNamespace, Evict
from .commands import ExtendTenure
from .pool import Pool
from .task_commands import Drain, Rebalance

__all__ = ["DECISIONS", "check_tenure", "extend_tenure", "is_past", "resume"]

DECISIONS: Final[frozenset[type[Any]]] = frozenset(
    (
        c.RenewSession,
        c.ResetNamespace,
        c.SetQuota,
        c.PutStart,
        c.PutCommit,
        c.CommitSpare,
        c.PutAbort,
        c.Remove,
        c.Pin,
        c.Unpin,
        c.Attach,
        c.Heartbeat,
        c.Detach,
        Drain,
        Rebalance,
        Configure,
        DeleteNamespace,
        Evict,
        c.ReportFailure,
        c.NodeProbed,
    )
)
"""Commands that are refused past the tenure, whatever they would do."""


def extend_tenure(pool: Pool, command: ExtendTenure, now_s: float) -> None:
    """Learn how far the tenure is proven by now."""
    pool.tenure_end_s = command.end_s
    if pool.tenure_lapsed and now_s < command.end_s:
        resume(pool, now_s)


def is_past(pool: Pool, now_s: float) -> bool:
    """Whether another master may lead by now."""
    return now_s >= pool.tenure_end_s


def check_tenure(pool: Pool, now_s: float) -> None:
    """Raises TenureEnded."""
    if now_s >= pool.tenure_end_s:
        raise TenureEnded(
            "this master can't prove any more that it leads: its metadata service has not answered"
            f" in time, for {now_s - pool.tenure_end_s:.1f} s"
        )


def resume(pool: Pool, now_s: float) -> None:
    """The tenure goes on: nobody is taken for silent who could not be heard."""
    pool.tenure_lapsed = False
    for node in pool.nodes.by_id.values():
        node.heard_s = now_s
    for session in pool.sessions.by_id.values():
        session.expires_s = max(session.expires_s, now_s + pool.config.session_ttl_s)
