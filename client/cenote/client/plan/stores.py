"""Payload, commit and seal of one grant.

Works on rows (granted keys in order). Each ends as sealed (stored), `same`/`different` (another
writer was first), failed with an error, or in none of these: then it may be started anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    InternalError,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.rows import EXTENT, PUT, SEAL, CommitStatus
from cenote.transport.base import ItemStatus, SealBatch
from cenote.v1 import master_pb2 as pb

from .asking import ask_master
from .budgets import SEAL_ATTEMPTS_MAX, attempt_budget_s, backoff_s, node_failed
from .pieces import Items, Pieces, Placement, cut_items, place_replicas
from .state import Call, Grant
from .steps import Checksum, Hash, Move, Part, Pause, Plan, RefreshView, SealPart, Seals

__all__ = ["Store"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
_NONE: Final[I64] = np.zeros(0, np.int64)


class Store:
    """One grant being filled."""

    def __init__(
        self,
        *,
        call: Call,
        reply: pb.PutStartResponse,
        granted: I64,
        keys: Sequence[bytes],
        digests: bytes,
        pieces: Pieces,
        sizes: I64,
        tails: I64 | None,
        min_replicas: int,
    ) -> None:
        self.call = call
        self.keys = keys
        self.digests = digests
        self.pieces = pieces
        self.sizes = sizes
        self.min_replicas = min_replicas
        self._granted = granted
        self._reply = reply
        self._grant = Grant(reply.grant_id)
        puts = np.frombuffer(reply.puts, PUT)[granted]
        self.replicas: I64 = puts["replicas"].astype(np.int64)
        self.placement: Placement = place_replicas(
            np.frombuffer(reply.extents, EXTENT),
            puts["extents"].astype(np.int64),
            self.replicas,
            sizes if tails is None else sizes + tails,
        )
        self.nodes: I64 = _NONE
        self.lost: Bools = np.zeros(0, np.bool_)
        """Per extent: its replica was not written, or not sealed."""
        self.sealed: I64 = _NONE
        self.same: I64 = _NONE
        self.different: I64 = _NONE
        self.decided: I64 = _NONE
        """Rows that were decided but not sealed."""
        self.failed: list[tuple[I64, CenoteError]] = []
        self.last_error: CenoteError | None = None

    def run(self) -> Plan[None]:
        """All of it. Raises what ends the whole call; GrantRevoked ends this grant only."""
        self.call.grants[self._grant.grant_id] = self._grant
        self.nodes = self.call.state.peers.nodes_of(self.placement.extents["segment"])
        if (self.nodes < 0).any():
            yield RefreshView(self.call.remaining_s())
            self.nodes = self.call.state.peers.nodes_of(self.placement.extents["segment"])
        self.lost = self.nodes < 0
        checksums = yield from self._move()
        rows = self._written_rows()
        if len(rows) < len(self.keys):
            yield from self._abort(np.setdiff1d(np.arange(len(self.keys)), rows))
        if not len(rows):
            self.call.grants.pop(self._grant.grant_id, None)
            return
        decided, seqs, epoch = yield from self._commit(rows, checksums)
        if len(decided):
            yield from self._seal(decided, seqs, epoch, checksums)

    # ---- payload -----------------------------------------------------------------------------

    def _move(self) -> Plan[U64]:
        """Write every replica; the payloads' checksums."""
        parts: list[Part] = []
        members: list[tuple[I64, I64]] = []
        first_items: Items | None = None
        for replica in range(int(self.replicas.max())):
            items, of_extent = self._items(replica)
            if not replica:
                first_items = items
            for part, where in self._parts(items, Checksum.NEVER if replica else Checksum.ALWAYS):
                parts.append(part)
                members.append((of_extent[where], where if not replica else _NONE))
        assert first_items is not None
        self._grant.unfenced = True  # until it is known that every write ended
        yield Move(parts)
        unfenced = False
        sums = np.zeros(len(first_items.owner), np.uint64)
        summed = np.zeros(len(first_items.owner), np.bool_)
        for part, (extents, where) in zip(parts, members, strict=True):
            unfenced |= self._take_part(part, extents)
            if len(where) and part.checksums is not None and part.error is None:
                sums[where] = part.checksums
                summed[where] = True
        self._grant.unfenced = unfenced
        if first_items.whole and summed.all():
            by_row = np.empty(len(self.keys), np.uint64)
            by_row[first_items.owner] = sums
            return by_row
        hashed: U64 = yield Hash(self.pieces, self.sizes.astype(np.uint64))
        return hashed

    def _items(self, replica: int) -> tuple[Items, I64]:
        """What one replica of every row takes, and which extent each item lies in."""
        placement = self.placement
        if placement.single:
            items = cut_items(
                placement.extents, placement.owner, placement.start, self.sizes, self.pieces
            )
            return items, placement.owner if items.whole else items.owner
        select = np.flatnonzero(placement.replica == replica)
        rows = np.unique(placement.owner[select])
        whole = len(rows) == len(self.keys)
        owner = placement.owner[select]
        items = cut_items(
            placement.extents[select],
            owner if whole else np.searchsorted(rows, owner),
            placement.start[select],
            self.sizes if whole else self.sizes[rows],
            self.pieces if whole else self.pieces.take(rows),
        )
        if not whole:
            items.owner = rows[items.owner]
        return items, select[self._extent_of(items, select)]

    def _extent_of(self, items: Items, select: I64) -> I64:
        """Position in `select` of the extent that holds each item."""
        if len(items.owner) == len(select):
            return np.arange(len(select), dtype=np.int64)
        extents = self.placement.extents[select]
        order = np.lexsort((extents["offset"], extents["segment"]))
        # Extents never overlap, so (segment, offset) sorts items into them.
        keys = extents["segment"][order].astype(object) * (1 << 64) + extents["offset"][order]
        wanted = items.extents["segment"].astype(object) * (1 << 64) + items.extents["offset"]
        found: I64 = order[np.searchsorted(keys, wanted, side="right") - 1]
        return found

    def _parts(self, items: Items, checksum: int) -> list[tuple[Part, I64]]:
        remaining_s = self.call.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the bytes were sent")
        nodes = self.call.state.peers.nodes_of(items.extents["segment"])
        made = []
        for node in np.unique(nodes).tolist():
            if node < 0:
                continue
            where = np.flatnonzero(nodes == node)
            extents = items.extents if len(where) == len(nodes) else items.extents[where]
            size_bytes = int(extents["length"].sum())
            part = Part(
                node,
                extents,
                items.addresses if len(where) == len(nodes) else items.addresses[where],
                budget_s=attempt_budget_s(remaining_s, size_bytes, alternatives=True),
                size_bytes=size_bytes,
                checksum=checksum,
                grant_id=self._grant.grant_id,
            )
            made.append((part, where))
        return made

    def _take_part(self, part: Part, extents: I64) -> bool:
        """Note what one node did not take; whether bytes of it may still be under way."""
        error = part.error
        if error is None and part.statuses is not None:
            self.call.state.trust(part.node_id)
            if not part.statuses.any():
                return False
            self.lost[extents[part.statuses != ItemStatus.OK]] = True
            for code in np.unique(part.statuses).tolist():
                if code == ItemStatus.NOT_DONE:
                    self.call.node_failed(part.node_id, "it did not complete a write")
                if code != ItemStatus.OK:
                    what = f"node {part.node_id} did not take the bytes"
                    self.last_error = error_from_code(code, what)
            return True
        assert error is not None
        self.lost[extents] = True
        self.last_error = error
        if isinstance(error, BufferInUse | ClientClosed):
            raise error
        if isinstance(error, StaleEpoch | StaleLocation | SessionUnknown | GrantRevoked):
            return True
        if node_failed(error) and self.call.remaining_s() > 0:
            self.call.node_failed(part.node_id, str(error))
            return True
        raise error

    def _lost_replicas(self) -> NDArray[np.bool_]:
        """bool[rows, replicas]: which replicas are not (wholly) there."""
        widest = int(self.replicas.max())
        lost: NDArray[np.bool_] = np.arange(widest) >= self.replicas[:, None]
        gone = np.flatnonzero(self.lost)
        lost[self.placement.owner[gone], self.placement.replica[gone]] = True
        return lost

    def _enough(self, lost: NDArray[np.bool_]) -> Bools:
        good = lost.shape[1] - lost.sum(axis=1)
        enough: Bools = good >= np.minimum(max(1, self.min_replicas), self.replicas)
        return enough

    def _written_rows(self) -> I64:
        if not self.lost.any():
            return np.arange(len(self.keys), dtype=np.int64)
        return np.flatnonzero(self._enough(self._lost_replicas()))

    # ---- decision ----------------------------------------------------------------------------

    def _abort(self, rows: I64) -> Plan[None]:
        request = pb.PutAbortRequest(
            grant_id=self._grant.grant_id,
            indexes=self._granted[rows].astype("<u4").tobytes(),
            session_id=self.call.state.session_id,
            unfenced=self._grant.unfenced,
        )
        yield from ask_master(self.call, "put_abort", request, pb.PutAbortResponse)

    def _commit(self, rows: I64, checksums: U64) -> Plan[tuple[I64, U64, int]]:
        """Have the rows decided: (decided rows, their seqs, epoch)."""
        call = self.call
        whole = len(rows) == len(self.keys)
        request = pb.PutCommitRequest(
            grant_id=self._grant.grant_id,
            indexes=b"" if whole else self._granted[rows].astype("<u4").tobytes(),
            checksums=(checksums if whole else checksums[rows]).astype("<u8", copy=False).tobytes(),
            session_id=call.state.session_id,
            request_id=next(call.state.request_ids),
            piggyback=call.state.piggyback(call.space),
            epoch=self._reply.epoch,
            failed_replicas=self._failed_replicas(rows),
        )
        reply = yield from ask_master(call, "put_commit", request, pb.PutCommitResponse)
        call.grants.pop(self._grant.grant_id, None)
        statuses = np.frombuffer(reply.statuses, np.uint8)
        if len(statuses) != len(rows):
            raise InternalError(f"put_commit answered {len(statuses)} of {len(rows)} keys")
        seqs = np.uint64(reply.seq_first) + np.arange(len(rows), dtype=np.uint64)
        chosen = statuses == CommitStatus.DECIDED
        if chosen.all():
            return rows, seqs, reply.epoch
        self.same = rows[statuses == CommitStatus.EXISTS_SAME]
        self.different = rows[statuses == CommitStatus.EXISTS_DIFFERENT]
        if (statuses == CommitStatus.NOT_GRANTED).any():
            self.last_error = GrantRevoked("the grant ended before the put was committed")
        return rows[chosen], seqs[chosen], reply.epoch

    def _failed_replicas(self, rows: I64) -> bytes:
        if not self.lost.any():
            return b""
        lost = self._lost_replicas()[rows] & (
            np.arange(int(self.replicas.max())) < self.replicas[rows][:, None]
        )
        where = np.argwhere(lost)
        table = np.empty((len(where), 2), "<u4")
        table[:, 0] = self._granted[rows[where[:, 0]]]
        table[:, 1] = where[:, 1]
        return table.tobytes()

    # ---- seal --------------------------------------------------------------------------------

    def _seal(self, rows: I64, seqs: U64, epoch: int, checksums: U64) -> Plan[None]:
        """Have the daemons write the slots; sets `sealed` and `decided`."""
        seq_of = np.zeros(len(self.keys), np.uint64)
        seq_of[rows] = seqs
        member = np.zeros(len(self.keys), np.bool_)
        member[rows] = True
        open_ = np.flatnonzero(member[self.placement.owner] & ~self.lost)
        table = self._seal_rows(open_, seq_of, checksums)
        for attempt in range(1, SEAL_ATTEMPTS_MAX + 1):
            parts, members = self._seal_parts(open_, table, epoch)
            yield Seals(parts)
            again = [
                self._take_seal(part, extents) for part, extents in zip(parts, members, strict=True)
            ]
            waiting = np.concatenate(again) if again else _NONE
            if not len(waiting):
                break
            pause_s = backoff_s(attempt)
            if self.call.remaining_s() <= pause_s or attempt == SEAL_ATTEMPTS_MAX:
                self.lost[waiting] = True
                break
            table = table[np.searchsorted(open_, waiting)]
            open_ = waiting
            yield Pause(pause_s)
        enough = self._enough(self._lost_replicas()) if self.lost.any() else member
        self.sealed = rows[enough[rows]]
        self.decided = rows[~enough[rows]]

    def _seal_rows(self, extents: I64, seq_of: U64, checksums: U64) -> NDArray[np.void]:
        placement = self.placement
        owner = placement.owner[extents]
        granted = placement.extents[extents]
        rows = np.zeros(len(extents), SEAL)
        for name in ("segment", "slot", "offset", "length"):
            rows[name] = granted[name]
        rows["seq"] = seq_of[owner]
        rows["checksum"] = checksums[owner]
        rows["object_size"] = self.sizes[owner]
        rows["digest"] = np.frombuffer(self.digests, "V16")[owner]
        rows["key_length"] = np.fromiter(map(len, self.keys), np.uint16, len(self.keys))[owner]
        if placement.single:
            rows["extent_count"] = 1
            return rows
        rows["replica"] = placement.replica[extents]
        index, count = _extent_numbers(placement)
        rows["extent_index"] = index[extents]
        rows["extent_count"] = count[extents]
        return rows

    def _seal_parts(
        self, extents: I64, table: NDArray[np.void], epoch: int
    ) -> tuple[list[SealPart], list[I64]]:
        space = self.call.space
        remaining_s = max(self.call.remaining_s(), 0.0)
        parts: list[SealPart] = []
        members: list[I64] = []
        nodes = self.nodes[extents]
        for node in np.unique(nodes).tolist():
            where = np.flatnonzero(nodes == node)
            owner = self.placement.owner[extents[where]]
            if len(owner) == len(self.keys) and self.placement.single:
                keys = b"".join(self.keys)
            else:
                keys = b"".join([self.keys[row] for row in owner.tolist()])
            batch = SealBatch(
                epoch, space.namespace_id, space.generation, table[where].tobytes(), keys
            )
            budget_s = attempt_budget_s(remaining_s, 0, alternatives=bool(len(parts)))
            parts.append(SealPart(node, batch, remaining_s if not parts else budget_s))
            members.append(extents[where])
        return parts, members

    def _take_seal(self, part: SealPart, extents: I64) -> I64:
        """Note what one daemon did not seal; extents to try again."""
        error = part.error
        if error is None and part.statuses is not None:
            statuses = part.statuses
            if not statuses.any():
                return _NONE
            later = statuses == Unavailable.code  # its slot table is still growing
            refused = ~later & (statuses != ItemStatus.OK)
            self.lost[extents[refused]] = True
            if refused.any():
                code = int(statuses[refused][0])
                self.last_error = error_from_code(code, f"node {part.node_id} refused to seal")
            if later.any():
                self.last_error = Unavailable(
                    f"the slot table of node {part.node_id} did not grow in time",
                    remedy="put again",
                )
            again: I64 = extents[later]
            return again
        assert error is not None
        self.lost[extents] = True
        self.last_error = error
        if isinstance(error, ClientClosed):
            raise error
        if node_failed(error):
            self.call.node_failed(part.node_id, str(error))
        return _NONE


def _extent_numbers(placement: Placement) -> tuple[I64, I64]:
    """Per extent: its number within its replica, and how many that replica has."""
    first = placement.start == 0
    group = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    index: I64 = np.arange(len(first), dtype=np.int64) - starts[group]
    count: I64 = np.bincount(group)[group]
    return index, count
