"""The part of AdminService that looks closer and reaches deeper: see `admin` for the rest."""

from __future__ import annotations

import json
import math
import secrets
from typing import Any, Final, cast

from cenote.api.codec import unpack_digests, unpack_keys
from cenote.api.errors import InvalidArgument, NamespaceNotFound
from cenote.api.keys import digest_keys, encode_key
from cenote.v1 import admin_pb2 as pb
from cenote.v1 import common_pb2

from .admin_commands import Configure, DeleteNamespace, Evict
from .audit import audit
from .config import MasterConfig
from .config_values import config_values, parse_values
from .debug_dump import debug_dump
from .explaining import Explanation, HolderStatus
from .front import Front
from .grpc_service import deadline_of
from .guard import GRPC_CALLER
from .requests import check_text
from .service import MasterService
from .views import namespace_message

__all__ = ["AdminMore"]

_EVICT_MAX: Final = 65_536
_EVICT_DEFAULT: Final = 4096
_KEYS_MAX: Final = 65_536


class AdminMore:
    """Methods of the servicer. They raise CenoteError."""

    def __init__(self, front: Front, config: MasterConfig, *, version: str) -> None:
        self._front = front
        self._config = config
        self._version = version

    @property
    def _service(self) -> MasterService:
        """Raises NotLeader on a standby."""
        return self._front.service()

    def _now_s(self) -> float:
        return self._service.decider.clock.monotonic_s()

    def _namespace(self, name: str) -> pb.NamespaceStatus:
        for namespace in self._service.state.namespaces():
            if namespace.name == name:
                return namespace_message(namespace)
        raise NamespaceNotFound(
            f"no namespace is called {name!r}", remedy="`cenote namespaces` lists them"
        )

    async def DeleteNamespace(
        self, request: pb.DeleteNamespaceRequest, context: Any
    ) -> pb.DeleteNamespaceResponse:
        """Raises NamespaceNotFound."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        name = check_text(request.name, "name")
        objects = decider.apply(DeleteNamespace(name, secrets.randbits(64)))
        await self._service.make_durable(deadline_of(context))
        audit(context, "namespace deleted", namespace=name, objects=objects)
        return pb.DeleteNamespaceResponse(objects=objects)

    # ---- looking closer ---------------------------------------------------------------------

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """Raises NamespaceNotFound, InvalidKey."""
        service, now_s = self._service, self._now_s()
        state, key = service.state, encode_key(request.key)
        status = self._namespace(check_text(request.namespace, "namespace"))

        def explain(namespace_id: int, generation: int) -> Explanation:
            seed = state.namespace_seed(namespace_id, generation)
            digest = unpack_digests(digest_keys([key], seed))[0]
            return state.explain(namespace_id, generation, digest, now_s)

        found = explain(status.namespace_id, status.generation)
        reply = _explain_message(found, now_s)
        reply.namespace.CopyFrom(status)
        reply.tenure_s = service.decider.led_s
        if found.state == "absent":
            reply.found_in.extend(
                other.name
                for other in state.namespaces()
                if other.objects and explain(other.namespace_id, other.generation).state != "absent"
            )
        if self._front.guard is not None:
            self._front.guard.complete(GRPC_CALLER.get(), request, b"", reply)
        return reply

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Any
    ) -> pb.ListSessionsResponse:
        holders = self._service.state.holders(self._now_s())
        shown = holders[: request.limit] if request.limit else holders
        return pb.ListSessionsResponse(
            sessions=map(_session_message, shown), sessions_total=len(holders)
        )

    async def DebugDump(self, request: pb.DebugDumpRequest, context: Any) -> pb.DebugDumpResponse:
        facts = debug_dump(self._front, self._config, version=self._version)
        return pb.DebugDumpResponse(json=json.dumps(facts, default=str))

    # ---- reaching deeper --------------------------------------------------------------------

    async def EvictObjects(
        self, request: pb.EvictObjectsRequest, context: Any
    ) -> pb.EvictObjectsResponse:
        """Raises NamespaceNotFound, InvalidArgument, InvalidKey."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        status = self._namespace(check_text(request.namespace, "namespace"))
        command = Evict(status.namespace_id, status.generation)
        command.rows_max = min(request.objects_max or _EVICT_DEFAULT, _EVICT_MAX)
        command.size_bytes = request.size_bytes
        if not (math.isfinite(request.idle_s) and request.idle_s >= 0):
            raise InvalidArgument(f"idle_s is {request.idle_s}, and no duration")
        command.idle_s = request.idle_s
        if request.key_lengths:
            if len(request.key_lengths) > 2 * _KEYS_MAX:
                raise InvalidArgument(f"more than {_KEYS_MAX} keys", remedy="send several batches")
            keys = unpack_keys(request.keys, request.key_lengths)
            seed = decider.state.namespace_seed(status.namespace_id, status.generation)
            command.digests = unpack_digests(digest_keys(keys, seed))
            command.rows_max = len(keys)
        reply = decider.apply(command)
        await self._service.make_durable(deadline_of(context))
        audit(context, "objects evicted", namespace=request.namespace, objects=reply.objects)
        return pb.EvictObjectsResponse(
            objects=reply.objects,
            size_bytes=reply.size_bytes,
            pinned=reply.pinned,
            leased=reply.leased,
            absent=reply.absent,
        )

    def _config_values(self) -> list[pb.ConfigValue]:
        service = self._front.leading
        overrides = {} if service is None else service.state.overrides
        return config_values(self._config, overrides)

    async def GetConfig(self, request: pb.GetConfigRequest, context: Any) -> pb.GetConfigResponse:
        """Of this master: a standby answers with what it was started with."""
        return pb.GetConfigResponse(values=self._config_values())

    async def SetConfig(self, request: pb.SetConfigRequest, context: Any) -> pb.SetConfigResponse:
        """Raises InvalidArgument."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        if not request.values and not request.unset:
            raise InvalidArgument("the request changes nothing", remedy="name values, or unset")
        decider.apply(Configure(parse_values(dict(request.values)), list(request.unset)))
        await self._service.make_durable(deadline_of(context))
        audit(context, "limits changed", **request.values, unset=",".join(request.unset))
        return pb.SetConfigResponse(values=self._config_values())

    async def TakeSnapshot(
        self, request: pb.TakeSnapshotRequest, context: Any
    ) -> pb.TakeSnapshotResponse:
        """Raises InvalidArgument where no metadata are kept."""
        service, backend = self._service, self._front.backend
        wanted = 0
        if not request.only_look:
            service.flush()
            wanted = backend.request_snapshot()
            audit(context, "snapshot asked for", through_entry=wanted)
        return pb.TakeSnapshotResponse(
            wanted_entry=wanted,
            covered_entry=backend.snapshot_entry,
            journal_bytes=backend.bytes_used,
        )


def _explain_message(found: Explanation, now_s: float) -> pb.ExplainResponse:
    reply = pb.ExplainResponse(
        state=found.state,
        size_bytes=found.size_bytes,
        version=common_pb2.Version(epoch=found.epoch, seq=found.seq),
        idle_s=found.idle_s,
        leases=found.leases,
        pinned_s=found.pinned_s,
        writer=found.writer,
        log_keys=found.log_keys,
        log_s=found.log_s,
        over_quota=found.over_quota,
    )
    for place in found.places:
        reply.places.add(
            replica=place.replica,
            segment_id=place.segment_id,
            tier=cast("common_pb2.Tier", place.tier),
            node_name=place.node_name,
            node_state=cast("common_pb2.NodeState", int(place.node_state)),
            attached=place.attached,
            offset_bytes=place.offset_bytes,
            length_bytes=place.length_bytes,
        )
    for decision, idle_s in found.decisions:
        reply.decisions.add(
            fate=decision.fate.name.lower(),
            cause=decision.why.name.lower(),
            ago_s=max(0.0, now_s - decision.at_s),
            idle_s=None if math.isnan(idle_s) else idle_s,
            batch_objects=decision.batch,
            seq=decision.seq,
        )
    return reply


def _session_message(holder: HolderStatus) -> pb.SessionStatus:
    return pb.SessionStatus(
        session_id=holder.session_id,
        client_name=holder.client_name,
        boot_id=holder.boot_id,
        process_id=holder.process_id,
        leases=holder.leases,
        holds=holder.holds,
        leased_objects=holder.leased_objects,
        leased_bytes=holder.leased_bytes,
        ends_s=holder.ends_s,
        grants=holder.grants,
        granted_bytes=holder.granted_bytes,
        expires_s=holder.expires_s,
    )
