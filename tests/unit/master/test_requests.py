"""Requests of strangers: every field that can be wrong is named, and nothing else happens."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cenote.api.errors import CenoteError, InvalidArgument, InvalidKey, ProtocolError
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, attach_request, lane, u32, u64

D16 = b"d" * 16


def batch(**fields: object) -> common_pb2.KeyBatch:
    return common_pb2.KeyBatch(**({"namespace_id": 1, "generation": 1} | fields))  # type: ignore[arg-type]


ONE = batch(digests=D16)
SESSION = MasterPool.session_id
WRONG: list[tuple[object, str]] = [
    (pb.HelloRequest(session_id=b"short"), "session_id has 5 bytes"),
    (pb.HelloRequest(session_id=SESSION, client_name="x" * 300), "client_name has 300"),
    (pb.HelloRequest(session_id=SESSION, boot_id="a\nb"), "boot_id has characters"),
    (pb.RenewSessionRequest(session_id=SESSION, lease_ids=b"123"), "lease_ids has 3 bytes"),
    (pb.RenewSessionRequest(session_id=SESSION, lease_ttl_ms=99_999), "lease_ttl_ms is 99999"),
    (pb.RenewSessionRequest(session_id=SESSION, lease_ids=bytes(8 * 65_537)), "65536 leases"),
    (pb.CloseSessionRequest(), "session_id has 0 bytes"),
    (pb.OpenNamespaceRequest(create=True), "needs a name"),
    (pb.OpenNamespaceRequest(name="n" * 257, create=True), "name has 257"),
    (pb.OpenNamespaceRequest(name="n", fingerprint=bytes(5000), create=True), "at most 4096"),
    (pb.OpenNamespaceRequest(name="n", create=True, durability=9), "durability 9"),  # type: ignore[arg-type]
    (pb.ExistsRequest(), "no key"),
    (pb.ExistsRequest(keys=batch(digests=b"d" * 17)), "digests has 17 bytes"),
    (pb.ExistsRequest(keys=batch(digests=bytes(16 * 16_385))), "batch of 16385 keys"),
    (pb.ExistsRequest(keys=batch(key_lengths=bytes(2 * 16_385))), "batch of 16385 keys"),
    (pb.ExistsRequest(keys=batch(digests=D16, keys=b"k")), "not both"),
    (pb.ExistsRequest(keys=batch(keys=b"k", key_lengths=b"\2\0")), "add up to 2"),
    (pb.ExistsRequest(keys=batch(keys=b"k", key_lengths=b"\1")), "key_lengths has 1 bytes"),
    (pb.ExistsRequest(keys=batch(keys=b"k")), "add up to 0"),
    (pb.MatchRequest(keys=batch(digests=b"d" * 15)), "digests has 15 bytes"),
    (
        pb.ExistsRequest(keys=ONE, piggyback=common_pb2.Piggyback(released_lease_ids=b"1")),
        "released_lease_ids has 1 bytes",
    ),
    (
        pb.TouchRequest(piggyback=common_pb2.Piggyback(touched_digests=b"1")),
        "touched_digests has 1 bytes",
    ),
    (
        pb.TouchRequest(piggyback=common_pb2.Piggyback(touched_chain_digests=bytes(16 * 16_385))),
        "16384 keys are touched",
    ),
    (pb.AcquireRequest(keys=ONE, session_id=b"s"), "session_id has 1 bytes"),
    (pb.AcquireRequest(keys=ONE, session_id=SESSION, ttl_ms=10_001), "ttl_ms is 10001"),
    (pb.AcquireRequest(keys=ONE, session_id=SESSION, replicas_max=9), "replicas_max is 9"),
    (
        pb.AcquireRequest(keys=ONE, session_id=SESSION, avoid_node_ids=b"123"),
        "avoid_node_ids has 3 bytes",
    ),
    (pb.PutStartRequest(keys=ONE, sizes=u64(1, 2), session_id=SESSION), "2 sizes for 1 keys"),
    (pb.PutStartRequest(keys=ONE, session_id=SESSION), "0 sizes for 1 keys"),
    (pb.PutStartRequest(keys=ONE, sizes=b"1", session_id=SESSION), "sizes has 1 bytes"),
    (pb.PutStartRequest(keys=ONE, sizes=u64(1 << 51), session_id=SESSION), "more than any pool"),
    (
        pb.PutStartRequest(keys=ONE, sizes=u64(1), session_id=SESSION, tail_lengths=bytes(4)),
        "2 tail_lengths for 1 keys",
    ),
    (
        pb.PutStartRequest(keys=ONE, sizes=u64(1), session_id=SESSION, tail_lengths=b"\xff\xff"),
        "longer than the longest key",
    ),
    (
        pb.PutStartRequest(keys=ONE, sizes=u64(1), session_id=SESSION, content_digests=b"1"),
        "content_digests",
    ),
    (
        pb.PutStartRequest(
            keys=ONE, sizes=u64(1), session_id=SESSION, options=pb.PutOptions(replicas=99)
        ),
        "at most 8 replicas",
    ),
    (
        pb.PutStartRequest(
            keys=ONE, sizes=u64(1), session_id=SESSION, options=pb.PutOptions(min_replicas=2)
        ),
        "min_replicas 2 of replicas 1",
    ),
    (
        pb.PutStartRequest(
            keys=ONE,
            sizes=u64(1),
            session_id=SESSION,
            options=pb.PutOptions(tier=common_pb2.TIER_SSD),
        ),
        "tier 2",
    ),
    (
        pb.PutStartRequest(
            keys=ONE, sizes=u64(1), session_id=SESSION, options=pb.PutOptions(pin=True)
        ),
        "pin is no option",
    ),
    (
        pb.PutStartRequest(
            keys=ONE, sizes=u64(1), session_id=SESSION, shard_index=3, shard_count=3
        ),
        "shard 3 of 3",
    ),
    (
        pb.PutStartRequest(keys=ONE, sizes=u64(1), session_id=SESSION, shard_index=3),
        "without shard_count",
    ),
    (pb.PutCommitRequest(grant_id=1, session_id=SESSION), "0 checksums"),
    (pb.PutCommitRequest(grant_id=1, session_id=SESSION, checksums=b"1"), "checksums has 1"),
    (
        pb.PutCommitRequest(grant_id=1, session_id=SESSION, checksums=u64(1), indexes=u32(0, 1)),
        "1 checksums for 2 indexes",
    ),
    (
        pb.PutCommitRequest(grant_id=1, session_id=SESSION, checksums=u64(1), indexes=u32(20_000)),
        "beyond 16384",
    ),
    (
        pb.PutCommitRequest(
            grant_id=1, session_id=SESSION, checksums=u64(1), failed_replicas=u32(0)
        ),
        "failed_replicas has 4 bytes",
    ),
    (
        pb.PutCommitRequest(
            grant_id=1, session_id=SESSION, checksums=u64(1), failed_replicas=u32(0, 300)
        ),
        "replicas beyond 8",
    ),
    (
        pb.PutCommitRequest(
            grant_id=1, session_id=SESSION, checksums=u64(1), failed_replicas=u32(20_000, 0)
        ),
        "positions beyond 16384",
    ),
    (pb.PutAbortRequest(grant_id=1, session_id=SESSION, indexes=b"12"), "indexes has 2 bytes"),
    (pb.RemoveRequest(), "no key"),
    (pb.PinRequest(), "no key"),
    (pb.UnpinRequest(), "no key"),
    (pb.ReportFailureRequest(node_id=1, session_id=SESSION, what="x" * 3000), "what has 3000"),
    (pb.DrainRequest(node_id=99), "no node 99"),
    (pb.HeartbeatRequest(node_id=1, epoch=1, cut_session_ids=b"1"), "cut_session_ids has 1"),
    (attach_request(node_uuid=b"u"), "node_uuid has 1 bytes"),
    (attach_request(node_name=""), "needs a node_name"),
    (attach_request(node_name="n" * 300), "node_name has 300"),
    (attach_request(inventory=b"123"), "inventory has 3 bytes"),
]


@pytest.fixture(scope="module")
def shared() -> MasterPool:
    return MasterPool()


@pytest.mark.parametrize(("request_", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_fields_are_named(shared: MasterPool, request_: object, says: str) -> None:
    service = shared.service
    name = type(request_).__name__.removesuffix("Request")
    method = "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
    before = service.state.status(0)
    with pytest.raises(InvalidArgument, match=says):
        getattr(service, method)(request_, 1.0)
    after = service.state.status(0)
    assert (after.objects, after.grants, after.leases) == (
        before.objects,
        before.grants,
        before.leases,
    )


@pytest.mark.parametrize("key", [b"", b"x" * 513])
def test_wrong_keys_are_named(shared: MasterPool, key: bytes) -> None:
    with pytest.raises(InvalidKey, match=f"key 1 has {len(key)} bytes"):
        shared.service.exists(pb.ExistsRequest(keys=shared.full(b"good", key)), 1.0)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tier", 0, "tier 0"),
        ("tier", 77, "tier 77"),
        ("incarnation", b"", "1 to 64 bytes"),
        ("unit_bytes", 0, "power of two"),
        ("unit_bytes", 96, "power of two"),
        ("ready_bytes", 1 << 40, "can't be ready"),
        ("size_bytes", 0, "can't be ready"),
        ("slots", 1 << 30, "slots"),
        ("retired_extents", b"1", "retired_extents has 1 bytes"),
        ("node_segment_index", 999, "at most 256 segments"),
    ],
)
def test_wrong_segments_are_named(shared: MasterPool, field: str, value: object, says: str) -> None:
    request = attach_request(9)
    setattr(request.segments[0], field, value)
    with pytest.raises(InvalidArgument, match=says):
        shared.service.attach(request, 1.0)


METHODS = sorted(set(pb.MasterMethod.values()) - {0})


def answered_or_refused(pool: MasterPool, method: int, body: bytes) -> None:
    """Nothing but a reply or a typed error comes of it."""
    try:
        reply = pool.service.dispatch(lane(SESSION), method, body, 100)
        if inspect.iscoroutine(reply):  # a heartbeat that would be held
            reply.close()
    except CenoteError as error:
        assert error.message  # noqa: PT017 - most raise
    pool.service.flush()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.integers(0, 40), body=st.binary(max_size=120))
def test_any_bytes_on_the_lane_are_answered_or_refused(
    shared: MasterPool, method: int, body: bytes
) -> None:
    answered_or_refused(shared, method, body)


REQUESTS = {
    method: getattr(pb, "".join(w.capitalize() for w in name.split("_")[2:]) + "Request")
    for name, method in pb.MasterMethod.items()
    if method
}
FIELD_BYTES = st.one_of(st.binary(max_size=40), st.integers(0, 5).map(lambda n: bytes(8 * n)))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), data=st.data())
def test_any_fields_are_answered_or_refused(
    shared: MasterPool, method: int, data: st.DataObject
) -> None:
    """Fields of the right type with any values, in known batches and sessions."""
    request = REQUESTS[method]()
    for field in request.DESCRIPTOR.fields:
        if not data.draw(st.booleans()):
            continue
        if field.name == "keys":
            digests = data.draw(st.integers(0, 3).map(lambda n: bytes(range(16 * n))))
            request.keys.CopyFrom(batch(digests=digests))
        elif field.name == "session_id":
            request.session_id = data.draw(st.sampled_from([SESSION, bytes(16), b"x"]))
        elif field.type == field.TYPE_BYTES:
            setattr(request, field.name, data.draw(FIELD_BYTES))
        elif field.type == field.TYPE_STRING:
            setattr(request, field.name, data.draw(st.text(max_size=10)))
        elif field.type == field.TYPE_BOOL:
            setattr(request, field.name, data.draw(st.booleans()))
        elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
            setattr(request, field.name, data.draw(st.sampled_from([0, 1, 2, 1 << 16, 2**32 - 1])))
    answered_or_refused(shared, method, request.SerializeToString())
    shared.service.tick()


def test_an_unknown_method_and_a_garbled_body_are_refused(shared: MasterPool) -> None:
    with pytest.raises(InvalidArgument, match="no method 99"):
        shared.service.dispatch(lane(), 99, b"", 100)
    with pytest.raises(ProtocolError, match="method 10"):
        shared.service.dispatch(lane(), pb.MASTER_METHOD_EXISTS, b"\xff\xff", 100)
    with pytest.raises(ProtocolError, match="hello"):
        shared.service.lane_hello(lane(), b"\xff\xff")
