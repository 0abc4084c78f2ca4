"""What is fuzzed: for each target a function that takes any bytes, and inputs to begin with.

A target returns for input that is right and for input that is refused with a typed error; anything
else that it raises is a finding. Imported by `run_target.py` while atheris instruments.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.codec import pack_u64
from cenote.api.errors import CenoteError, InternalError
from cenote.client.config import ClientConfig
from cenote.master.config import MasterConfig
from cenote.master.effects import (
    PLACED,
    EpochStarted,
    Expires,
    Gone,
    GoneReason,
    NamespaceOpened,
    NodeKnown,
    Pinned,
    QuotaSet,
    ReplicasChanged,
    SegmentKnown,
    Stored,
)
from cenote.master.journal import (
    HEADER_BYTES,
    MAGIC_BYTES,
    RECORD_BYTES_MAX,
    SCHEMA,
    RecordWriter,
    read_entries,
    snapshot_records,
    verify_record,
)
from cenote.rpc import frames
from cenote.runtime.config import load_config
from cenote.store.config import StoreConfig
from cenote.store.serving import ServingLimits
from cenote.store.slot_format import SLOT_BYTES, unpack_header, unpack_ranges
from cenote.transport import wire
from cenote.v1 import master_pb2 as pb
from cenote.v1 import store_pb2
from master_pool import MasterPool, attach_request, lane
from raw_data_client import SESSION, Daemon, Raw, daemon, rows
from slot_rows import Sealed, seal, table

__all__ = ["TARGETS", "Target", "close"]


class Target(NamedTuple):
    """`check` raises on a finding; `seeds` are inputs that reach deep."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


# ---- the lane ---------------------------------------------------------------------------------

_BODY_BYTES_MAX: Final = 4096


def _lane_frames(data: bytes) -> None:
    """A stream cut in two: the parser holds no more than was fed, and cuts change nothing."""
    if not data:
        return
    cut, stream = data[0] % max(len(data), 1), data[1:]
    assert _frames_of([stream]) == _frames_of([stream[:cut], stream[cut:]])
    for parse in (frames.parse_hello, frames.parse_hello_reply):
        with contextlib.suppress(CenoteError):
            parse(stream)
    error = frames.decode_error(data[0], stream)
    assert isinstance(error, CenoteError)
    assert len(frames.encode_error(error)) < 4096


def _frames_of(chunks: list[bytes]) -> tuple[list[frames.Frame], bool]:
    parser = frames.FrameParser(_BODY_BYTES_MAX)
    found: list[frames.Frame] = []
    fed = 0
    for chunk in chunks:
        parser.feed(chunk)
        fed += len(chunk)
        assert parser.buffered_bytes <= fed
        try:
            while (frame := parser.next()) is not None:
                found.append(frame)
        except CenoteError:
            return found, False
    return found, True


def _lane_frame_seeds() -> list[bytes]:
    hello = frames.pack_frame(frames.HELLO, 1, body=frames.pack_hello(b"payload"))
    request = frames.pack_frame(frames.REQUEST, 2, 7, 1000, b"a body")
    refusal = frames.pack_error(3, InternalError("what", remedy="do"))
    return [b"\x05" + hello + request, b"\x20" + request + refusal, hello]


# ---- the master's requests ----------------------------------------------------------------------

_METHODS: Final = sorted(pb.MasterMethod.values())


def _requests(data: bytes) -> None:
    """Some requests of any method with any body, to a master with an object, a node, a session."""
    pool = MasterPool(size_bytes=1 << 20)
    pool.put(b"a")
    connection = lane(pool.session_id)
    rest = data
    for _ in range(4):
        if len(rest) < 3:
            return
        method, length = rest[0], int.from_bytes(rest[1:3], "little")
        body, rest = rest[3 : 3 + length], rest[3 + length :]
        try:
            pool.service.dispatch(connection, _METHODS[method % len(_METHODS)], body, 1000)
        except InternalError:
            raise
        except CenoteError:
            continue
    pool.service.tick()
    pool.service.flush()


def _request_seeds() -> list[bytes]:
    pool = MasterPool(size_bytes=1 << 20)
    keys = pool.batch(b"a", b"b")
    full = pool.full(b"a", b"b" * 100)
    sizes = pack_u64([100, 100])
    bodies: dict[int, bytes] = {
        pb.MASTER_METHOD_EXISTS: pb.ExistsRequest(keys=keys).SerializeToString(),
        pb.MASTER_METHOD_MATCH: pb.MatchRequest(keys=full).SerializeToString(),
        pb.MASTER_METHOD_ACQUIRE: pb.AcquireRequest(keys=keys).SerializeToString(),
        pb.MASTER_METHOD_PUT_START: pb.PutStartRequest(
            keys=full, sizes=sizes, session_id=pool.session_id, request_id=1
        ).SerializeToString(),
        pb.MASTER_METHOD_REMOVE: pb.RemoveRequest(keys=keys, request_id=2).SerializeToString(),
        pb.MASTER_METHOD_PIN: pb.PinRequest(keys=keys, ttl_ms=1000).SerializeToString(),
        pb.MASTER_METHOD_ATTACH: attach_request(1, 1 << 20).SerializeToString(),
        pb.MASTER_METHOD_HEARTBEAT: pb.HeartbeatRequest(node_id=1, epoch=1).SerializeToString(),
        pb.MASTER_METHOD_OPEN_NAMESPACE: pb.OpenNamespaceRequest(
            name="models", fingerprint=b"f", create=True
        ).SerializeToString(),
    }
    bodies[pb.MASTER_METHOD_PUT_COMMIT] = pb.PutCommitRequest(
        grant_id=2, checksums=pack_u64([1, 2]), session_id=pool.session_id, request_id=9
    ).SerializeToString()
    made = [
        bytes([_METHODS.index(method)]) + len(body).to_bytes(2, "little") + body
        for method, body in bodies.items()
    ]
    return [*made, b"".join(made[:4]), b"".join(made[3:7])]


# ---- the data port ------------------------------------------------------------------------------


_held: Final = contextlib.ExitStack()


@cache
def _running() -> Daemon:
    """One data server for all inputs, until `close`."""
    folder = _held.enter_context(tempfile.TemporaryDirectory())
    limits = ServingLimits(hello_timeout_s=0.5, stall_timeout_s=0.5, spin_s=0.0)
    return _held.enter_context(daemon(Path(folder), limits))


def close() -> None:
    """End what targets keep from one input to the next."""
    _held.close()
    _running.cache_clear()


def _data(data: bytes) -> None:
    """A greeted connection and any bytes behind: it ends, and says no word of a failure inside."""
    if not data:
        return
    with Raw(_running(), unix=True) as client:
        client.sock.settimeout(60.0)  # a busy machine is no finding
        if data[0] & 1:
            client.hello(SESSION, writer=bool(data[0] & 2))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sock.sendall(data[1:])
            client.sock.shutdown(1)  # SHUT_WR: no more will come
        answer = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while more := client.sock.recv(1 << 16):
                answer += more
                assert len(answer) < 64 << 20
    assert b"the data server failed" not in answer, bytes(answer[-500:])


def _data_seeds() -> list[bytes]:
    def request(op: int, count: int, body: bytes) -> bytes:
        head = wire.REQUEST.pack(op, 0, 0, 1, count, 0, 0, len(body))
        return b"\x03" + head + body.ljust(wire.BODY_BYTES_MIN, b"\0")

    hello = wire.encode_hello(store_pb2.DataHelloRequest(session_id=SESSION))
    return [
        request(wire.OP_READ, 1, rows((7, 0, 100))),
        request(wire.OP_WRITE, 1, rows((7, 0, 5)) + b"hello"),
        request(wire.OP_PING, 1, bytes(24)),
        request(wire.OP_SEAL, 1, wire.SEAL_PREFIX.pack(1, 1) + bytes(wire.SEAL_ROW_BYTES + 3)),
        request(wire.OP_SLOTS, 1, bytes(wire.SLOT_WANTED_BYTES)),
        b"\0" + hello,
    ]


# ---- what outlives a daemon ----------------------------------------------------------------

_SLOTS: Final = 8


def _slots(data: bytes) -> None:
    """A slot table of any bytes: what is left after recovery is sound, and recovery is final."""
    with contextlib.suppress(CenoteError):
        unpack_header(data)
    with contextlib.suppress(CenoteError):
        unpack_ranges(data)
    memory = bytearray(data[: _SLOTS * SLOT_BYTES].ljust(_SLOTS * SLOT_BYTES, b"\0"))
    made, _, _ = table(_SLOTS, memory=memory)
    sealed = made.recover()
    found = sum(len(block) for block in made.inventory(0))
    assert found == sealed
    assert made.recover() == sealed
    for namespace in (0, 1):
        assert len(list(made.list_keys(namespace, 1, b"", 100))) <= sealed


def _slot_seeds() -> list[bytes]:
    made, memory, _ = table(_SLOTS)
    seal(made, Sealed(slot=0), Sealed(slot=3, key=b"k" * 70, offset=640))
    return [bytes(memory), bytes(memory[:SLOT_BYTES])]


def _journal(data: bytes) -> None:
    """Any record is read or refused, also where its checksum is right."""
    for record in (data, _with_right_checksum(data)):
        try:
            header = verify_record(record)
            entries = list(read_entries([record]))
        except CenoteError:
            continue
        assert len(entries) <= header.last - header.first + 1


def _with_right_checksum(data: bytes) -> bytes:
    """As a record that says of itself what is true, so that the fuzzer gets past the checksum."""
    record = bytearray(data[:RECORD_BYTES_MAX].ljust(HEADER_BYTES + 1, b"\0"))
    record[:4] = MAGIC_BYTES
    struct.pack_into("<IH", record, 12, len(record), SCHEMA)
    struct.pack_into("<Q", record, 4, xxh3_64_intdigest(bytes(record[12:])))
    return bytes(record)


def _journal_seeds() -> list[bytes]:
    writer = RecordWriter(1, 1)
    writer.add(EpochStarted(1, 0))
    writer.add(NamespaceOpened("models", 1, 1, b"f", 7, 0))
    writer.add(QuotaSet(1, 1 << 30, 0, 1000, 2))
    writer.add(NodeKnown(1, b"n" * 16, "node", "boot", "rack"))
    writer.add(SegmentKnown(1, 1, 0, 1, b"i" * 16, 1 << 20, 64, 100))
    digests = np.arange(6, dtype=np.uint64).reshape(3, 2)
    seqs = np.arange(1, 4, dtype=np.uint64)
    placed = np.zeros(3, PLACED)
    placed["segment"], placed["slot"], placed["length_units"] = 1, range(3), 4
    counts, replicas = np.ones(3, np.uint16), np.ones(3, np.uint8)
    stored = (digests, seqs * 64, seqs, seqs, counts, counts, replicas, placed)
    writer.add(Stored(1, 1, 1, *stored))
    writer.add(ReplicasChanged(digests, seqs, counts, replicas, placed))
    writer.add(Pinned(1, digests, True, 1000))
    writer.add(Expires(1_700_000_000_000, 1000, digests, seqs))
    writer.add(Gone(1, digests, seqs, GoneReason.EVICTED))
    whole = writer.take()
    return [*whole, *snapshot_records([EpochStarted(1, 0)], covers=5, epoch=1)]


# ---- configuration --------------------------------------------------------------------------


def _config(data: bytes) -> None:
    """A file of any bytes: a configuration, or ConfigError (or what its values break)."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        for cls, prefix in (
            (MasterConfig, "CENOTE_MASTER_"),
            (StoreConfig, "CENOTE_STORE_"),
            (ClientConfig, "CENOTE_"),
        ):
            with contextlib.suppress(CenoteError):
                load_config(cls, env_prefix=prefix, file=file.name, env={})


def _config_seeds() -> list[bytes]:
    return [
        b'metadata = "file:/tmp/x"\nlisten = "127.0.0.1:7000"\n',
        b'dram = "4GiB"\nmaster = "127.0.0.1:7000"\nssd = ["/a", "/b"]\n',
        b'deadline_s = "250ms"\nnamespace = "models"\nverify = true\n',
    ]


TARGETS: Final = {
    "lane": Target(_lane_frames, _lane_frame_seeds),
    "requests": Target(_requests, _request_seeds),
    "data": Target(_data, _data_seeds),
    "slots": Target(_slots, _slot_seeds),
    "journal": Target(_journal, _journal_seeds),
    "config": Target(_config, _config_seeds),
}
