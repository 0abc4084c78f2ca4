"""The daemon's connection to a master: what it asks, and what becomes of odd answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cenote.api.errors import ClientClosed, InvalidArgument, ProtocolError, Unavailable
from cenote.store import master_link
from cenote.store.master_link import LaneMasterLink
from cenote.v1 import master_pb2 as pb

HELLO = pb.HelloRequest(session_id=b"s" * 16, observer=True)


class FakeLane:
    """A LaneClient whose server answers what the test says."""

    answers: dict[int, bytes]
    greeting = pb.HelloResponse(epoch=9, is_leader=True).SerializeToString()

    def __init__(
        self, address: str, hello: bytes, *, on_hello: Callable[[bytes], None], **_: Any
    ) -> None:
        assert pb.HelloRequest.FromString(hello) == HELLO
        self.on_hello = on_hello
        self.calls: list[tuple[int, bytes]] = []

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        if not self.calls:
            self.on_hello(self.greeting)
        self.calls.append((method, body))
        return self.answers[method]

    def close(self) -> None:
        pass


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> LaneMasterLink:
    FakeLane.answers = {
        pb.MASTER_METHOD_GET_CLUSTER_VIEW: b"",
        pb.MASTER_METHOD_ATTACH: pb.AttachResponse(node_id=1).SerializeToString(),
        pb.MASTER_METHOD_HEARTBEAT: pb.HeartbeatResponse(epoch=2).SerializeToString(),
        pb.MASTER_METHOD_DETACH: b"",
    }
    monkeypatch.setattr(master_link, "LaneClient", FakeLane)
    return LaneMasterLink("here", HELLO)


def test_each_call_has_its_method_and_its_answer(link: LaneMasterLink) -> None:
    assert link.hello(1.0).epoch == 9
    assert link.attach(pb.AttachRequest(node_name="n"), 1.0).node_id == 1
    assert link.heartbeat(pb.HeartbeatRequest(epoch=2), 1.0).epoch == 2
    assert link.detach(pb.DetachRequest(), 1.0) == pb.DetachResponse()
    link.close()


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        (pb.MASTER_METHOD_ATTACH, lambda link: link.attach(pb.AttachRequest(), 1.0)),
        (pb.MASTER_METHOD_HEARTBEAT, lambda link: link.heartbeat(pb.HeartbeatRequest(), 1.0)),
        (pb.MASTER_METHOD_DETACH, lambda link: link.detach(pb.DetachRequest(), 1.0)),
    ],
)
def test_an_answer_that_is_no_message_is_a_protocol_error(
    link: LaneMasterLink, method: int, ask: Callable[[LaneMasterLink], object]
) -> None:
    FakeLane.answers[method] = b"\xff\xff\xff"
    with pytest.raises(ProtocolError, match="the master's answer is no message"):
        ask(link)


def test_addresses_that_cannot_be_reached() -> None:
    with pytest.raises(InvalidArgument, match="has no host or no port"):
        LaneMasterLink("nowhere", HELLO)
    link = LaneMasterLink("127.0.0.1:1", HELLO)
    with pytest.raises(Unavailable, match="Connection refused"):
        link.hello(0.2)
    link.close()
    with pytest.raises(ClientClosed):
        link.hello(0.2)
