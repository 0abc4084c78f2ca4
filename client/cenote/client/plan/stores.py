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
    GrantRevoked,
    InternalError,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.rows import CommitStatus
from cenote.api.types import Sameness
from cenote.transport.base import ItemStatus, SealBatch
from cenote.v1 import master_pb2 as pb

from .asking import ask_master, hidden_after_report
from .budgets import (
    SEAL_ATTEMPTS_MAX,
    SEAL_FAILURES_MAX,
    backoff_s,
    node_failed,
    seal_budget_s,
)
from .granted import Granted
from .peers import groups_by_node
from .pieces import Items, Pieces
from .replicas import are_enough, failed_rows, lost_replicas
from .seal_rows import seal_rows
from .state import Call, pick_digests
from .steps import (
    Checksum,
    Hash,
    Move,
    Part,
    Pause,
    Plan,
    RefreshView,
    Reopen,
    SealPart,
    Seals,
    Stage,
    Staged,
)
from .tails import KeyTails, Members, can_stage, items_of_replica, join_part

__all__ = ["Store"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
_NONE: Final[I64] = np.zeros(0, np.int64)
DECIDED: Final = bytes([CommitStatus.DECIDED])
_SAME, _DIFFERENT = np.uint8(Sameness.SAME), np.uint8(Sameness.DIFFERENT)
count_nonzero: Final = np.count_nonzero  # five times as fast as any() and all() of short arrays


class Store:
    """One grant being filled."""

    def __init__(
        self,
        *,
        call: Call,
        granted: Granted,
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
        self._grant = granted.grant
        self._cut = False  # whether a daemon cut this session off
        self.checksums: U64 | None = None
        """Of what is there already; see `AliasStore`."""
        self._seal_failures = 0
        self._until_s = 0.0  # when the step under way is to be done
        self._tails = tails
        self._moved = sizes, pieces
        """What is written: the payloads, or copies of them with their keys."""
        self._key_tails: KeyTails | None = None
        """Keys to write behind the payloads."""
        self.replicas = granted.replicas
        self.placement = granted.placement
        self.nodes: I64 = _NONE
        self.lost: Bools = np.zeros(0, np.bool_)
        """Per extent: its replica was not written, or not sealed."""
        self.sealed: I64 = _NONE
        self.same: I64 = _NONE
        self.different: I64 = _NONE
        self.unsealed: I64 = _NONE
        self.unsealed_sameness: NDArray[np.uint8] = np.zeros(0, np.uint8)
        """Rows whose keys others had decided, and not sealed as far as the master knows."""
        self.decided: I64 = _NONE
        """Rows that were decided but not sealed at enough nodes."""
        self.decided_seqs: U64 = np.zeros(0, np.uint64)
        self.decided_epoch = 0
        self.failed: list[tuple[I64, CenoteError]] = []
        self.last_error: CenoteError | None = None

    def run(self) -> Plan[None]:
        """All of it. Raises what ends the whole call; GrantRevoked ends this grant only."""
        self.call.grants[self._granted.key] = self._grant
        self._locate()
        if count_nonzero(self.lost):
            yield RefreshView(self.call.remaining_s())
            self._locate()
        checksums = yield from self._move()
        rows = self._written_rows()
        if len(rows) < len(self.keys):
            yield from self._abort(np.setdiff1d(np.arange(len(self.keys)), rows))
        if not len(rows):
            self.call.grants.pop(self._granted.key, None)
            return
        reply = yield from self._commit(rows, checksums)
        yield from self._finish(rows, reply, checksums)

    def go_on(
        self,
        reply: pb.PutCommitResponse,
        checksums: U64,
        tried: SealPart | None = None,
        until_s: float = 0.0,
    ) -> Plan[None]:
        """`run`, from where everything is written and was decided like this. `tried`: and all of it
        was to be sealed by `until_s`, in whichever way that ended."""
        self._until_s = until_s
        self._locate()
        yield from self._finish(np.arange(len(self.keys)), reply, checksums, tried)

    def _finish(
        self, rows: I64, reply: pb.PutCommitResponse, checksums: U64, tried: SealPart | None = None
    ) -> Plan[None]:
        decided, seqs = self._take_decision(rows, reply)
        unwritten = count_nonzero(self.lost)  # the commit has told of these
        if len(decided):
            yield from self._seal(decided, seqs, reply.epoch, checksums, tried)
        # Nor is it told of what was sealed by enough daemons, and not by all: the master would take
        # any replica for one that outlives its daemon.
        is_sealed = not len(self.decided) and count_nonzero(self.lost) == unwritten
        end = self.call.sealed if is_sealed else self.call.lose_commit
        end()

    def _locate(self) -> None:
        """Which node holds what."""
        self.nodes = self.call.state.peers.nodes_of(self.placement.extents["segment"])
        self.lost = self.nodes < 0

    # ---- payload -----------------------------------------------------------------------------

    def _move(self) -> Plan[U64]:
        """Write every replica; the payloads' checksums."""
        staged: Staged | None = None
        if self._tails is not None:
            if can_stage(self.sizes, self._tails, self.pieces):
                staged = yield Stage(self.pieces, int(self.sizes[0]), self.keys)
                self._moved = self.sizes + self._tails, staged.pieces
            else:
                self._key_tails = KeyTails(self.keys, self._tails)
        parts: list[Part] = []
        members: list[Members] = []
        first_items: Items | None = None
        for replica in range(1 if self.placement.single else int(self.replicas.max())):
            items = items_of_replica(self.placement, replica, *self._moved, self._key_tails)
            hashed_here = not replica and staged is None
            for part, where in self._parts(items, hashed_here):
                parts.append(part)
                of = items.extent if where is None else items.extent[where]
                members.append(Members(of, where, hashed_here))
                if staged is not None and items.whole:
                    members[-1].counts = join_part(part)
            if not replica:
                first_items = items
        assert first_items is not None
        self._grant.moving = parts
        self._until_s = self.call.now() + sum(part.budget_s for part in parts)
        yield Move(parts)
        unfenced = False
        sums = np.zeros(len(first_items.owner), np.uint64)
        summed = 0
        for part, member in zip(parts, members, strict=True):
            if member.counts is not None and part.statuses is not None:
                part.statuses = np.repeat(part.statuses, member.counts)
            unfenced |= self._take_part(part, member.extents)
            # An item that was not written was not hashed either, and another replica may be.
            statuses = part.statuses if part.error is None else None
            if member.hashed and part.checksums is not None and statuses is not None:
                if count_nonzero(statuses):
                    continue
                sums[slice(None) if member.where is None else member.where] = part.checksums
                summed += len(part.checksums)
        self._grant.unfenced = unfenced
        self._grant.moving = ()
        if self._cut:
            yield self._begin_another_session()
            raise self.last_error or GrantRevoked("this session was cut off")
        if staged is not None:
            return staged.checksums
        if first_items.whole and summed == len(sums):
            payloads = len(self.keys)  # keys behind them come after them
            if self.placement.single:
                return sums[:payloads]
            by_row = np.empty(payloads, np.uint64)
            by_row[first_items.owner[:payloads]] = sums[:payloads]
            return by_row
        hashed: U64 = yield Hash(self.pieces, self.sizes.astype(np.uint64))
        return hashed

    def _parts(self, items: Items, hashed: bool) -> list[tuple[Part, I64 | None]]:
        """One part for each node, and which items it has (None: all)."""
        nodes = self.nodes
        if not self.placement.single or len(items.owner) != len(nodes):
            nodes = nodes[items.extent]
        made = []
        for node, where in groups_by_node(nodes):
            if node < 0:
                continue
            extents, addresses = items.extents, items.addresses
            if where is not None:
                extents, addresses = extents[where], addresses[where]
            size = int(extents["length"].sum())
            part = Part(
                node,
                extents,
                addresses,
                budget_s=self.call.put_budget_s(node, size),
                size_bytes=size,
                checksum=Checksum.ALWAYS if hashed else Checksum.NEVER,
                grant_id=self._grant.grant_id,
                keeper=(self._moved, self._key_tails),
            )
            made.append((part, where))
        return made

    def _take_part(self, part: Part, extents: I64) -> bool:
        """Note what one node did not take; whether bytes of it may still be under way."""
        error = part.error
        if error is None and part.statuses is not None:
            self.call.state.trust(part.node_id)
            if not count_nonzero(part.statuses):
                return False
            self.lost[extents[part.statuses != ItemStatus.OK]] = True
            for code in np.unique(part.statuses).tolist():
                if code == ItemStatus.NOT_DONE:
                    failed = Unavailable("it did not complete a write")
                    self.call.node_failed(part.node_id, failed)
                if code != ItemStatus.OK:
                    what = f"node {part.node_id} did not take the bytes"
                    self.last_error = error_from_code(code, what)
            unended = bool(count_nonzero(part.statuses == ItemStatus.NOT_DONE))
            return unended and part.node_id not in self.call.state.lease_proven
        assert error is not None
        self.lost[extents] = True
        self.last_error = error
        if isinstance(error, BufferInUse | ClientClosed):
            raise error
        if isinstance(error, GrantRevoked):
            self._cut = True
        elif node_failed(error):
            self.call.node_failed(part.node_id, error, until_s=self._until_s)
            if self.call.remaining_s() <= 0:
                raise error
        elif not isinstance(error, StaleEpoch | StaleLocation | SessionUnknown):
            raise error
        return part.unfenced

    def _begin_another_session(self) -> Reopen:
        self._cut = False
        return Reopen(
            self.call.remaining_s(), session_too=True, cut_session_id=self._grant.session_id
        )

    def _lost_replicas(self) -> Bools:
        return lost_replicas(self.replicas, self.placement, self.lost)

    def _enough(self, lost: Bools) -> Bools:
        return are_enough(self.replicas, lost, self.min_replicas)

    def _written_rows(self) -> I64:
        if not count_nonzero(self.lost):
            return np.arange(len(self.keys), dtype=np.int64)
        return np.flatnonzero(self._enough(self._lost_replicas()))

    # ---- decision ----------------------------------------------------------------------------

    def _abort(self, rows: I64) -> Plan[None]:
        request = pb.PutAbortRequest(
            grant_id=self._grant.grant_id,
            indexes=self._granted.positions[rows].astype("<u4").tobytes(),
            session_id=self._grant.session_id,
            unfenced=self._grant.unfenced,
        )
        yield from ask_master(self.call, "put_abort", request, pb.PutAbortResponse)

    def _commit(self, rows: I64, checksums: U64) -> Plan[pb.PutCommitResponse]:
        """Have the rows decided."""
        call = self.call
        whole = len(rows) == len(self.keys)
        request_id, sealed_through = call.commits(self._grant.session_id)
        request = pb.PutCommitRequest(
            grant_id=self._grant.grant_id,
            indexes=b""
            if whole and self._granted.named
            else self._granted.positions[rows].astype("<u4").tobytes(),
            checksums=(checksums if whole else checksums[rows]).astype("<u8", copy=False).tobytes(),
            session_id=self._grant.session_id,
            request_id=request_id,
            sealed_through=sealed_through,
            piggyback=call.state.piggyback(call.space),
            epoch=self._granted.epoch,
            failed_replicas=self._failed_replicas(rows),
        )
        if not self._granted.named:
            self._name(request, rows)
        reply = yield from ask_master(call, "put_commit", request, pb.PutCommitResponse)
        call.grants.pop(self._granted.key, None)
        return reply

    def _take_decision(self, rows: I64, reply: pb.PutCommitResponse) -> tuple[I64, U64]:
        """What became of the rows: those that were decided, and their seqs."""
        if len(reply.statuses) != len(rows):
            raise InternalError(f"put_commit answered {len(reply.statuses)} of {len(rows)} keys")
        seqs = np.uint64(reply.seq_first) + np.arange(len(rows), dtype=np.uint64)
        if reply.statuses == DECIDED * len(rows):
            return rows, seqs
        statuses = np.frombuffer(reply.statuses, np.uint8)
        chosen = statuses == CommitStatus.DECIDED
        self.same = rows[statuses == CommitStatus.EXISTS_SAME]
        self.different = rows[statuses == CommitStatus.EXISTS_DIFFERENT]
        others = statuses >= CommitStatus.UNSEALED_SAME
        self.unsealed = rows[others]
        same = statuses[others] == CommitStatus.UNSEALED_SAME
        self.unsealed_sameness = np.where(same, _SAME, _DIFFERENT)
        if (statuses == CommitStatus.NOT_GRANTED).any():
            self.last_error = GrantRevoked("the grant ended before the put was committed")
        return rows[chosen], seqs[chosen]

    def _name(self, request: pb.PutCommitRequest, rows: I64) -> None:
        """Say which objects are in the extents."""
        digests, sizes, tails = self.digests, self.sizes, self._tails
        if len(rows) < len(self.keys):
            digests, sizes = pick_digests(digests, rows), sizes[rows]
            tails = None if tails is None else tails[rows]
        request.names.CopyFrom(self._granted.names(self.call, digests, sizes, tails))

    def _failed_replicas(self, rows: I64) -> bytes:
        if not count_nonzero(self.lost):
            return b""
        lost = self._lost_replicas()[rows]
        return failed_rows(self.replicas[rows], lost, self._granted.positions[rows])

    # ---- seal --------------------------------------------------------------------------------

    def _seal(
        self, rows: I64, seqs: U64, epoch: int, checksums: U64, tried: SealPart | None = None
    ) -> Plan[None]:
        """Have the daemons write the slots; sets `sealed` and `decided`."""
        everything = len(rows) == len(self.keys)
        seq_of = seqs
        if not everything:
            seq_of = np.zeros(len(self.keys), np.uint64)
            seq_of[rows] = seqs
        member = np.zeros(len(self.keys), np.bool_)
        member[rows] = True
        if everything and self.placement.single and not count_nonzero(self.lost):
            open_ = rows
        else:
            open_ = np.flatnonzero(member[self.placement.owner] & ~self.lost)
        table = seal_rows(
            self.placement, open_, seq_of, checksums, self.sizes, self.keys, self.digests
        )
        for attempt in range(1, SEAL_ATTEMPTS_MAX + 1):
            if tried is None:
                parts, members = self._seal_parts(open_, table, epoch)
                yield Seals(parts)
            else:
                parts, members, tried = [tried], [open_], None
            again = [
                self._take_seal(part, extents) for part, extents in zip(parts, members, strict=True)
            ]
            waiting = np.sort(np.concatenate(again)) if again else _NONE
            if self.call.stalled and len(waiting):
                waiting = yield from self._without_hidden(waiting)
            if not len(waiting):
                break
            pause_s = backoff_s(attempt)
            if self.call.remaining_s() <= pause_s or attempt == SEAL_ATTEMPTS_MAX:
                self.lost[waiting] = True
                break
            table = table[np.searchsorted(open_, waiting)]
            open_ = waiting
            if self._cut:
                yield self._begin_another_session()
            else:
                yield Pause(pause_s)
        if not count_nonzero(self.lost):
            self.sealed = rows
            return
        enough = self._enough(self._lost_replicas())[rows]
        self.sealed = rows[enough]
        self.decided, self.decided_seqs = rows[~enough], seqs[~enough]
        self.decided_epoch = epoch

    def _seal_parts(
        self, extents: I64, table: NDArray[np.void], epoch: int
    ) -> tuple[list[SealPart], list[I64]]:
        remaining_s = self.call.remaining_s()
        parts: list[SealPart] = []
        members: list[I64] = []
        for node, where in groups_by_node(self.nodes[extents]):
            some, rows = (extents, table) if where is None else (extents[where], table[where])
            if self.placement.single and len(some) == len(self.keys):
                keys = b"".join(self.keys)
            else:
                keys = b"".join([self.keys[row] for row in self.placement.owner[some].tolist()])
            call = self.call
            batch = SealBatch(epoch, call.namespace_id, call.generation, rows.tobytes(), keys)
            budget_s = seal_budget_s(remaining_s, len(some), self._seal_failures)
            parts.append(SealPart(node, batch, budget_s))
            members.append(some)
        self._until_s = self.call.now() + sum(part.budget_s for part in parts)
        return parts, members

    def _take_seal(self, part: SealPart, extents: I64) -> I64:
        """Note what one daemon did not seal; extents to try again."""
        error = part.error
        if error is None and part.statuses is not None:
            statuses = part.statuses
            if not count_nonzero(statuses):
                self.call.state.trust(part.node_id)
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
        self.last_error = error
        if isinstance(error, ClientClosed):
            raise error
        if isinstance(error, GrantRevoked) and not self._cut:
            self._cut = True  # the decision stands: seal it in another session
            return extents
        if node_failed(error):
            self.call.node_failed(part.node_id, error, until_s=self._until_s)
            if self._ask_once_more(extents):
                return extents
        self.lost[extents] = True
        return _NONE

    def _without_hidden(self, extents: I64) -> Plan[I64]:
        """Extents on nodes that the master has not given up, after a look at the silent ones."""
        silent = self.call.stalled & set(self.nodes[extents].tolist())
        if not silent:
            return extents
        hidden = yield from hidden_after_report(self.call, silent)
        gone = np.isin(self.nodes[extents], np.array(list(hidden), np.int64))
        self.lost[extents[gone]] = True
        return extents[~gone]

    def _ask_once_more(self, extents: I64) -> bool:
        """Whether some object has too few replicas without these; no more than once."""
        self._seal_failures += 1
        if self._seal_failures >= SEAL_FAILURES_MAX or self.call.remaining_s() <= 0:
            return False
        lost = self._lost_replicas()
        lost[self.placement.owner[extents], self.placement.replica[extents]] = True
        return not self._enough(lost).all()
