"""What the master says to exist: an acknowledgement, so that it must be sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import PUT, CommitStatus, PutStatus
from cenote.master.commands import CommitSpare, PutCommit, PutStart
from cenote.master.pool import Pool
from cenote.master.sessions import commit_key, start_key
from sim.loop import Violation

if TYPE_CHECKING:
    from sim.oracle import Oracle

__all__ = ["asked", "check_answer"]

_EXISTS = (CommitStatus.EXISTS_SAME, CommitStatus.EXISTS_DIFFERENT)


def asked(pool: Pool, command: Any) -> NDArray[np.uint64] | None:
    """The digests that the command is about to be answered for, if it puts any for the first time
    that it comes."""
    if not isinstance(command, PutStart | PutCommit | CommitSpare):
        return None
    session = pool.sessions.by_id.get(command.session_id)
    number = start_key if isinstance(command, PutStart) else commit_key
    if session is None or (command.request_id and number(command.request_id) in session.replies):
        return None
    if isinstance(command, PutStart):
        return command.digests
    if isinstance(command, CommitSpare):
        return np.frombuffer(command.digest, np.uint64).reshape(1, 2)
    if command.names is not None:
        return command.names.digests
    grant = session.grants.get(command.grant_id)
    if grant is None:
        return None
    indexes = command.indexes
    entries = grant.all_entries() if indexes is None else grant.entries_at(indexes)
    found = grant.digests[np.maximum(entries, 0)].copy()
    found[entries < 0] = 0
    return found


def check_answer(oracle: Oracle, pool: Pool, digests: NDArray[np.uint64], reply: Any) -> None:
    """What it was said of that it exists is acknowledged to whoever put it."""
    if hasattr(reply, "puts"):
        there = np.frombuffer(reply.puts, PUT)["status"] == PutStatus.EXISTS
    else:
        there = np.isin(np.frombuffer(reply.statuses, np.uint8), _EXISTS)
    rows = pool.objects.lookup(digests[there])
    for row in rows[rows > 0].tolist():
        record = pool.record_of(row)
        version = record[3], record[2]
        put = next((p for p in oracle.puts.values() if version in p.versions), None)
        if put is None:
            continue
        if not oracle.is_safe(put, version):
            raise Violation(
                f"put {put.serial} of key {put.key}, version {version}, was said to exist, and none"
                " of its replicas is sealed"
            )
        put.said_to_exist.add(version)
