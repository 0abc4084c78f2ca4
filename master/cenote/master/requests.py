"""Messages of clients and tools as commands of the state; everything a stranger may get wrong.

Whatever a field holds, the result is a command with sound columns or an InvalidArgument
(InvalidKey, for a key) that names the field. What depends on the state (is there such a namespace?)
is the state's to say. Messages of daemons: `node_requests.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.codec import (
    SESSION_ID_BYTES,
    unpack_digests,
    unpack_keys,
    unpack_rows,
    unpack_u16,
    unpack_u32,
    unpack_u64,
)
from cenote.api.errors import InvalidArgument
from cenote.api.keys import digest_keys, tail_lengths
from cenote.api.rows import DIGEST_BYTES, EXTENT, KEY_BYTES_MAX, OBJECT
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .commands import (
    EMPTY_U64,
    Acquire,
    CloseSession,
    CommitSpare,
    Digests,
    Exists,
    OpenNamespace,
    OpenSession,
    Piggyback,
    Pin,
    PutAbort,
    PutCommit,
    PutStart,
    Remove,
    RenewSession,
    ReportFailure,
    SpareNames,
    Unpin,
)
from .sessions import CANCELLED_MAX

__all__ = ["BATCH_KEYS_MAX", "RequestReader", "check_text"]

BATCH_KEYS_MAX: Final = 16_384
LEASE_IDS_MAX: Final = 65_536
"""In one message."""
REPLICAS_MAX: Final = 8
SHARDS_MAX: Final = 255
AVOID_NODES_MAX: Final = 4096
NAME_BYTES_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 4096
PUT_SIZE_BYTES_MAX: Final = 1 << 50

_DIGEST: Final = np.dtype(("<u8", (2,)))
_ONE_KEY: Final = DIGEST_BYTES
_ONE_INDEX: Final = 4
_DURABILITIES: Final = frozenset(common_pb2.Durability.values())
_TIERS: Final = frozenset((common_pb2.TIER_UNSPECIFIED, common_pb2.TIER_DRAM))

SeedOf: TypeAlias = Callable[[int, int], int]


def check_text(text: str, field: str, bytes_max: int = NAME_BYTES_MAX) -> str:
    """`text`, if it is printable and not too long. Raises InvalidArgument."""
    if len(text) > bytes_max or len(text.encode()) > bytes_max:
        raise InvalidArgument(
            f"{field} has {len(text.encode())} bytes, at most {bytes_max} are due"
        )
    if not text.isprintable():
        raise InvalidArgument(f"{field} has characters that can't be printed")
    return text


def check_id(data: bytes, field: str) -> bytes:
    """`data`, if it is 16 bytes. Raises InvalidArgument."""
    if len(data) != SESSION_ID_BYTES:
        raise InvalidArgument(f"{field} has {len(data)} bytes, {SESSION_ID_BYTES} are due")
    return data


def _indexes(data: bytes, field: str) -> NDArray[np.uint32] | None:
    """Positions in a batch; None where there are none."""
    if not data:
        return None
    positions = unpack_u32(data, field)
    if len(positions) > BATCH_KEYS_MAX or int(positions.max()) >= BATCH_KEYS_MAX:
        raise InvalidArgument(f"{field} names positions beyond {BATCH_KEYS_MAX}")
    return positions


def _failed_replicas(data: bytes) -> NDArray[np.uint32] | None:
    """uint32[k, 2] of (position, replica); None where there are none."""
    if not data:
        return None
    if len(data) % 8:
        raise InvalidArgument(f"failed_replicas has {len(data)} bytes, which is no whole rows of 8")
    rows = unpack_u32(data, "failed_replicas").reshape(-1, 2)
    beyond = int(rows[:, 0].max()) >= BATCH_KEYS_MAX or int(rows[:, 1].max()) >= REPLICAS_MAX
    if beyond or len(rows) > BATCH_KEYS_MAX * REPLICAS_MAX:
        raise InvalidArgument(
            f"failed_replicas names positions beyond {BATCH_KEYS_MAX} or replicas beyond"
            f" {REPLICAS_MAX}"
        )
    return rows


def _avoid(data: bytes) -> NDArray[np.uint32] | None:
    if not data:
        return None
    node_ids = unpack_u32(data, "avoid_node_ids")
    if len(node_ids) > AVOID_NODES_MAX:
        raise InvalidArgument(f"avoid_node_ids names more than {AVOID_NODES_MAX} nodes")
    return node_ids


class RequestReader:
    """`seed_of(namespace_id, generation)` is for callers that send full keys.

    `session` is what a lane connection said in its hello: requests on it may leave theirs out.
    """

    __slots__ = ("_lease_ttl_max_ms", "_seed_of")

    def __init__(self, seed_of: SeedOf, lease_ttl_max_ms: int) -> None:
        self._seed_of = seed_of
        self._lease_ttl_max_ms = lease_ttl_max_ms

    # ---- keys -------------------------------------------------------------------------------

    def digests(self, batch: common_pb2.KeyBatch) -> Digests:
        """The digests of a batch of 1 to 16384 keys."""
        data = batch.digests
        if batch.keys or not data:
            return self._hashed(batch)[0]
        if len(data) == _ONE_KEY:
            return np.frombuffer(data, _DIGEST)
        if len(data) > BATCH_KEYS_MAX * DIGEST_BYTES:
            raise self._too_many(len(data) // DIGEST_BYTES)
        return unpack_digests(data)

    def _hashed(self, batch: common_pb2.KeyBatch) -> tuple[Digests, list[bytes]]:
        lengths = batch.key_lengths
        if batch.digests:
            raise InvalidArgument("a batch has either digests or keys, not both")
        if not lengths and not batch.keys:
            raise InvalidArgument("the request names no key")
        if len(lengths) > BATCH_KEYS_MAX * 2:
            raise self._too_many(len(lengths) // 2)
        keys = unpack_keys(batch.keys, lengths)
        seed = self._seed_of(batch.namespace_id, batch.generation)
        return unpack_digests(digest_keys(keys, seed)), keys

    @staticmethod
    def _too_many(count: int) -> InvalidArgument:
        return InvalidArgument(
            f"a batch of {count} keys, at most {BATCH_KEYS_MAX} are due",
            remedy="send several batches",
        )

    # ---- what rides along -------------------------------------------------------------------

    @staticmethod
    def piggyback(message: common_pb2.Piggyback) -> Piggyback | None:
        """None where it says nothing."""
        released = message.released_lease_ids
        touched = message.touched_digests
        chain = message.touched_chain_digests
        chained = message.chained_digests
        if not (released or touched or chain or chained):
            return None
        if len(released) > LEASE_IDS_MAX * 8:
            raise InvalidArgument(f"more than {LEASE_IDS_MAX} leases are released at once")
        if max(len(touched), len(chain), len(chained)) > BATCH_KEYS_MAX * DIGEST_BYTES:
            raise InvalidArgument(f"more than {BATCH_KEYS_MAX} keys are touched at once")
        return Piggyback(
            message.namespace_id,
            message.generation,
            unpack_u64(released, "released_lease_ids"),
            unpack_digests(touched, "touched_digests"),
            unpack_digests(chain, "touched_chain_digests"),
            unpack_digests(chained, "chained_digests"),
        )

    # ---- sessions and namespaces ------------------------------------------------------------

    @staticmethod
    def hello(message: pb.HelloRequest) -> OpenSession:
        return OpenSession(
            check_id(message.session_id, "session_id"),
            check_text(message.client_name, "client_name"),
            check_text(message.boot_id, "boot_id"),
            message.process_id,
            message.observer,
        )

    def renew_session(self, message: pb.RenewSessionRequest, session: bytes) -> RenewSession:
        lease_ids = unpack_u64(message.lease_ids, "lease_ids")
        if len(lease_ids) > LEASE_IDS_MAX:
            raise InvalidArgument(f"more than {LEASE_IDS_MAX} leases are renewed at once")
        cancelled = unpack_u64(message.cancelled_request_ids, "cancelled_request_ids")
        if len(cancelled) > CANCELLED_MAX:
            raise InvalidArgument(f"more than {CANCELLED_MAX} requests are cancelled at once")
        return RenewSession(
            check_id(message.session_id or session, "session_id"),
            lease_ids if len(lease_ids) else EMPTY_U64,
            self._lease_ttl(message.lease_ttl_ms, "lease_ttl_ms"),
            cancelled if len(cancelled) else EMPTY_U64,
            message.sealed_through,
        )

    @staticmethod
    def close_session(message: pb.CloseSessionRequest, session: bytes) -> CloseSession:
        session_id = check_id(message.session_id or session, "session_id")
        return CloseSession(session_id, message.sealed_through)

    @staticmethod
    def open_namespace(message: pb.OpenNamespaceRequest, seed_if_new: int) -> OpenNamespace:
        name = check_text(message.name, "name")
        if not name:
            raise InvalidArgument("a namespace needs a name")
        if len(message.fingerprint) > FINGERPRINT_BYTES_MAX:
            raise InvalidArgument(f"a fingerprint has at most {FINGERPRINT_BYTES_MAX} bytes")
        durability = _durability(message.durability)
        return OpenNamespace(name, message.fingerprint, message.create, durability, seed_if_new)

    def _lease_ttl(self, ttl_ms: int, field: str) -> int:
        if ttl_ms > self._lease_ttl_max_ms:
            raise InvalidArgument(
                f"{field} is {ttl_ms}, at most {self._lease_ttl_max_ms} are due",
                remedy="renew the lease while you need it",
            )
        return ttl_ms

    # ---- lookups ----------------------------------------------------------------------------

    def exists(self, message: pb.ExistsRequest | pb.MatchRequest) -> Exists:
        batch = message.keys
        return Exists(batch.namespace_id, batch.generation, self.digests(batch))

    def acquire(self, message: pb.AcquireRequest, session: bytes) -> Acquire:
        batch = message.keys
        digests = self.digests(batch)
        ttl_ms = message.ttl_ms
        if ttl_ms > self._lease_ttl_max_ms:
            self._lease_ttl(ttl_ms, "ttl_ms")
        replicas_max = message.replicas_max
        if replicas_max > REPLICAS_MAX:
            raise InvalidArgument(f"replicas_max is {replicas_max}, at most {REPLICAS_MAX} are due")
        avoid = message.avoid_node_ids
        return Acquire(
            check_id(message.session_id or session, "session_id"),
            batch.namespace_id,
            batch.generation,
            digests,
            ttl_ms,
            message.lease,
            message.chain,
            message.hold,
            replicas_max,
            _avoid(avoid) if avoid else None,
            message.request_id,
        )

    # ---- writes -----------------------------------------------------------------------------

    def put_start(self, message: pb.PutStartRequest, session: bytes) -> PutStart:
        batch = message.keys
        tails: NDArray[np.uint16] | None
        if batch.digests:
            digests = self.digests(batch)
            tails = _tails(message.tail_lengths, len(digests))
        else:
            digests, keys = self._hashed(batch)
            if message.tail_lengths:
                raise InvalidArgument("tail_lengths goes with digests; with keys it is known")
            tails = tail_lengths(keys)
        command = PutStart(
            check_id(message.session_id or session, "session_id"),
            message.request_id,
            batch.namespace_id,
            batch.generation,
            digests,
            _sizes(message.sizes, len(digests)),
            tails,
        )
        content = message.content_digests
        if content and len(content) != len(digests) * DIGEST_BYTES:
            raise InvalidArgument("content_digests is not one digest a key")
        if content:
            command.contents = unpack_digests(content)
        if message.HasField("options"):
            _apply_options(command, message.options)
        if message.shard_count:
            command.shard_index, command.shard_count = message.shard_index, message.shard_count
            if not command.shard_index < command.shard_count <= SHARDS_MAX:
                raise InvalidArgument(
                    f"shard {command.shard_index} of {command.shard_count}: shards count from 0, "
                    f"and there are at most {SHARDS_MAX}"
                )
        elif message.shard_index:
            raise InvalidArgument("shard_index is given without shard_count")
        if message.spare_count:
            command.spare_count, command.spare_bytes = message.spare_count, message.spare_bytes
            if not 0 < command.spare_bytes <= PUT_SIZE_BYTES_MAX:
                raise InvalidArgument(f"spare_bytes {command.spare_bytes} is no extent's size")
        if message.sealed_seqs:
            command.sealed_seqs = unpack_u64(message.sealed_seqs, "sealed_seqs")
            command.sealed_epoch = message.sealed_epoch
            if len(command.sealed_seqs) != len(digests):
                raise InvalidArgument("sealed_seqs has not one number for each key")
        return command

    def put_commit(self, message: pb.PutCommitRequest, session: bytes) -> PutCommit | CommitSpare:
        if len(message.indexes) == _ONE_INDEX and message.HasField("names"):
            one = _one_spare(message, session)
            if one is not None:
                return one
        checksums = unpack_u64(message.checksums, "checksums")
        indexes = message.indexes
        positions = _indexes(indexes, "indexes") if indexes else None
        if positions is not None and len(positions) != len(checksums):
            raise InvalidArgument(
                f"there are {len(checksums)} checksums for {len(positions)} indexes"
            )
        if not 0 < len(checksums) <= BATCH_KEYS_MAX:
            raise InvalidArgument(f"{len(checksums)} checksums: 1 to {BATCH_KEYS_MAX} are due")
        return PutCommit(
            check_id(message.session_id or session, "session_id"),
            message.request_id,
            message.grant_id,
            positions,
            checksums,
            _failed_replicas(message.failed_replicas),
            self._names(message.names, len(checksums)) if message.HasField("names") else None,
            message.sealed_through,
            message.tickets or None,
        )

    def _names(self, names: pb.SpareNames, count: int) -> SpareNames:
        batch = names.keys
        digests = self.digests(batch)
        if len(digests) != count:
            raise InvalidArgument(f"there are {len(digests)} names for {count} checksums")
        return SpareNames(
            batch.namespace_id,
            batch.generation,
            digests,
            _sizes(names.sizes, count),
            _tails(names.tail_lengths, count),
            names.chain,
        )

    def put_abort(self, message: pb.PutAbortRequest, session: bytes) -> PutAbort:
        abort = PutAbort(
            check_id(message.session_id or session, "session_id"),
            message.grant_id,
            _indexes(message.indexes, "indexes"),
            message.unfenced,
        )
        if message.unsealed_seqs:
            abort.unsealed = self.digests(message.unsealed_keys)
            abort.unsealed_seqs = unpack_u64(message.unsealed_seqs, "unsealed_seqs")
            abort.unsealed_epoch = message.unsealed_epoch
            if len(abort.unsealed) != len(abort.unsealed_seqs):
                raise InvalidArgument("unsealed_seqs has not one number for each key")
        return abort

    def remove(self, message: pb.RemoveRequest) -> Remove:
        batch = message.keys
        return Remove(
            batch.namespace_id,
            batch.generation,
            self.digests(batch),
            message.session_id,
            message.request_id,
        )

    def pin(self, message: pb.PinRequest) -> Pin:
        batch = message.keys
        return Pin(batch.namespace_id, batch.generation, self.digests(batch), message.ttl_ms)

    def unpin(self, message: pb.UnpinRequest) -> Unpin:
        batch = message.keys
        return Unpin(batch.namespace_id, batch.generation, self.digests(batch))

    def report_failure(self, message: pb.ReportFailureRequest, session: bytes) -> ReportFailure:
        report = ReportFailure(
            message.node_id,
            check_id(message.session_id or session, "session_id"),
            check_text(message.what, "what", 2000),
        )
        if message.misread_objects:
            report.digests = self.digests(message.misread_keys)
            report.misread = unpack_rows(message.misread_objects, OBJECT, "misread_objects")
            if len(report.misread) != len(report.digests):
                raise InvalidArgument("misread_objects has not one row for each key")
            if message.misread_extents:
                report.misread_at = unpack_rows(message.misread_extents, EXTENT, "misread_extents")
                if len(report.misread_at) != len(report.digests):
                    raise InvalidArgument("misread_extents has not one row for each key")
        return report


def _one_spare(message: pb.PutCommitRequest, session: bytes) -> CommitSpare | None:
    """One object in one spare extent; None where it is not that, or not in order."""
    names = message.names
    keys = names.keys
    position, checksum = message.indexes, message.checksums
    size, tail, digest = names.sizes, names.tail_lengths, keys.digests
    session_id = message.session_id or session
    if (
        (len(position), len(checksum), len(size), len(digest)) != (_ONE_INDEX, 8, 8, DIGEST_BYTES)
        or len(tail) not in (0, 2)
        or int.from_bytes(tail, "little") > KEY_BYTES_MAX
        or len(session_id) != SESSION_ID_BYTES
        or keys.keys
        or message.failed_replicas
    ):
        return None
    return CommitSpare(
        session_id,
        message.request_id,
        message.grant_id,
        int.from_bytes(position, "little"),
        int.from_bytes(checksum, "little"),
        keys.namespace_id,
        keys.generation,
        digest,
        int.from_bytes(size, "little"),
        int.from_bytes(tail, "little"),
        message.sealed_through,
    )


def _durability(value: int) -> int:
    if value not in _DURABILITIES:
        raise InvalidArgument(f"durability {value} is unknown")
    return value


def _sizes(data: bytes, count: int) -> NDArray[np.uint64]:
    sizes = unpack_u64(data, "sizes")
    if len(sizes) != count:
        if len(sizes) != 1:
            raise InvalidArgument(f"there are {len(sizes)} sizes for {count} keys")
        largest = int(sizes[0])
        sizes = sizes.repeat(count)
    else:
        largest = int(sizes[0]) if count == 1 else int(sizes.max())
    if largest > PUT_SIZE_BYTES_MAX:
        raise InvalidArgument(f"a size of {largest} bytes is more than any pool has")
    return sizes


def _tails(data: bytes, count: int) -> NDArray[np.uint16] | None:
    if not data:
        return None
    tails = unpack_u16(data, "tail_lengths")
    if len(tails) != count:
        raise InvalidArgument(f"there are {len(tails)} tail_lengths for {count} keys")
    if int(tails.max()) > KEY_BYTES_MAX:
        raise InvalidArgument(f"a tail is longer than the longest key, {KEY_BYTES_MAX} bytes")
    return tails


def _apply_options(command: PutStart, options: pb.PutOptions) -> None:
    command.replicas = options.replicas or 1
    command.min_replicas = options.min_replicas or 1
    if not command.min_replicas <= command.replicas <= REPLICAS_MAX:
        raise InvalidArgument(
            f"min_replicas {command.min_replicas} of replicas {command.replicas}: "
            f"at most {REPLICAS_MAX} replicas, and no more of them can be needed than are placed"
        )
    command.durability = _durability(options.durability)
    if options.tier not in _TIERS:
        raise InvalidArgument(f"tier {options.tier} can't be written to", remedy="use TIER_DRAM")
    command.tier = options.tier or common_pb2.TIER_DRAM
    if options.priority:
        raise InvalidArgument(
            "a put has no priority of its own in this release",
            remedy="give its namespace one: `cenote namespaces set-quota --priority`",
        )
    if options.pin:
        raise InvalidArgument("pin is no option of a put in this release", remedy="pin afterwards")
    command.local_first = options.local_first
    command.ttl_ms = options.ttl_ms
    command.chain = options.chain
    command.avoid_node_ids = _avoid(options.avoid_node_ids)
