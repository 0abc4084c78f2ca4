from cenote.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MasterMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASTER_METHOD_UNSPECIFIED: _ClassVar[MasterMethod]
    MASTER_METHOD_RENEW_SESSION: _ClassVar[MasterMethod]
    MASTER_METHOD_CLOSE_SESSION: _ClassVar[MasterMethod]
    MASTER_METHOD_GET_CLUSTER_VIEW: _ClassVar[MasterMethod]
    MASTER_METHOD_OPEN_NAMESPACE: _ClassVar[MasterMethod]
    MASTER_METHOD_EXISTS: _ClassVar[MasterMethod]
    MASTER_METHOD_MATCH: _ClassVar[MasterMethod]
    MASTER_METHOD_ACQUIRE: _ClassVar[MasterMethod]
    MASTER_METHOD_RELEASE: _ClassVar[MasterMethod]
    MASTER_METHOD_TOUCH: _ClassVar[MasterMethod]
    MASTER_METHOD_PUT_START: _ClassVar[MasterMethod]
    MASTER_METHOD_PUT_COMMIT: _ClassVar[MasterMethod]
    MASTER_METHOD_PUT_ABORT: _ClassVar[MasterMethod]
    MASTER_METHOD_REMOVE: _ClassVar[MasterMethod]
    MASTER_METHOD_PIN: _ClassVar[MasterMethod]
    MASTER_METHOD_UNPIN: _ClassVar[MasterMethod]
    MASTER_METHOD_REPORT_FAILURE: _ClassVar[MasterMethod]
    MASTER_METHOD_ATTACH: _ClassVar[MasterMethod]
    MASTER_METHOD_HEARTBEAT: _ClassVar[MasterMethod]
    MASTER_METHOD_DETACH: _ClassVar[MasterMethod]
    MASTER_METHOD_DRAIN: _ClassVar[MasterMethod]
MASTER_METHOD_UNSPECIFIED: MasterMethod
MASTER_METHOD_RENEW_SESSION: MasterMethod
MASTER_METHOD_CLOSE_SESSION: MasterMethod
MASTER_METHOD_GET_CLUSTER_VIEW: MasterMethod
MASTER_METHOD_OPEN_NAMESPACE: MasterMethod
MASTER_METHOD_EXISTS: MasterMethod
MASTER_METHOD_MATCH: MasterMethod
MASTER_METHOD_ACQUIRE: MasterMethod
MASTER_METHOD_RELEASE: MasterMethod
MASTER_METHOD_TOUCH: MasterMethod
MASTER_METHOD_PUT_START: MasterMethod
MASTER_METHOD_PUT_COMMIT: MasterMethod
MASTER_METHOD_PUT_ABORT: MasterMethod
MASTER_METHOD_REMOVE: MasterMethod
MASTER_METHOD_PIN: MasterMethod
MASTER_METHOD_UNPIN: MasterMethod
MASTER_METHOD_REPORT_FAILURE: MasterMethod
MASTER_METHOD_ATTACH: MasterMethod
MASTER_METHOD_HEARTBEAT: MasterMethod
MASTER_METHOD_DETACH: MasterMethod
MASTER_METHOD_DRAIN: MasterMethod

class HelloRequest(_message.Message):
    __slots__ = ("credentials", "session_id", "client_name", "boot_id", "process_id", "observer", "pool_id", "last_epoch")
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    credentials: _common_pb2.Credentials
    session_id: bytes
    client_name: str
    boot_id: str
    process_id: int
    observer: bool
    pool_id: bytes
    last_epoch: int
    def __init__(self, credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ..., session_id: _Optional[bytes] = ..., client_name: _Optional[str] = ..., boot_id: _Optional[str] = ..., process_id: _Optional[int] = ..., observer: bool = ..., pool_id: _Optional[bytes] = ..., last_epoch: _Optional[int] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("epoch", "session_ttl_ms", "cluster_view", "shard_map", "location_ttl_ms", "lease_ttl_max_ms", "batch_keys_max", "cluster_name", "is_leader", "server_version", "leader_addresses", "past_tenure", "pool_id", "ticket", "no_mapping")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_VIEW_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    LOCATION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PAST_TENURE_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NO_MAPPING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session_ttl_ms: int
    cluster_view: _common_pb2.ClusterView
    shard_map: _common_pb2.ShardMap
    location_ttl_ms: int
    lease_ttl_max_ms: int
    batch_keys_max: int
    cluster_name: str
    is_leader: bool
    server_version: str
    leader_addresses: _containers.RepeatedScalarFieldContainer[str]
    past_tenure: bool
    pool_id: bytes
    ticket: bytes
    no_mapping: bool
    def __init__(self, epoch: _Optional[int] = ..., session_ttl_ms: _Optional[int] = ..., cluster_view: _Optional[_Union[_common_pb2.ClusterView, _Mapping]] = ..., shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ..., location_ttl_ms: _Optional[int] = ..., lease_ttl_max_ms: _Optional[int] = ..., batch_keys_max: _Optional[int] = ..., cluster_name: _Optional[str] = ..., is_leader: bool = ..., server_version: _Optional[str] = ..., leader_addresses: _Optional[_Iterable[str]] = ..., past_tenure: bool = ..., pool_id: _Optional[bytes] = ..., ticket: _Optional[bytes] = ..., no_mapping: bool = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session_id", "piggyback", "lease_ttl_ms", "lease_ids", "cancelled_request_ids", "sealed_through")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    piggyback: _common_pb2.Piggyback
    lease_ttl_ms: int
    lease_ids: bytes
    cancelled_request_ids: bytes
    sealed_through: int
    def __init__(self, session_id: _Optional[bytes] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., lease_ttl_ms: _Optional[int] = ..., lease_ids: _Optional[bytes] = ..., cancelled_request_ids: _Optional[bytes] = ..., sealed_through: _Optional[int] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("view_version", "epoch", "lost_lease_ids", "ticket")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    lost_lease_ids: bytes
    ticket: bytes
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., lost_lease_ids: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "sealed_through")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEALED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    sealed_through: int
    def __init__(self, session_id: _Optional[bytes] = ..., sealed_through: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterViewRequest(_message.Message):
    __slots__ = ("known_view_version",)
    KNOWN_VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    known_view_version: int
    def __init__(self, known_view_version: _Optional[int] = ...) -> None: ...

class GetClusterViewResponse(_message.Message):
    __slots__ = ("cluster_view", "epoch")
    CLUSTER_VIEW_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    cluster_view: _common_pb2.ClusterView
    epoch: int
    def __init__(self, cluster_view: _Optional[_Union[_common_pb2.ClusterView, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("name", "fingerprint", "create", "durability", "credentials")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    create: bool
    durability: _common_pb2.Durability
    credentials: _common_pb2.Credentials
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., create: bool = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "generation", "digest_seed", "fingerprint", "durability", "created", "dedup_key")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_SEED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    DEDUP_KEY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    generation: int
    digest_seed: int
    fingerprint: bytes
    durability: _common_pb2.Durability
    created: bool
    dedup_key: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., digest_seed: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., created: bool = ..., dedup_key: _Optional[bytes] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("keys", "piggyback")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    piggyback: _common_pb2.Piggyback
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("present", "past_tenure")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PAST_TENURE_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    past_tenure: bool
    def __init__(self, present: _Optional[bytes] = ..., past_tenure: bool = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("keys", "piggyback", "will_read")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    WILL_READ_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    piggyback: _common_pb2.Piggyback
    will_read: bool
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., will_read: bool = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("presence_bitmap", "prefix_keys", "past_tenure")
    PRESENCE_BITMAP_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    PAST_TENURE_FIELD_NUMBER: _ClassVar[int]
    presence_bitmap: bytes
    prefix_keys: int
    past_tenure: bool
    def __init__(self, presence_bitmap: _Optional[bytes] = ..., prefix_keys: _Optional[int] = ..., past_tenure: bool = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "ttl_ms", "piggyback", "chain", "lease", "replicas_max", "avoid_node_ids", "hold", "session_id", "request_id")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MAX_FIELD_NUMBER: _ClassVar[int]
    AVOID_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    ttl_ms: int
    piggyback: _common_pb2.Piggyback
    chain: bool
    lease: bool
    replicas_max: int
    avoid_node_ids: bytes
    hold: bool
    session_id: bytes
    request_id: int
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., ttl_ms: _Optional[int] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., chain: bool = ..., lease: bool = ..., replicas_max: _Optional[int] = ..., avoid_node_ids: _Optional[bytes] = ..., hold: bool = ..., session_id: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("objects", "extents", "lease", "view_version", "past_tenure")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAST_TENURE_FIELD_NUMBER: _ClassVar[int]
    objects: bytes
    extents: bytes
    lease: _common_pb2.Lease
    view_version: int
    past_tenure: bool
    def __init__(self, objects: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., view_version: _Optional[int] = ..., past_tenure: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("piggyback",)
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    piggyback: _common_pb2.Piggyback
    def __init__(self, piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("piggyback",)
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    piggyback: _common_pb2.Piggyback
    def __init__(self, piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutOptions(_message.Message):
    __slots__ = ("replicas", "min_replicas", "durability", "tier", "local_first", "ttl_ms", "priority", "pin", "chain", "avoid_node_ids")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIRST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    AVOID_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    min_replicas: int
    durability: _common_pb2.Durability
    tier: _common_pb2.Tier
    local_first: bool
    ttl_ms: int
    priority: int
    pin: bool
    chain: bool
    avoid_node_ids: bytes
    def __init__(self, replicas: _Optional[int] = ..., min_replicas: _Optional[int] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., local_first: bool = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ..., pin: bool = ..., chain: bool = ..., avoid_node_ids: _Optional[bytes] = ...) -> None: ...

class PutStartRequest(_message.Message):
    __slots__ = ("keys", "sizes", "tail_lengths", "content_digests", "options", "session_id", "request_id", "piggyback", "shard_index", "shard_count", "credentials", "spare_count", "spare_bytes", "sealed_seqs", "sealed_epoch")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TAIL_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    SPARE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_SEQS_FIELD_NUMBER: _ClassVar[int]
    SEALED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    sizes: bytes
    tail_lengths: bytes
    content_digests: bytes
    options: PutOptions
    session_id: bytes
    request_id: int
    piggyback: _common_pb2.Piggyback
    shard_index: int
    shard_count: int
    credentials: _common_pb2.Credentials
    spare_count: int
    spare_bytes: int
    sealed_seqs: bytes
    sealed_epoch: int
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., sizes: _Optional[bytes] = ..., tail_lengths: _Optional[bytes] = ..., content_digests: _Optional[bytes] = ..., options: _Optional[_Union[PutOptions, _Mapping]] = ..., session_id: _Optional[bytes] = ..., request_id: _Optional[int] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., shard_index: _Optional[int] = ..., shard_count: _Optional[int] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ..., spare_count: _Optional[int] = ..., spare_bytes: _Optional[int] = ..., sealed_seqs: _Optional[bytes] = ..., sealed_epoch: _Optional[int] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("puts", "extents", "grant_id", "epoch", "view_version", "spare_grant_id", "spare_extents", "unsealed", "alias_grant_id", "alias_extents", "alias_checksums", "grant_signatures", "spare_signatures")
    PUTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPARE_GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    SPARE_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_FIELD_NUMBER: _ClassVar[int]
    ALIAS_GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    GRANT_SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    SPARE_SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    puts: bytes
    extents: bytes
    grant_id: int
    epoch: int
    view_version: int
    spare_grant_id: int
    spare_extents: bytes
    unsealed: bytes
    alias_grant_id: int
    alias_extents: bytes
    alias_checksums: bytes
    grant_signatures: bytes
    spare_signatures: bytes
    def __init__(self, puts: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., grant_id: _Optional[int] = ..., epoch: _Optional[int] = ..., view_version: _Optional[int] = ..., spare_grant_id: _Optional[int] = ..., spare_extents: _Optional[bytes] = ..., unsealed: _Optional[bytes] = ..., alias_grant_id: _Optional[int] = ..., alias_extents: _Optional[bytes] = ..., alias_checksums: _Optional[bytes] = ..., grant_signatures: _Optional[bytes] = ..., spare_signatures: _Optional[bytes] = ...) -> None: ...

class SpareNames(_message.Message):
    __slots__ = ("keys", "sizes", "tail_lengths", "chain")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TAIL_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    sizes: bytes
    tail_lengths: bytes
    chain: bool
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., sizes: _Optional[bytes] = ..., tail_lengths: _Optional[bytes] = ..., chain: bool = ...) -> None: ...

class PutCommitRequest(_message.Message):
    __slots__ = ("grant_id", "indexes", "checksums", "session_id", "request_id", "piggyback", "epoch", "failed_replicas", "names", "sealed_through", "tickets")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SEALED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    indexes: bytes
    checksums: bytes
    session_id: bytes
    request_id: int
    piggyback: _common_pb2.Piggyback
    epoch: int
    failed_replicas: bytes
    names: SpareNames
    sealed_through: int
    tickets: bytes
    def __init__(self, grant_id: _Optional[int] = ..., indexes: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., session_id: _Optional[bytes] = ..., request_id: _Optional[int] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., epoch: _Optional[int] = ..., failed_replicas: _Optional[bytes] = ..., names: _Optional[_Union[SpareNames, _Mapping]] = ..., sealed_through: _Optional[int] = ..., tickets: _Optional[bytes] = ...) -> None: ...

class PutCommitResponse(_message.Message):
    __slots__ = ("statuses", "epoch", "seq_first")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIRST_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    epoch: int
    seq_first: int
    def __init__(self, statuses: _Optional[bytes] = ..., epoch: _Optional[int] = ..., seq_first: _Optional[int] = ...) -> None: ...

class PutAbortRequest(_message.Message):
    __slots__ = ("grant_id", "indexes", "session_id", "piggyback", "unfenced", "unsealed_keys", "unsealed_seqs", "unsealed_epoch")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    UNFENCED_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_KEYS_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_SEQS_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    indexes: bytes
    session_id: bytes
    piggyback: _common_pb2.Piggyback
    unfenced: bool
    unsealed_keys: _common_pb2.KeyBatch
    unsealed_seqs: bytes
    unsealed_epoch: int
    def __init__(self, grant_id: _Optional[int] = ..., indexes: _Optional[bytes] = ..., session_id: _Optional[bytes] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ..., unfenced: bool = ..., unsealed_keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., unsealed_seqs: _Optional[bytes] = ..., unsealed_epoch: _Optional[int] = ...) -> None: ...

class PutAbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("keys", "credentials", "session_id", "request_id", "piggyback")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    credentials: _common_pb2.Credentials
    session_id: bytes
    request_id: int
    piggyback: _common_pb2.Piggyback
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ..., session_id: _Optional[bytes] = ..., request_id: _Optional[int] = ..., piggyback: _Optional[_Union[_common_pb2.Piggyback, _Mapping]] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    def __init__(self, removed: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "ttl_ms", "credentials")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    ttl_ms: int
    credentials: _common_pb2.Credentials
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., ttl_ms: _Optional[int] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: bytes
    def __init__(self, pinned: _Optional[bytes] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("keys", "credentials")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.KeyBatch
    credentials: _common_pb2.Credentials
    def __init__(self, keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: bytes
    def __init__(self, unpinned: _Optional[bytes] = ...) -> None: ...

class ReportFailureRequest(_message.Message):
    __slots__ = ("node_id", "session_id", "what", "transport", "misread_keys", "misread_objects", "misread_extents")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MISREAD_KEYS_FIELD_NUMBER: _ClassVar[int]
    MISREAD_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MISREAD_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    session_id: bytes
    what: str
    transport: _common_pb2.TransportKind
    misread_keys: _common_pb2.KeyBatch
    misread_objects: bytes
    misread_extents: bytes
    def __init__(self, node_id: _Optional[int] = ..., session_id: _Optional[bytes] = ..., what: _Optional[str] = ..., transport: _Optional[_Union[_common_pb2.TransportKind, str]] = ..., misread_keys: _Optional[_Union[_common_pb2.KeyBatch, _Mapping]] = ..., misread_objects: _Optional[bytes] = ..., misread_extents: _Optional[bytes] = ...) -> None: ...

class ReportFailureResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.NodeState
    def __init__(self, state: _Optional[_Union[_common_pb2.NodeState, str]] = ...) -> None: ...

class SegmentInfo(_message.Message):
    __slots__ = ("node_segment_index", "tier", "incarnation", "size_bytes", "ready_bytes", "unit_bytes", "slots", "retired_extents", "unverified", "slot_sums")
    NODE_SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    SLOT_SUMS_FIELD_NUMBER: _ClassVar[int]
    node_segment_index: int
    tier: _common_pb2.Tier
    incarnation: bytes
    size_bytes: int
    ready_bytes: int
    unit_bytes: int
    slots: int
    retired_extents: bytes
    unverified: bool
    slot_sums: bytes
    def __init__(self, node_segment_index: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., incarnation: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., unit_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., retired_extents: _Optional[bytes] = ..., unverified: bool = ..., slot_sums: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("credentials", "node_name", "node_uuid", "boot_id", "failure_domain", "endpoints", "segments", "inventory", "more", "last_epoch", "process_id", "server_version", "start_number", "attempt", "slice", "claims", "pool", "master_pool_id", "slots_per_block", "told_blocks", "ticket_key")
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_UUID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MASTER_POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOLD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    credentials: _common_pb2.Credentials
    node_name: str
    node_uuid: bytes
    boot_id: str
    failure_domain: str
    endpoints: _containers.RepeatedCompositeFieldContainer[_common_pb2.Endpoint]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentInfo]
    inventory: bytes
    more: bool
    last_epoch: int
    process_id: int
    server_version: str
    start_number: int
    attempt: int
    slice: int
    claims: bytes
    pool: PoolCopy
    master_pool_id: bytes
    slots_per_block: int
    told_blocks: bytes
    ticket_key: bytes
    def __init__(self, credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ..., node_name: _Optional[str] = ..., node_uuid: _Optional[bytes] = ..., boot_id: _Optional[str] = ..., failure_domain: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[_common_pb2.Endpoint, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[SegmentInfo, _Mapping]]] = ..., inventory: _Optional[bytes] = ..., more: bool = ..., last_epoch: _Optional[int] = ..., process_id: _Optional[int] = ..., server_version: _Optional[str] = ..., start_number: _Optional[int] = ..., attempt: _Optional[int] = ..., slice: _Optional[int] = ..., claims: _Optional[bytes] = ..., pool: _Optional[_Union[PoolCopy, _Mapping]] = ..., master_pool_id: _Optional[bytes] = ..., slots_per_block: _Optional[int] = ..., told_blocks: _Optional[bytes] = ..., ticket_key: _Optional[bytes] = ...) -> None: ...

class PoolCopy(_message.Message):
    __slots__ = ("pool_id", "ancestors", "namespaces")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    pool_id: bytes
    ancestors: _containers.RepeatedScalarFieldContainer[bytes]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceCopy]
    def __init__(self, pool_id: _Optional[bytes] = ..., ancestors: _Optional[_Iterable[bytes]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceCopy, _Mapping]]] = ...) -> None: ...

class NamespaceCopy(_message.Message):
    __slots__ = ("namespace_id", "generation", "name", "fingerprint", "digest_seed", "durability", "dram_quota_bytes", "ssd_quota_bytes", "objects_quota", "priority")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_SEED_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    DRAM_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_QUOTA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    generation: int
    name: str
    fingerprint: bytes
    digest_seed: int
    durability: _common_pb2.Durability
    dram_quota_bytes: int
    ssd_quota_bytes: int
    objects_quota: int
    priority: _common_pb2.Priority
    def __init__(self, namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., digest_seed: _Optional[int] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., dram_quota_bytes: _Optional[int] = ..., ssd_quota_bytes: _Optional[int] = ..., objects_quota: _Optional[int] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("node_id", "epoch", "segment_ids", "heartbeat_interval_ms", "clear_slots", "last_seq", "first_grant_id", "pool", "wanted_blocks", "access_keys")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACCESS_KEYS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    epoch: int
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    heartbeat_interval_ms: int
    clear_slots: bytes
    last_seq: int
    first_grant_id: int
    pool: PoolCopy
    wanted_blocks: bytes
    access_keys: bytes
    def __init__(self, node_id: _Optional[int] = ..., epoch: _Optional[int] = ..., segment_ids: _Optional[_Iterable[int]] = ..., heartbeat_interval_ms: _Optional[int] = ..., clear_slots: _Optional[bytes] = ..., last_seq: _Optional[int] = ..., first_grant_id: _Optional[int] = ..., pool: _Optional[_Union[PoolCopy, _Mapping]] = ..., wanted_blocks: _Optional[bytes] = ..., access_keys: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "segments", "wait_ms", "done_instruction", "cut_session_ids", "quarantined_session_ids", "stats", "start_number", "withdrawn_session_ids", "copied", "endpoints")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DONE_INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    CUT_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    START_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    epoch: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentInfo]
    wait_ms: int
    done_instruction: int
    cut_session_ids: bytes
    quarantined_session_ids: bytes
    stats: NodeStats
    start_number: int
    withdrawn_session_ids: bytes
    copied: bytes
    endpoints: _containers.RepeatedCompositeFieldContainer[_common_pb2.Endpoint]
    def __init__(self, node_id: _Optional[int] = ..., epoch: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentInfo, _Mapping]]] = ..., wait_ms: _Optional[int] = ..., done_instruction: _Optional[int] = ..., cut_session_ids: _Optional[bytes] = ..., quarantined_session_ids: _Optional[bytes] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ..., start_number: _Optional[int] = ..., withdrawn_session_ids: _Optional[bytes] = ..., copied: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[_Union[_common_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("read_bytes", "written_bytes", "seals", "sessions", "connections", "broken_slots", "unverified_slots", "damaged_slots", "rdma_registered_bytes", "rdma_queue_pairs", "rdma_received_bytes", "rdma_sent_bytes", "rdma_trouble", "ssd_write_budget_bytes", "ssd_write_allowance_bytes", "ssd_written_day_bytes", "ssd_written_total_bytes")
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RDMA_REGISTERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_QUEUE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    RDMA_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITE_ALLOWANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITTEN_DAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_WRITTEN_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    read_bytes: int
    written_bytes: int
    seals: int
    sessions: int
    connections: int
    broken_slots: int
    unverified_slots: int
    damaged_slots: bytes
    rdma_registered_bytes: int
    rdma_queue_pairs: int
    rdma_received_bytes: int
    rdma_sent_bytes: int
    rdma_trouble: str
    ssd_write_budget_bytes: int
    ssd_write_allowance_bytes: int
    ssd_written_day_bytes: int
    ssd_written_total_bytes: int
    def __init__(self, read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., seals: _Optional[int] = ..., sessions: _Optional[int] = ..., connections: _Optional[int] = ..., broken_slots: _Optional[int] = ..., unverified_slots: _Optional[int] = ..., damaged_slots: _Optional[bytes] = ..., rdma_registered_bytes: _Optional[int] = ..., rdma_queue_pairs: _Optional[int] = ..., rdma_received_bytes: _Optional[int] = ..., rdma_sent_bytes: _Optional[int] = ..., rdma_trouble: _Optional[str] = ..., ssd_write_budget_bytes: _Optional[int] = ..., ssd_write_allowance_bytes: _Optional[int] = ..., ssd_written_day_bytes: _Optional[int] = ..., ssd_written_total_bytes: _Optional[int] = ...) -> None: ...

class Instruction(_message.Message):
    __slots__ = ("number", "grow_slots", "cut_sessions", "clear_slots", "copy_extents", "keep_pool", "pull_replicas")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GROW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CUT_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    COPY_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_POOL_FIELD_NUMBER: _ClassVar[int]
    PULL_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    number: int
    grow_slots: GrowSlots
    cut_sessions: CutSessions
    clear_slots: ClearSlots
    copy_extents: CopyExtents
    keep_pool: PoolCopy
    pull_replicas: PullReplicas
    def __init__(self, number: _Optional[int] = ..., grow_slots: _Optional[_Union[GrowSlots, _Mapping]] = ..., cut_sessions: _Optional[_Union[CutSessions, _Mapping]] = ..., clear_slots: _Optional[_Union[ClearSlots, _Mapping]] = ..., copy_extents: _Optional[_Union[CopyExtents, _Mapping]] = ..., keep_pool: _Optional[_Union[PoolCopy, _Mapping]] = ..., pull_replicas: _Optional[_Union[PullReplicas, _Mapping]] = ...) -> None: ...

class GrowSlots(_message.Message):
    __slots__ = ("segment_id", "offset", "length", "slots")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    offset: int
    length: int
    slots: int
    def __init__(self, segment_id: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class CutSessions(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: bytes
    def __init__(self, session_ids: _Optional[bytes] = ...) -> None: ...

class ClearSlots(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    def __init__(self, slots: _Optional[bytes] = ...) -> None: ...

class CopyExtents(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: bytes
    def __init__(self, copies: _Optional[bytes] = ...) -> None: ...

class PullReplicas(_message.Message):
    __slots__ = ("pulls", "sources")
    PULLS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    pulls: bytes
    sources: _containers.RepeatedCompositeFieldContainer[PullSource]
    def __init__(self, pulls: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[PullSource, _Mapping]]] = ...) -> None: ...

class PullSource(_message.Message):
    __slots__ = ("address", "segment_ids")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[str] = ..., segment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("instructions", "epoch", "access_keys")
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCESS_KEYS_FIELD_NUMBER: _ClassVar[int]
    instructions: _containers.RepeatedCompositeFieldContainer[Instruction]
    epoch: int
    access_keys: bytes
    def __init__(self, instructions: _Optional[_Iterable[_Union[Instruction, _Mapping]]] = ..., epoch: _Optional[int] = ..., access_keys: _Optional[bytes] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "contents_survive", "start_number")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_SURVIVE_FIELD_NUMBER: _ClassVar[int]
    START_NUMBER_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    epoch: int
    contents_survive: bool
    start_number: int
    def __init__(self, node_id: _Optional[int] = ..., epoch: _Optional[int] = ..., contents_survive: bool = ..., start_number: _Optional[int] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "cancel", "credentials", "bandwidth")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    cancel: bool
    credentials: _common_pb2.Credentials
    bandwidth: int
    def __init__(self, node_id: _Optional[int] = ..., cancel: bool = ..., credentials: _Optional[_Union[_common_pb2.Credentials, _Mapping]] = ..., bandwidth: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining_bytes",)
    REMAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    remaining_bytes: int
    def __init__(self, remaining_bytes: _Optional[int] = ...) -> None: ...
