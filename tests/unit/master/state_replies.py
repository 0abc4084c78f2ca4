"""Replies of a master's state, unpacked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cenote.api.rows import EXTENT, OBJECT, PUT, ObjectStatus, PutStatus
from cenote.master import commands as c

__all__ = ["Hit", "Put", "read_hits", "read_put", "read_spares"]


@dataclass
class Put:
    """What came of a put_start: rows by key position."""

    reply: c.PutStartReply
    keys: list[int]
    sizes: list[int]
    statuses: list[int]
    extents: dict[int, list[tuple[int, int, int, int]]]
    """Position -> (segment, slot, offset, length)."""
    replicas: dict[int, int]

    @property
    def granted(self) -> list[int]:
        return list(self.extents)


@dataclass
class Hit:
    size: int
    checksum: int
    seq: int
    epoch: int
    status: int
    replicas: int
    extents: list[tuple[int, int, int, int]]
    """(segment, replica, offset, length)."""


def read_put(reply: c.PutStartReply, keys: list[int], sizes: list[int]) -> Put:
    puts = np.frombuffer(reply.puts, PUT)
    extents = np.frombuffer(reply.extents, EXTENT).tolist()
    assert len(puts) == len(keys)
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    at = 0
    for position, row in enumerate(puts):
        count = int(row["extents"])
        assert (count > 0) == (row["status"] in (PutStatus.GRANTED, PutStatus.UNSEALED))
        if row["status"] == PutStatus.UNSEALED:
            assert reply.unsealed
            continue
        if count:
            found[position] = extents[at : at + count]
        at += count
    assert at == len(extents)
    replicas = {position: int(puts[position]["replicas"]) for position in found}
    return Put(reply, keys, sizes, puts["status"].tolist(), found, replicas)


def read_spares(reply: c.PutStartReply) -> Put:
    """The spare extents of a reply, as a grant of keys that are not known yet (-1)."""
    rows = np.frombuffer(reply.spare_extents, EXTENT).tolist()
    assert (reply.spare_grant_id > 0) == bool(rows)
    count = len(rows)
    return Put(
        replace(reply, grant_id=reply.spare_grant_id),
        [-1] * count,
        [0] * count,
        [PutStatus.GRANTED] * count,
        {position: [row] for position, row in enumerate(rows)},
        dict.fromkeys(range(count), 1),
    )


def read_hits(reply: c.AcquireReply) -> list[Hit | None]:
    extents = np.frombuffer(reply.extents, EXTENT).tolist()
    hits: list[Hit | None] = []
    at = 0
    for row in np.frombuffer(reply.objects, OBJECT):
        if row["status"] == ObjectStatus.MISS:
            assert row["extents"] == 0
            hits.append(None)
            continue
        count = int(row["extents"])
        size, checksum, seq, epoch, _, replicas, status = row.tolist()
        hits.append(Hit(size, checksum, seq, epoch, status, replicas, extents[at : at + count]))
        at += count
    assert at == len(extents)
    return hits
