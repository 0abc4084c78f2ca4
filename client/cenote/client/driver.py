"""Drives plans from blocking threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    ResourceUnavailable,
    StaleEpoch,
    Unavailable,
)
from cenote.transport.base import Channel, U8Array
from cenote.transport.memory_access import checksum_at, checksums_of

from .buffers import hash_pieces, hash_pieces_wide, new_bytes
from .devices import Areas
from .locations import LOCATION_STRUCT
from .master_stub import METHODS, LaneMaster, decoded
from .plan.budgets import attempt_budget_s, node_failed
from .plan.counters import FETCH, READ
from .plan.device_rows import Devices
from .plan.pieces import Pieces
from .plan.state import TIMED_MASK, Call
from .plan.steps import (
    Allocate,
    AllocateOne,
    Ask,
    AskMany,
    AskRaw,
    Checksum,
    CopyBegin,
    CopyWait,
    Hash,
    HashWide,
    Move,
    MoveOne,
    Part,
    Pause,
    Plan,
    ProofPart,
    Proofs,
    RefreshView,
    Reopen,
    SealPart,
    Seals,
    Settle,
    Stage,
    Staged,
    TakeAreas,
)
from .session import Session
from .staging import stage, write_with_tail

__all__ = ["BlockingDriver", "blocking_driver"]

T = TypeVar("T")

_unpack_location: Final = LOCATION_STRUCT.unpack

# Below these, handing work to a thread and waiting for it costs more than it gains. Over shared
# memory it never pays: there the memory is the limit, and long copies have helpers of their own.
_PARALLEL_BYTES_MIN: Final = 2 << 20
_PARALLEL_SEALS_MIN: Final = 3
_INTERRUPT_WAIT_S: Final = 1.5


class BlockingDriver:
    """Does what the plans of one session ask for, in the calling thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.do: dict[type, Any] = {
            Ask: self.ask,
            AskRaw: self.ask_raw,
            AskMany: self.ask_many,
            Move: self.move,
            MoveOne: self.move_one,
            Seals: self.seals,
            Hash: self.hash,
            HashWide: self.hash_wide,
            Proofs: self.proofs,
            Stage: self.stage,
            Allocate: self.allocate,
            AllocateOne: self.allocate_one,
            TakeAreas: self.take_areas,
            CopyBegin: self.copy_begin,
            CopyWait: self.copy_wait,
            Settle: self.settle,
            Pause: self.pause,
            RefreshView: self.refresh_view,
            Reopen: self.reopen,
        }

    def run(self, call: Call, plan: Plan[T]) -> T:
        """Drive the plan to its end; grants that it leaves open are given back in any case."""
        do = self.do
        running = self._session.running
        running.add(call)
        try:
            step = next(plan)
            while True:
                try:
                    result = do[type(step)](call, step)
                except CenoteError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            plan.close()
            if call.grants:
                for grant in call.grants.values():
                    self._session.abort_later(grant)
            if call.unanswered:
                self._session.state.cancel(call.unanswered)
            if call.committing:
                call.lose_commit()
            running.discard(call)
            self._session.state.note_call(call)

    def read_cached(self, call: Call, digest: bytes, row: bytes, address: int, length: int) -> int:
        """Read one object from where it was a moment ago: its size, 0 where the master is to be
        asked. The shortest way through the client: no plan, for there is nothing to decide."""
        session = self._session
        state = session.state
        end_s, offset, size, checksum, segment, node = _unpack_location(row)
        channel = session.channels.get(node)
        if channel is None or size > length or node in state.suspects or state.now() > end_s:
            return 0
        space = call.space
        budget_s = attempt_budget_s(call.deadline_s, size, alternatives=True)
        try:
            status, got = channel.read_one(segment, offset, size, address, budget_s, True)
        except BufferInUse as error:
            space.counters.fail(READ, FETCH, error)
            raise
        except CenoteError as error:  # the plan that asks the master meets it again, if it lasts
            if node_failed(error):
                call.node_failed(node, error)
            return 0
        counters = space.counters
        if status or got != checksum:
            space.locations.forget(digest)
            counters.stale_locations += 1
            return 0
        counters.hits += 1
        counters.cached_reads += 1
        counters.read_bytes += size
        space.touches.append(digest)
        session.housekeeper.wake()
        state.moved[node][0] += size
        # As `note_call` does: a method call would cost more than this.
        calls = state.calls
        calls[0] = count = calls[0] + 1
        if count & TIMED_MASK == 1:
            state.seconds[0].observe(state.now() - call.end_s + call.deadline_s)
        found: int = size
        return found

    # ---- the master --------------------------------------------------------------------------

    def ask(self, call: Call, step: Ask) -> Message:
        reply: Message = getattr(self._session.master, step.method)(step.request, step.deadline_s)
        return reply

    def ask_raw(self, call: Call, step: AskRaw) -> Message:
        number, request_type, reply_type = METHODS[step.method]
        master = self._session.master
        if type(master) is LaneMaster:
            try:
                return decoded(reply_type, master.call_lane(number, step.body, step.deadline_s))
            except ClientClosed as closed:
                raise self._lane_error(closed) from None
        request = request_type.FromString(step.body)
        reply: Message = getattr(master, step.method)(request, step.deadline_s)
        return reply

    def ask_many(self, call: Call, step: AskMany) -> Sequence[Message | CenoteError]:
        master = self._session.master
        call_many = getattr(master, "call_many", None)
        if call_many is not None:
            try:
                replies: list[Message | CenoteError] = call_many(
                    step.method, [make() for make in step.make], step.deadline_s
                )
            except ClientClosed as closed:
                raise self._lane_error(closed) from None
            return [
                self._lane_error(reply) if isinstance(reply, ClientClosed) else reply
                for reply in replies
            ]
        until_s = time.monotonic() + step.deadline_s
        found: list[Message | CenoteError] = []
        for make in step.make:
            try:
                found.append(
                    getattr(master, step.method)(make(), max(0.001, until_s - time.monotonic()))
                )
            except CenoteError as error:
                found.append(error)
        return found

    def _lane_error(self, closed: ClientClosed) -> CenoteError:
        """As the plan is to see it: a lane is also closed by a thread that opens the session anew,
        as housekeeping does when it was found lost."""
        if self._session.refusal is not None:
            return closed
        gone = Unavailable("the connection to the master was given up meanwhile")
        gone.maybe_executed = True
        return gone

    def refresh_view(self, call: Call, step: RefreshView) -> None:
        self._session.refresh_view(step.deadline_s)

    def reopen(self, call: Call, step: Reopen) -> None:
        if step.cut_session_id:
            self._session.replace_session(step.cut_session_id, step.deadline_s)
        elif step.session_too:
            self._session.reopen_session(step.deadline_s)
        else:
            self._session.reopen_space(call.space, step.deadline_s)

    # ---- here --------------------------------------------------------------------------------

    def allocate_one(self, call: Call, step: AllocateOne) -> tuple[bytes, int]:
        return new_bytes(step.size)

    def pause(self, call: Call, step: Pause) -> None:
        time.sleep(step.duration_s)

    def hash(self, call: Call, step: Hash) -> NDArray[np.uint64]:
        return hash_pieces(step.pieces, step.sizes)

    def hash_wide(self, call: Call, step: HashWide) -> bytes:
        return hash_pieces_wide(step.pieces, step.sizes, step.seed, step.key)

    def stage(self, call: Call, step: Stage) -> Staged:
        return stage(step.pieces, step.size, step.keys)

    def allocate(self, call: Call, step: Allocate) -> tuple[Pieces, list[bytes]]:
        made = [new_bytes(size) for size in step.sizes.tolist()]
        values = [value for value, _ in made]
        addresses = np.array([address for _, address in made], np.uint64)
        return Pieces(addresses, step.sizes, None, [values]), values

    # ---- GPUs --------------------------------------------------------------------------------

    def take_areas(self, call: Call, step: TakeAreas) -> Areas:
        return self._session.staging.take(step.count, step.deadline_s)

    def copy_begin(self, call: Call, step: CopyBegin) -> None:
        areas = cast("Areas", step.areas)
        areas.begin(step.turn, step.rows, step.keepers, step.to_host)

    def copy_wait(self, call: Call, step: CopyWait) -> None:
        cast("Areas", step.areas).wait(step.turn, step.deadline_s)

    def settle(self, call: Call, step: Settle) -> None:
        devices = step.devices
        self._session.staging.settle(devices.numbers, devices.streams, step.deadline_s)

    # ---- nodes -------------------------------------------------------------------------------

    def move(self, call: Call, step: Move) -> None:
        parts = step.parts
        if len(parts) == 1:
            self.move_part(parts[0])
            return
        near: list[Part] = []
        far: list[Part] = []
        for part in parts:
            (near if part.node_id in self._session.state.lease_proven else far).append(part)
        if len(far) < 2 or sum(part.size_bytes for part in far) < _PARALLEL_BYTES_MIN:
            near = list(parts)
        else:
            self._side_by_side([(self.move_part, part, part.node_id) for part in far])
        for part in near:  # one after the other: what one takes is not there for the next
            part.budget_s = min(part.budget_s, call.remaining_s())
            self.move_part(part)

    def _side_by_side(self, tasks: Sequence[tuple[Any, Any, int]]) -> None:
        """Run tasks at the same time, the first one here. Returns when all ended."""
        pool = self._session.pool()
        futures: list[Future[None]] = []
        try:
            futures.extend(pool.submit(run, argument) for run, argument, _ in tasks[1:])
            tasks[0][0](tasks[0][1])
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C: nothing may touch the caller's memory when this returns
            running = [
                node
                for future, (_, _, node) in zip(futures, tasks[1:], strict=False)
                if not future.cancel() and not future.done()
            ]
            for node in running:
                channel = self._session.channels.get(node)
                if channel is not None:
                    self._session.drop_channel(node, channel)
            wait(futures, _INTERRUPT_WAIT_S)
            raise

    def _channel_for(self, step: Part | MoveOne | SealPart | ProofPart) -> Channel:
        """The channel to the step's node; what making one takes comes off the step's budget."""
        session = self._session
        channel = session.channels.get(step.node_id)
        if channel is None:
            now = session.state.now
            until_s = now() + step.budget_s
            channel = session.channel(step.node_id, step.budget_s)
            step.budget_s = until_s - now()
        return channel

    def move_part(self, part: Part) -> None:
        """One node's transfers; what went wrong is noted in the part."""
        session = self._session
        channel: Channel | None = None
        try:
            channel = self._channel_for(part)
            if part.direct is not None:
                part.statuses = self._read_direct(part, channel, part.direct)
                return
            sums = None
            if part.checksum == Checksum.ALWAYS or (
                part.checksum and not channel.verifies_by_lease
            ):
                sums = np.zeros(len(part.addresses), np.uint64)
            if part.grant_id:
                # Over shm a write has ended when the call has, in whichever way.
                part.unfenced = not channel.verifies_by_lease
                part.statuses = channel.write(
                    part.extents, part.addresses, part.grant_id, part.budget_s, sums
                )
                part.unfenced = False
                session.state.moved[part.node_id][1] += part.size_bytes
            else:
                part.statuses = channel.read(part.extents, part.addresses, part.budget_s, sums)
                session.state.moved[part.node_id][0] += part.size_bytes
                if sums is None and not channel.proves(part.lease_id):
                    sums = checksums_of(part.addresses, part.extents["length"])
            part.checksums = sums
        except CenoteError as error:
            part.error = self.node_error(part.node_id, channel, error)

    def _read_direct(self, part: Part, channel: Channel, devices: Devices) -> U8Array:
        """Have NICs write on GPUs. Raises ResourceUnavailable where this channel can't."""
        read = getattr(channel, "read_direct", None)
        if read is None:
            raise ResourceUnavailable(f"the way to node {part.node_id} does not reach GPUs")
        statuses: U8Array = read(part.extents, part.addresses, part.lease_id, part.budget_s)
        staging = self._session.staging
        staging.flush(devices.numbers)
        staging.direct_bytes += part.size_bytes
        self._session.state.moved[part.node_id][0] += part.size_bytes
        return statuses

    def move_one(self, call: Call, step: MoveOne) -> tuple[int, int, bool]:
        session = self._session
        channel: Channel | None = None
        try:
            channel = self._channel_for(step)
            wanted = step.checksum == Checksum.ALWAYS or (
                step.checksum == Checksum.UNLESS_LEASED and not channel.verifies_by_lease
            )
            if step.grant_id:
                step.unfenced = not channel.verifies_by_lease
                if step.tail:
                    status, checksum = write_with_tail(channel, step, session.state.now)
                else:
                    status, checksum = channel.write_one(
                        step.segment,
                        step.offset,
                        step.length,
                        step.address,
                        step.grant_id,
                        step.budget_s,
                        wanted,
                    )
                step.unfenced = False
                session.state.moved[step.node_id][1] += step.length
            else:
                status, checksum = channel.read_one(
                    step.segment, step.offset, step.length, step.address, step.budget_s, wanted
                )
                session.state.moved[step.node_id][0] += step.length
                if not wanted and not channel.proves(step.lease_id):
                    # The master was replaced meanwhile: its leases end with its tenure.
                    checksum, wanted = checksum_at(step.address, step.length), True
        except CenoteError as error:
            raise self.node_error(step.node_id, channel, error) from None
        return status, checksum, not wanted

    def seals(self, call: Call, step: Seals) -> None:
        parts = step.parts
        if len(parts) < _PARALLEL_SEALS_MIN:
            for part in parts:
                part.budget_s = min(part.budget_s, call.remaining_s())
                self.seal_part(part)
        else:
            self._side_by_side([(self.seal_part, part, part.node_id) for part in parts])

    def seal_part(self, part: SealPart) -> None:
        """One daemon's seals; what went wrong is noted in the part."""
        channel: Channel | None = None
        try:
            channel = self._channel_for(part)
            part.statuses = channel.seal(part.batch, max(part.budget_s, 0.001))
        except CenoteError as error:
            part.error = self.node_error(part.node_id, channel, error)

    def proofs(self, call: Call, step: Proofs) -> None:
        for part in step.parts:
            channel: Channel | None = None
            part.budget_s = min(part.budget_s, call.remaining_s())
            try:
                channel = self._channel_for(part)
                part.statuses, part.tickets = channel.prove(part.batch, max(part.budget_s, 0.001))
            except CenoteError as error:
                part.error = self.node_error(part.node_id, channel, error)

    def node_error(self, node_id: int, channel: Channel | None, error: CenoteError) -> CenoteError:
        """Note that a channel failed; the error as the plan is to see it."""
        session = self._session
        if channel is None:
            return error
        if isinstance(error, Unavailable | StaleEpoch) and channel.verifies_by_lease:
            session.drop_channel(node_id, channel)  # its maps belong to a daemon that is gone
        if isinstance(error, ClientClosed) and session.refusal is None:
            # Given up under us (a new view, another thread's failure); the client is open.
            return Unavailable(f"the channel to node {node_id} was closed meanwhile")
        return error


def blocking_driver(session: Session) -> BlockingDriver:
    """The driver of a session's calls, with spans where its configuration asks for them.

    Raises ConfigError where OpenTelemetry is missing then.
    """
    if not session.config.tracing:
        return BlockingDriver(session)
    from .tracing import CallTracer, TracedDriver  # what only those load who want it

    return TracedDriver(session, CallTracer(session))
