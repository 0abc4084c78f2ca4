"""Keys that others had decided, and may not have lived to seal; and what is told of one's own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import CenoteError, DeadlineExceeded, StaleLocation, Unavailable
from cenote.api.keys import split_digests
from cenote.api.rows import PUT, SEAL, CommitStatus, PutStatus
from cenote.client import Client
from cenote.client.plan.commits import Commits
from cenote.v1 import master_pb2 as pb
from fake_pool import FakeMaster
from waiting import wait_until

MakeClient = Callable[..., Client]
SLOT = 5000


class UnsealingMaster(FakeMaster):
    """What is in `unsealed` nobody has said to be sealed."""

    def __init__(self, nodes: int = 3) -> None:
        super().__init__(nodes)
        self.unsealed: set[bytes] = set()

    def put_start(self, request: pb.PutStartRequest, deadline_s: float) -> pb.PutStartResponse:
        digests = split_digests(request.keys.digests)
        told = np.frombuffer(request.sealed_seqs or bytes(8 * len(digests)), "<u8").tolist()
        for digest, seq in zip(digests, told, strict=True):
            if digest in self.objects and self.objects[digest].seq == seq:
                assert request.sealed_epoch == self.epoch
                self.unsealed.discard(digest)
        reply = super().put_start(request, deadline_s)
        puts = np.frombuffer(reply.puts, PUT).copy()
        seals = []
        for i, digest in enumerate(digests):
            if puts[i]["status"] == PutStatus.EXISTS and digest in self.unsealed:
                rows = self._seals(digest)
                puts[i]["status"], puts[i]["extents"] = PutStatus.UNSEALED, len(rows)
                seals.append(rows)
        reply.puts = puts.tobytes()
        if seals:
            reply.unsealed = np.concatenate(seals).tobytes()
        return reply

    def _seals(self, digest: bytes) -> np.ndarray[Any, Any]:
        found = self.objects[digest]
        rows = np.zeros(sum(map(len, found.replicas)), SEAL)
        places = [(n, *p) for n, replica in enumerate(found.replicas) for p in replica]
        for row, (number, node, offset, length) in zip(rows, places, strict=True):
            row["segment"], row["slot"], row["offset"], row["length"] = node, SLOT, offset, length
            row["seq"], row["checksum"], row["replica"] = found.seq, found.checksum, number
            row["object_size"], row["extent_count"] = found.size, 1
        return rows

    def put_commit(self, request: pb.PutCommitRequest, deadline_s: float) -> pb.PutCommitResponse:
        digests = [self.grants[request.grant_id].digests[0]]
        reply = super().put_commit(request, deadline_s)
        if digests[0] in self.unsealed and reply.statuses[0] != CommitStatus.DECIDED:
            reply.statuses = bytes([reply.statuses[0] + 3])
        return reply


@pytest.fixture
def master() -> UnsealingMaster:
    return UnsealingMaster()


def abandon(master: UnsealingMaster) -> None:
    """Nobody will say that what is there is sealed."""
    master.unsealed = set(master.objects)


PUTS: dict[str, Callable[[Client], Any]] = {
    "put": lambda c: [c.put("key", b"value")],
    "put_batch": lambda c: list(c.put_batch(["key", "other"], [b"value", b"other"])),
    "replicas": lambda c: [c.put("key", b"value", replicas=2)],
}


@pytest.mark.parametrize("name", PUTS)
def test_it_is_sealed_before_it_is_said_to_exist(
    make_client: MakeClient, master: UnsealingMaster, name: str
) -> None:
    first = PUTS[name](make_client())
    abandon(master)
    results = PUTS[name](make_client())
    assert [result.existed for result in results] == [True] * len(first)
    assert not master.unsealed
    sealed = [node.sealed[SLOT] for node in master.nodes.values() if SLOT in node.sealed]
    assert len(sealed) == (2 if name == "replicas" else 1)
    if len(first) == 1:
        (found,) = master.objects.values()
        assert set(sealed) == {(b"key", found.seq, found.checksum)}


def test_what_is_gone_meanwhile_is_put(make_client: MakeClient, master: UnsealingMaster) -> None:
    make_client().put("key", b"value")
    abandon(master)
    master.nodes[1].on_seal = master.objects.clear
    assert make_client().put("key", b"value").stored


@pytest.mark.parametrize("error", [Unavailable("killed"), StaleLocation("another's by now")])
def test_what_can_not_be_sealed_is_not_said_to_exist(
    make_client: MakeClient, master: UnsealingMaster, error: CenoteError
) -> None:
    make_client().put("key", b"value")
    abandon(master)
    client = make_client(deadline_s=0.5)
    master.nodes[1].fault = error
    with pytest.raises(CenoteError, match=error.message):
        client.put("key", b"value")
    master.nodes[1].fault = None
    assert client.put("key", b"value").existed


@pytest.mark.parametrize("ours", [b"value", b"other"])
def test_who_loses_a_race_learns_whether_the_bytes_are_the_same(
    make_client: MakeClient, master: UnsealingMaster, ours: bytes
) -> None:
    other, client = make_client(), make_client()

    def be_first() -> None:
        master.hooks.clear()
        other.put("key", b"value")
        abandon(master)

    master.hooks["put_commit"] = be_first
    result = client.put("key", ours)
    assert result.existed
    assert result.same_bytes is (ours == b"value")
    assert SLOT in {slot for node in master.nodes.values() for slot in node.sealed}


# ---- what is told of one's own ------------------------------------------------------------------


def told(master: FakeMaster, method: str) -> list[int]:
    return [request.sealed_through for request in master.requests[method]]


@pytest.mark.parametrize("batch", [False, True])
def test_each_commit_tells_that_those_before_it_are_sealed(
    make_client: MakeClient, master: UnsealingMaster, batch: bool
) -> None:
    client = make_client()
    for i in range(3):
        if batch:
            client.put_batch([f"{i}", f"{i}b"], [b"x", b"y"])
        else:
            client.put(f"{i}", b"x")
    client.close()
    ids = [request.request_id for request in master.requests["put_commit"]]
    for through, before, own in zip(told(master, "put_commit"), [0, *ids], ids, strict=False):
        assert before <= through < own
    assert told(master, "close_session")[-1] >= ids[-1]


def test_a_commit_that_is_not_sealed_is_told_of_by_name(
    make_client: MakeClient, master: UnsealingMaster
) -> None:
    client = make_client(deadline_s=0.3)
    master.faults["put_commit"] = [DeadlineExceeded("no answer came")]
    with pytest.raises(CenoteError):
        client.put("key", b"value")
    lost = master.requests["put_commit"][-1].request_id

    def is_cancelled() -> bool:
        sent = [r.cancelled_request_ids for r in master.requests["renew_session"]]
        return lost in np.frombuffer(b"".join(sent), "<u8").tolist()

    wait_until(is_cancelled, what="the commit to be cancelled")
    wait_until(lambda: not client.session.state.commits.lost(), what="the answer")
    client.put("other", b"value")
    assert told(master, "put_commit")[-1] >= lost


@pytest.mark.parametrize("fails", [False, True])
def test_what_some_of_its_daemons_have_not_sealed_is_not_told(
    make_client: MakeClient, master: UnsealingMaster, fails: bool
) -> None:
    """The put has as many copies as it must; the master is not to take the other one for sealed."""
    client = make_client(deadline_s=2.0)

    def die() -> None:
        raise Unavailable("killed")

    if fails:
        master.nodes[2].on_seal = die
    assert client.put("key", b"value", replicas=2, min_replicas=1).stored
    (request,) = master.requests["put_commit"]
    assert client.put("other", b"value").stored
    assert fails or told(master, "put_commit")[-1] >= request.request_id
    lost = [*client.session.state.commits.lost()]
    for renewal in master.requests["renew_session"]:
        lost += np.frombuffer(renewal.cancelled_request_ids, "<u8").tolist()
    assert (request.request_id in lost) == fails


def test_commits_under_way_hold_back_what_is_told() -> None:
    commits = Commits(b"s" * 16, itertools.count(1))
    (first, _), (second, through) = commits.begin(), commits.begin()
    assert through < first
    commits.end(second)
    assert commits.through() < first
    commits.lose(first)
    assert commits.through() < first
    assert commits.lost() == [first]
    commits.were_told([first])
    assert commits.through() >= second
    assert not commits.lost()


def test_nothing_under_way_is_ever_told_by_another_thread() -> None:
    commits = Commits(b"s" * 16, itertools.count(1))
    begun: dict[int, None] = {}
    ended: dict[int, None] = {}
    wrong: list[int] = []

    def run() -> None:
        for _ in range(300):
            request_id, through = commits.begin()
            begun[request_id] = None
            wrong.extend(each for each in list(begun) if each <= through and each not in ended)
            ended[request_id] = None
            commits.end(request_id)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 4 * 300
    assert not wrong
