"""Garbage on every port: an answer or the connection's end, and everybody else is served on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator

import grpc
import pytest

from cenote.api.errors import (
    CenoteError,
    InvalidArgument,
    NamespaceReset,
    ProtocolError,
    ProtocolVersionMismatch,
)
from cenote.rpc import frames
from cenote.rpc.grpc_util import typed_error
from cenote.v1 import common_pb2, master_pb2
from ports import SESSION, Pool, pool_with_canaries, received, say
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
TIMEOUT_S = 20.0
PORTS = ["lane tcp", "lane unix", "master grpc", "data tcp", "data unix", "store grpc"]


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    with pool_with_canaries() as made:
        yield made


@pytest.fixture
def pool(shared_pool: Pool) -> Iterator[Pool]:
    """After each test everything that was put before is still there, and nobody died."""
    yield shared_pool
    shared_pool.check()


def garbage(rng: random.Random) -> dict[str, bytes]:
    return {
        "zeros": bytes(100_000),
        "ones": b"\xff" * 100_000,
        "HTTP": b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50),
        "TLS": bytes.fromhex("16030100a5010000a10303") + rng.randbytes(160),
        "text": b"hello?\n" * 100,
        "random": rng.randbytes(100_000),
        "short": b"\x01",
    }


@pytest.mark.parametrize("port", PORTS)
def test_garbage_ends_its_connection_only(pool: Pool, port: str, rng: random.Random) -> None:
    for name, data in garbage(rng).items():
        with pool.connect(port) as sock:
            say(sock, data)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            answer = received(sock)
            # On gRPC's ports, HTTP/2's preface is no garbage.
            if "grpc" not in port and name != "short":
                assert answer, f"{name}: closed without a word"
        pool.check()


@pytest.mark.parametrize("port", PORTS)
def test_connections_that_say_nothing_cost_nobody_anything(pool: Pool, port: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(pool.connect(port))
        pool.check()
    pool.check()


@pytest.mark.parametrize("port", PORTS)
def test_many_connections_that_end_at_once(pool: Pool, port: str, rng: random.Random) -> None:
    for number in range(200):
        with pool.connect(port) as sock:
            say(sock, rng.randbytes(number % 40))


# ---- the lane -----------------------------------------------------------------------------------

LANES = ["lane tcp", "lane unix"]


def hello_frame(version_min: int = 1, version_max: int = 1, payload: bytes | None = None) -> bytes:
    if payload is None:
        payload = master_pb2.HelloRequest(session_id=SESSION, observer=True).SerializeToString()
    return frames.pack_frame(
        frames.HELLO, 1, 0, 0, frames.pack_hello(payload, version_min, version_max)
    )


def lane_answers(answer: bytes) -> list[tuple[int, int, bytes, int]]:
    """(kind, call id, body, word) of each frame."""
    parser = frames.FrameParser()
    parser.feed(answer)
    found = []
    while (frame := parser.next()) is not None:
        kind, call_id, _, word, body = frame
        found.append((kind, call_id, body, word))
    return found


def last_error(answer: bytes) -> CenoteError:
    kind, _, body, word = lane_answers(answer)[-1]
    assert kind == frames.ERROR
    return frames.decode_error(word, body)


def header(
    length: int, call_id: int, method: int, kind: int, flags: int = 0, word: int = 0
) -> bytes:
    return frames.HEADER.pack(length, call_id, method, kind, flags, word)


BAD_FRAMES: dict[str, tuple[bytes, type[CenoteError], str]] = {
    "no hello": (frames.pack_frame(frames.REQUEST, 1, 10, 100, b""), ProtocolError, "HELLO|hello"),
    "version 0": (hello_frame(0, 0), ProtocolVersionMismatch, "version"),
    "version 77": (hello_frame(77, 99), ProtocolVersionMismatch, "77"),
    "versions reversed": (hello_frame(2, 1), ProtocolError, "version"),
    "other magic": (
        frames.pack_frame(frames.HELLO, 1, 0, 0, b"etcd\0\0\0\0\1\0\1\0"),
        ProtocolError,
        "etcd",
    ),
    "hello of nonsense": (hello_frame(payload=b"\xff" * 40), ProtocolError, "hello"),
    "hello without session": (hello_frame(payload=b""), InvalidArgument, "session"),
    "oversized": (hello_frame() + header(1 << 31, 2, 10, frames.REQUEST), ProtocolError, "limit"),
    "oversized hello": (header((1 << 32) - 1, 1, 0, frames.HELLO), ProtocolError, "limit|begin"),
    "kind": (hello_frame() + header(0, 2, 10, 99), ProtocolError, "kind 99"),
    "flags": (hello_frame() + header(0, 2, 10, frames.REQUEST, 1), ProtocolError, "flags"),
    "a reply to a server": (hello_frame() + header(0, 2, 10, frames.REPLY), ProtocolError, "REPLY"),
    "two hellos": (hello_frame() * 2, ProtocolError, "HELLO"),
}


@pytest.mark.parametrize("port", LANES)
@pytest.mark.parametrize(("data", "kind", "named"), BAD_FRAMES.values(), ids=list(BAD_FRAMES))
def test_bad_frames_on_the_lane(
    pool: Pool, port: str, data: bytes, kind: type[CenoteError], named: str
) -> None:
    with pool.connect(port) as sock:
        say(sock, data)
        error = last_error(received(sock))
    with pytest.raises(kind, match=named):
        raise error


@pytest.mark.parametrize("port", LANES)
def test_frames_cut_anywhere(pool: Pool, port: str) -> None:
    request = master_pb2.ExistsRequest(keys=common_pb2.KeyBatch(digests=bytes(16)))
    whole = hello_frame() + frames.pack_frame(
        frames.REQUEST, 2, master_pb2.MASTER_METHOD_EXISTS, 1000, request.SerializeToString()
    )
    for length in range(0, len(whole), 3):
        with pool.connect(port) as sock:
            say(sock, whole[:length])


def bad_requests() -> dict[str, tuple[int, bytes, type[CenoteError]]]:
    method = master_pb2.MasterMethod.Value
    keys = common_pb2.KeyBatch(namespace_id=1, generation=1, digests=bytes(16))
    exists, start = method("MASTER_METHOD_EXISTS"), method("MASTER_METHOD_PUT_START")
    commit, acquire = method("MASTER_METHOD_PUT_COMMIT"), method("MASTER_METHOD_ACQUIRE")

    def batch(**changes: object) -> common_pb2.KeyBatch:
        made = common_pb2.KeyBatch()
        made.CopyFrom(keys)
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def start_of(**fields: object) -> bytes:
        settings: dict[str, object] = {
            "keys": keys,
            "sizes": struct.pack("<Q", 100),
            "session_id": SESSION,
            "request_id": 1,
        }
        return master_pb2.PutStartRequest(**(settings | fields)).SerializeToString()  # type: ignore[arg-type]

    return {
        "method 0": (0, b"", InvalidArgument),
        "method 999": (999, b"", InvalidArgument),
        "nonsense": (exists, b"\xff" * 30, ProtocolError),
        "half a digest": (
            exists,
            master_pb2.ExistsRequest(keys=batch(digests=b"12345678")).SerializeToString(),
            InvalidArgument,
        ),
        "unknown namespace": (
            exists,
            master_pb2.ExistsRequest(keys=batch(namespace_id=4_000_000)).SerializeToString(),
            NamespaceReset,
        ),
        "sizes missing": (start, start_of(sizes=b""), InvalidArgument),
        "sizes of another batch": (start, start_of(sizes=bytes(24)), InvalidArgument),
        "half a size": (start, start_of(sizes=b"123"), InvalidArgument),
        "tails of another batch": (start, start_of(tail_lengths=bytes(6)), InvalidArgument),
        "65535 replicas": (
            start,
            start_of(options=master_pb2.PutOptions(replicas=65535)),
            InvalidArgument,
        ),
        "unknown session": (
            acquire,
            master_pb2.AcquireRequest(
                keys=keys, ttl_ms=1, lease=True, session_id=b"z" * 16
            ).SerializeToString(),
            CenoteError,
        ),
        "short session": (
            acquire,
            master_pb2.AcquireRequest(keys=keys, ttl_ms=1, session_id=b"z").SerializeToString(),
            CenoteError,
        ),
        "commit of half an index": (
            commit,
            master_pb2.PutCommitRequest(
                grant_id=1, indexes=b"123", session_id=SESSION, request_id=2
            ).SerializeToString(),
            InvalidArgument,
        ),
    }


@pytest.mark.parametrize("port", LANES)
@pytest.mark.parametrize("name", list(bad_requests()))
def test_bad_requests_on_the_lane(pool: Pool, port: str, name: str) -> None:
    method, body, kind = bad_requests()[name]
    good = frames.pack_frame(
        frames.REQUEST,
        3,
        master_pb2.MASTER_METHOD_GET_CLUSTER_VIEW,
        1000,
        master_pb2.GetClusterViewRequest().SerializeToString(),
    )
    with pool.connect(port) as sock:
        payload = master_pb2.HelloRequest(session_id=SESSION).SerializeToString()
        say(sock, hello_frame(payload=payload))
        say(sock, frames.pack_frame(frames.REQUEST, 2, method, 1000, body) + good)
        answers = b""
        while len(lane_answers(answers)) < 3:
            part = sock.recv(65536)
            assert part, f"closed after {lane_answers(answers)}"
            answers += part
    by_call = {call_id: (what, word, text) for what, call_id, text, word in lane_answers(answers)}
    what, word, text = by_call[2]
    assert what == frames.ERROR
    error = frames.decode_error(word, text)
    assert isinstance(error, kind), repr(error)
    # And the connection serves what comes next.
    assert by_call[3][0] == frames.REPLY


def test_mutated_requests_on_the_lane(pool: Pool, rng: random.Random) -> None:
    """Bytes of good requests are changed at random: all are answered, or end their connection."""
    bodies = [
        (method, bytearray(body or b"\x0a\x00")) for method, body, _ in bad_requests().values()
    ]
    for _ in range(400):
        method, body = rng.choice(bodies)
        data = bytearray(body)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        frame = bytearray(frames.pack_frame(frames.REQUEST, 2, method, 1000, bytes(data)))
        if rng.random() < 0.3:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        with pool.connect("lane tcp") as sock:
            say(sock, hello_frame() + bytes(frame))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            assert lane_answers(received(sock))


# ---- gRPC ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["master grpc", "store grpc"])
@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("/cenote.v1.MasterService/Exists", b"\xff" * 100),
        ("/cenote.v1.MasterService/Nonsense", b""),
        ("/cenote.v1.AdminService/StatObject", b"\x0a\x04\xff\xff\xff\xff"),
        ("/cenote.v1.StoreService/ListSlots", b"\xff" * 100),
        ("/nowhere/at/all", b"x" * 1000),
    ],
)
def test_bad_calls_over_grpc(pool: Pool, port: str, method: str, body: bytes) -> None:
    with grpc.insecure_channel(pool.addresses[port]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(body, timeout=TIMEOUT_S)
        assert isinstance(typed_error(caught.value), ProtocolError)


def test_an_oversized_message_over_grpc(pool: Pool) -> None:
    with grpc.insecure_channel(pool.addresses["master grpc"]) as channel:
        call = channel.unary_unary("/cenote.v1.MasterService/Exists")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(64 * MIB), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_daemons_forget_about_all_of_it(pool: Pool) -> None:
    """No descriptor stays open for connections that are gone."""

    def open_sockets(pid: int) -> int:
        count = 0
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        return count

    few = 25  # listeners, the daemons' own connections, this client's
    for process in pool.cluster.processes:
        wait_until(lambda p=process: open_sockets(p.pid) < few, what="closed sockets")  # type: ignore[misc]
