from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_RELAXED: _ClassVar[Durability]
    DURABILITY_JOURNALED: _ClassVar[Durability]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]

class TransportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_KIND_UNSPECIFIED: _ClassVar[TransportKind]
    TRANSPORT_KIND_TCP: _ClassVar[TransportKind]
    TRANSPORT_KIND_SHM: _ClassVar[TransportKind]
    TRANSPORT_KIND_RDMA: _ClassVar[TransportKind]
    TRANSPORT_KIND_MEMORY: _ClassVar[TransportKind]
    TRANSPORT_KIND_GRPC: _ClassVar[TransportKind]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ALIVE: _ClassVar[NodeState]
    NODE_STATE_SUSPECT: _ClassVar[NodeState]
    NODE_STATE_DEAD: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_DETACHED: _ClassVar[NodeState]
TIER_UNSPECIFIED: Tier
TIER_DRAM: Tier
TIER_SSD: Tier
TIER_HBM: Tier
DURABILITY_UNSPECIFIED: Durability
DURABILITY_RELAXED: Durability
DURABILITY_JOURNALED: Durability
PRIORITY_UNSPECIFIED: Priority
PRIORITY_LOW: Priority
PRIORITY_NORMAL: Priority
PRIORITY_HIGH: Priority
TRANSPORT_KIND_UNSPECIFIED: TransportKind
TRANSPORT_KIND_TCP: TransportKind
TRANSPORT_KIND_SHM: TransportKind
TRANSPORT_KIND_RDMA: TransportKind
TRANSPORT_KIND_MEMORY: TransportKind
TRANSPORT_KIND_GRPC: TransportKind
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ALIVE: NodeState
NODE_STATE_SUSPECT: NodeState
NODE_STATE_DEAD: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_DETACHED: NodeState

class Credentials(_message.Message):
    __slots__ = ("tenant", "token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    token: bytes
    def __init__(self, tenant: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("epoch", "seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "epoch")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_ms: int
    epoch: int
    def __init__(self, lease_id: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class KeyBatch(_message.Message):
    __slots__ = ("namespace_id", "generation", "digests", "keys", "key_lengths")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    generation: int
    digests: bytes
    keys: bytes
    key_lengths: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., digests: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., key_lengths: _Optional[bytes] = ...) -> None: ...

class Piggyback(_message.Message):
    __slots__ = ("released_lease_ids", "touched_digests", "touched_chain_digests", "namespace_id", "generation", "chained_digests")
    RELEASED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_CHAIN_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHAINED_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    released_lease_ids: bytes
    touched_digests: bytes
    touched_chain_digests: bytes
    namespace_id: int
    generation: int
    chained_digests: bytes
    def __init__(self, released_lease_ids: _Optional[bytes] = ..., touched_digests: _Optional[bytes] = ..., touched_chain_digests: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., chained_digests: _Optional[bytes] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("kind", "address", "device_info")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INFO_FIELD_NUMBER: _ClassVar[int]
    kind: TransportKind
    address: str
    device_info: bytes
    def __init__(self, kind: _Optional[_Union[TransportKind, str]] = ..., address: _Optional[str] = ..., device_info: _Optional[bytes] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("node_id", "name", "boot_id", "failure_domain", "endpoints", "segment_ids", "state")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    name: str
    boot_id: str
    failure_domain: str
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    state: NodeState
    def __init__(self, node_id: _Optional[int] = ..., name: _Optional[str] = ..., boot_id: _Optional[str] = ..., failure_domain: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., segment_ids: _Optional[_Iterable[int]] = ..., state: _Optional[_Union[NodeState, str]] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("view_version", "nodes", "segments")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentView]
    def __init__(self, view_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[SegmentView, _Mapping]]] = ...) -> None: ...

class SegmentView(_message.Message):
    __slots__ = ("segment_id", "node_id", "node_segment_index", "tier", "incarnation", "size_bytes", "ready_bytes", "unit_bytes")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    node_id: int
    node_segment_index: int
    tier: Tier
    incarnation: bytes
    size_bytes: int
    ready_bytes: int
    unit_bytes: int
    def __init__(self, segment_id: _Optional[int] = ..., node_id: _Optional[int] = ..., node_segment_index: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., incarnation: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., unit_bytes: _Optional[int] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("map_version", "entries")
    MAP_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    map_version: int
    entries: _containers.RepeatedCompositeFieldContainer[ShardMapEntry]
    def __init__(self, map_version: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[ShardMapEntry, _Mapping]]] = ...) -> None: ...

class ShardMapEntry(_message.Message):
    __slots__ = ("first_digest", "last_digest", "master_addresses")
    FIRST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    first_digest: bytes
    last_digest: bytes
    master_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first_digest: _Optional[bytes] = ..., last_digest: _Optional[bytes] = ..., master_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class BlobReference(_message.Message):
    __slots__ = ("content_digest", "size_bytes")
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    content_digest: bytes
    size_bytes: int
    def __init__(self, content_digest: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ScatterList(_message.Message):
    __slots__ = ("region_id", "extents")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    extents: bytes
    def __init__(self, region_id: _Optional[int] = ..., extents: _Optional[bytes] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "reason", "message", "remedy")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    remedy: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...
