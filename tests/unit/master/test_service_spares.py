"""Spare extents through the service: what strangers say of them, and that it loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.errors import CenoteError, InvalidArgument, NamespaceReset
from cenote.api.rows import EXTENT, CommitStatus
from cenote.master.memory_backend import MemoryLog
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MIB, MasterPool, lane, restarted, u32, u64
from unit.master.state_checks import check, contents, pool_of

DECIDED, NOT_GRANTED = CommitStatus.DECIDED, CommitStatus.NOT_GRANTED
SIZE = 1000


def start(pool: MasterPool, key: bytes, count: int = 8, **fields: object) -> pb.PutStartResponse:
    request = pb.PutStartRequest(
        keys=pool.batch(key),
        sizes=u64(SIZE),
        session_id=pool.session_id,
        request_id=pool.next_request(),
        spare_count=count,
        spare_bytes=SIZE,
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return pool.service.put_start(request, 1.0)


def names(pool: MasterPool, *keys: bytes, **fields: object) -> pb.SpareNames:
    made = pb.SpareNames(keys=pool.batch(*keys), sizes=u64(SIZE))
    for name, value in fields.items():
        if name == "keys":
            made.keys.CopyFrom(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return made


def commit_request(
    pool: MasterPool, grant_id: int, positions: list[int], named: pb.SpareNames, **fields: object
) -> pb.PutCommitRequest:
    request = pb.PutCommitRequest(
        grant_id=grant_id,
        indexes=u32(*positions),
        checksums=u64(*range(len(positions))),
        session_id=pool.session_id,
        request_id=pool.next_request(),
        names=named,
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def commit(pool: MasterPool, grant_id: int, positions: list[int], *keys: bytes) -> list[int]:
    request = commit_request(pool, grant_id, positions, names(pool, *keys))
    return list(pool.service.put_commit(request, 1.0).statuses)


@pytest.fixture
def pool() -> MasterPool:
    return MasterPool()


@pytest.fixture
def grant_id(pool: MasterPool) -> int:
    """Of eight spares of 1000 bytes."""
    started = start(pool, b"first")
    pool.put_commit(started)
    assert len(np.frombuffer(started.spare_extents, EXTENT)) == 8
    return started.spare_grant_id


def facts(pool: MasterPool) -> tuple[object, ...]:
    state = pool.service.state
    check(state)
    status = state.status(0)
    return contents(state), status.grants, status.granted_bytes, status.last_seq


def test_the_whole_way(pool: MasterPool, grant_id: int) -> None:
    assert commit(pool, grant_id, [0], b"a") == [DECIDED]
    assert commit(pool, grant_id, [1, 2], b"b", b"c") == [DECIDED] * 2
    assert commit(pool, grant_id, [3], b"a") == [CommitStatus.UNSEALED_SAME]
    sealed = pb.RenewSessionRequest(session_id=pool.session_id, sealed_through=pool.requests)
    pool.service.renew_session(sealed, 1.0)
    assert commit(pool, grant_id, [4, 5], b"d", b"a") == [DECIDED, CommitStatus.EXISTS_DIFFERENT]
    assert pool.exists(b"a", b"b", b"c") == [1, 1, 1]
    found = pool.acquire(b"a", b"b", b"c")
    assert [int(row["length"]) for row in np.frombuffer(found.extents, EXTENT)] == [SIZE] * 3


def test_it_is_the_same_on_the_lane(pool: MasterPool, grant_id: int) -> None:
    """Where the hello names the session, a request may leave it out."""
    request = commit_request(pool, grant_id, [0], names(pool, b"a"))
    request.session_id = b""
    body = request.SerializeToString()
    reply = pool.service.dispatch(lane(pool.session_id), pb.MASTER_METHOD_PUT_COMMIT, body, 100)
    assert isinstance(reply, bytes)
    assert list(pb.PutCommitResponse.FromString(reply).statuses) == [DECIDED]
    again = pool.service.dispatch(lane(pool.session_id), pb.MASTER_METHOD_PUT_COMMIT, body, 100)
    assert again == reply


def test_names_may_be_full_keys(pool: MasterPool, grant_id: int) -> None:
    named = names(pool, b"", keys=pool.full(b"a"))
    request = commit_request(pool, grant_id, [0], named)
    assert list(pool.service.put_commit(request, 1.0).statuses) == [DECIDED]
    named = names(pool, b"", keys=pool.full(b"b", b"c"))
    request = commit_request(pool, grant_id, [1, 2], named)
    assert list(pool.service.put_commit(request, 1.0).statuses) == [DECIDED] * 2
    assert pool.exists(b"a", b"b", b"c") == [1, 1, 1]


@pytest.mark.parametrize("spare_bytes", [0, (1 << 50) + 1, 2**64 - 1])
def test_a_size_that_no_extent_has(pool: MasterPool, spare_bytes: int) -> None:
    before = facts(pool)
    with pytest.raises(InvalidArgument, match=f"spare_bytes {spare_bytes} "):
        start(pool, b"a", spare_bytes=spare_bytes)
    assert facts(pool) == before


@pytest.mark.parametrize("count", [1 << 20, 2**32 - 1])
def test_more_than_there_are(pool: MasterPool, count: int) -> None:
    started = start(pool, b"a", count)
    spared = len(np.frombuffer(started.spare_extents, EXTENT))
    assert 0 < spared * 1024 <= 4 * MIB // 64
    facts(pool)


def test_objects_too_large_for_it_get_none(pool: MasterPool) -> None:
    started = start(pool, b"a", 5, spare_bytes=1 << 30)
    assert (started.spare_grant_id, started.spare_extents) == (0, b"")
    assert pool.put_commit(started).statuses == bytes([DECIDED])


def wrong_commits(pool: MasterPool, grant_id: int) -> dict[str, pb.PutCommitRequest]:
    """By what is said of them."""

    def made(positions: list[int], named: pb.SpareNames, **fields: object) -> pb.PutCommitRequest:
        return commit_request(pool, grant_id, positions, named, **fields)

    two = names(pool, b"a", b"b")
    one = names(pool, b"a")
    several = common_pb2.KeyBatch(namespace_id=1, generation=1, digests=bytes(17))
    return {
        "1 names for 2 checksums": made([0, 1], one),
        "2 names for 1 checksums": made([0], two),
        "says which": made([0], one, indexes=b""),
        "one index for each name|says which": made([0, 1], two, indexes=b""),
        "1 checksums for 2 indexes": made([0, 1], two, checksums=u64(1)),
        "2 checksums for 1 indexes": made([0, 1], two, indexes=u32(0)),
        "indexes has 3 bytes": made([0], one, indexes=b"123"),
        "checksums has 7 bytes": made([0], one, checksums=bytes(7)),
        "digests has 17 bytes": made([0], names(pool, b"", keys=several)),
        "no key": made([0], pb.SpareNames(sizes=u64(SIZE))),
        "0 sizes for 1 keys": made([0], names(pool, b"a", sizes=b"")),
        "sizes has 5 bytes": made([0], names(pool, b"a", sizes=bytes(5))),
        "3 sizes for 2 keys": made([0, 1], names(pool, b"a", b"b", sizes=u64(1, 2, 3))),
        "more than any pool": made([0, 1], names(pool, b"a", b"b", sizes=u64(2**63))),
        "does not fit": made([0], names(pool, b"a", sizes=u64(2**63))),
        "does not fit its": made([0], names(pool, b"a", sizes=u64(0))),
        "fit its spare": made([0, 1], names(pool, b"a", b"b", sizes=u64(SIZE, 0))),
        "2 tail_lengths for 1 keys": made([0], names(pool, b"a", tail_lengths=bytes(4))),
        "tail_lengths has 3 bytes": made([0], names(pool, b"a", tail_lengths=bytes(3))),
        "longer than the longest key": made(
            [0], names(pool, b"a", sizes=u64(1), tail_lengths=(1000).to_bytes(2, "little"))
        ),
        "longer than the longest": made(
            [0, 1], names(pool, b"a", b"b", sizes=u64(1), tail_lengths=b"\xe8\x03" * 2)
        ),
        "session_id has 5 bytes": made([0], one, session_id=b"short"),
        "failed_replicas has 4 bytes": made([0], one, failed_replicas=bytes(4)),
        "beyond 16384": made([0, 20_000], two),
    }


SAID = list(wrong_commits(MasterPool(), 1))


@pytest.mark.parametrize("says", SAID)
def test_wrong_commits_are_told_what_is_wrong(pool: MasterPool, grant_id: int, says: str) -> None:
    request = wrong_commits(pool, grant_id)[says]
    before = facts(pool)
    with pytest.raises(InvalidArgument, match=says):
        pool.service.put_commit(request, 1.0)
    assert facts(pool) == before
    assert commit(pool, grant_id, [0], b"a") == [DECIDED]
    assert commit(pool, grant_id, list(range(1, 8)), *(b"k%d" % i for i in range(7))) == (
        [DECIDED] * 7
    )
    assert pool.service.state.status(0).grants == 0


@pytest.mark.parametrize("positions", [[], [0], [0, 1]])
def test_a_commit_without_names_stores_nothing(
    pool: MasterPool, grant_id: int, positions: list[int]
) -> None:
    before = facts(pool)
    request = pb.PutCommitRequest(
        grant_id=grant_id,
        indexes=u32(*positions),
        checksums=u64(*range(len(positions) or 8)),
        session_id=pool.session_id,
        request_id=pool.next_request(),
    )
    with pytest.raises(InvalidArgument, match="names"):
        pool.service.put_commit(request, 1.0)
    assert facts(pool) == before
    assert commit(pool, grant_id, [0], b"a") == [DECIDED]


def test_names_in_vain(pool: MasterPool) -> None:
    """Of a grant that is over, or never was, or whose keys are known."""
    assert commit(pool, 12345, [0], b"a") == [NOT_GRANTED]
    assert commit(pool, 12345, [0, 1], b"a", b"b") == [NOT_GRANTED] * 2
    started = pool.put_start(b"a", b"b")
    for positions in ([0], [0, 1]):
        with pytest.raises(InvalidArgument, match="names"):
            commit(pool, started.grant_id, positions, *(b"x", b"y")[: len(positions)])
    assert list(pool.put_commit(started).statuses) == [DECIDED] * 2
    facts(pool)


@pytest.mark.parametrize("count", [1, 2])
def test_other_namespaces(pool: MasterPool, grant_id: int, count: int) -> None:
    keys = (b"a", b"b")[:count]
    before = facts(pool)
    for place, error in (((99, 1), NamespaceReset), ((1, 2), NamespaceReset)):
        batch = pool.batch(*keys)
        batch.namespace_id, batch.generation = place
        request = commit_request(pool, grant_id, list(range(count)), names(pool, keys=batch))
        with pytest.raises(error):
            pool.service.put_commit(request, 1.0)
    assert facts(pool) == before


FIELD = st.one_of(
    st.binary(max_size=20),
    st.lists(st.sampled_from([0, 1, 7, 8, 2**32 - 1]), max_size=3).map(lambda v: u32(*v)),
    st.lists(st.sampled_from([0, 1, 961, SIZE, 1024, 1025, 2**64 - 1]), max_size=3).map(
        lambda v: u64(*v)
    ),
    st.integers(0, 3).map(lambda n: bytes(range(16 * n))),
    st.sampled_from([b"\0\0", b"\x10\0", b"\x10\0" * 2, b"\xff\xff"]),
)


@settings(max_examples=200, deadline=None)
@given(
    indexes=FIELD, checksums=FIELD, digests=FIELD, sizes=FIELD, tails=FIELD,
    place=st.sampled_from([(1, 1), (1, 2), (2, 1)]), failed=st.sampled_from([b"", bytes(8)]),
    named=st.booleans(), chain=st.booleans(),
)  # fmt: skip
def test_any_fields_lose_nothing(
    shared: MasterPool,
    indexes: bytes,
    checksums: bytes,
    digests: bytes,
    sizes: bytes,
    tails: bytes,
    place: tuple[int, int],
    failed: bytes,
    named: bool,
    chain: bool,
) -> None:
    """A stranger's commit is answered or refused; what it stores is in order, the rest stays."""
    pool = shared
    request = pb.PutCommitRequest(
        grant_id=start(pool, b"first").spare_grant_id,
        indexes=indexes,
        checksums=checksums,
        session_id=pool.session_id,
        failed_replicas=failed,
    )
    if named:
        request.names.CopyFrom(
            pb.SpareNames(sizes=sizes, tail_lengths=tails, chain=chain, keys=common_pb2.KeyBatch(
                namespace_id=place[0], generation=place[1], digests=digests))
        )  # fmt: skip
    before = facts(pool)
    try:
        pool.service.put_commit(request, 1.0)
    except CenoteError:
        assert facts(pool) == before
    for fact in contents(pool.service.state).values():
        size, tail = fact[3], fact[5]
        assert isinstance(size, int)
        assert isinstance(tail, int)
        assert size > 0
        assert tail <= 512
    abort = pb.PutAbortRequest(grant_id=request.grant_id, session_id=pool.session_id)
    pool.service.put_abort(abort, 1.0)
    facts(pool)
    assert pool.service.state.status(0).grants == 0


@pytest.fixture(scope="module")
def shared() -> MasterPool:
    pool = MasterPool()
    pool.put(b"first", size=SIZE)
    return pool


def test_a_restart_knows_what_was_committed() -> None:
    log = MemoryLog()
    pool = MasterPool(log=log)
    started = start(pool, b"first")
    commit(pool, started.spare_grant_id, [0], b"a")
    commit(pool, started.spare_grant_id, [2, 3], b"b", b"c")
    there = contents(pool.service.state)
    pool.service.close()
    again = restarted(log)
    assert contents(again.service.state) == there
    assert len(there) == 3
    assert len(pool_of(again.service.state).grants) == 0
    assert again.exists(b"first") == [0]
    assert commit(again, started.spare_grant_id, [1], b"d") == [NOT_GRANTED]
    facts(again)
