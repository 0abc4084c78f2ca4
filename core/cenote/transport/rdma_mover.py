"""One call's work on the queue pairs of a lane: divided, posted, waited for, done over elsewhere.

Completions are looked for without sleeping for a moment, then by event, so that a long transfer
costs no processor time. Meanwhile the connection is watched: a daemon that dies closes it, long
before the device has given up to ask it.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, final

from cenote.api.errors import DeadlineExceeded, InvalidBuffer, Unavailable

from .base import U64Array
from .connection import DataConnection
from .nics import striping
from .rdma_lane import Lane
from .rdma_memory import Snapshot
from .rdma_places import IndexArray, Pieces
from .rdma_queue import CHAIN_REQUESTS_MAX, Chain, Ticket, WorkQueue, chains_of
from .verbs.base import VerbsError, WorkStatus

__all__ = ["Mover", "NicsFailed"]

SPIN_S: Final = 150e-6
_LOOK_S: Final = 0.5
"""Wake up now and then in any case: an event that was lost costs no more than this."""
_LOOK_WITHOUT_EVENTS_S: Final = 0.001
_SPINS_PER_CLOCK: Final = 8


class NicsFailed(Unavailable):
    """No NIC path of a lane works any more, or the daemon's device refused: nothing is under way
    on it, and the same can be tried over TCP."""


@final
class Mover:
    """For one call, until `deadline` on the monotonic clock.

    Its methods raise DeadlineExceeded, NicsFailed, InvalidBuffer (memory here was deregistered
    during the call) and what the connection has to say. After an error the lane is to be stopped.
    """

    def __init__(
        self,
        lane: Lane,
        queues: Sequence[WorkQueue],
        opcode: int,
        snapshot: Snapshot,
        deadline: float,
        spin_s: float = SPIN_S,
    ) -> None:
        self._connection: DataConnection = lane.connection
        self._queues = list(queues)
        self._opcode = opcode
        self._keys = {
            queue: (
                snapshot.keys[queue.path.local.device],
                lane.places.keys[queue.path.peer.device],
            )
            for queue in queues
        }
        self._deadline = deadline
        self._spin_s = spin_s
        self.failed: list[WorkQueue] = []
        """Queue pairs that were given up during the call."""

    def keys_of(self, queue: WorkQueue) -> tuple[U64Array, U64Array]:
        """(local keys by region, remote keys by registration)."""
        return self._keys[queue]

    def post(self, pieces: Pieces, regions: IndexArray) -> Ticket:
        """Have pieces moved, as merged as they can be; `regions`: those of the local addresses."""
        ticket = Ticket()
        runs, regions = pieces.merged(regions)
        working = self._queues
        if len(working) > 1:
            self._stripe(runs, regions, ticket)
        else:
            self._assign(working[0], runs, regions, ticket)
        self._pump()
        return ticket

    def _stripe(self, runs: Pieces, regions: IndexArray, ticket: Ticket) -> None:
        lanes = [
            striping.Lane(
                index,
                queue.path.rate_gbps,
                queue.outstanding_bytes + sum(chain.bytes for chain in queue.backlog),
                queue.path.standby,
            )
            for index, queue in enumerate(self._queues)
        ]
        for share in striping.plan_stripes(striping.whole(runs.lengths), lanes):
            which = share.pieces.items.astype("int64")
            part = Pieces(
                runs.items[which],
                runs.local[which] + share.pieces.starts,
                runs.remote[which] + share.pieces.starts,
                share.pieces.lengths,
                runs.registrations[which],
            )
            self._assign(self._queues[share.lane], part, regions[which], ticket)

    def _assign(self, queue: WorkQueue, runs: Pieces, regions: IndexArray, ticket: Ticket) -> None:
        runs, regions = runs.cut(queue.message_bytes_max, regions)
        most = min(CHAIN_REQUESTS_MAX, queue.depth)
        queue.backlog.extend(chains_of(runs, regions, ticket, most))

    def _pump(self) -> None:
        for queue in self._queues:
            if queue.backlog:
                queue.pump(self._opcode, *self._keys[queue])

    def finish(self, ticket: Ticket) -> None:
        """Wait until all of it has moved."""
        begun = monotonic()
        turns = 0
        while ticket.chains_left:
            if self._progress():
                begun = monotonic()
                turns = 0
                continue
            turns += 1
            if turns % _SPINS_PER_CLOCK:
                continue
            now = monotonic()
            if now > self._deadline:
                raise DeadlineExceeded(
                    f"{self._connection.name} did not complete before the deadline"
                )
            if now - begun > self._spin_s:
                self._sleep(now)

    def _progress(self) -> bool:
        """Take in completions and post what there is room for; whether anything had ended."""
        any_ended = False
        for queue in self._queues:
            if queue.poll():
                any_ended = True
                if queue.backlog and not queue.status:
                    queue.pump(self._opcode, *self._keys[queue])
        if any(queue.status for queue in self._queues):
            self._give_up_failed()
        return any_ended

    def _give_up_failed(self) -> None:
        """What a queue pair that failed had to do goes to the others, once it is drained."""
        broken = [queue for queue in self._queues if queue.status]
        self._queues = [queue for queue in self._queues if not queue.status]
        self.failed += broken
        left: list[Chain] = []
        for queue in broken:
            if queue.status == WorkStatus.LOCAL_PROTECTION:
                raise InvalidBuffer(
                    "registered memory was deregistered while a call used it",
                    remedy="wait for the call to end first",
                )
            if not queue.stop() or queue.status == WorkStatus.REMOTE_ACCESS or not self._queues:
                raise NicsFailed(f"RDMA over {queue.path.local.name} failed: {queue.why}")
            left += queue.unfinished()
        for chain in left:
            chain.ticket.chains_left -= 1
            queue = min(self._queues, key=lambda q: q.outstanding_bytes)
            self._assign(queue, chain.pieces, chain.regions, chain.ticket)
        self._pump()

    def _sleep(self, now: float) -> None:
        """Until something completes or the daemon has something to say."""
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLIN)
        events = True
        for queue in self._queues:
            if queue.fd < 0:
                events = False
                continue
            with suppress(VerbsError):  # then one looks now and then
                queue.arm()
                poll.register(queue.fd, select.POLLIN)
                continue
            events = False
        if self._progress():  # what ended before it was armed makes no event
            return
        left_s = min(self._deadline - now, _LOOK_S if events else _LOOK_WITHOUT_EVENTS_S)
        ready = {fd for fd, _ in poll.poll(max(0.0, left_s) * 1000)}
        for queue in self._queues:
            if queue.fd in ready:
                with suppress(VerbsError):
                    queue.consume_event()
        if self._connection.sock.fileno() in ready and not self._progress():
            self._connection.receive_farewell(self._deadline, monotonic())
