"""AdminService over gRPC: what people and their tools ask of a cluster."""

from __future__ import annotations

import math
import secrets
import time
from typing import Any, final

from cenote.api.codec import pack_u32
from cenote.api.errors import AlreadyExists
from cenote.policy.advisor import CURVE_FACTORS
from cenote.v1 import admin_pb2 as pb
from cenote.v1 import master_pb2

from .admin_more import AdminMore
from .audit import audit
from .commands import ResetNamespace
from .front import ADMIN_SERVICE, LEADER, STANDBY
from .grpc_service import deadline_of
from .guard import GRPC_CALLER
from .metadata import ALONE
from .quota_requests import quota_command
from .requests import check_text
from .task_commands import Rebalance
from .task_view import moving_text
from .views import namespace_message, node_message, segment_message, task_message

__all__ = ["ADMIN_SERVICE", "AdminGrpc"]


@final
class AdminGrpc(AdminMore):
    """The servicer. Methods raise CenoteError."""

    def _about_this_master(self) -> pb.GetStatusResponse:
        front, backend = self._front, self._front.backend
        leader = backend.leader
        refusal = backend.refusal
        backlog = backend.backlog
        now_s = time.monotonic()
        left_s = backend.tenure_end_s - now_s
        return pb.GetStatusResponse(
            cluster_name=self._config.cluster_name,
            epoch=0 if leader is None else leader.epoch,
            role=front.role,
            metadata_backend=backend.name,
            uptime_s=time.monotonic() - front.started_s,
            journal_bytes=backend.bytes_used,
            server_version=self._version,
            masters=[
                pb.MasterInfo(
                    name=row.name,
                    addresses=row.addresses,
                    grpc=row.grpc,
                    role=LEADER if leader is not None and row.name == leader.row.name else STANDBY,
                    silent_s=row.silent_s(now_s),
                )
                for row in backend.masters
                if row is not ALONE
            ],
            backlog_entries=backlog.entries,
            backlog_bytes=backlog.size_bytes,
            backlog_age_s=backlog.age_s,
            tenure_left_s=max(0.0, left_s) if math.isfinite(left_s) else 0.0,
            writes_refused="" if refusal is None else str(refusal),
            last_entry=backend.last_entry,
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        reply = self._about_this_master()
        service = self._front.leading
        if service is None:
            return reply
        status = service.state.status(self._now_s())
        counters = status.counters
        refusal = service.decider.refusal
        about_pool = pb.GetStatusResponse(
            epoch=status.epoch,
            objects=status.objects,
            capacity_bytes=status.capacity_bytes,
            used_bytes=status.used_bytes,
            logical_bytes=status.logical_bytes,
            dedup_objects=counters.dedup_puts,
            dedup_bytes=counters.dedup_bytes,
            granted_bytes=status.granted_bytes,
            condemned_bytes=status.condemned_bytes,
            quarantined_bytes=status.quarantined_bytes,
            leases=status.leases,
            leased_bytes=status.leased_bytes,
            sessions=status.sessions,
            grants=status.grants,
            evicted_objects=counters.evicted,
            evicted_bytes=counters.evicted_bytes,
            nodes_alive=status.nodes_alive,
            nodes_total=status.nodes_total,
            metadata_memory_bytes=status.metadata_memory_bytes,
            last_seq=status.last_seq,
            pinned_objects=status.pinned_objects,
            pinned_bytes=status.pinned_bytes,
            pinned_bytes_max=status.pinned_bytes_max,
            expired_objects=counters.expired,
            dram_quota_bytes=status.dram_quota_bytes,
            ssd_quota_bytes=status.ssd_quota_bytes,
            acquired_keys=counters.acquired_keys,
            acquired_hits=counters.acquired_hits,
            lost_objects=counters.lost,
            damaged_replicas=counters.damaged,
            broken_slots=status.broken_slots,
            unverified_slots=status.unverified_slots,
            writes_refused="" if refusal is None else str(refusal),
            rdma_trouble=status.rdma_trouble,
            ssd_write_budget_bytes=status.ssd_write_budget_bytes,
            ssd_written_day_bytes=status.ssd_written_day_bytes,
            notice=status.notice,
            ssd_capacity_bytes=status.ssd_capacity_bytes,
            ssd_used_bytes=status.ssd_used_bytes,
            acquired_hits_ssd=counters.acquired_hits_ssd,
            demoted_objects=counters.demoted,
            demoted_bytes=counters.demoted_bytes,
            promoted_objects=counters.promoted,
            promoted_bytes=counters.promoted_bytes,
            failed_copies=counters.copies_failed,
            evicted_to_ssd=counters.evicted_to_ssd,
            copying_bytes=status.copying_bytes,
            moving=moving_text(service.state.tasks(self._now_s())),
            eviction_policy_wanted=status.policy_wanted,
            eviction_policy=status.policy,
            eviction_policy_switches=status.policy_switches,
        )
        reply.MergeFrom(about_pool)
        return reply

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        nodes = self._service.state.nodes(self._now_s())
        return pb.ListNodesResponse(nodes=map(node_message, nodes))

    async def ListSegments(
        self, request: pb.ListSegmentsRequest, context: Any
    ) -> pb.ListSegmentsResponse:
        segments = self._service.state.segments(self._now_s())
        return pb.ListSegmentsResponse(segments=map(segment_message, segments))

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Any
    ) -> pb.ListNamespacesResponse:
        namespaces = self._service.state.namespaces()
        reply = pb.ListNamespacesResponse(namespaces=map(namespace_message, namespaces))
        if self._front.guard is not None:
            self._front.guard.complete(GRPC_CALLER.get(), request, b"", reply)
        return reply

    async def CreateNamespace(
        self, request: pb.CreateNamespaceRequest, context: Any
    ) -> pb.CreateNamespaceResponse:
        """Raises AlreadyExists, FingerprintMismatch, InvalidArgument."""
        opened = await self._service.call(
            master_pb2.OpenNamespaceRequest(
                name=request.name,
                fingerprint=request.fingerprint,
                create=True,
                durability=request.durability,
                credentials=request.credentials,
            ),
            deadline_of(context),
        )
        assert isinstance(opened, master_pb2.OpenNamespaceResponse)
        if not opened.created:
            raise AlreadyExists(f"namespace {request.name!r} exists, with this fingerprint")
        audit(context, "namespace created", namespace=request.name)
        return pb.CreateNamespaceResponse(namespace=self._namespace(request.name))

    async def ResetNamespace(
        self, request: pb.ResetNamespaceRequest, context: Any
    ) -> pb.ResetNamespaceResponse:
        """Raises NamespaceNotFound."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        reply = decider.apply(
            ResetNamespace(check_text(request.name, "name"), secrets.randbits(64))
        )
        await self._service.make_durable(deadline_of(context))
        audit(context, "namespace reset", namespace=request.name, generation=reply.generation)
        return pb.ResetNamespaceResponse(generation=reply.generation)

    async def SetNamespaceQuota(
        self, request: pb.SetNamespaceQuotaRequest, context: Any
    ) -> pb.SetNamespaceQuotaResponse:
        """Raises NamespaceNotFound, InvalidArgument."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        command = quota_command(request)
        decider.apply(command)
        await self._service.make_durable(deadline_of(context))
        given = ((name, getattr(command, name)) for name in ("dram_bytes", "ssd_bytes", "objects"))
        limits = {name: value for name, value in given if value is not None}
        if command.priority is not None:
            limits["priority"] = command.priority
        audit(context, "quota set", namespace=request.name, **limits)
        return pb.SetNamespaceQuotaResponse(namespace=self._namespace(request.name))

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksResponse:
        tasks = self._service.state.tasks(self._now_s())
        return pb.ListTasksResponse(tasks=map(task_message, tasks))

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        """Raises InvalidArgument."""
        decider = self._service.decider
        decider.refuse_unless_writable()
        decider.apply(Rebalance(request.cancel, request.bandwidth))
        audit(context, "rebalance", cancel=request.cancel, bandwidth=request.bandwidth)
        return pb.RebalanceResponse()

    async def GetMissRatioCurves(
        self, request: pb.GetMissRatioCurvesRequest, context: Any
    ) -> pb.GetMissRatioCurvesResponse:
        state = self._service.state
        status, found = state.status(self._now_s()), state.miss_ratios()
        curves = [
            pb.MissRatioCurve(
                namespace=curve.namespace, references=curve.references, hit_rates=curve.hit_rates
            )
            for curve in found.curves
        ]
        return pb.GetMissRatioCurvesResponse(
            capacity_objects=found.capacity_objects,
            sampling_rate=found.sampling_rate,
            eviction_policy_wanted=status.policy_wanted,
            eviction_policy=status.policy,
            eviction_policy_switches=status.policy_switches,
            capacity_factors=CURVE_FACTORS,
            all=curves[0],
            namespaces=curves[1:],
            policies=[
                pb.PolicyHitRate(policy=name, hit_rate=rate)
                for name, rate in found.policies.items()
            ],
            references_dropped=found.dropped,
        )

    async def StatObject(
        self, request: pb.StatObjectRequest, context: Any
    ) -> pb.StatObjectResponse:
        """Raises NamespaceNotFound, NamespaceReset, InvalidArgument, InvalidKey."""
        batch = request.keys
        stats = self._service.state.stat_objects(
            batch.namespace_id,
            batch.generation,
            self._service.reader.digests(batch),
            self._now_s(),
        )
        return pb.StatObjectResponse(
            objects=stats.objects,
            extents=stats.extents,
            idle_s=stats.idle_s.astype("<f8").tobytes(),
            lease_counts=pack_u32(stats.lease_counts),
            pinned_s=stats.pinned_s.astype("<f8").tobytes(),
        )
