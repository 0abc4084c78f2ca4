from cenote.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataHelloRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "boot_id", "process_id", "want_descriptors", "writer", "wants_claims", "has_head", "wants_staging", "ticket")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WANTS_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    HAS_HEAD_FIELD_NUMBER: _ClassVar[int]
    WANTS_STAGING_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    boot_id: str
    process_id: int
    want_descriptors: bool
    writer: bool
    wants_claims: bool
    has_head: bool
    wants_staging: bool
    ticket: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., boot_id: _Optional[str] = ..., process_id: _Optional[int] = ..., want_descriptors: bool = ..., writer: bool = ..., wants_claims: bool = ..., has_head: bool = ..., wants_staging: bool = ..., ticket: _Optional[bytes] = ...) -> None: ...

class AccessTicket(_message.Message):
    __slots__ = ("session_id", "holder", "role", "namespaces", "may_map", "key_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    MAY_MAP_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    holder: str
    role: int
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    may_map: bool
    key_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., holder: _Optional[str] = ..., role: _Optional[int] = ..., namespaces: _Optional[_Iterable[str]] = ..., may_map: bool = ..., key_id: _Optional[int] = ...) -> None: ...

class DataHelloResponse(_message.Message):
    __slots__ = ("epoch", "node_id", "server_version", "segments", "has_claims", "claims_offset", "has_head", "disk_segments", "staging_id", "staging_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    HAS_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HAS_HEAD_FIELD_NUMBER: _ClassVar[int]
    DISK_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    node_id: int
    server_version: str
    segments: _containers.RepeatedCompositeFieldContainer[SharedSegment]
    has_claims: bool
    claims_offset: int
    has_head: bool
    disk_segments: _containers.RepeatedCompositeFieldContainer[SharedSegment]
    staging_id: int
    staging_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., node_id: _Optional[int] = ..., server_version: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[SharedSegment, _Mapping]]] = ..., has_claims: bool = ..., claims_offset: _Optional[int] = ..., has_head: bool = ..., disk_segments: _Optional[_Iterable[_Union[SharedSegment, _Mapping]]] = ..., staging_id: _Optional[int] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class SharedSegment(_message.Message):
    __slots__ = ("segment_id", "size_bytes", "incarnation", "tier", "ready_bytes", "index")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    size_bytes: int
    incarnation: bytes
    tier: _common_pb2.Tier
    ready_bytes: int
    index: int
    def __init__(self, segment_id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., ready_bytes: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class RdmaPorts(_message.Message):
    __slots__ = ("ports",)
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedCompositeFieldContainer[RdmaPort]
    def __init__(self, ports: _Optional[_Iterable[_Union[RdmaPort, _Mapping]]] = ...) -> None: ...

class RdmaPort(_message.Message):
    __slots__ = ("device", "port", "link_layer", "gids", "rate_gbps", "lid")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    GIDS_FIELD_NUMBER: _ClassVar[int]
    RATE_GBPS_FIELD_NUMBER: _ClassVar[int]
    LID_FIELD_NUMBER: _ClassVar[int]
    device: str
    port: int
    link_layer: str
    gids: _containers.RepeatedCompositeFieldContainer[RdmaGid]
    rate_gbps: float
    lid: int
    def __init__(self, device: _Optional[str] = ..., port: _Optional[int] = ..., link_layer: _Optional[str] = ..., gids: _Optional[_Iterable[_Union[RdmaGid, _Mapping]]] = ..., rate_gbps: _Optional[float] = ..., lid: _Optional[int] = ...) -> None: ...

class RdmaGid(_message.Message):
    __slots__ = ("index", "gid")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    index: int
    gid: bytes
    def __init__(self, index: _Optional[int] = ..., gid: _Optional[bytes] = ...) -> None: ...

class RdmaRequest(_message.Message):
    __slots__ = ("queue_pairs", "lane_id", "ended_lane_ids")
    QUEUE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_LANE_IDS_FIELD_NUMBER: _ClassVar[int]
    queue_pairs: _containers.RepeatedCompositeFieldContainer[RdmaQueuePair]
    lane_id: int
    ended_lane_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, queue_pairs: _Optional[_Iterable[_Union[RdmaQueuePair, _Mapping]]] = ..., lane_id: _Optional[int] = ..., ended_lane_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RdmaQueuePair(_message.Message):
    __slots__ = ("device", "port", "gid_index", "number", "first_psn", "lid", "gid", "mtu_code", "reads_in_flight", "writes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GID_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_PSN_FIELD_NUMBER: _ClassVar[int]
    LID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    MTU_CODE_FIELD_NUMBER: _ClassVar[int]
    READS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    device: str
    port: int
    gid_index: int
    number: int
    first_psn: int
    lid: int
    gid: bytes
    mtu_code: int
    reads_in_flight: int
    writes: bool
    def __init__(self, device: _Optional[str] = ..., port: _Optional[int] = ..., gid_index: _Optional[int] = ..., number: _Optional[int] = ..., first_psn: _Optional[int] = ..., lid: _Optional[int] = ..., gid: _Optional[bytes] = ..., mtu_code: _Optional[int] = ..., reads_in_flight: _Optional[int] = ..., writes: bool = ...) -> None: ...

class RdmaReply(_message.Message):
    __slots__ = ("epoch", "first_grant_id", "queue_pairs", "devices", "registrations")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    REGISTRATIONS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_grant_id: int
    queue_pairs: _containers.RepeatedCompositeFieldContainer[RdmaQueuePair]
    devices: _containers.RepeatedScalarFieldContainer[str]
    registrations: _containers.RepeatedCompositeFieldContainer[RdmaRegistration]
    def __init__(self, epoch: _Optional[int] = ..., first_grant_id: _Optional[int] = ..., queue_pairs: _Optional[_Iterable[_Union[RdmaQueuePair, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ..., registrations: _Optional[_Iterable[_Union[RdmaRegistration, _Mapping]]] = ...) -> None: ...

class RdmaRegistration(_message.Message):
    __slots__ = ("segment_id", "offset", "length", "address", "remote_keys")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_KEYS_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    offset: int
    length: int
    address: int
    remote_keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment_id: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., address: _Optional[int] = ..., remote_keys: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStoreStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreStatusResponse(_message.Message):
    __slots__ = ("node_id", "epoch", "segments", "sealed_slots", "sessions", "read_bytes", "written_bytes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    epoch: int
    segments: _containers.RepeatedCompositeFieldContainer[SharedSegment]
    sealed_slots: int
    sessions: int
    read_bytes: int
    written_bytes: int
    def __init__(self, node_id: _Optional[int] = ..., epoch: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SharedSegment, _Mapping]]] = ..., sealed_slots: _Optional[int] = ..., sessions: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class ListSlotsRequest(_message.Message):
    __slots__ = ("namespace_id", "generation", "key_prefix", "limit")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    generation: int
    key_prefix: bytes
    limit: int
    def __init__(self, namespace_id: _Optional[int] = ..., generation: _Optional[int] = ..., key_prefix: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListSlotsResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SlotEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SlotEntry, _Mapping]]] = ...) -> None: ...

class SlotEntry(_message.Message):
    __slots__ = ("key", "digest", "size_bytes", "version", "segment_id", "replica")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    digest: bytes
    size_bytes: int
    version: _common_pb2.Version
    segment_id: int
    replica: int
    def __init__(self, key: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., segment_id: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...
