"""What was decided and is not known to be sealed: nobody may be told that it exists.

A writer that dies between the decision and the seal leaves an object that can be read, and that is
lost when its daemon or the master is restarted. It was never told that it is stored; whoever puts
the key next must not be told so either. So

- what is decided enters the table with the bit UNSEALED;
- a client says which of its commits are sealed, with the next one and when it renews or closes its
  session: all up to a number (`told`). Then the bit goes;
- who puts a key whose object has the bit gets UNSEALED, and all that it takes to seal it
  (`seals_of`); a daemon takes a version twice without a change. It says so with its next PutStart
  (`confirm`): if the object still has that version, the bit goes, and the key exists.

Only what has the bit may be taken back by the writer that could not have it sealed (`damage`).
Objects of earlier tenures have no bit: what their daemons do not have sealed is dropped when these
attach. Where nobody will ever say so (the session ended), the bit stays until the key is put.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import SEAL, UNIT_BYTES

from .commands import PutStart
from .object_columns import UNSEALED
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM
from .sessions import Session
from .spans import segments_of

__all__ = ["confirm", "forget", "is_known", "note_decided", "seals_of", "told", "unsealed_rows"]

COMMITS_MAX: Final = 4096
"""Of a session, not yet told to be sealed; of the oldest beyond it keeps the bit."""
_SEALED: Final = np.uint8(0xFF ^ UNSEALED)
_EPOCH_MASK: Final = np.uint64(0xFFFF_FFFF)


def note_decided(
    session: Session, request_id: int, rows: Rows | int, seqs: NDArray[np.uint64] | int
) -> None:
    """A commit decided these rows: one, or several."""
    if request_id <= session.sealed_through:  # given up by its client before it came
        return
    commits = session.unsealed
    if request_id in commits:  # it is decided key by key
        commits[request_id].append((rows, seqs))
        return
    commits[request_id] = [(rows, seqs)]
    if len(commits) > COMMITS_MAX:
        del commits[next(iter(commits))]


def told(pool: Pool, session: Session, through: int) -> None:
    """All that was decided for requests of the session up to this one is sealed."""
    if through <= session.sealed_through:
        return
    session.sealed_through = through
    commits = session.unsealed
    for request_id in [each for each in commits if each <= through]:
        for rows, seqs in commits.pop(request_id):
            if not isinstance(rows, int):
                still = pool.objects.seqs_match(rows, np.asarray(seqs))
                _clear(pool, rows if np.count_nonzero(still) == len(rows) else rows[still])
            elif pool.record_of(rows)[2] == seqs:
                pool.state_bytes[rows] &= 0xFF ^ UNSEALED


def forget(session: Session, request_ids: list[int]) -> None:
    """Nobody will say of these commits that they are sealed."""
    for request_id in request_ids:
        session.unsealed.pop(request_id, None)


def _clear(pool: Pool, rows: Rows) -> None:
    pool.state[rows] = pool.state.take(rows) & _SEALED


def is_known(pool: Pool, row: int) -> bool:
    """Whether this live row can be read and is known to be sealed; False where that takes a closer
    look."""
    return not pool.state_bytes[row] & UNSEALED and pool.is_settled(row)


def unsealed_rows(pool: Pool, rows: Rows) -> NDArray[np.bool_]:
    """Which of these live rows nobody has said to be sealed."""
    bits: NDArray[np.bool_] = (pool.state.take(rows) & np.uint8(UNSEALED)) != 0
    at = np.flatnonzero(bits)
    ssds = [s.segment_id for s in pool.segments.by_id.values() if s.tier != DRAM] if len(at) else []
    if ssds:  # daemons copy there only what is sealed
        counts, spans = pool.spans_of(rows[at])
        owner = np.repeat(at, counts)
        bits[owner[np.isin(segments_of(spans), ssds)]] = False
    return bits


def seals_of(pool: Pool, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """(extents of each row, a SEAL row for each of these but for the length of the key)."""
    counts, spans = pool.spans_of(rows)
    records = pool.records_of(rows)
    owner = np.repeat(np.arange(len(rows)), counts)
    replica = (spans[:, 0] >> 16) & 0xFF
    pairs = owner * 256 + replica
    first = np.flatnonzero(np.r_[True, pairs[1:] != pairs[:-1]])
    sizes = np.diff(np.r_[first, len(pairs)])
    group = np.repeat(np.arange(len(first)), sizes)
    lengths = spans[:, 3].astype(np.int64) * UNIT_BYTES
    # The last extent of each replica is cut to what is left for it.
    tails = (records[:, 4] >> np.uint64(16)) & np.uint64(0xFFFF)
    wanted = (records[:, 0] + tails).astype(np.int64)[owner[first]]
    lengths[first + sizes - 1] -= np.add.reduceat(lengths, first) - wanted
    seals = np.zeros(len(spans), SEAL)
    seals["segment"] = segments_of(spans)
    seals["slot"] = spans[:, 1]
    seals["offset"] = spans[:, 2].astype(np.uint64) * np.uint64(UNIT_BYTES)
    seals["length"] = lengths
    seals["seq"] = records[:, 2][owner]
    seals["checksum"] = records[:, 1][owner]
    seals["object_size"] = records[:, 0][owner]
    seals["digest"] = pool.digests_of(rows).view("V16").reshape(-1)[owner]
    seals["extent_index"] = np.arange(len(spans)) - first[group]
    seals["extent_count"] = sizes[group]
    seals["replica"] = replica
    return counts, seals


def confirm(pool: Pool, command: PutStart) -> None:
    """The session had sealed what others had decided, and could not say themselves."""
    seqs = command.sealed_seqs
    if seqs is None or command.sealed_epoch != pool.epoch:
        return
    at = np.flatnonzero(seqs)
    rows = pool.objects.lookup(command.digests[at])
    at, rows = at[rows > 0], rows[rows > 0]
    records = pool.records_of(rows)
    same = (records[:, 2] == seqs[at]) & ((records[:, 3] & _EPOCH_MASK) == pool.epoch)
    same &= (pool.state.take(rows) & LIVE) != 0
    _clear(pool, rows[same])
