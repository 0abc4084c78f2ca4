"""Moving the bytes of located objects here: replica by replica until one is proven right.

Works on rows (positions in a lookup's answer), each of which ends in exactly one of: hit, miss,
failed with an error, or `again` (the location was stale: ask the master).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    InvalidBuffer,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.rows import EXTENT, ObjectStatus
from cenote.transport.base import ItemStatus

from .asking import report_stalled
from .budgets import attempt_budget_s, node_failed
from .grants import LeaseHold
from .peers import groups_by_node
from .pieces import Items, Pieces, Placement, cut_items, place_replicas
from .state import Call
from .steps import Allocate, Checksum, Hash, Move, Part, Plan, RefreshView, Reopen

__all__ = ["Fetch", "Located"]

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
_NONE: Final[I64] = np.zeros(0, np.int64)

_OPEN, _HIT, _MISS, _FAILED, _AGAIN = range(5)
# Looking a member up in its enum's class takes longer than the rest of the expression.
_MISS_STATUS: Final = int(ObjectStatus.MISS)
_LEASED: Final = int(ObjectStatus.LEASED)
count_nonzero: Final = np.count_nonzero  # five times as fast as any() and all() of short arrays


@dataclass(slots=True)
class Located:
    """The answer to a lookup: OBJECT rows, their EXTENT rows, and what proves a read of them."""

    positions: I64
    """Of each row in the user's batch."""
    objects: NDArray[np.void]
    extents: NDArray[np.void]
    hold: LeaseHold | None = None
    cached: bool = False
    asked_s: float = 0.0


@dataclass(slots=True)
class _Pick:
    """The replicas chosen for one try."""

    rows: I64
    """Rows that are read now."""
    extents: NDArray[np.void]
    owner: I64
    """Per extent: its row's position in `rows`."""
    start: I64
    nodes: I64
    alternatives: bool
    """Whether any row has another replica to turn to."""


class Fetch:
    """One lookup's answer being read."""

    __slots__ = (
        "_call",
        "_cut",
        "_leased",
        "_located",
        "_placement",
        "_state",
        "_until_s",
        "_verify",
        "cacheable",
        "failed",
        "misread",
        "objects",
        "positions",
        "sizes",
        "values",
    )

    def __init__(self, call: Call, located: Located, verify: str) -> None:
        self._call = call
        self._located = located
        self._verify = verify
        self.positions = located.positions
        self.objects = located.objects
        status = located.objects["status"]
        if count_nonzero(status) < len(status):
            present = status != _MISS_STATUS
            self.positions = located.positions[present]
            self.objects = located.objects[present]
            status = status[present]
        self.sizes: I64 = self.objects["size"].astype(np.int64)
        self._state = np.zeros(len(self.objects), np.uint8)
        leased: Bools = status == _LEASED
        self._leased: Bools | None = None if count_nonzero(leased) == len(leased) else leased
        """Per row; None: all are."""
        self._placement: Placement | None = None
        self._cut = False
        """A daemon cut this session off."""
        self._until_s = 0.0
        """When the transfers under way are to be done."""
        self.failed: list[tuple[I64, CenoteError]] = []
        self.misread: dict[int, tuple[int, int, int]] = {}
        """Rows that arrived whole from a fresh location, with the wrong checksum -> (node, segment,
        offset) where they were read."""
        self.values: list[bytes] | None = None
        self.cacheable: NDArray[np.void] | None = None
        """Per row the only extent that it was read from, where that is so."""

    # ---- what came of it ---------------------------------------------------------------------

    def open_positions(self) -> I64:
        """Positions in the user's batch that have no outcome (yet)."""
        state = self._state
        if count_nonzero(state == _HIT) == len(state):
            return self.positions[:0]
        open_: I64 = self.positions[(state == _OPEN) | (state == _AGAIN)]
        return open_

    def hit_rows(self) -> I64:
        rows: I64 = (self._state == _HIT).nonzero()[0]
        return rows

    def hits_on(self, segments: frozenset[int]) -> int:
        """How many of the hits lie in one piece in one of these."""
        _, extents = self.cacheable_hits()
        return int(np.count_nonzero(np.isin(extents["segment"], list(segments))))

    def cacheable_hits(self) -> tuple[I64, NDArray[np.void]]:
        """(rows, the extent of each) of hits that lie in one piece."""
        if self.cacheable is None:
            return _NONE, self._located.extents[:0]
        good = (self._state == _HIT) & (self.cacheable["length"] != 0)
        rows = good.nonzero()[0]
        return rows, self.cacheable if len(rows) == len(good) else self.cacheable[rows]

    def nodes_of(self, segments: NDArray[np.uint32]) -> I64:
        return self._call.state.peers.nodes_of(segments)

    # ---- reading -----------------------------------------------------------------------------

    def run(self, pieces: Pieces | None) -> Plan[None]:
        """Read all rows. `pieces` are those of the user's whole batch (None: allocate)."""
        if not len(self.objects):
            return
        if pieces is None:
            mine, self.values = yield Allocate(self.objects["size"].astype(np.uint64))
        else:
            mine = pieces if self._is_whole(len(pieces)) else pieces.take(self.positions)
            self._refuse_small(mine)
        self._placement = place_replicas(
            self._located.extents,
            self.objects["extents"].astype(np.int64),
            self.objects["replicas"].astype(np.int64),
            self.sizes,
        )
        nodes = self.nodes_of(self._placement.extents["segment"])
        if count_nonzero(nodes < 0):  # a segment newer than our view
            yield RefreshView(self._call.remaining_s())
            nodes = self.nodes_of(self._placement.extents["segment"])
        while True:
            rows = (self._state == _OPEN).nonzero()[0]
            if not len(rows):
                return
            pick, lost = self._pick(rows, nodes)
            if len(lost):
                yield from self._give_up(lost, nodes)
            if len(pick.rows):
                yield from self._try(pick, mine)

    def _is_whole(self, count: int) -> bool:
        # Positions rise, so as many as there are, up to the last, are all of them.
        return len(self.positions) == count

    def _refuse_small(self, pieces: Pieces) -> None:
        totals = pieces.totals()
        too_small = totals < self.objects["size"]
        if count_nonzero(too_small):
            small = too_small.nonzero()[0]
            first = int(small[0])
            self._fail(
                small,
                InvalidBuffer(
                    f"buffer {int(self.positions[first])} has {int(totals[first])} bytes,"
                    f" the object has {int(self.sizes[first])}",
                    remedy="pass a buffer that is large enough",
                ),
            )

    def _fail(self, rows: I64, error: CenoteError) -> None:
        self._state[rows] = _FAILED
        self.failed.append((rows, error))

    def _pick(self, rows: I64, nodes: I64) -> tuple[_Pick, I64]:
        """The first usable replica of each row; rows without one."""
        placement = self._placement
        assert placement is not None
        avoid = self._call.avoid | self._call.state.peers.down
        unusable: Bools = nodes < 0
        if avoid:
            unusable = unusable | np.isin(nodes, np.array(sorted(avoid)))
        if placement.single:
            kept, lost = rows, _NONE
            if count_nonzero(unusable):
                lost = rows[unusable[rows]]
                kept = rows[~unusable[rows]]
            if len(kept) == len(self.objects):
                whole = placement.extents, placement.owner, placement.start, nodes
                return _Pick(kept, *whole, False), lost
            numbers = np.arange(len(kept), dtype=np.int64)
            part = placement.extents[kept], numbers, placement.start[kept], nodes[kept]
            return _Pick(kept, *part, False), lost
        replicas = self.objects["replicas"].astype(np.int64)
        widest = int(replicas.max())
        bad = np.arange(widest) >= replicas[:, None]
        np.logical_or.at(bad, (placement.owner, placement.replica), unusable)
        choice = np.argmin(bad, axis=1)
        usable = ~bad[np.arange(len(bad)), choice]
        kept = rows[usable[rows]]
        taken = np.zeros(len(self.objects), np.bool_)
        taken[kept] = True
        select = taken[placement.owner] & (placement.replica == choice[placement.owner])
        owner = np.searchsorted(kept, placement.owner[select])
        pick = _Pick(
            kept,
            placement.extents[select],
            owner,
            placement.start[select],
            nodes[select],
            alternatives=bool(((~bad).sum(axis=1)[kept] > 1).any()) if len(kept) else False,
        )
        return pick, rows[~usable[rows]]

    def _give_up(self, rows: I64, nodes: I64) -> Plan[None]:
        """No replica of these can be reached: a miss; a cached location may only be old.

        Where a node was in trouble for another call, a moment ago, it is tried all the same. Where
        a node fell silent in this call, the master looks whether it lives. If it does it is
        tried once more, for as long as there is time, else the master has hidden it by then.
        """
        call, placement = self._call, self._placement
        if self._located.cached:
            self._state[rows] = _AGAIN
            return
        if call.knows_newer_view:  # where a restarted daemon is
            if call.state.knows_newer_view:
                yield RefreshView(call.remaining_s())
            call.look_again()
            self._state[rows] = _AGAIN
            return
        if call.avoid and call.try_fresh_suspects(self._holders(rows, nodes)):
            return  # they stay open
        self._state[rows] = _MISS
        if call.stalled and placement is not None:
            silent = np.isin(nodes, np.array(list(call.stalled)))
            again = np.intersect1d(rows, placement.owner[silent])
            if len(again):
                yield from report_stalled(call, set(nodes[silent].tolist()))
                self._state[again] = _AGAIN
        counts = count_nonzero(self._state[rows] == _MISS)
        call.space.counters.unreachable_misses += int(counts)

    def _holders(self, rows: I64, nodes: I64) -> set[int]:
        """The nodes that have anything of these rows."""
        placement = self._placement
        assert placement is not None
        held: list[int] = nodes[np.isin(placement.owner, rows)].tolist()
        return set(held)

    def _try(self, pick: _Pick, mine: Pieces) -> Plan[None]:
        """Read one replica of each picked row."""
        rows = pick.rows
        local = mine if len(rows) == len(self.objects) else mine.take(rows)
        items = cut_items(pick.extents, pick.owner, pick.start, self.sizes[rows], local)
        nodes = pick.nodes if items.whole else self.nodes_of(items.extents["segment"])
        parts, members = self._parts(pick, items, nodes)
        session_id = self._call.state.session_id
        yield Move(parts)
        if len(pick.extents) == len(rows):
            if self.cacheable is None:
                self.cacheable = np.zeros(len(self.objects), EXTENT)
            self.cacheable[rows] = pick.extents
        if items.whole and self._all_leased(parts):
            held = self._located.hold
            self._state[rows] = _HIT if held and self._call.now() <= held.end_s else _AGAIN
            return
        done = np.ones(len(items.owner), np.bool_)
        leased = np.zeros(len(items.owner), np.bool_)
        sums = np.zeros(len(items.owner), np.uint64)
        for part, member in zip(parts, members, strict=True):
            where = np.arange(len(done)) if member is None else member
            # Of a cached location nobody knows whether another replica lives.
            alone = not (pick.alternatives or self._located.cached)
            self._take_part(part, where, items, rows, done, alone)
            if part.checksums is None:
                leased[where] = True
            else:
                sums[where] = part.checksums
        if self._cut:
            yield Reopen(self._call.remaining_s(), session_too=True, cut_session_id=session_id)
            self._cut = False
        complete = np.ones(len(rows), np.bool_)
        complete[items.owner[~done]] = False
        yield from self._prove(pick, items, complete, leased, sums, local)

    def _all_leased(self, parts: list[Part]) -> bool:
        """Whether all arrived, and the lease alone is to prove it: the usual case over shm."""
        for part in parts:
            if part.error is not None or part.checksums is not None or part.statuses is None:
                return False
            if count_nonzero(part.statuses):
                return False
        if self._call.state.suspects:
            for part in parts:
                self._call.state.trust(part.node_id)
        return True

    def _parts(self, pick: _Pick, items: Items, nodes: I64) -> tuple[list[Part], list[I64 | None]]:
        """One part for each node, and which items it has (None: all)."""
        remaining_s = self._call.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the bytes were read")
        parts: list[Part] = []
        members: list[I64 | None] = []
        hold = self._located.hold
        for node, where in groups_by_node(nodes):
            extents, addresses, owner = items.extents, items.addresses, items.owner
            if where is not None:
                extents, addresses, owner = extents[where], addresses[where], owner[where]
            size_bytes = int(extents["length"].sum())
            alternatives = pick.alternatives or self._located.cached or node in self._call.chances
            budget_s = attempt_budget_s(
                remaining_s,
                size_bytes,
                alternatives=alternatives,
                last=node in self._call.last_tries,
            )
            parts.append(
                Part(
                    node,
                    extents,
                    addresses,
                    budget_s=budget_s,
                    size_bytes=size_bytes,
                    checksum=self._checksum_mode(pick.rows, owner),
                    lease_id=0 if hold is None else hold.lease_id,
                )
            )
            members.append(where)
        self._until_s = self._call.now() + sum(part.budget_s for part in parts)
        return parts, members

    def _checksum_mode(self, rows: I64, owner: I64) -> int:
        if self._located.hold is None or self._verify == "checksum":
            return Checksum.ALWAYS
        if self._leased is not None and not self._leased[rows[owner]].all():
            return Checksum.ALWAYS
        return Checksum.UNLESS_LEASED

    def _take_part(
        self, part: Part, where: I64, items: Items, rows: I64, done: Bools, alone: bool
    ) -> None:
        """Note what one node did not deliver, and what becomes of those rows."""
        error = part.error
        if error is None and part.statuses is not None:
            self._call.state.trust(part.node_id)
            if not part.statuses.any():
                return
            bad = part.statuses != ItemStatus.OK
            done[where[bad]] = False
            for code in np.unique(part.statuses[bad]).tolist():
                affected = rows[items.owner[where[part.statuses == code]]]
                if code == ItemStatus.NOT_DONE:
                    failed = Unavailable("it did not complete a read")
                    self._call.node_failed(part.node_id, failed)
                elif code == ItemStatus.STALE:
                    self._state[affected] = _AGAIN
                else:
                    what = f"node {part.node_id} refused the read"
                    self._fail(np.unique(affected), error_from_code(code, what))
            return
        assert error is not None
        done[where] = False
        if isinstance(error, BufferInUse | ClientClosed):
            raise error
        if isinstance(error, GrantRevoked):
            self._cut = True
        if isinstance(error, StaleEpoch | StaleLocation | SessionUnknown | GrantRevoked):
            self._state[rows[items.owner[where]]] = _AGAIN
        elif node_failed(error):
            # The rows stay open: next replica.
            self._call.node_failed(part.node_id, error, alone=alone, until_s=self._until_s)
            if self._call.remaining_s() <= 0:
                raise error
        else:
            raise error

    def _prove(
        self,
        pick: _Pick,
        items: Items,
        complete: Bools,
        leased: Bools,
        sums: NDArray[np.uint64],
        local: Pieces,
    ) -> Plan[None]:
        """Tell right bytes from stale ones among the rows that arrived whole."""
        rows = pick.rows
        by_lease = np.ones(len(rows), np.bool_)
        by_lease[items.owner[~leased]] = False
        by_sum = np.flatnonzero(complete & ~by_lease)
        right = np.zeros(len(rows), np.bool_)
        if len(by_sum):
            if items.whole:
                got = sums[by_sum]
            else:
                picked = local.take(by_sum)
                got = yield Hash(picked, self.objects["size"][rows[by_sum]])
            right[by_sum] = got == self.objects["checksum"][rows[by_sum]]
            if count_nonzero(right) < len(by_sum) and not self._located.cached:
                self._note_misread(pick, by_sum[~right[by_sum]])
        held = complete & by_lease
        if held.any():
            hold = self._located.hold
            if hold is not None and self._call.now() <= hold.end_s:
                right |= held
        open_ = self._state[rows] == _OPEN
        self._state[rows[right & open_]] = _HIT
        self._state[rows[complete & ~right & open_]] = _AGAIN

    def _note_misread(self, pick: _Pick, wrong: I64) -> None:
        first = np.searchsorted(pick.owner, wrong)
        for at, extent in zip(wrong.tolist(), first.tolist(), strict=True):
            place = pick.extents[extent]
            self.misread[int(pick.rows[at])] = (
                int(pick.nodes[extent]),
                int(place["segment"]),
                int(place["offset"]),
            )
