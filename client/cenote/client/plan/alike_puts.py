"""Puts of batches that are all alike: one length, one piece and one extent each, on one node.

Nearly all batches that engines put are. What `stores` finds out row by row for any grant is told
here by a few comparisons, and rows that are the same for all are made once. Where something does
not go as it should, a `Store` goes on from there, or the general plan begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    GrantRevoked,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.keys import tail_bytes
from cenote.api.rows import EXTENT
from cenote.runtime.memory import address_of
from cenote.transport.base import ItemStatus, SealBatch
from cenote.v1 import master_pb2 as pb

from .asking import ask_master
from .budgets import node_failed, seal_budget_s
from .granted import ONE_GRANTED, Granted
from .grants import Grant
from .options import PutOptions
from .pieces import Pieces, place_single
from .seal_rows import alike_rows, fill_rows
from .spares import SpareRun, lie_back_to_back
from .state import Call
from .steps import Checksum, Move, MoveOne, Part, Plan, Reopen, SealPart, Seals, Stage
from .stores import DECIDED, Store
from .tails import STAGED_BYTES_MAX, STAGING_BYTES_MAX, staged_stride

__all__ = ["AlikeStore", "Likeness", "Places"]

U64 = NDArray[np.uint64]
_LOWER_HALF: Final = np.uint64(0xFFFF_FFFF)
count_nonzero: Final = np.count_nonzero


@final
class Likeness:
    """What the objects of such a batch have in common. Bytes."""

    __slots__ = ("count", "key_length", "length", "size", "staged", "tail")

    def __init__(self, count: int, size: int, key_length: int) -> None:
        self.count = count
        self.size = size
        self.key_length = key_length
        self.tail = tail_bytes(key_length)
        """Of the key, behind each payload."""
        self.length = size + self.tail
        """Of each extent."""
        self.staged = (
            self.tail > 0
            and size <= STAGED_BYTES_MAX
            and count * staged_stride(self.length) <= STAGING_BYTES_MAX
        )
        """Copied first, to stand before their keys."""

    def tails(self) -> NDArray[np.uint16] | None:
        """`tail` for each of them, None where there is none."""
        return np.full(self.count, self.tail, np.uint16) if self.tail else None

    @classmethod
    def of(cls, keys: Sequence[bytes], pieces: Pieces) -> Likeness | None:
        """None where it is not such a batch."""
        count = len(keys)
        if count < 2 or pieces.starts is not None or len(pieces.lengths) != count:
            return None
        sizes = pieces.lengths
        key_lengths = set(map(len, keys))
        if len(key_lengths) > 1 or count_nonzero(sizes != sizes[0]):
            return None
        return cls(count, int(sizes[0]), key_lengths.pop())


@final
class Places:
    """Where such a batch is to lie, and by what right."""

    __slots__ = (
        "epoch",
        "extents",
        "general",
        "grant",
        "indexes",
        "key",
        "rows",
        "segment",
    )

    def __init__(
        self,
        grant: Grant,
        key: object,
        epoch: int,
        segment: int,
        extents: NDArray[np.void],
        rows: NDArray[np.void],
        general: Callable[[], Granted],
        *,
        indexes: bytes = b"",
    ) -> None:
        self.grant = grant
        self.key = key
        """Among the grants of the call."""
        self.epoch = epoch
        self.segment = segment
        self.extents = extents
        self.rows = rows
        """SEAL rows, but for what differs from one batch to the next."""
        self.general = general
        """The same for a `Store`."""
        self.indexes = indexes
        """Packed u32: which extents of their grant; empty where the grant is just for these."""

    @classmethod
    def ahead(cls, run: SpareRun, likeness: Likeness | None, *, chain: bool) -> Places | None:
        """Spare extents for a whole batch; None where it is no such batch, or they are not for it
        all, or don't lie as it would."""
        if likeness is None or run.stop - run.start != likeness.count:
            return None
        if likeness.staged and not run.grant.joined:
            return None
        spare, some = run.grant, slice(run.start, run.stop)
        grant = run.as_grant()

        def general() -> Granted:
            lengths = np.full(likeness.count, likeness.length, np.int64)
            made = Granted.ahead(run, lengths, chain=chain)
            made.grant = grant
            return made

        rows = spare.seal_rows(likeness.length, likeness.size, likeness.key_length)
        return cls(
            grant,
            run,
            spare.epoch,
            spare.segment,
            spare.extents[some],
            rows[some],
            general,
            indexes=grant.indexes,
        )

    @classmethod
    def answered(
        cls, call: Call, reply: pb.PutStartResponse, likeness: Likeness | None
    ) -> Places | None:
        """What all keys of a batch were granted; None where it is anything else."""
        if likeness is None:
            return None
        count = likeness.count
        if reply.puts != ONE_GRANTED * count or len(reply.extents) != EXTENT.itemsize * count:
            return None
        extents = np.frombuffer(reply.extents, EXTENT)
        words = extents.view(np.uint64).reshape(count, 3)
        segments = words[:, 0] & _LOWER_HALF
        if count_nonzero(segments != segments[0]) or count_nonzero(words[:, 2] != likeness.length):
            return None
        if likeness.staged and not lie_back_to_back(words[:, 1], likeness.length):
            return None
        grant = Grant(reply.grant_id, call.state.session_id)
        rows = alike_rows(extents, likeness.length, likeness.size, likeness.key_length)

        def general() -> Granted:
            lengths = np.full(count, likeness.length, np.int64)
            placement = place_single(extents, lengths, lengths)
            everything = np.arange(count)
            return Granted(grant, reply.epoch, placement, np.ones(count, np.int64), everything)

        return cls(grant, grant.grant_id, reply.epoch, int(segments[0]), extents, rows, general)


@final
class AlikeStore:
    """Payload, commit and seal of such a batch."""

    __slots__ = (
        "_call",
        "_digests",
        "_joined_keys",
        "_keys",
        "_likeness",
        "_options",
        "_pieces",
        "_places",
        "error",
        "store",
    )

    def __init__(
        self,
        call: Call,
        places: Places,
        likeness: Likeness,
        keys: Sequence[bytes],
        digests: bytes,
        pieces: Pieces,
        options: PutOptions,
    ) -> None:
        self._call = call
        self._places = places
        self._likeness = likeness
        self._keys = keys
        self._joined_keys = b"".join(keys)
        self._digests = digests
        self._pieces = pieces
        self._options = options
        self.store: Store | None = None
        """What went on where it was not all alike any more."""
        self.error: CenoteError | None = None
        """Why nothing was decided: it is to be begun anew."""

    def run(self) -> Plan[bool]:
        """All of it; whether all is stored, else see `store` and `error`. Raises what ends the
        whole call; GrantRevoked ends this grant only."""
        call, places = self._call, self._places
        call.grants[places.key] = places.grant
        node = call.state.peers.node_by_segment.get(places.segment)
        if node is None:
            self.store = self._general()
            yield from self.store.run()
            return False
        checksums = yield from self._write(node)
        if checksums is None:
            return False
        reply = yield from self._commit(checksums)
        call.grants.pop(places.key, None)
        if reply.statuses != DECIDED * self._likeness.count:
            self.store = self._general()
            yield from self.store.go_on(reply, checksums)
            return False
        part = self._seal_part(node, reply, checksums)
        until_s = call.now() + part.budget_s
        yield Seals((part,))
        if part.error is not None or part.statuses is None or count_nonzero(part.statuses):
            self.store = self._general()
            yield from self.store.go_on(reply, checksums, part, until_s)
            return False
        call.state.trust(node)
        call.sealed()
        return True

    def _general(self) -> Store:
        count, tail = self._likeness.count, self._likeness.tail
        return Store(
            call=self._call,
            granted=self._places.general(),
            keys=self._keys,
            digests=self._digests,
            pieces=self._pieces,
            sizes=np.full(count, self._likeness.size, np.int64),
            tails=np.full(count, tail, np.int64) if tail else None,
            min_replicas=self._options.min_replicas,
        )

    # ---- payload -----------------------------------------------------------------------------

    def _write(self, node: int) -> Plan[U64 | None]:
        """The payloads' checksums; None where they are not all written."""
        call, likeness, grant = self._call, self._likeness, self._places.grant
        budget_s = call.put_budget_s(node, likeness.count * likeness.length)
        until_s = call.now() + budget_s
        try:
            if likeness.staged:
                checksums = yield from self._write_staged(node, budget_s)
            else:
                checksums = yield from self._write_straight(node, budget_s)
        except (BufferInUse, ClientClosed):
            raise
        except CenoteError as error:
            self.error = error
            if isinstance(error, GrantRevoked):
                yield Reopen(call.remaining_s(), session_too=True, cut_session_id=grant.session_id)
                return None
            if node_failed(error):
                call.node_failed(node, error, until_s=until_s)
                if call.remaining_s() <= 0:
                    raise
            elif not isinstance(error, StaleEpoch | StaleLocation | SessionUnknown):
                raise
        grant.unfenced |= grant.is_unfenced()
        grant.moving = ()
        if self.error is not None:
            yield from self._abort()
            return None
        return checksums

    def _write_staged(self, node: int, budget_s: float) -> Plan[U64]:
        """Copies that lie as their extents do: one transfer. Sets `error`."""
        likeness, places = self._likeness, self._places
        staged = yield Stage(self._pieces, likeness.size, self._keys)
        length = (likeness.count - 1) * staged_stride(likeness.length) + likeness.length
        write = MoveOne(
            node,
            places.segment,
            int(places.extents["offset"][0]),
            length,
            int(staged.pieces.addresses[0]),
            budget_s,
            Checksum.NEVER,
            places.grant.grant_id,
        )
        places.grant.moving = (write,)
        status, _, _ = yield write
        if status:
            self.error = error_from_code(status, f"node {node} did not take the bytes")
        checksums: U64 = staged.checksums
        return checksums

    def _write_straight(self, node: int, budget_s: float) -> Plan[U64]:
        """Payloads, and what stands behind them, from where they are. Sets `error`."""
        call, grant = self._call, self._places.grant
        part = self._part(node, budget_s)
        grant.moving = (part,)
        yield Move((part,))
        if part.error is not None:
            raise part.error
        assert part.statuses is not None
        assert part.checksums is not None
        if count_nonzero(part.statuses):
            self.error = error_from_code(
                int(part.statuses.max()), f"node {node} did not take the bytes"
            )
            if count_nonzero(part.statuses == ItemStatus.NOT_DONE):
                call.node_failed(node, Unavailable("it did not complete a write"))
                grant.unfenced = node not in call.state.lease_proven
        return part.checksums[: self._likeness.count]

    def _part(self, node: int, budget_s: float) -> Part:
        likeness, extents, addresses = self._likeness, self._places.extents, self._pieces.addresses
        count, size, tail = likeness.count, likeness.size, likeness.tail
        if tail:
            extents = np.concatenate((extents, extents))
            extents["length"][:count] = size
            extents["length"][count:] = tail
            extents["offset"][count:] += np.uint64(size)
            first = address_of(self._joined_keys)
            keys = np.arange(first, first + count * tail, tail, dtype=np.uint64)
            addresses = np.concatenate((addresses, keys))
        elif self._places.indexes:  # of spare extents the length is not this one's
            extents = extents.copy()
            extents["length"] = size
        return Part(
            node,
            extents,
            addresses,
            budget_s=budget_s,
            size_bytes=count * likeness.length,
            checksum=Checksum.ALWAYS,
            grant_id=self._places.grant.grant_id,
            keeper=(self._pieces, self._joined_keys),
        )

    def _abort(self) -> Plan[None]:
        """Give the space back before it is asked for anew."""
        call, places = self._call, self._places
        grant = places.grant
        request = pb.PutAbortRequest(
            grant_id=grant.grant_id,
            indexes=places.indexes,
            session_id=grant.session_id,
            unfenced=grant.unfenced,
        )
        yield from ask_master(call, "put_abort", request, pb.PutAbortResponse)
        call.grants.pop(places.key, None)

    # ---- decision and seal -------------------------------------------------------------------

    def _commit(self, checksums: U64) -> Plan[pb.PutCommitResponse]:
        call, places, likeness = self._call, self._places, self._likeness
        grant = places.grant
        request_id, sealed_through = call.commits(grant.session_id)
        names = None
        if places.indexes:  # the master does not know the keys
            tail = likeness.tail
            names = pb.SpareNames(
                keys=call.key_batch(self._digests),
                sizes=likeness.size.to_bytes(8, "little"),
                tail_lengths=tail.to_bytes(2, "little") * likeness.count if tail else b"",
                chain=self._options.chain,
            )
        request = pb.PutCommitRequest(
            grant_id=grant.grant_id,
            indexes=places.indexes,
            checksums=checksums.tobytes(),
            session_id=grant.session_id,
            request_id=request_id,
            sealed_through=sealed_through,
            piggyback=call.state.piggyback(call.space),
            epoch=places.epoch,
            names=names,
        )
        return (yield from ask_master(call, "put_commit", request, pb.PutCommitResponse))

    def _seal_part(self, node: int, reply: pb.PutCommitResponse, checksums: U64) -> SealPart:
        call, rows = self._call, self._places.rows
        fill_rows(rows, reply.seq_first, checksums, self._digests)
        home = call.namespace_id, call.generation
        batch = SealBatch(reply.epoch, *home, rows.tobytes(), self._joined_keys)
        return SealPart(node, batch, seal_budget_s(call.remaining_s(), len(rows), 0))
