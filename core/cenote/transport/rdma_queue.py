"""A queue pair of this process's own, and the chains of requests that wait or are under way on it.

Work is posted in chains of which only the last request is signalled, so that a completion stands
for up to CHAIN_REQUESTS_MAX of them, and never more at once than the queue pair is deep.
"""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Final, final

import numpy as np

from .base import U64Array
from .nics.choice import NicPath
from .rdma_places import IndexArray, Pieces
from .verbs.base import (
    CompletionQueue,
    Device,
    PathSettings,
    QueuePair,
    QueuePairAddress,
    VerbsError,
    WorkStatus,
)

__all__ = ["CHAIN_REQUESTS_MAX", "Chain", "Ticket", "WorkQueue", "chains_of", "whole_regions"]

CHAIN_REQUESTS_MAX: Final = 64
DEPTH: Final = 256
DRAIN_S: Final = 0.05
_POLL_MOST: Final = 32


NO_REGIONS: Final[IndexArray] = np.zeros(0, np.int64)
_NOTHING: Final[U64Array] = np.zeros(0, np.uint64)
NO_PIECES: Final = Pieces(NO_REGIONS, _NOTHING, _NOTHING, _NOTHING, NO_REGIONS)


@final
class Ticket:
    """A part of a call's work; done when no chain of it is left."""

    __slots__ = ("chains_left",)

    def __init__(self) -> None:
        self.chains_left = 0


@final
class Chain:
    """Requests that are posted together."""

    __slots__ = ("bytes", "count", "last_id", "pieces", "regions", "ticket")

    def __init__(
        self, pieces: Pieces, regions: IndexArray, ticket: Ticket, count: int, size_bytes: int
    ) -> None:
        self.pieces = pieces
        self.regions = regions
        self.ticket = ticket
        self.count = count
        self.bytes = size_bytes
        self.last_id = 0
        ticket.chains_left += 1


@final
class WorkQueue:
    """For one call at a time. After `status` is set nothing is posted any more."""

    def __init__(self, path: NicPath, device: Device) -> None:
        """Raises VerbsError."""
        self.path = path
        self.device = device
        self.depth = max(1, min(DEPTH, device.limits.work_requests, device.limits.completions // 2))
        self.first_psn = secrets.randbits(24)
        self.message_bytes_max = device.port(path.local.port).message_bytes_max
        self.status = WorkStatus.SUCCESS
        """Of the first request that failed."""
        self.why = ""
        self.backlog: deque[Chain] = deque()
        self.under_way: deque[Chain] = deque()
        self.outstanding_bytes = 0
        self._free = self.depth
        self._next_id = 0
        self._uncertain = False
        """A post failed in the middle: it is unknown what the last request is."""
        self._closed = False
        # Each request has room for a completion of its own: in error state, each gets one.
        self._queue: CompletionQueue = device.completion_queue(self.depth + 16)
        try:
            self.pair: QueuePair = device.queue_pair(self._queue, self.depth, 0)
        except VerbsError:
            self._queue.close()
            raise
        self.fd = self._queue.fd

    def connect(self, peer: QueuePairAddress, settings: PathSettings) -> None:
        """Raises VerbsError."""
        self.pair.connect(self.first_psn, peer, settings)

    # ---- work -------------------------------------------------------------------------------

    def pump(self, opcode: int, local_keys: U64Array, remote_keys: U64Array) -> None:
        """Post what waits, as far as there is room."""
        while self.backlog and not self.status:
            chain = self.backlog[0]
            pieces, count = chain.pieces, chain.count
            if count > self._free:
                return
            self.backlog.popleft()
            first = self._next_id
            self._next_id = first + count
            chain.last_id = first + count - 1
            self._free -= count
            self.outstanding_bytes += chain.bytes
            self.under_way.append(chain)
            try:
                self.pair.post(
                    opcode,
                    first,
                    pieces.local.tolist(),
                    pieces.lengths.tolist(),
                    local_keys[chain.regions].tolist(),
                    pieces.remote.tolist(),
                    remote_keys[pieces.registrations].tolist(),
                )
            except VerbsError as error:
                self._uncertain = True
                self.status, self.why = WorkStatus.FLUSHED, str(error.strerror or error)

    def post_one(
        self,
        opcode: int,
        local: int,
        length: int,
        local_key: int,
        remote: int,
        remote_key: int,
    ) -> Ticket:
        """One request, at once; nothing else is on the queue pair. The latency path: no columns."""
        ticket = Ticket()
        chain = Chain(NO_PIECES, NO_REGIONS, ticket, 1, length)
        chain.last_id = number = self._next_id
        self._next_id = number + 1
        self._free -= 1
        self.outstanding_bytes += length
        self.under_way.append(chain)
        try:
            self.pair.post(
                opcode, number, (local,), (length,), (local_key,), (remote,), (remote_key,)
            )
        except VerbsError as error:
            self._uncertain = True
            self.status, self.why = WorkStatus.FLUSHED, str(error.strerror or error)
        return ticket

    def poll(self) -> bool:
        """Take in what has ended; whether anything had."""
        ended = self._queue.poll(_POLL_MOST)
        under_way = self.under_way
        for number, status in ended:
            if status:
                if not self.status:
                    self.status = status
                    self.why = f"work request status {status}"
                continue
            while under_way and under_way[0].last_id <= number:
                chain = under_way.popleft()
                chain.ticket.chains_left -= 1
                self._free += chain.count
                self.outstanding_bytes -= chain.bytes
        return bool(ended)

    def arm(self) -> None:
        """Make `fd` readable at the next completion. Raises VerbsError."""
        self._queue.arm()

    def consume_event(self) -> None:
        self._queue.consume_event()

    # ---- endings ----------------------------------------------------------------------------

    def stop(self, drain_s: float = DRAIN_S) -> bool:
        """Let nothing of it touch memory any more; whether that is certain.

        In error state all that is under way is told as ended, the last request last. Destroying the
        queue pair is as good, and what is left where the device is slow.
        """
        if self._closed or (not self.under_way and not self._uncertain):
            return True
        with suppress(VerbsError):
            self.pair.fail()
            last = self._next_id - 1
            end = monotonic() + drain_s
            while not self._uncertain and monotonic() < end:
                for number, status in self._queue.poll(_POLL_MOST):
                    if status and not self.status:
                        self.status, self.why = status, f"work request status {status}"
                    if number == last:
                        return True
        try:
            self.pair.close()
        except VerbsError:
            return False
        return True

    def close(self) -> bool:
        """Destroy it; whether nothing touches memory any more."""
        if self._closed:
            return True
        try:
            self.pair.close()
        except VerbsError:
            return False
        with suppress(VerbsError):
            self._queue.close()
        self._closed = True
        return True

    def unfinished(self) -> list[Chain]:
        """What it had and did not end, in order; it is nobody's then."""
        left = [*self.under_way, *self.backlog]
        self.under_way.clear()
        self.backlog.clear()
        self.outstanding_bytes = 0
        return left


def chains_of(
    pieces: Pieces, regions: IndexArray, ticket: Ticket, requests_max: int = CHAIN_REQUESTS_MAX
) -> list[Chain]:
    """Pieces, in chains. Short ones first, so that the device begins while the next is made."""
    chains = []
    first, size = 0, min(16, requests_max)
    while first < len(pieces):
        last = min(len(pieces), first + size)
        chosen = slice(first, last)
        part = pieces[chosen]
        total = int(part.lengths.sum())
        chains.append(Chain(part, regions[chosen], ticket, len(part), total))
        first, size = last, requests_max
    return chains


def whole_regions(count: int, region: int) -> IndexArray:
    """For pieces that all lie in one region."""
    return np.full(count, region, np.int64)
