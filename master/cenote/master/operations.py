"""Every operation of the master: a message in, a message out, or when it may leave.

No waiting and no I/O but the journal's appends: carriers (`service.py`: in process, lane, gRPC) do
the waiting that `Later` asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
from google.protobuf.message import Message

from cenote.api.codec import pack_bitmap, pack_u64
from cenote.api.errors import InternalError, StaleEpoch
from cenote.api.rows import SLOT_REF
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .commands import AttachReply, HeartbeatReply
from .decider import Decider
from .instructions import Instruction
from .node_requests import AttachCollector, detach_command, heartbeat_command, pool_message
from .requests import BATCH_KEYS_MAX, RequestReader
from .task_commands import Drain, DrainReply
from .views import ViewCache

__all__ = ["Later", "Operation", "Operations", "Settings"]

_BIT: Final = (b"\0", b"\1")
JOURNALED: Final = common_pb2.DURABILITY_JOURNALED
CLEAR_SLOTS_MAX: Final = 400_000
"""In one reply, so that it fits in a message of the lane."""


@dataclass(slots=True)
class Later:
    """A reply that has to wait.

    Without `again`, until all decisions so far are durable, or those up to `entry` where that is
    not 0. With it, until the node has something to do, which `again` then tells, or until `wait_s`
    have passed.
    """

    reply: Message
    entry: int = 0
    node_id: int = 0
    wait_s: float = 0.0
    again: Callable[[], Message] | None = None


Reply: TypeAlias = Message | Later
Operation: TypeAlias = Callable[[Message, bytes], Reply]
"""(request, session id of the connection or empty) -> reply."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What hello tells clients."""

    cluster_name: str = "cenote"
    server_version: str = ""
    addresses: tuple[str, ...] = ()
    """Where clients find this master."""
    location_ttl_ms: int = 10_000
    heartbeat_interval_ms: int = 1000


@final
class Operations:
    """`draw_seed()` gives 64 random bits: the state rolls no dice."""

    def __init__(self, decider: Decider, settings: Settings, draw_seed: Callable[[], int]) -> None:
        self._decider = decider
        self.settings = settings
        self._draw_seed = draw_seed
        config = decider.config
        self.reader = RequestReader(self._seed_of, int(config.lease_ttl_max_s * 1000))
        self._attaches = AttachCollector()
        self._views = ViewCache(decider)
        self._shared = decider.backend.shared
        self._heartbeat_wait_s_max = config.node_dead_s / 3

    def _seed_of(self, namespace_id: int, generation: int) -> int:
        return self._decider.state.namespace_seed(namespace_id, generation)

    def _news(self, message: common_pb2.Piggyback) -> None:
        """What rides along is applied first."""
        news = self.reader.piggyback(message)
        if news is not None:
            self._decider.apply(news)

    # ---- sessions and namespaces ------------------------------------------------------------

    def hello(self, request: pb.HelloRequest, _session: bytes = b"") -> pb.HelloResponse:
        decider = self._decider
        state = decider.state
        if (
            request.pool_id not in (b"", state.pool_id)
            and request.last_epoch >= decider.epoch
            and state.is_blank
            and state.pool_id
            and not decider.backend.shared  # whose epochs rise with elections alone
        ):
            decider.refuse_unless_writable()
            decider.begin_above(request.last_epoch)
        self._decider.apply(self.reader.hello(request))
        settings, config = self.settings, self._decider.config
        return pb.HelloResponse(
            epoch=self._decider.epoch,
            session_ttl_ms=int(config.session_ttl_s * 1000),
            cluster_view=self._views.view(),
            shard_map=common_pb2.ShardMap(
                map_version=1,
                entries=[common_pb2.ShardMapEntry(master_addresses=settings.addresses)],
            ),
            location_ttl_ms=settings.location_ttl_ms,
            lease_ttl_max_ms=int(config.lease_ttl_max_s * 1000),
            batch_keys_max=BATCH_KEYS_MAX,
            cluster_name=settings.cluster_name,
            is_leader=True,
            leader_addresses=settings.addresses,
            server_version=settings.server_version,
            past_tenure=self._decider.is_past_tenure,
            pool_id=self._decider.state.pool_id,
        )

    def renew_session(
        self, request: pb.RenewSessionRequest, session: bytes = b""
    ) -> pb.RenewSessionResponse:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        reply = self._decider.apply(self.reader.renew_session(request, session))
        return pb.RenewSessionResponse(
            view_version=reply.view_version,
            epoch=self._decider.epoch,
            lost_lease_ids=pack_u64(reply.lost_lease_ids),
        )

    def close_session(
        self, request: pb.CloseSessionRequest, session: bytes = b""
    ) -> pb.CloseSessionResponse:
        self._decider.apply(self.reader.close_session(request, session))
        return pb.CloseSessionResponse()

    def get_cluster_view(
        self, request: pb.GetClusterViewRequest, _session: bytes = b""
    ) -> pb.GetClusterViewResponse:
        response = pb.GetClusterViewResponse(epoch=self._decider.epoch)
        view = self._views.view()
        if request.known_view_version != view.view_version:
            response.cluster_view.CopyFrom(view)
        return response

    def open_namespace(self, request: pb.OpenNamespaceRequest, _session: bytes = b"") -> Reply:
        if request.create and not self._decider.state.has_namespace(request.name):
            self._decider.refuse_unless_writable()
        reply = self._decider.apply(self.reader.open_namespace(request, self._draw_seed()))
        response = pb.OpenNamespaceResponse(
            namespace_id=reply.namespace_id,
            generation=reply.generation,
            digest_seed=reply.digest_seed,
            fingerprint=reply.fingerprint,
            durability=reply.durability,
            created=reply.created,
            dedup_key=self._decider.state.dedup_key(request.name),
        )
        # Whoever opened it: a seed that is lost would make all its objects unreachable.
        if reply.created:
            return Later(response)
        entry = self._decider.unsettled_naming
        return Later(response, entry) if entry else response

    # ---- lookups ----------------------------------------------------------------------------

    def exists(self, request: pb.ExistsRequest, _session: bytes = b"") -> pb.ExistsResponse:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        present = self._decider.exists(self.reader.exists(request))
        response = pb.ExistsResponse(present=present.tobytes())
        if self._decider.is_past_tenure:
            response.past_tenure = True
        return response

    def match(self, request: pb.MatchRequest, _session: bytes = b"") -> pb.MatchResponse:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        command = self.reader.exists(request)
        present = self._decider.exists(command)
        if request.will_read:
            self._decider.prefetch(command)
        if len(present) == 1:
            there = bool(present[0])
            response = pb.MatchResponse(presence_bitmap=_BIT[there], prefix_keys=there)
        else:
            # argmin gives the first 0, and 0 also where there is none.
            prefix = len(present) if present.all() else int(np.argmin(present))
            response = pb.MatchResponse(presence_bitmap=pack_bitmap(present), prefix_keys=prefix)
        if self._decider.is_past_tenure:
            response.past_tenure = True
        return response

    def acquire(self, request: pb.AcquireRequest, session: bytes = b"") -> pb.AcquireResponse:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        reply = self._decider.apply(self.reader.acquire(request, session))
        response = pb.AcquireResponse(
            objects=reply.objects, extents=reply.extents, view_version=reply.view_version
        )
        if reply.lease_id:
            lease = response.lease
            lease.lease_id = reply.lease_id
            lease.ttl_ms = reply.ttl_ms
            lease.epoch = self._decider.epoch
        elif self._decider.is_past_tenure:
            response.past_tenure = True
        return response

    def release(self, request: pb.ReleaseRequest, _session: bytes = b"") -> pb.ReleaseResponse:
        self._news(request.piggyback)
        return pb.ReleaseResponse()

    def touch(self, request: pb.TouchRequest, _session: bytes = b"") -> pb.TouchResponse:
        self._news(request.piggyback)
        return pb.TouchResponse()

    # ---- writes -----------------------------------------------------------------------------

    def put_start(self, request: pb.PutStartRequest, session: bytes = b"") -> Reply:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        decider = self._decider
        decider.refuse_unless_writable()
        command = self.reader.put_start(request, session)
        reply = decider.apply(command)
        response = pb.PutStartResponse(
            puts=reply.puts,
            extents=reply.extents,
            grant_id=reply.grant_id,
            epoch=decider.epoch,
            view_version=reply.view_version,
            spare_grant_id=reply.spare_grant_id,
            spare_extents=reply.spare_extents,
            unsealed=reply.unsealed,
        )
        if reply.alias_grant_id:
            response.alias_grant_id = reply.alias_grant_id
            response.alias_extents = reply.alias_extents
            response.alias_checksums = reply.alias_checksums
        if self._shared and (
            entry := decider.unsettled_under(command.digests, reply.extents, reply.spare_extents)
        ):
            return Later(response, entry)
        return response

    def put_commit(self, request: pb.PutCommitRequest, session: bytes = b"") -> Reply:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        decider = self._decider
        decider.refuse_unless_writable()
        reply = decider.apply(self.reader.put_commit(request, session))
        response = pb.PutCommitResponse(
            statuses=reply.statuses, epoch=reply.epoch, seq_first=reply.seq_first
        )
        return Later(response) if reply.durability == JOURNALED else response

    def put_abort(self, request: pb.PutAbortRequest, session: bytes = b"") -> pb.PutAbortResponse:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        self._decider.apply(self.reader.put_abort(request, session))
        return pb.PutAbortResponse()

    def remove(self, request: pb.RemoveRequest, _session: bytes = b"") -> Reply:
        if request.HasField("piggyback"):
            self._news(request.piggyback)
        self._decider.refuse_unless_writable()
        removed = self._decider.apply(self.reader.remove(request))
        # Also for unknown keys: what was decided before it, such as their eviction, goes first.
        return Later(pb.RemoveResponse(removed=removed.tobytes()))

    def pin(self, request: pb.PinRequest, _session: bytes = b"") -> pb.PinResponse:
        self._decider.refuse_unless_writable()
        pinned = self._decider.apply(self.reader.pin(request))
        return pb.PinResponse(pinned=pinned.tobytes())

    def unpin(self, request: pb.UnpinRequest, _session: bytes = b"") -> pb.UnpinResponse:
        self._decider.refuse_unless_writable()
        unpinned = self._decider.apply(self.reader.unpin(request))
        return pb.UnpinResponse(unpinned=unpinned.tobytes())

    def report_failure(
        self, request: pb.ReportFailureRequest, session: bytes = b""
    ) -> pb.ReportFailureResponse:
        state = self._decider.apply(self.reader.report_failure(request, session))
        return pb.ReportFailureResponse(state=state)

    # ---- store daemons ----------------------------------------------------------------------

    def attach(self, request: pb.AttachRequest, _session: bytes = b"") -> Reply:
        epoch = self._decider.epoch
        if request.last_epoch > epoch:
            raise StaleEpoch(
                f"the daemon was attached to epoch {request.last_epoch}, this master is in {epoch}",
                remedy="the metadata directory is older than the daemon: write a number of at "
                f"least {request.last_epoch} into its file `epoch`, and restart the master",
            )
        self._refuse_unless_meant(request)
        self._decider.refuse_unless_writable()
        command = self._attaches.add(request, self._decider.clock.monotonic_s())
        if command is None:
            return pb.AttachResponse(epoch=epoch)
        reply: AttachReply = self._decider.apply(command)
        if reply.wanted_blocks:
            return pb.AttachResponse(epoch=epoch, wanted_blocks=reply.wanted_blocks)
        response = pb.AttachResponse(
            node_id=reply.node_id,
            epoch=reply.epoch,
            segment_ids=reply.segment_ids,
            heartbeat_interval_ms=self.settings.heartbeat_interval_ms,
            # The rest is found again at the next attach: nothing depends on its being cleared.
            clear_slots=reply.clear_slots[: CLEAR_SLOTS_MAX * SLOT_REF.itemsize],
            last_seq=reply.last_seq,
            first_grant_id=reply.first_grant_id,
        )
        if reply.pool is not None:
            response.pool.CopyFrom(pool_message(reply.pool))
        # Ids of nodes and segments must not be given twice, whatever power failure comes.
        return Later(response)

    def _refuse_unless_meant(self, request: pb.AttachRequest) -> None:
        """An attach may be for another master, or for this one before it began a later epoch: the
        lane connects anew by itself. That daemon has fenced nobody for this epoch yet, and where
        its pool is another it does not tell of its namespaces."""
        epoch = self._decider.epoch
        other_pool = request.master_pool_id not in (b"", self._decider.state.pool_id)
        if other_pool or 0 < request.last_epoch < epoch:
            raise StaleEpoch(
                f"the daemon has fenced its writers for epoch {request.last_epoch}"
                f"{' of another pool' if other_pool else ''}, this is epoch {epoch}",
                remedy="say hello, fence for the epoch that it tells, and attach again",
            )

    def heartbeat(self, request: pb.HeartbeatRequest, _session: bytes = b"") -> Reply:
        reply: HeartbeatReply = self._decider.apply(heartbeat_command(request))
        response = self._instructions(reply)
        if response.instructions and self._shared and (entry := self._decider.unsettled_entry):
            return Later(response, entry)  # space may be given up for slots
        if response.instructions or not request.wait_ms:
            return response
        wait_s = min(request.wait_ms / 1000, self._heartbeat_wait_s_max)

        def again() -> pb.HeartbeatResponse:
            # Says nothing anew: what it reported has been taken down already.
            later = pb.HeartbeatRequest(
                node_id=request.node_id,
                epoch=request.epoch,
                done_instruction=request.done_instruction,
                segments=request.segments,
                stats=request.stats,
                quarantined_session_ids=request.quarantined_session_ids,
                start_number=request.start_number,
            )
            return self._instructions(self._decider.apply(heartbeat_command(later, held=True)))

        return Later(response, 0, request.node_id, wait_s, again)

    def _instructions(self, reply: HeartbeatReply) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse(
            epoch=self._decider.epoch,
            instructions=[_instruction(instruction) for instruction in reply.instructions],
        )

    def detach(self, request: pb.DetachRequest, _session: bytes = b"") -> pb.DetachResponse:
        if request.epoch != self._decider.epoch:
            raise StaleEpoch(
                f"node {request.node_id} detaches from epoch {request.epoch}, "
                f"this is epoch {self._decider.epoch}",
                remedy="attach first",
            )
        self._decider.apply(detach_command(request))
        return pb.DetachResponse()

    def drain(self, request: pb.DrainRequest, _session: bytes = b"") -> Reply:
        self._decider.refuse_unless_writable()
        reply: DrainReply = self._decider.apply(
            Drain(request.node_id, request.cancel, request.bandwidth)
        )
        # Whoever hears that nothing is left may stop the daemon: what moved must not come undone.
        return Later(pb.DrainResponse(remaining_bytes=reply.remaining_bytes))


def _instruction(instruction: Instruction) -> pb.Instruction:
    message = pb.Instruction(number=instruction.number)
    if instruction.grow_slots is not None:
        segment_id, offset, length, slots = instruction.grow_slots
        message.grow_slots.CopyFrom(
            pb.GrowSlots(segment_id=segment_id, offset=offset, length=length, slots=slots)
        )
    elif instruction.cut_sessions is not None:
        message.cut_sessions.session_ids = b"".join(instruction.cut_sessions)
    elif instruction.clear_slots is not None:
        message.clear_slots.slots = instruction.clear_slots.tobytes()
    elif instruction.copies is not None:
        message.copy_extents.copies = instruction.copies.tobytes()
    elif instruction.pulls is not None:
        sources, rows = instruction.pulls
        message.pull_replicas.pulls = rows.tobytes()
        for address, segment_ids in sources:
            message.pull_replicas.sources.add(address=address, segment_ids=segment_ids)
    elif instruction.keep_pool is not None:
        message.keep_pool.CopyFrom(pool_message(instruction.keep_pool))
    else:
        raise InternalError(f"instruction {instruction.number} says nothing")
    return message
