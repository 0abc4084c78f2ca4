"""How objects are put: start, payload, commit, seal; and what is tried again.

    put_start --> EXISTS: nothing is sent
        |         UNSEALED: another's is sealed, and put_start asked anew
        |         refused: the key's error
      granted --> payload to every replica --> enough replicas written? --- no --> abort, start anew
                                                     |                             elsewhere
                                                  commit --> another was first: existed
                                                     |       grant lost: start anew
                                                   seal --> slot table still growing: seal again
                                                     |      no replica sealed: start anew
                                                   stored

Acknowledged means sealed, sealed means decided. Rows (positions in the user's batch) end as stored,
existed or failed; `_OPEN` ones are started anew, at most `PUT_ATTEMPTS_MAX` times.
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
    NamespaceReset,
    NoSpace,
    QuotaExceeded,
    Unavailable,
)
from cenote.api.keys import tail_lengths
from cenote.api.rows import PUT, SEAL, PutStatus
from cenote.api.types import PutStatus as Outcome
from cenote.api.types import Sameness
from cenote.v1 import master_pb2 as pb

from .aliases import AliasStore, Contents, aliases_of
from .alike_puts import AlikeStore, Likeness, Places
from .asking import ask_master, hidden_after_report, sealed_too_late
from .budgets import DECIDED_ATTEMPTS_MAX, PUT_ATTEMPTS_MAX, backoff_s
from .granted import ONE_GRANTED, Granted, give_spares_back
from .options import PutOptions
from .others import seal_for_others
from .outcomes import PutOutcome, count_outcome
from .pieces import Pieces
from .refusals import FOR_LACK_OF_NODES, refusal_of
from .spares import SPARE_BYTES_MAX, SpareRun, common_length, units_of
from .state import Call, pick_digests
from .steps import HashWide, Pause, Plan, RefreshView
from .stores import Store

__all__ = ["put_objects"]

I64 = NDArray[np.int64]

_OPEN: Final = 0
_STORED: Final = int(Outcome.STORED)

_NOT_YET_PAUSE_S: Final = 0.05


def put_objects(
    call: Call,
    keys: Sequence[bytes],
    digests: bytes,
    pieces: Pieces,
    options: PutOptions,
    *,
    started: pb.PutStartResponse | None = None,
    prefix: bytes = b"",
    decided: tuple[int, int] | None = None,
    sameness: int = Sameness.UNKNOWN,
    last: CenoteError | None = None,
) -> Plan[PutOutcome]:
    """Put every key's pieces.

    `started`: the answer to a put_start of exactly these keys. `decided`: the version (epoch, seq)
    of an earlier attempt to put the only key, which ended with `last`: it was decided but not
    sealed, so that the master's EXISTS does not mean that it is stored. `sameness`: of the only
    key, with what another writer had decided, and not sealed yet, when this one was to be decided.
    `prefix`: packed digests of the keys before these in their chain.

    Raises what ended the call before any key had an outcome; afterwards errors are per key.
    """
    count = len(keys)
    outcome = PutOutcome.blank(count)
    sizes = pieces.totals()
    writer = _Writer(call, keys, digests, pieces, sizes, options, outcome)
    if decided is not None:
        writer.note_decided(np.zeros(1, np.int64), *decided)
    writer.sameness[:] = sameness
    writer.last = last
    if options.dedup:
        hashed: bytes = yield HashWide(pieces, sizes, call.space.seed, call.space.dedup_key)
        writer.contents = Contents(hashed)
    per_slice = call.state.limits.batch_keys_max
    for first in range(0, count, per_slice):
        todo = np.arange(first, min(count, first + per_slice), dtype=np.int64)
        try:
            for turn in [todo] if writer.contents is None else writer.contents.turns(todo):
                yield from writer.put(turn, started)
        except (BufferInUse, ClientClosed, NamespaceReset):
            raise
        except CenoteError as error:
            open_ = np.flatnonzero(outcome.statuses == _OPEN)
            if len(open_) == count:
                raise
            outcome.fail(open_, error)
            break
    if prefix:
        # Told after the commits (news is applied before the request that it rides on), so that of
        # the whole chain the root is newest and not the blocks that were put last.
        call.space.chain_touches.append((prefix + digests, False))
        call.state.wake()
    count_outcome(call, outcome, sizes)
    return outcome


class _Writer:
    """One user's batch."""

    __slots__ = (
        "again",
        "call",
        "contents",
        "crowded",
        "decided",
        "digests",
        "keys",
        "lacking",
        "last",
        "likeness",
        "not_yet",
        "options",
        "others",
        "others_epoch",
        "outcome",
        "pieces",
        "sameness",
        "sizes",
        "tails",
        "versions",
    )

    def __init__(
        self,
        call: Call,
        keys: Sequence[bytes],
        digests: bytes,
        pieces: Pieces,
        sizes: NDArray[np.uint64],
        options: PutOptions,
        outcome: PutOutcome,
    ) -> None:
        self.call = call
        self.keys = keys
        self.digests = digests
        self.pieces = pieces
        self.sizes = sizes
        self.likeness = likeness = Likeness.of(keys, pieces)
        self.tails = tail_lengths(keys) if likeness is None else likeness.tails()
        self.options = options
        self.outcome = outcome
        self.contents: Contents | None = None
        self.last: CenoteError | None = None
        self.not_yet = False
        """The master has no space to give for some of it, but will have."""
        self.crowded = False
        """It has none, but there are spare extents here."""
        self.lacking = False
        """It has none but on nodes that did not answer in time in this call."""
        self.again = False
        """Others had some of it decided, and not sealed: asked at once for what became of that."""
        self.others: dict[int, int] = {}
        """Position -> seq of what was sealed for them since, in this epoch."""
        self.others_epoch = 0
        self.sameness = np.zeros(len(keys), np.uint8)
        """With theirs."""
        # Decided, but sealed nowhere: that the master knows the key does not make it stored.
        self.decided = np.zeros(len(keys), np.bool_)
        self.versions: dict[int, tuple[int, int]] = {}
        """Position -> (epoch, seq) of those, until the master took them back."""

    def put(self, todo: I64, started: pb.PutStartResponse | None = None) -> Plan[None]:
        """Put the keys at these positions."""
        if started is None and (run := self._spare_run(todo)) is not None:
            yield from self._store_spares(todo, run)
            todo = todo[self.outcome.statuses[todo] == _OPEN]
            if not len(todo):
                return
        attempt = 0
        while attempt < DECIDED_ATTEMPTS_MAX:
            if attempt >= PUT_ATTEMPTS_MAX and not self.decided[todo].any():
                break
            if attempt:
                self.call.state.counters.retries += 1
                yield Pause(min(backoff_s(attempt + 4), max(0.0, self.call.remaining_s())))
            if (attempt or self.call.failed) and self.call.knows_newer_view:
                yield RefreshView(max(0.001, self.call.remaining_s()))
                self.call.look_again()
            if self.versions:
                if self.call.remaining_s() <= 0:
                    raise sealed_too_late(self.last)
                yield from self._take_back()
            self.not_yet = self.crowded = self.lacking = self.again = False
            try:
                reply = started or (yield from self._start(todo))
            except GrantRevoked as revoked:  # the answer got lost, and is forgotten by now
                self.last = revoked
                attempt += 1
                continue
            started = None
            granted, duplicates = self._sort_answers(todo, reply)
            if len(granted):
                if (places := Places.answered(self.call, reply, self.likeness)) is not None:
                    error = yield from self._store_alike(todo, places)
                else:
                    positions = todo[granted]
                    ours = Granted.by_answer(self.call, reply, granted, self._lengths(positions))
                    error = yield from self._store(positions, ours)
                self.last = error or self.last
            if reply.alias_grant_id:
                yield from self._store_aliases(todo, reply)
            if reply.unsealed:
                yield from self._seal_for_others(todo, reply)
            if len(duplicates):
                self.outcome.copy_duplicates(self.digests, todo, duplicates)
            if np.count_nonzero(self.outcome.statuses) == len(self.keys):
                return
            left = todo[self.outcome.statuses[todo] == _OPEN]
            if not len(left):
                return
            if self.crowded:
                yield from give_spares_back(self.call)
            if self.lacking:
                yield from hidden_after_report(self.call, set(self.call.stalled))
            if self.not_yet:  # however often: the deadline ends it
                if self.call.remaining_s() <= _NOT_YET_PAUSE_S:
                    break
                yield Pause(_NOT_YET_PAUSE_S)
            elif not self.again and (
                len(left) == len(todo) or not isinstance(self.last, QuotaExceeded)
            ):
                attempt += 1  # else what was stored made room for more of a very large batch
            todo = left
        self.outcome.fail(
            todo,
            self.last
            or Unavailable(
                "the put was decided, but no node sealed it",
                remedy="put again; `cenote nodes` shows which daemons are in trouble",
            ),
        )

    def note_decided(self, positions: I64, epoch: int, seqs: int | NDArray[np.uint64]) -> None:
        """These were decided, and could not be sealed at enough nodes."""
        self.decided[positions] = True
        numbers = np.broadcast_to(np.asarray(seqs, np.uint64), len(positions))
        for position, seq in zip(positions.tolist(), numbers.tolist(), strict=True):
            self.versions[position] = epoch, seq

    def _take_back(self) -> Plan[None]:
        """Have the master forget what was decided and not sealed, so that it is placed anew."""
        for epoch in {epoch for epoch, _ in self.versions.values()}:
            some = {at: seq for at, (e, seq) in self.versions.items() if e == epoch}
            request = pb.PutAbortRequest(
                session_id=self.call.state.session_id,
                unsealed_keys=self.call.key_batch(pick_digests(self.digests, list(some))),
                unsealed_seqs=np.array(list(some.values()), "<u8").tobytes(),
                unsealed_epoch=epoch,
            )
            yield from ask_master(self.call, "put_abort", request, pb.PutAbortResponse)
            for at in some:
                del self.versions[at]
                self.decided[at] = False

    def _start(self, todo: I64) -> Plan[pb.PutStartResponse]:
        call, options = self.call, self.options
        whole = len(todo) == len(self.keys)
        sizes = self.sizes if whole else self.sizes[todo]
        if len(sizes) > 1 and np.count_nonzero(sizes != sizes[0]) == 0:
            sizes = sizes[:1]
        tails = self.tails if whole or self.tails is None else self.tails[todo]
        request = pb.PutStartRequest(
            keys=call.key_batch(self.digests if whole else pick_digests(self.digests, todo)),
            sizes=sizes.astype("<u8", copy=False).tobytes(),
            tail_lengths=b"" if tails is None else tails.astype("<u2", copy=False).tobytes(),
            options=options.message(call.avoided_ids()),
            session_id=call.state.session_id,
            request_id=call.asks(),
            piggyback=call.state.piggyback(call.space),
            credentials=call.state.credentials,
        )
        length = self._common_length(todo)
        if length and not call.avoid and options.takes_spares():  # else nobody would take them
            request.spare_count = call.space.spares.wanted(units_of(length), len(todo))
            request.spare_bytes = length
        if self.contents is not None:
            request.content_digests = self.contents.message(todo)
        if self.others:
            seqs = [self.others.get(position, 0) for position in todo.tolist()]
            request.sealed_seqs = np.array(seqs, "<u8").tobytes()
            request.sealed_epoch = self.others_epoch
        reply = yield from ask_master(call, "put_start", request, pb.PutStartResponse)
        call.unanswered = 0
        self.others.clear()
        call.started(reply)
        if request.spare_count:
            call.keep_spares(reply, request.session_id, len(todo))
        return reply

    def _lengths(self, todo: I64) -> I64:
        """Bytes of each object with what its key adds."""
        lengths = self.sizes if self.tails is None else self.sizes + self.tails
        return (lengths if len(todo) == len(lengths) else lengths[todo]).astype(np.int64)

    def _common_length(self, todo: I64) -> int:
        """Bytes of each object, with what its key adds, if they all need as much space; else 0."""
        if self.likeness is not None:
            length = self.likeness.length
            return length if length <= SPARE_BYTES_MAX else 0
        return common_length(self._lengths(todo))

    def _spare_run(self, todo: I64) -> SpareRun | None:
        """Extents for all of these that were granted ahead, if there are any.

        Not for what was decided before and is sealed nowhere: then it may be the very object that
        the commit finds in its place. Nor for what another had decided: that is not written twice.
        """
        call = self.call
        spares = call.space.spares
        if not spares.held or call.avoid or not self.options.takes_spares():
            return None
        if self.versions and np.count_nonzero(self.decided[todo]):
            return None
        if np.count_nonzero(self.sameness) and np.count_nonzero(self.sameness[todo]):
            return None
        length = self._common_length(todo)
        if not length:
            return None
        state = call.state
        run = spares.take(
            units_of(length),
            len(todo),
            state.limits.epoch,
            state.session_id,
            (call.namespace_id, call.generation),
            call.now(),
        )
        if run is not None and state.suspects:
            segment = run.grant.extent(run.start)[0]
            if state.peers.node_by_segment.get(segment) in state.suspects:
                spares.unwanted.append(run)
                spares.give_up()
                return None
        return run

    def _store_spares(self, todo: I64, run: SpareRun) -> Plan[None]:
        """Payload, commit and seal in extents that were granted ahead."""
        chain = self.options.chain
        places = Places.ahead(run, self.likeness, chain=chain)
        if places is not None:
            error = yield from self._store_alike(todo, places)
        else:
            granted = Granted.ahead(run, self._lengths(todo), chain=chain)
            error = yield from self._store(todo, granted)
        if error is not None:
            self.last = error
            self.call.space.spares.give_up()

    def _store_aliases(self, todo: I64, reply: pb.PutStartResponse) -> Plan[None]:
        """Refer to bytes that are there; those that can't be are sent."""
        at, granted, checksums = aliases_of(self.call, reply, self.sizes[todo].astype(np.int64))
        self.last = (yield from self._store(todo[at], granted, checksums)) or self.last
        open_ = todo[at][self.outcome.statuses[todo[at]] == _OPEN]
        assert self.contents is not None
        self.again |= self.contents.were_refused(open_, failed=bool(self.call.failed))

    def _sort_answers(self, todo: I64, reply: pb.PutStartResponse) -> tuple[I64, I64]:
        """Give refused and existing keys their outcome; (granted, duplicate) indexes in `todo`."""
        if len(reply.puts) != PUT.itemsize * len(todo):
            raise InternalError(f"put_start answered {len(reply.puts)} bytes for {len(todo)} keys")
        everything = np.arange(len(todo), dtype=np.int64)
        if reply.puts == ONE_GRANTED * len(todo):
            return everything, everything[:0]
        statuses = np.frombuffer(reply.puts, PUT)["status"]
        there = todo[statuses == PutStatus.EXISTS]
        there = there[~self.decided[there]]
        self.outcome.existed(there, self.sameness[there])
        for status in np.unique(statuses).tolist():
            if status in FOR_LACK_OF_NODES and self.call.give_suspects_a_chance():
                continue  # started anew, on nodes that failed a while ago, too
            if status in FOR_LACK_OF_NODES and self.call.may_try_once_more():
                self.lacking = True
                continue
            if status == PutStatus.NO_SPACE and self.call.space.spares.held:
                self.crowded = True
                self.last = NoSpace("the pool has no room beside this client's spare extents")
                continue
            if status == PutStatus.NOT_YET:
                self.not_yet = True
                self.last = Unavailable(
                    "the master was just restarted and gives no space yet",
                    remedy="try again once its daemons have attached, or with a longer deadline",
                )
                continue
            refused = todo[statuses == status]
            last = self.last if status != PutStatus.QUOTA_EXCEEDED else None
            refusal = refusal_of(status, self.sizes[refused], self.options.min_replicas, last)
            if status == PutStatus.QUOTA_EXCEEDED:
                # What one session may have under way comes back with what is stored: left open.
                self.last = refusal
            elif refusal is not None:
                self.outcome.fail(refused, refusal)
        return (
            everything[statuses == PutStatus.GRANTED],
            everything[statuses == PutStatus.DUPLICATE_IN_BATCH],
        )

    def _seal_for_others(self, todo: I64, reply: pb.PutStartResponse) -> Plan[None]:
        """Keys that others had decided exist when they are sealed, which they may not have lived to
        do. The next PutStart says so, and is told whether they are still there."""
        puts = np.frombuffer(reply.puts, PUT)
        at = np.flatnonzero(puts["status"] == PutStatus.UNSEALED)
        seals, counts = np.frombuffer(reply.unsealed, SEAL), puts["extents"][at].astype(np.int64)
        keys = [self.keys[i] for i in todo[at].tolist()]
        sealed, error = yield from seal_for_others(self.call, keys, seals, counts, reply.epoch)
        seqs = seals["seq"][np.cumsum(counts) - counts]
        self.others = dict(zip(todo[at[sealed]].tolist(), seqs[sealed].tolist(), strict=True))
        self.others_epoch = reply.epoch
        self.again = bool(self.others)
        if not sealed.all():
            self.not_yet = True
            self.last = error or self.last

    def _store(
        self, positions: I64, granted: Granted, checksums: NDArray[np.uint64] | None = None
    ) -> Plan[CenoteError | None]:
        """Payload, commit and seal of what was granted; what is still open afterwards, and why.

        `checksums`: of payloads that are there already."""
        whole = len(positions) == len(self.keys)
        sizes = self.sizes.astype(np.int64)
        tails = None if self.tails is None else self.tails.astype(np.int64)
        store: Store = (Store if checksums is None else AliasStore)(
            call=self.call,
            granted=granted,
            keys=self.keys if whole else [self.keys[i] for i in positions.tolist()],
            digests=self.digests if whole else pick_digests(self.digests, positions),
            pieces=self.pieces if whole else self.pieces.take(positions),
            sizes=sizes if whole else sizes[positions],
            tails=tails if whole or tails is None else tails[positions],
            min_replicas=self.options.min_replicas,
        )
        store.checksums = checksums
        try:
            yield from store.run()
        except GrantRevoked as revoked:  # the whole grant: nothing of it counts
            return revoked
        finally:
            self._note(store, positions)
        return store.last_error

    def _note(self, store: Store, positions: I64) -> None:
        """What came of a grant, as far as it came."""
        outcome, sealed = self.outcome, store.sealed
        outcome.stored(positions if len(sealed) == len(positions) else positions[sealed])
        if len(sealed) < len(positions):
            outcome.existed(positions[store.same], Sameness.SAME)
            outcome.existed(positions[store.different], Sameness.DIFFERENT)
            self.note_decided(positions[store.decided], store.decided_epoch, store.decided_seqs)
            self.sameness[positions[store.unsealed]] = store.unsealed_sameness
            self.again |= len(store.unsealed) > 0
        for rows, error in store.failed:
            outcome.fail(positions[rows], error)

    def _store_alike(self, positions: I64, places: Places) -> Plan[CenoteError | None]:
        """As `_store`, for the whole batch."""
        assert self.likeness is not None
        batch = self.likeness, self.keys, self.digests, self.pieces
        alike = AlikeStore(self.call, places, *batch, self.options)
        try:
            if (yield from alike.run()):
                self.outcome.all_stored()
                return None
        except GrantRevoked as revoked:
            return revoked
        finally:
            if alike.store is not None:
                self._note(alike.store, positions)
        return alike.error if alike.store is None else alike.store.last_error
