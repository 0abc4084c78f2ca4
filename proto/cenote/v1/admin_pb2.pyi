from cenote.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("cluster_name", "epoch", "role", "metadata_backend", "uptime_s", "objects", "capacity_bytes", "used_bytes", "granted_bytes", "condemned_bytes", "quarantined_bytes", "leases", "leased_bytes", "sessions", "grants", "evicted_objects", "evicted_bytes", "nodes_alive", "nodes_total", "metadata_memory_bytes", "journal_bytes", "last_seq", "pinned_objects", "server_version", "acquired_keys", "acquired_hits", "lost_objects", "damaged_replicas", "broken_slots", "unverified_slots", "masters", "backlog_entries", "backlog_bytes", "backlog_age_s", "tenure_left_s", "writes_refused", "last_entry", "notice", "eviction_policy_wanted", "eviction_policy", "eviction_policy_switches", "ssd_capacity_bytes", "ssd_used_bytes", "acquired_hits_ssd", "demoted_objects", "demoted_bytes", "promoted_objects", "promoted_bytes", "failed_copies", "evicted_to_ssd", "copying_bytes", "rdma_trouble", "ssd_write_budget_bytes", "ssd_written_day_bytes", "pinned_bytes", "pinned_bytes_max", "expired_objects", "dram_quota_bytes", "ssd_quota_bytes", "moving", "logical_bytes", "dedup_objects", "dedup_bytes")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_BACKEND_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONDEMNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_ALIVE_FIELD_NUMBER: _ClassVar[int]
    NODES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    METADATA_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PINNED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_KEYS_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_HITS_FIELD_NUMBER: _ClassVar[int]
    LOST_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MASTERS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TENURE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    WRITES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_WANTED_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    SSD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_HITS_SSD_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_COPIES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TO_SSD_FIELD_NUMBER: _ClassVar[int]
    COPYING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITTEN_DAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DRAM_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEDUP_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DEDUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    epoch: int
    role: str
    metadata_backend: str
    uptime_s: float
    objects: int
    capacity_bytes: int
    used_bytes: int
    granted_bytes: int
    condemned_bytes: int
    quarantined_bytes: int
    leases: int
    leased_bytes: int
    sessions: int
    grants: int
    evicted_objects: int
    evicted_bytes: int
    nodes_alive: int
    nodes_total: int
    metadata_memory_bytes: int
    journal_bytes: int
    last_seq: int
    pinned_objects: int
    server_version: str
    acquired_keys: int
    acquired_hits: int
    lost_objects: int
    damaged_replicas: int
    broken_slots: int
    unverified_slots: int
    masters: _containers.RepeatedCompositeFieldContainer[MasterInfo]
    backlog_entries: int
    backlog_bytes: int
    backlog_age_s: float
    tenure_left_s: float
    writes_refused: str
    last_entry: int
    notice: str
    eviction_policy_wanted: str
    eviction_policy: str
    eviction_policy_switches: int
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    acquired_hits_ssd: int
    demoted_objects: int
    demoted_bytes: int
    promoted_objects: int
    promoted_bytes: int
    failed_copies: int
    evicted_to_ssd: int
    copying_bytes: int
    rdma_trouble: str
    ssd_write_budget_bytes: int
    ssd_written_day_bytes: int
    pinned_bytes: int
    pinned_bytes_max: int
    expired_objects: int
    dram_quota_bytes: int
    ssd_quota_bytes: int
    moving: str
    logical_bytes: int
    dedup_objects: int
    dedup_bytes: int
    def __init__(self, cluster_name: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., metadata_backend: _Optional[str] = ..., uptime_s: _Optional[float] = ..., objects: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., condemned_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., grants: _Optional[int] = ..., evicted_objects: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., nodes_alive: _Optional[int] = ..., nodes_total: _Optional[int] = ..., metadata_memory_bytes: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., last_seq: _Optional[int] = ..., pinned_objects: _Optional[int] = ..., server_version: _Optional[str] = ..., acquired_keys: _Optional[int] = ..., acquired_hits: _Optional[int] = ..., lost_objects: _Optional[int] = ..., damaged_replicas: _Optional[int] = ..., broken_slots: _Optional[int] = ..., unverified_slots: _Optional[int] = ..., masters: _Optional[_Iterable[_Union[MasterInfo, _Mapping]]] = ..., backlog_entries: _Optional[int] = ..., backlog_bytes: _Optional[int] = ..., backlog_age_s: _Optional[float] = ..., tenure_left_s: _Optional[float] = ..., writes_refused: _Optional[str] = ..., last_entry: _Optional[int] = ..., notice: _Optional[str] = ..., eviction_policy_wanted: _Optional[str] = ..., eviction_policy: _Optional[str] = ..., eviction_policy_switches: _Optional[int] = ..., ssd_capacity_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., acquired_hits_ssd: _Optional[int] = ..., demoted_objects: _Optional[int] = ..., demoted_bytes: _Optional[int] = ..., promoted_objects: _Optional[int] = ..., promoted_bytes: _Optional[int] = ..., failed_copies: _Optional[int] = ..., evicted_to_ssd: _Optional[int] = ..., copying_bytes: _Optional[int] = ..., rdma_trouble: _Optional[str] = ..., ssd_write_budget_bytes: _Optional[int] = ..., ssd_written_day_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pinned_bytes_max: _Optional[int] = ..., expired_objects: _Optional[int] = ..., dram_quota_bytes: _Optional[int] = ..., ssd_quota_bytes: _Optional[int] = ..., moving: _Optional[str] = ..., logical_bytes: _Optional[int] = ..., dedup_objects: _Optional[int] = ..., dedup_bytes: _Optional[int] = ...) -> None: ...

class MasterInfo(_message.Message):
    __slots__ = ("name", "addresses", "grpc", "role", "silent_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    grpc: str
    role: str
    silent_s: float
    def __init__(self, name: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., grpc: _Optional[str] = ..., role: _Optional[str] = ..., silent_s: _Optional[float] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("view", "capacity_bytes", "used_bytes", "heartbeat_age_s", "read_bytes", "written_bytes", "sessions", "process_id", "server_version", "rdma_registered_bytes", "rdma_queue_pairs", "rdma_received_bytes", "rdma_sent_bytes", "rdma_trouble", "ssd_write_budget_bytes", "ssd_write_allowance_bytes", "ssd_written_day_bytes", "ssd_written_total_bytes", "ssd_capacity_bytes", "ssd_used_bytes", "drained")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RDMA_REGISTERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_QUEUE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    RDMA_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITE_ALLOWANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITTEN_DAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITTEN_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    view: _common_pb2.NodeView
    capacity_bytes: int
    used_bytes: int
    heartbeat_age_s: float
    read_bytes: int
    written_bytes: int
    sessions: int
    process_id: int
    server_version: str
    rdma_registered_bytes: int
    rdma_queue_pairs: int
    rdma_received_bytes: int
    rdma_sent_bytes: int
    rdma_trouble: str
    ssd_write_budget_bytes: int
    ssd_write_allowance_bytes: int
    ssd_written_day_bytes: int
    ssd_written_total_bytes: int
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    drained: bool
    def __init__(self, view: _Optional[_Union[_common_pb2.NodeView, _Mapping]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., process_id: _Optional[int] = ..., server_version: _Optional[str] = ..., rdma_registered_bytes: _Optional[int] = ..., rdma_queue_pairs: _Optional[int] = ..., rdma_received_bytes: _Optional[int] = ..., rdma_sent_bytes: _Optional[int] = ..., rdma_trouble: _Optional[str] = ..., ssd_write_budget_bytes: _Optional[int] = ..., ssd_write_allowance_bytes: _Optional[int] = ..., ssd_written_day_bytes: _Optional[int] = ..., ssd_written_total_bytes: _Optional[int] = ..., ssd_capacity_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., drained: bool = ...) -> None: ...

class ListSegmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSegmentsResponse(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentStatus]
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentStatus, _Mapping]]] = ...) -> None: ...

class SegmentStatus(_message.Message):
    __slots__ = ("view", "node_name", "used_bytes", "objects", "slots", "slots_used", "largest_free_bytes", "free_runs", "retired_bytes")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_RUNS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    view: _common_pb2.SegmentView
    node_name: str
    used_bytes: int
    objects: int
    slots: int
    slots_used: int
    largest_free_bytes: int
    free_runs: int
    retired_bytes: int
    def __init__(self, view: _Optional[_Union[_common_pb2.SegmentView, _Mapping]] = ..., node_name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., slots: _Optional[int] = ..., slots_used: _Optional[int] = ..., largest_free_bytes: _Optional[int] = ..., free_runs: _Optional[int] = ..., retired_bytes: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("name", "namespace_id", "generation", "fingerprint", "durability", "objects", "used_bytes", "ssd_used_bytes", "dram_quota_bytes", "ssd_quota_bytes", "objects_quota", "priority", "pinned_objects", "pinned_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: int
    generation: int
    fingerprint: bytes
    durability: _common_pb2.Durability
    objects: int
    used_bytes: int
    ssd_used_bytes: int
    dram_quota_bytes: int
    ssd_quota_bytes: int
    objects_quota: int
    priority: _common_pb2.Priority
    pinned_objects: int
    pinned_bytes: int
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., objects: _Optional[int] = ..., used_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., dram_quota_bytes: _Optional[int] = ..., ssd_quota_bytes: _Optional[int] = ..., objects_quota: _Optional[int] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., pinned_objects: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class SetNamespaceQuotaRequest(_message.Message):
    __slots__ = ("name", "dram_bytes", "ssd_bytes", "objects", "priority", "credentials")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dram_bytes: int
    ssd_bytes: int
    objects: int
    priority: _common_pb2.Priority
    credentials: _common_pb2.Credentials
    def __init__(self, name: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class SetNamespaceQuotaResponse(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceStatus
    def __init__(self, namespace: _Optional[_Union[NamespaceStatus, _Mapping]] = ...) -> None: ...

class CreateNamespaceRequest(_message.Message):
    __slots__ = ("name", "fingerprint", "durability", "credentials")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    durability: _common_pb2.Durability
    credentials: _common_pb2.Credentials
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class CreateNamespaceResponse(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceStatus
    def __init__(self, namespace: _Optional[_Union[NamespaceStatus, _Mapping]] = ...) -> None: ...

class ResetNamespaceRequest(_message.Message):
    __slots__ = ("name", "credentials")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    credentials: _common_pb2.Credentials
    def __init__(self, name: _Optional[str] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class ResetNamespaceResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class StatObjectRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ...) -> None: ...

class StatObjectResponse(_message.Message):
    __slots__ = ("objects", "extents", "idle_s", "lease_counts", "pinned_s")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    objects: bytes
    extents: bytes
    idle_s: bytes
    lease_counts: bytes
    pinned_s: bytes
    def __init__(self, objects: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., idle_s: _Optional[bytes] = ..., lease_counts: _Optional[bytes] = ..., pinned_s: _Optional[bytes] = ...) -> None: ...

class GetMissRatioCurvesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMissRatioCurvesResponse(_message.Message):
    __slots__ = ("capacity_objects", "sampling_rate", "eviction_policy_wanted", "eviction_policy", "eviction_policy_switches", "capacity_factors", "all", "namespaces", "policies", "references_dropped")
    CAPACITY_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_WANTED_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FACTORS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    capacity_objects: int
    sampling_rate: float
    eviction_policy_wanted: str
    eviction_policy: str
    eviction_policy_switches: int
    capacity_factors: _containers.RepeatedScalarFieldContainer[float]
    all: MissRatioCurve
    namespaces: _containers.RepeatedCompositeFieldContainer[MissRatioCurve]
    policies: _containers.RepeatedCompositeFieldContainer[PolicyHitRate]
    references_dropped: int
    def __init__(self, capacity_objects: _Optional[int] = ..., sampling_rate: _Optional[float] = ..., eviction_policy_wanted: _Optional[str] = ..., eviction_policy: _Optional[str] = ..., eviction_policy_switches: _Optional[int] = ..., capacity_factors: _Optional[_Iterable[float]] = ..., all: _Optional[_Union[MissRatioCurve, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[MissRatioCurve, _Mapping]]] = ..., policies: _Optional[_Iterable[_Union[PolicyHitRate, _Mapping]]] = ..., references_dropped: _Optional[int] = ...) -> None: ...

class MissRatioCurve(_message.Message):
    __slots__ = ("namespace", "references", "hit_rates")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    references: int
    hit_rates: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, namespace: _Optional[str] = ..., references: _Optional[int] = ..., hit_rates: _Optional[_Iterable[float]] = ...) -> None: ...

class PolicyHitRate(_message.Message):
    __slots__ = ("policy", "hit_rate")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    policy: str
    hit_rate: float
    def __init__(self, policy: _Optional[str] = ..., hit_rate: _Optional[float] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTasksResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskStatus]
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskStatus, _Mapping]]] = ...) -> None: ...

class TaskStatus(_message.Message):
    __slots__ = ("kind", "node_id", "node_name", "state", "running_s", "bandwidth", "moved_objects", "moved_bytes", "dropped_objects", "evicted_objects", "failed_copies", "remaining_objects", "remaining_bytes", "note")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    MOVED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_COPIES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    node_id: int
    node_name: str
    state: str
    running_s: float
    bandwidth: int
    moved_objects: int
    moved_bytes: int
    dropped_objects: int
    evicted_objects: int
    failed_copies: int
    remaining_objects: int
    remaining_bytes: int
    note: str
    def __init__(self, kind: _Optional[str] = ..., node_id: _Optional[int] = ..., node_name: _Optional[str] = ..., state: _Optional[str] = ..., running_s: _Optional[float] = ..., bandwidth: _Optional[int] = ..., moved_objects: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., dropped_objects: _Optional[int] = ..., evicted_objects: _Optional[int] = ..., failed_copies: _Optional[int] = ..., remaining_objects: _Optional[int] = ..., remaining_bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("cancel", "bandwidth", "credentials")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    cancel: bool
    bandwidth: int
    credentials: _common_pb2.Credentials
    def __init__(self, cancel: bool = ..., bandwidth: _Optional[int] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteNamespaceRequest(_message.Message):
    __slots__ = ("name", "credentials")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    credentials: _common_pb2.Credentials
    def __init__(self, name: _Optional[str] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class DeleteNamespaceResponse(_message.Message):
    __slots__ = ("objects",)
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    objects: int
    def __init__(self, objects: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "key", "credentials")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    key: bytes
    credentials: _common_pb2.Credentials
    def __init__(self, namespace: _Optional[str] = ..., key: _Optional[bytes] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("state", "size_bytes", "version", "idle_s", "leases", "pinned_s", "places", "writer", "decisions", "log_keys", "log_s", "over_quota", "found_in", "namespace", "tenure_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    LOG_KEYS_FIELD_NUMBER: _ClassVar[int]
    LOG_S_FIELD_NUMBER: _ClassVar[int]
    OVER_QUOTA_FIELD_NUMBER: _ClassVar[int]
    FOUND_IN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENURE_S_FIELD_NUMBER: _ClassVar[int]
    state: str
    size_bytes: int
    version: _common_pb2.Version
    idle_s: float
    leases: int
    pinned_s: float
    places: _containers.RepeatedCompositeFieldContainer[ObjectPlace]
    writer: str
    decisions: _containers.RepeatedCompositeFieldContainer[KeyDecision]
    log_keys: int
    log_s: float
    over_quota: bool
    found_in: _containers.RepeatedScalarFieldContainer[str]
    namespace: NamespaceStatus
    tenure_s: float
    def __init__(self, state: _Optional[str] = ..., size_bytes: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., idle_s: _Optional[float] = ..., leases: _Optional[int] = ..., pinned_s: _Optional[float] = ..., places: _Optional[_Iterable[_Union[ObjectPlace, _Mapping]]] = ..., writer: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[KeyDecision, _Mapping]]] = ..., log_keys: _Optional[int] = ..., log_s: _Optional[float] = ..., over_quota: bool = ..., found_in: _Optional[_Iterable[str]] = ..., namespace: _Optional[_Union[NamespaceStatus, _Mapping]] = ..., tenure_s: _Optional[float] = ...) -> None: ...

class ObjectPlace(_message.Message):
    __slots__ = ("replica", "segment_id", "tier", "node_name", "node_state", "attached", "offset_bytes", "length_bytes")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_STATE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    segment_id: int
    tier: _common_pb2.Tier
    node_name: str
    node_state: _common_pb2.NodeState
    attached: bool
    offset_bytes: int
    length_bytes: int
    def __init__(self, replica: _Optional[int] = ..., segment_id: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., node_name: _Optional[str] = ..., node_state: _Optional[_Union[_common_pb2.NodeState, str]] = ..., attached: bool = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class KeyDecision(_message.Message):
    __slots__ = ("fate", "cause", "ago_s", "idle_s", "batch_objects", "seq")
    FATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    fate: str
    cause: str
    ago_s: float
    idle_s: float
    batch_objects: int
    seq: int
    def __init__(self, fate: _Optional[str] = ..., cause: _Optional[str] = ..., ago_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., batch_objects: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "sessions_total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    sessions_total: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., sessions_total: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "client_name", "boot_id", "process_id", "leases", "holds", "leased_objects", "leased_bytes", "ends_s", "grants", "granted_bytes", "expires_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    LEASED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDS_S_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    client_name: str
    boot_id: str
    process_id: int
    leases: int
    holds: int
    leased_objects: int
    leased_bytes: int
    ends_s: float
    grants: int
    granted_bytes: int
    expires_s: float
    def __init__(self, session_id: _Optional[bytes] = ..., client_name: _Optional[str] = ..., boot_id: _Optional[str] = ..., process_id: _Optional[int] = ..., leases: _Optional[int] = ..., holds: _Optional[int] = ..., leased_objects: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., ends_s: _Optional[float] = ..., grants: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., expires_s: _Optional[float] = ...) -> None: ...

class EvictObjectsRequest(_message.Message):
    __slots__ = ("namespace", "keys", "key_lengths", "size_bytes", "idle_s", "objects_max", "credentials")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_MAX_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: bytes
    key_lengths: bytes
    size_bytes: int
    idle_s: float
    objects_max: int
    credentials: _common_pb2.Credentials
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[bytes] = ..., key_lengths: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., idle_s: _Optional[float] = ..., objects_max: _Optional[int] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class EvictObjectsResponse(_message.Message):
    __slots__ = ("objects", "size_bytes", "pinned", "leased", "absent")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    objects: int
    size_bytes: int
    pinned: int
    leased: int
    absent: int
    def __init__(self, objects: _Optional[int] = ..., size_bytes: _Optional[int] = ..., pinned: _Optional[int] = ..., leased: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[ConfigValue]
    def __init__(self, values: _Optional[_Iterable[_Union[ConfigValue, _Mapping]]] = ...) -> None: ...

class ConfigValue(_message.Message):
    __slots__ = ("name", "value", "dynamic", "changed", "started_with", "help")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    STARTED_WITH_FIELD_NUMBER: _ClassVar[int]
    HELP_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    dynamic: bool
    changed: bool
    started_with: str
    help: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., dynamic: bool = ..., changed: bool = ..., started_with: _Optional[str] = ..., help: _Optional[str] = ...) -> None: ...

class SetConfigRequest(_message.Message):
    __slots__ = ("values", "unset", "credentials")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    UNSET_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    unset: _containers.RepeatedScalarFieldContainer[str]
    credentials: _common_pb2.Credentials
    def __init__(self, values: _Optional[_Mapping[str, str]] = ..., unset: _Optional[_Iterable[str]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class SetConfigResponse(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[ConfigValue]
    def __init__(self, values: _Optional[_Iterable[_Union[ConfigValue, _Mapping]]] = ...) -> None: ...

class TakeSnapshotRequest(_message.Message):
    __slots__ = ("only_look", "credentials")
    ONLY_LOOK_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    only_look: bool
    credentials: _common_pb2.Credentials
    def __init__(self, only_look: bool = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class TakeSnapshotResponse(_message.Message):
    __slots__ = ("wanted_entry", "covered_entry", "journal_bytes")
    WANTED_ENTRY_FIELD_NUMBER: _ClassVar[int]
    COVERED_ENTRY_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    wanted_entry: int
    covered_entry: int
    journal_bytes: int
    def __init__(self, wanted_entry: _Optional[int] = ..., covered_entry: _Optional[int] = ..., journal_bytes: _Optional[int] = ...) -> None: ...

class DebugDumpRequest(_message.Message):
    __slots__ = ("credentials",)
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    credentials: _common_pb2.Credentials
    def __init__(self, credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class DebugDumpResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
