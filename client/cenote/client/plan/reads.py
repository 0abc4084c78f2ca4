"""How objects are read: where from, what proves the bytes, what is tried next.

    cached location --> read, verify by checksum --- right ------> hit
         |                                   \\------ wrong ---\\
    acquire (lease, all replicas) --> read one replica         |
         ^                                 |                   |
         |                                 +-- proven by lease or checksum --> hit
         |                                 +-- node failed --> its next replica; none left: a miss
         +-- stale, mismatch, lease over --+   (bounded)

A wrong checksum says that the location was stale, and never that the node is bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    GrantRevoked,
    InvalidArgument,
    NamespaceReset,
    StaleLocation,
)
from cenote.api.keys import split_digests
from cenote.api.rows import DIGEST_BYTES, EXTENT, OBJECT, ObjectStatus
from cenote.api.types import AcquiredLease, GetStatus
from cenote.client.locations import LOCATION
from cenote.v1 import master_pb2 as pb

from .alike import CACHED_BYTES_MAX, Alike
from .asking import ask_master
from .budgets import LEASE_SHARE, READ_ATTEMPTS_MAX, backoff_s, lease_ttl_ms
from .counters import FETCH, LOOKUP, READ, VERIFY
from .device_rows import Devices
from .fetches import Fetch, Located
from .grants import LeaseHold
from .misreads import Misreads
from .pieces import Pieces, ranges
from .state import Call, pick_digests
from .steps import Move, Pause, Plan, Settle

__all__ = ["ReadOptions", "ReadOutcome", "acquire", "read_direct", "read_objects"]

I64 = NDArray[np.int64]
_HIT: Final = int(GetStatus.HIT)
_MISS: Final = int(GetStatus.MISS)

"""Larger objects are not read under a cached location where a lease proves a read without a
checksum: hashing them would take longer than the round trip that the cache saves."""


@dataclass(slots=True)
class ReadOptions:
    chain: bool = False
    verify: str = "auto"
    lease: AcquiredLease | None = None
    first: Located | None = None
    """A lookup of exactly these keys that was made already; its lease is the caller's."""
    lease_proves: bool = True
    """False: the end of the given lease can't be told here, so checksums prove."""


@dataclass(slots=True)
class ReadOutcome:
    """Per key: GetStatus, size in bytes (0 unless a hit), error code; the values, where memory was
    allocated for them."""

    statuses: NDArray[np.uint8]
    sizes: NDArray[np.uint64]
    codes: NDArray[np.uint16]
    values: list[bytes | None] | None = None
    errors: dict[int, CenoteError] = field(default_factory=dict)
    """The first error of each code."""
    failures: list[tuple[str, CenoteError, int]] = field(default_factory=list)
    """(stage, error, how many keys)."""

    @classmethod
    def blank(cls, count: int, *, values: bool) -> ReadOutcome:
        return cls(
            np.full(count, _MISS, np.uint8),
            np.zeros(count, np.uint64),
            np.zeros(count, np.uint16),
            [None] * count if values else None,
        )

    def hit(self, positions: I64, sizes: NDArray[np.uint64]) -> None:
        self.statuses[positions] = _HIT
        self.sizes[positions] = sizes

    def fail(self, positions: I64, error: CenoteError, stage: str) -> None:
        self.failures.append((stage, error, len(positions)))
        self.statuses[positions] = GetStatus.FAILED
        self.codes[positions] = error.code
        self.errors.setdefault(error.code, error)


def read_objects(
    call: Call, digests: bytes, pieces: Pieces | None, options: ReadOptions
) -> Plan[ReadOutcome]:
    """Read every key's object into its pieces (None: into new `bytes`).

    Raises what ended the call before any key had an outcome; afterwards errors are per key.
    """
    count = len(digests) // DIGEST_BYTES
    outcome = ReadOutcome.blank(count, values=pieces is None)
    per_slice = call.state.limits.batch_keys_max
    for first in range(0, count, per_slice):
        reader = _Reader(call, digests, pieces, options, outcome)
        reader.todo = np.arange(first, min(count, first + per_slice), dtype=np.int64)
        end = int(reader.todo[-1]) + 1
        try:
            yield from reader.read()
        except (BufferInUse, ClientClosed, NamespaceReset) as error:
            call.space.counters.fail(READ, FETCH, error, count)
            raise
        except CenoteError as error:
            if len(reader.todo) == count:
                call.space.counters.fail(READ, LOOKUP, error, count)
                raise
            outcome.fail(np.concatenate((reader.todo, np.arange(end, count))), error, LOOKUP)
            break
        if options.chain and (outcome.statuses[first:end] == _MISS).any():
            break
    _count(call, outcome)
    return outcome


def read_direct(
    call: Call, digests: bytes, pieces: Pieces, options: ReadOptions
) -> Plan[ReadOutcome | None]:
    """Read a batch into memory of GPUs that NICs reach, without the processor; None where not all
    of it can be had in this way: nothing is said of any key then."""
    count = len(digests) // DIGEST_BYTES
    devices = pieces.devices
    if devices is None or count > call.state.limits.batch_keys_max:
        return None
    outcome = ReadOutcome.blank(count, values=False)
    reader = _Reader(call, digests, pieces, options, outcome)
    reader.todo = np.arange(count, dtype=np.int64)
    yield Settle(devices, max(0.001, call.remaining_s()))
    if not (yield from reader.read_direct(devices)):
        return None
    _count(call, outcome)
    return outcome


def _count(call: Call, outcome: ReadOutcome) -> None:
    counters = call.space.counters
    hits, misses, failed = np.bincount(outcome.statuses, minlength=3).tolist()
    counters.hits += hits
    counters.misses += misses
    counters.failed += failed
    counters.read_bytes += int(outcome.sizes.sum())
    for stage, error, keys in outcome.failures:
        counters.fail(READ, stage, error, keys)


class _Reader:
    """One slice of a batch."""

    __slots__ = ("call", "digests", "misreads", "options", "outcome", "pieces", "todo")

    def __init__(
        self,
        call: Call,
        digests: bytes,
        pieces: Pieces | None,
        options: ReadOptions,
        outcome: ReadOutcome,
    ) -> None:
        self.call = call
        self.digests = digests
        self.pieces = pieces
        self.options = options
        self.outcome = outcome
        self.misreads = Misreads()
        self.todo: I64 = np.zeros(0, np.int64)
        """Positions without an outcome (a miss is one)."""

    def read(self) -> Plan[None]:
        if self.options.first is not None:
            yield from self._fetch(self.options.first)
        elif self.options.lease is not None:
            yield from self._fetch(self._under_lease(self.options.lease))
        elif self.call.space.locations.may_have(self._first_digest()):
            cached = self._from_cache()
            if cached is not None:
                yield from self._fetch(cached)
        for attempt in range(READ_ATTEMPTS_MAX):
            if not len(self.todo):
                return
            if attempt:
                yield Pause(min(backoff_s(attempt), max(0.0, self.call.remaining_s())))
            located = yield from self._acquired()
            try:
                if not (yield from self._fetch_alike(located)):
                    yield from self._fetch(located)
            finally:
                if located.hold is not None:
                    self.call.state.release(located.hold.lease_id)
                    self.call.state.holds.pop(located.hold.lease_id, None)
        if len(self.todo):
            lost = StaleLocation(
                f"the bytes were not where the master said, {READ_ATTEMPTS_MAX} times",
                remedy="remove the key and put it again if this persists",
            )
            self.outcome.fail(self.todo, lost, VERIFY)

    def read_direct(self, devices: Devices) -> Plan[bool]:
        """Have a NIC put all of it on GPUs, proven by the lease; False: it is to be staged."""
        lease = self.options.lease
        if lease is not None:
            return (yield from self._fetch_alike(self._under_lease(lease), devices))
        located = yield from self._acquired()
        try:
            return (yield from self._fetch_alike(located, devices))
        finally:
            if located.hold is not None:
                self.call.state.release(located.hold.lease_id)
                self.call.state.holds.pop(located.hold.lease_id, None)

    def _fetch_alike(self, located: Located, direct: Devices | None = None) -> Plan[bool]:
        """Read a whole batch of objects that lie in one piece each, on one node, and are all there:
        the usual case, in a tenth of the steps. False: not that, or it did not go smoothly."""
        call, todo = self.call, self.todo
        alike = Alike.of(call, located, self.pieces) if not call.avoid else None
        if alike is None or call.remaining_s() <= 0:
            return False
        part = alike.part(call, self.options.verify, direct)
        yield Move([part])
        if not alike.arrived(call, part):
            return False
        outcome = self.outcome
        outcome.statuses.fill(_HIT)
        outcome.sizes[:] = alike.sizes
        self.todo = todo[:0]
        if alike.is_cacheable(call):
            end_s = located.asked_s + call.state.limits.location_ttl_s
            call.space.locations.store_batch(
                self.digests, end_s, located.objects, located.extents, alike.node
            )
        return True

    def _fetch(self, located: Located) -> Plan[None]:
        """Read what was located; leaves in `todo` what is to be asked for (again)."""
        fetch = Fetch(self.call, located, self.options.verify)
        asked = located.positions
        rest = self.todo[~np.isin(self.todo, asked)] if len(asked) < len(self.todo) else None
        try:
            yield from fetch.run(self.pieces)
        finally:
            self._take_over(fetch, located)
            open_ = fetch.open_positions()
            self.call.space.counters.stale_locations += len(open_)
            self.todo = open_ if rest is None else np.union1d(rest, open_)
        if fetch.misread:
            rows = np.array(list(fetch.misread), np.int64)
            wanted = split_digests(self._digests_of(fetch.positions[rows]))
            yield from self.misreads.report_repeated(self.call, fetch, wanted)

    def _take_over(self, fetch: Fetch, located: Located) -> None:
        outcome = self.outcome
        hits = fetch.hit_rows()
        if len(hits):
            everything = len(hits) == len(fetch.positions)
            positions = fetch.positions if everything else fetch.positions[hits]
            sizes = fetch.objects["size"]
            outcome.hit(positions, sizes if everything else sizes[hits])
            if self.call.state.peers.on_ssd:
                self.call.space.counters.ssd_hits += fetch.hits_on(self.call.state.peers.on_ssd)
            if outcome.values is not None and fetch.values is not None:
                for row, position in zip(hits.tolist(), positions.tolist(), strict=True):
                    outcome.values[position] = fetch.values[row]
            if located.cached:
                self._touch(positions)
            elif fetch.cacheable is not None and self.options.lease is None:
                # Not what a lease says: its objects may have been removed since it was acquired.
                self._remember(fetch, located)
        for rows, error in fetch.failed:
            outcome.fail(fetch.positions[rows], error, FETCH)

    # ---- cached locations --------------------------------------------------------------------

    def _from_cache(self) -> Located | None:
        cache, todo = self.call.space.locations, self.todo
        wanted = self._digests_of(todo)
        where, rows = cache.find_many(split_digests(wanted), self.call.now())
        if not len(where) or (self.options.chain and len(where) < len(todo)):
            return None
        objects = np.zeros(len(where), OBJECT)
        objects["size"] = rows["size"]
        objects["checksum"] = rows["checksum"]
        objects["extents"] = objects["replicas"] = 1
        objects["status"] = ObjectStatus.UNLEASED
        extents = np.zeros(len(where), EXTENT)
        extents["segment"] = rows["segment"]
        extents["offset"] = rows["offset"]
        extents["length"] = rows["size"]
        return Located(todo[where], objects, extents, cached=True)

    def _remember(self, fetch: Fetch, located: Located) -> None:
        """Cache where the hits of a lookup are, if they will be read from there."""
        state, space = self.call.state, self.call.space
        rows, extents = fetch.cacheable_hits()
        if not len(rows) or not space.locations.entries_max:
            return
        objects = fetch.objects if len(rows) == len(fetch.objects) else fetch.objects[rows]
        nodes = fetch.nodes_of(extents["segment"])
        worth = objects["size"] <= CACHED_BYTES_MAX
        if np.count_nonzero(worth) < len(worth):
            worth |= ~np.isin(nodes, np.array(list(state.lease_proven), np.int64))
            rows, extents, objects, nodes = (
                rows[worth],
                extents[worth],
                objects[worth],
                nodes[worth],
            )
        locations = np.empty(len(rows), LOCATION)
        locations["end_s"] = located.asked_s + state.limits.location_ttl_s
        locations["offset"] = extents["offset"]
        locations["size"] = objects["size"]
        locations["checksum"] = objects["checksum"]
        locations["segment"] = extents["segment"]
        locations["node_id"] = nodes
        digests = split_digests(self._digests_of(fetch.positions[rows]))
        space.locations.store_many(digests, locations)

    def _touch(self, positions: I64) -> None:
        """The master did not see these reads: tell it soon, so that hot objects don't look cold."""
        space = self.call.space
        digests = self._digests_of(positions)
        self.call.space.counters.cached_reads += len(positions)
        if self.options.chain:
            space.chain_touches.append((digests, True))
        else:
            space.touches.extend(split_digests(digests))
        self.call.state.wake()

    def _first_digest(self) -> bytes:
        at = int(self.todo[0]) * DIGEST_BYTES
        return self.digests[at : at + DIGEST_BYTES]

    def _digests_of(self, positions: I64) -> bytes:
        if len(positions) * DIGEST_BYTES == len(self.digests):
            return self.digests
        return pick_digests(self.digests, positions)

    # ---- the master --------------------------------------------------------------------------

    def _acquired(self) -> Plan[Located]:
        call = self.call
        positions = self.todo
        asked_s = call.now()
        ttl_ms = lease_ttl_ms(call.remaining_s(), call.state.limits.lease_ttl_max_ms)
        reply, hold = yield from acquire(
            call, self._digests_of(positions), ttl_ms, chain=self.options.chain
        )
        objects = np.frombuffer(reply.objects, OBJECT)
        if hold is not None and hold.end_s < call.end_s:
            call.state.holds[hold.lease_id] = hold  # renewed while this call runs
            call.state.wake()
        return Located(
            positions, objects, np.frombuffer(reply.extents, EXTENT), hold, asked_s=asked_s
        )

    def _under_lease(self, lease: AcquiredLease) -> Located:
        """The wanted rows of a lease that somebody acquired. Raises InvalidArgument."""
        objects = np.frombuffer(lease.objects, OBJECT)
        extents = np.frombuffer(lease.extents, EXTENT)
        hold = (
            LeaseHold(lease.lease_id, 0, lease.end_s)
            if lease.lease_id and self.options.lease_proves
            else None
        )
        asked_s = self.call.now()
        if lease.digests == self.digests and len(self.todo) == len(objects):
            return Located(self.todo, objects, extents, hold, asked_s=asked_s)
        rank = {digest: row for row, digest in enumerate(split_digests(lease.digests))}
        wanted = split_digests(self._digests_of(self.todo))
        found = [rank.get(digest, -1) for digest in wanted]
        if -1 in found:
            raise InvalidArgument(
                f"key {int(self.todo[found.index(-1)])} is not one of those that were acquired",
                remedy="read under a lease only the keys that it was acquired for",
            )
        rows = np.array(found, np.int64)
        counts = objects["extents"].astype(np.int64)
        starts = np.cumsum(counts) - counts
        picked = ranges(starts[rows], counts[rows])
        return Located(self.todo, objects[rows], extents[picked], hold, asked_s=asked_s)


def acquire(
    call: Call,
    digests: bytes,
    ttl_ms: int,
    *,
    chain: bool = False,
    hold: bool = False,
) -> Plan[tuple[pb.AcquireResponse, LeaseHold | None]]:
    """Locations of the keys' objects and a lease of them (None where none was given).

    The lease lasts `ttl_ms`, or as long as the master gives one.
    """
    try:
        return (yield from _acquire(call, digests, ttl_ms, chain, hold))
    except GrantRevoked:  # of a hold: the answer got lost, and is forgotten by now
        return (yield from _acquire(call, digests, ttl_ms, chain, hold))


def _acquire(
    call: Call, digests: bytes, ttl_ms: int, chain: bool, hold: bool
) -> Plan[tuple[pb.AcquireResponse, LeaseHold | None]]:
    ttl_ms = min(ttl_ms, call.state.limits.lease_ttl_max_ms or ttl_ms)
    request = pb.AcquireRequest(
        keys=call.key_batch(digests),
        ttl_ms=ttl_ms,
        lease=True,
        chain=chain,
        hold=hold,
        request_id=call.asks() if hold else 0,
        session_id=call.state.session_id,
        avoid_node_ids=call.avoided_ids(),
        piggyback=call.state.piggyback(call.space),
    )
    asked_s = call.now()
    reply = yield from ask_master(call, "acquire", request, pb.AcquireResponse)
    call.unanswered = 0
    call.state.see_view(reply.view_version)
    if not reply.lease.lease_id:
        if reply.past_tenure:
            call.state.doubt_leader()
        return reply, None
    ttl_ms = reply.lease.ttl_ms
    return reply, LeaseHold(reply.lease.lease_id, ttl_ms, asked_s + LEASE_SHARE * ttl_ms / 1000)
