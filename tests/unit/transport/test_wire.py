from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import (
    ERRORS_BY_CODE,
    CenoteError,
    GrantRevoked,
    InvalidArgument,
    ProtocolError,
    ProtocolVersionMismatch,
)
from cenote.api.rows import EXTENT, SEAL
from cenote.transport import wire
from cenote.v1 import store_pb2


def test_the_layouts_are_those_of_the_documentation() -> None:
    assert (wire.REQUEST_BYTES, wire.HEAD_BYTES, wire.REPLY_BYTES) == (32, 56, 24)
    assert wire.REPLY_ONE.size == wire.REPLY_BYTES + 1
    assert (EXTENT.itemsize, SEAL.itemsize) == (wire.EXTENT_BYTES, wire.SEAL_ROW_BYTES)
    assert wire.HELLO.size == 16
    assert len(wire.MAGIC) == 8
    # The first row of a request follows its header at once.
    head = wire.REQUEST.pack(1, 2, 3, 4, 5, 6, 7, 8) + bytes(24)
    assert wire.REQUEST_ONE.unpack(head)[:8] == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_hello_and_its_answer() -> None:
    hello = store_pb2.DataHelloRequest(ticket=b"ticket", session_id=b"s" * 16, writer=True)
    sent = wire.encode_hello(hello)
    length = wire.hello_length(sent[: wire.HELLO.size])
    assert wire.decode_hello(sent[wire.HELLO.size :]) == hello
    assert length == len(sent) - wire.HELLO.size
    answer = store_pb2.DataHelloResponse(epoch=3, node_id=4)
    sent = wire.encode_hello_reply(answer)
    code, length = wire.hello_reply_length(sent[: wire.HELLO_REPLY.size])
    assert (code, length) == (0, len(sent) - wire.HELLO_REPLY.size)
    assert wire.decode_hello_reply(code, sent[wire.HELLO_REPLY.size :]) == answer


def test_a_refused_hello_raises_the_very_error() -> None:
    sent = wire.encode_hello_error(GrantRevoked("cut off", remedy="open a new session"))
    code, _ = wire.hello_reply_length(sent[: wire.HELLO_REPLY.size])
    with pytest.raises(GrantRevoked) as caught:
        wire.decode_hello_reply(code, sent[wire.HELLO_REPLY.size :])
    assert (caught.value.message, caught.value.remedy) == ("cut off", "open a new session")


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (b"GET / HTTP/1.1\r\n", ProtocolError),
        (wire.HELLO.pack(wire.MAGIC, 9, 12, 0), ProtocolVersionMismatch),
        (wire.HELLO.pack(wire.MAGIC, 0, 0, 0), ProtocolVersionMismatch),
        (wire.HELLO.pack(wire.MAGIC, 1, 1, wire.HELLO_BYTES_MAX + 1), ProtocolError),
    ],
)
def test_hellos_that_are_none(head: bytes, error: type[CenoteError]) -> None:
    with pytest.raises(error):
        wire.hello_length(head)


def test_bodies_that_are_none() -> None:
    with pytest.raises(ProtocolError):
        wire.decode_hello(b"\xff\xff\xff")
    with pytest.raises(ProtocolError):
        wire.decode_hello_reply(0, b"\xff\xff\xff")
    with pytest.raises(ProtocolError):
        wire.hello_reply_length(wire.HELLO_REPLY.pack(0, 1 << 31))
    with pytest.raises(ProtocolError):
        wire.hello_reply_length(b"HTTP/1.1")


@given(st.sampled_from(sorted(ERRORS_BY_CODE)), st.text(), st.text())
def test_errors_keep_their_type_and_are_bounded(code: int, message: str, remedy: str) -> None:
    message = message.replace("\x00", "")
    sent = wire.encode_error(ERRORS_BY_CODE[code](message, remedy=remedy))
    assert len(sent) <= wire.TEXT_BYTES_MAX
    received = wire.decode_error(code, sent)
    assert type(received) is ERRORS_BY_CODE[code]
    if message and len(sent) < wire.TEXT_BYTES_MAX:
        assert received.message == message


def test_long_and_broken_error_texts() -> None:
    sent = wire.encode_error(InvalidArgument("ä" * 5000))
    assert len(sent) == wire.TEXT_BYTES_MAX
    assert wire.decode_error(3, sent).message.startswith("äää")
    assert isinstance(wire.decode_error(60_000, b"of a newer release"), CenoteError)
