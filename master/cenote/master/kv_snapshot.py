"""Writing a snapshot into the key-value service: by whichever process, while others read and lead.

Its records go under keys of their own; nobody reads them before the row `snapshot` names them. That
row only moves forward. A prefix of the journal never changes, so a snapshot needs no fence: it is
true whoever leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from cenote.api.errors import ResourceUnavailable
from cenote.kv.service import Get, Kv, KvUnavailable, Modified, Put

from .journal import ENTRIES_PER_RECORD_MAX, RECORD_BYTES_MAX
from .kv_follow import last_entry_of
from .kv_keys import Keys, SnapshotRow

__all__ = ["write_snapshot"]

CALL_TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 6
VALUES_PER_TXN: Final = 4


def write_snapshot(
    kv: Kv,
    keys: Keys,
    records: Iterable[bytes],
    covers: int,
    nonce: str,
    rest: Callable[[], None],
) -> SnapshotRow:
    """`nonce`: of this attempt alone, so that two at work at the same time don't mix. `rest` is
    called after each write, and lets the journal have its turn.

    Raises ResourceUnavailable: no answer, or a snapshot that covers as much is in force.
    """
    _revision_to_replace(kv, keys, SnapshotRow(covers, 0, 0, 0, nonce))
    resume = _resume(kv, keys, covers)
    number = size_bytes = 0
    puts: list[Put] = []
    for value in _values(records):
        puts.append(Put(keys.chunk(covers, nonce, number), value))
        number += 1
        size_bytes += len(value)
        if len(puts) == VALUES_PER_TXN:
            _attempt(partial(kv.txn, (), puts, timeout_s=CALL_TIMEOUT_S))
            puts = []
            rest()
    if puts:
        _attempt(partial(kv.txn, (), puts, timeout_s=CALL_TIMEOUT_S))
    row = SnapshotRow(covers, resume, number, size_bytes, nonce)
    _attempt(partial(_put_in_force, kv, keys, row))
    return row


def _resume(kv: Kv, keys: Keys, covers: int) -> int:
    """See `SnapshotRow.resume`. What a key of the journal holds never changes."""
    # A key has at most as many entries as one record could. To be given all keys of a long journal
    # takes longer than a call may.
    first, end = keys.journal(max(covers - ENTRIES_PER_RECORD_MAX, 0)), keys.journal(covers + 1)
    found = kv.range(first, end, keys_only=True, timeout_s=CALL_TIMEOUT_S).rows
    rows = kv.range(found[-1].key, timeout_s=CALL_TIMEOUT_S).rows if found else []
    last = last_entry_of(rows[0].value) if rows else 0
    if last < covers:  # not written yet, or truncated since: then another snapshot is in force
        raise ResourceUnavailable(f"entry {covers} is not in the journal in etcd")
    resume = keys.first_entry(rows[0].key)
    assert resume is not None
    return resume if last > covers else covers + 1


def _values(records: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    size_bytes = 0
    for record in records:
        if parts and size_bytes + len(record) > RECORD_BYTES_MAX:
            yield b"".join(parts)
            parts, size_bytes = [], 0
        parts.append(record)
        size_bytes += len(record)
    if parts:
        yield b"".join(parts)


def _attempt(run: Callable[[], object]) -> None:
    """Done again after a lost answer, it comes to the same."""
    for attempt in range(ATTEMPTS):
        try:
            run()
            return
        except KvUnavailable:
            if attempt == ATTEMPTS - 1:
                raise


def _revision_to_replace(kv: Kv, keys: Keys, row: SnapshotRow) -> int:
    """Of the row in force; -1 where that is `row` already."""
    rows = kv.range(keys.snapshot, timeout_s=CALL_TIMEOUT_S).rows
    if not rows:
        return 0
    in_force = SnapshotRow.parse(rows[0].value)
    if in_force == row:
        return -1
    if in_force.covers >= row.covers:
        raise ResourceUnavailable(f"a snapshot of entry {in_force.covers} is there already")
    return rows[0].mod_revision


def _put_in_force(kv: Kv, keys: Keys, row: SnapshotRow) -> None:
    revision = _revision_to_replace(kv, keys, row)
    if revision < 0:  # by an attempt whose answer was lost
        return
    data = row.to_bytes()
    reply = kv.txn(
        [Modified(keys.snapshot, revision)],
        [Put(keys.snapshot, data)],
        [Get(keys.snapshot)],
        timeout_s=CALL_TIMEOUT_S,
    )
    found = None if reply.succeeded else reply.rows[0]
    if not reply.succeeded and (found is None or found.value != data):
        raise ResourceUnavailable("another snapshot was put in force meanwhile")
