"""Puts of bytes that others have put, into a state with pretended daemons (`state_kit`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import ticket_of
from cenote.api.rows import EXTENT, PUT, CommitStatus, PutStatus
from cenote.master import commands as c
from unit.master.state_kit import KIB, FakeNode, Kit, session_id
from unit.master.state_replies import Put, read_put

__all__ = ["aliases_of", "commit_aliases", "contents_of", "put_bytes", "start_bytes"]


def contents_of(*contents: int) -> NDArray[np.uint64]:
    """Content digests of small numbers; of 0 none."""
    words = [(n * 0x9E37_79B9_7F4A_7C15 % 2**64, n) for n in contents]
    return np.array(words, np.uint64).reshape(-1, 2)


def content_checksum(content: int) -> int:
    return content * 104_729 + 7


def start_bytes(
    kit: Kit, keys: Sequence[int], contents: Sequence[int], size: int = KIB, **options: Any
) -> c.PutStartReply:
    """PutStart of these keys, each with the digest of its content."""
    kit.requests += 1
    options.setdefault("request_id", kit.requests)
    options.setdefault("contents", contents_of(*contents))
    reply: c.PutStartReply = kit.apply(
        c.PutStart(
            session_id(options.pop("session", 1)),
            namespace_id=kit.place[0],
            generation=kit.place[1],
            digests=kit.digests(*keys),
            sizes=np.full(len(keys), size, np.uint64),
            **options,
        )
    )
    return reply


def aliases_of(reply: c.PutStartReply, keys: Sequence[int], size: int) -> Put:
    """What was granted of others' extents, as a put."""
    puts = np.frombuffer(reply.puts, PUT)
    extents = np.frombuffer(reply.alias_extents, EXTENT).tolist()
    found, replicas, at = {}, {}, 0
    for position in np.flatnonzero(puts["status"] == PutStatus.DEDUPLICATED).tolist():
        count = int(puts["extents"][position])
        found[position] = extents[at : at + count]
        replicas[position] = int(puts["replicas"][position])
        at += count
    assert at == len(extents)
    statuses = puts["status"].tolist()
    return Put(reply, list(keys), [size] * len(keys), statuses, found, replicas)


def tickets_of(kit: Kit, put: Put, positions: Sequence[int], *, strong: bool = False) -> bytes:
    """What daemons give to a writer that has the bytes."""
    tickets = []
    for position in positions:
        segment_id, _, offset, _ = put.extents[position][0]
        (node,) = [n for n in kit.nodes.values() if kit.segments[segment_id] in n.segments]
        of = put.reply.alias_grant_id, segment_id, offset, put.sizes[position]
        tickets.append(ticket_of(node.uuid, *of, strong=strong))
    return b"".join(tickets)


def commit_aliases(
    kit: Kit,
    put: Put,
    contents: Sequence[int],
    *,
    tickets: bytes | None = None,
    seal: bool = True,
    session: int = 1,
) -> list[int]:
    """Decide and seal what was granted of others' extents; CommitStatus of each."""
    positions = put.granted
    kit.requests += 1
    reply: c.PutCommitReply = kit.apply(
        c.PutCommit(
            session_id(session),
            kit.requests,
            put.reply.alias_grant_id,
            np.array(positions, np.uint32),
            np.zeros(len(positions), np.uint64),
            tickets=tickets_of(kit, put, positions) if tickets is None else tickets,
        )
    )
    _seal(kit, put, positions, reply, contents, seal=seal)
    return list(reply.statuses)


def _seal(
    kit: Kit,
    put: Put,
    positions: Sequence[int],
    reply: c.PutCommitReply,
    contents: Sequence[int],
    *,
    seal: bool,
) -> None:
    for i, position in enumerate(positions):
        if reply.statuses[i] == CommitStatus.DECIDED and seal:
            kit.seal(put, position, reply.epoch, reply.seq_first + i)
            for segment_id, slot, _, _ in put.extents[position]:
                if segment_id in kit.segments:
                    row = kit.segments[segment_id].table[slot]
                    row["checksum"] = content_checksum(contents[position])


def put_bytes(
    kit: Kit, keys: Sequence[int], contents: Sequence[int], size: int = KIB, **options: Any
) -> int:
    """Put these keys; how many of them were references."""
    seal = options.pop("seal", True)
    session = options.get("session", 1)
    reply = start_bytes(kit, keys, contents, size, **options)
    moved = reply.puts
    if reply.alias_grant_id:
        rows = np.frombuffer(reply.puts, PUT).copy()
        aliased = rows["status"] == PutStatus.DEDUPLICATED
        rows["extents"][aliased] = rows["status"][aliased] = 0
        moved = rows.tobytes()
        aliases = aliases_of(reply, keys, size)
        statuses = commit_aliases(kit, aliases, contents, seal=seal, session=session)
        assert statuses == [CommitStatus.DECIDED] * len(aliases.granted)
    put = read_put(
        c.PutStartReply(moved, reply.extents, reply.grant_id, reply.view_version),
        list(keys),
        [size] * len(keys),
    )
    if put.granted:
        kit.requests += 1
        done: c.PutCommitReply = kit.apply(
            c.PutCommit(
                session_id(session),
                kit.requests,
                reply.grant_id,
                np.array(put.granted, np.uint32),
                np.array([content_checksum(contents[i]) for i in put.granted], np.uint64),
            )
        )
        assert set(done.statuses) == {CommitStatus.DECIDED}
        _seal(kit, put, put.granted, done, contents, seal=seal)
    return int(np.count_nonzero(np.frombuffer(reply.puts, PUT)["status"] == 1))


def used_units(kit: Kit, node: FakeNode) -> int:
    """What is not free of a node's memory."""
    segments = kit.state._pool.segments.by_id.values()
    return sum(s.used_units for s in segments if s.node.node_id == node.node_id)
