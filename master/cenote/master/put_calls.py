"""PutStart and PutCommit as they come: whose they are, whether they came before, which way they go.

A request with an id is decided once: its reply is kept with the session, and a retry gets it again.
"""

from __future__ import annotations

from cenote.api.errors import InvalidArgument

from .aliases import commit_aliases
from .commands import CommitSpare, PutCommit, PutCommitReply, PutStart, PutStartReply
from .commits import commit_grant, commit_many
from .pool import Pool
from .puts import start_puts
from .sealing import confirm, told
from .sessions import commit_key, start_key
from .spares import commit_one_spare, commit_spares, grant_spares

__all__ = ["commit_spare", "put_commit", "put_start"]

_REPLY_BYTES = 200
"""Of a reply that is kept, besides its rows."""


def put_start(pool: Pool, command: PutStart, now_s: float) -> PutStartReply:
    """Decide about each key; grant space for those that are new, and spare extents."""
    session = pool.sessions.get(command.session_id)
    session.expires_s = now_s + pool.config.session_ttl_s
    key = start_key(command.request_id)
    if key:
        known = session.replies.get(key)
        if known is not None:
            assert isinstance(known[0], PutStartReply)
            return known[0]
        session.begin(command.request_id)
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    if command.sealed_seqs is not None:
        confirm(pool, command)
    if pool.placement_dirty:
        pool.refresh_placement(now_s)
    reply = start_puts(pool, command, session, namespace, now_s)
    if command.spare_count:
        reply.spare_grant_id, reply.spare_extents = grant_spares(
            pool, command, session, namespace, now_s
        )
    if key:
        for grant_id in (reply.grant_id, reply.spare_grant_id, reply.alias_grant_id):
            if grant_id:
                session.grants[grant_id].request_id = command.request_id
        size = len(reply.puts) + len(reply.extents) + len(reply.spare_extents) + _REPLY_BYTES
        size += len(reply.unsealed) + len(reply.alias_extents) + len(reply.alias_checksums)
        session.remember(
            key,
            reply,
            size,
            pool.config.replies_per_session_max,
            pool.config.reply_bytes_per_session_max,
        )
    return reply


def commit_spare(pool: Pool, command: CommitSpare, now_s: float) -> PutCommitReply:
    """`put_commit` of one object in a spare extent."""
    session = pool.sessions.get(command.session_id)
    told(pool, session, command.sealed_through)
    key = commit_key(command.request_id)
    grant = session.grants.get(command.grant_id)
    if grant is None or (command.request_id and key in session.replies):
        return put_commit(pool, command.as_commit(), now_s)
    reply = commit_one_spare(pool, command, session, grant)
    if reply is None:
        return put_commit(pool, command.as_commit(), now_s)
    session.expires_s = now_s + pool.config.session_ttl_s
    if command.request_id:
        session.remember(
            key,
            reply,
            len(reply.statuses) + _REPLY_BYTES,
            pool.config.replies_per_session_max,
            pool.config.reply_bytes_per_session_max,
        )
    return reply


def put_commit(pool: Pool, command: PutCommit, now_s: float) -> PutCommitReply:
    """Decide granted keys, in order."""
    session = pool.sessions.get(command.session_id)
    session.expires_s = now_s + pool.config.session_ttl_s
    told(pool, session, command.sealed_through)
    key = commit_key(command.request_id)
    if command.request_id:
        known = session.replies.get(key)
        if known is not None:
            assert isinstance(known[0], PutCommitReply)
            return known[0]
    grant = session.grants.get(command.grant_id)
    if command.names is None:
        if grant is not None and grant.spare_units:
            raise InvalidArgument("a commit of spare extents says which keys they hold: names")
        if grant is None or grant.checksums is None:
            reply = commit_grant(pool, command, session, grant, now_s)
        else:
            reply = commit_aliases(pool, command, session, grant, now_s)
    elif grant is None:
        reply = commit_many(pool, command, session, None, now_s)
    else:
        reply = commit_spares(pool, command, session, grant, now_s)
    if command.request_id:
        session.remember(
            key,
            reply,
            len(reply.statuses) + _REPLY_BYTES,
            pool.config.replies_per_session_max,
            pool.config.reply_bytes_per_session_max,
        )
    return reply
