"""Slow and failed requests have a line in the log, which says whose they are."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from cenote.api.errors import CenoteError, NamespaceReset, PermissionDenied, SessionUnknown
from cenote.master import service as service_module
from cenote.master.request_log import LINES_AT_ONCE, RequestLog
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, lane, u64
from unit.master.test_service_journal import JOURNALED, SlowDisk
from waiting import loop_turns

LOGGER = "cenote.master.requests"


def lines_of(caplog: pytest.LogCaptureFixture, logger: str = LOGGER) -> list[dict[str, Any]]:
    return [
        {"message": record.getMessage(), **record.__dict__.get("cenote_fields", {})}
        for record in caplog.records
        if record.name == logger
    ]


def ask(pool: MasterPool, method: int, request: Any) -> Any:
    return pool.service.dispatch(lane(pool.session_id), method, request.SerializeToString(), 5000)


def test_a_failed_request_says_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    pool = MasterPool()
    request = pb.PutStartRequest(
        keys=pool.batch(b"a", b"b"), sizes=u64(1, 2, 3), session_id=pool.session_id, request_id=77
    )
    with pytest.raises(CenoteError):
        ask(pool, pb.MASTER_METHOD_PUT_START, request)
    (line,) = lines_of(caplog)
    assert line["message"] == "request failed"
    assert line["method"] == "put_start"
    assert line["request"] == 77
    assert line["session"] == pool.session_id.hex()
    assert line["reason"] == "InvalidArgument"
    assert "sizes" in line["why"]


def test_what_clients_are_told_every_day_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    pool = MasterPool()
    keys = common_pb2.KeyBatch(namespace_id=99, generation=1, digests=bytes(16))
    with pytest.raises(NamespaceReset):
        ask(pool, pb.MASTER_METHOD_EXISTS, pb.ExistsRequest(keys=keys))
    log = RequestLog(lambda session: "")
    for error in (SessionUnknown("x"), PermissionDenied("has a line of its own")):
        log.failed(lane(), pb.MASTER_METHOD_EXISTS, pb.ExistsRequest(), error)
    assert lines_of(caplog) == []


def test_a_request_that_holds_up_the_loop_is_slow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = MasterPool()
    pool.exists(b"a")
    monkeypatch.setattr(service_module, "SLOW_S", -1.0)
    ask(pool, pb.MASTER_METHOD_EXISTS, pb.ExistsRequest(keys=pool.batch(b"a")))
    (line,) = lines_of(caplog)
    assert (line["message"], line["method"], line["waited_for"]) == (
        "slow request", "exists", "the loop",
    )  # fmt: skip
    assert "request" not in line  # it has no number


def test_a_commit_that_waits_for_the_journal_is_slow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk()
    pool = MasterPool(disk)

    async def scenario() -> None:
        started = pool.put_start(b"a", options=JOURNALED)
        disk.slow = True
        commit = pb.PutCommitRequest(
            grant_id=started.grant_id,
            checksums=u64(0),
            session_id=pool.session_id,
            request_id=pool.next_request(),
        )
        reply = asyncio.ensure_future(ask(pool, pb.MASTER_METHOD_PUT_COMMIT, commit))
        await loop_turns()
        monkeypatch.setattr(service_module, "SLOW_S", 0.0)
        disk.let_go()
        await reply
        (line,) = lines_of(caplog)
        assert line["waited_for"] == "the journal"
        assert line["request"] == commit.request_id

    asyncio.run(scenario())


def test_a_flood_of_failures_is_no_flood_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = RequestLog(lambda session: "engine", clock=lambda: now_s)
    for _ in range(1000):
        log.failed(lane(b"s"), pb.MASTER_METHOD_MATCH, pb.MatchRequest(), CenoteError("x"))
    assert len(lines_of(caplog)) == LINES_AT_ONCE
    now_s = 1.0
    log.failed(lane(b"s"), pb.MASTER_METHOD_MATCH, pb.MatchRequest(), CenoteError("x"))
    last = lines_of(caplog)[-1]
    assert last["unsaid_before"] == 1000 - LINES_AT_ONCE
    assert last["client"] == "engine"


def test_a_drain_over_the_lane_is_audited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = MasterPool(nodes=2)
    node = next(iter(pool.service.state.nodes(0.0))).node_id
    ask(pool, pb.MASTER_METHOD_DRAIN, pb.DrainRequest(node_id=node))
    (line,) = lines_of(caplog, "cenote.audit")
    assert (line["message"], line["node_id"], line["cancel"]) == ("drain", node, False)
