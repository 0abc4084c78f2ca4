"""Frames: what is packed is parsed, however the stream is cut; what is no frame is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import (
    ERRORS_BY_CODE,
    AlreadyExists,
    CenoteError,
    NoSpace,
    NotLeader,
    ProtocolError,
    ProtocolVersionMismatch,
)
from cenote.rpc.frames import (
    ERROR,
    GOODBYE,
    HEADER,
    HEADER_BYTES,
    HELLO,
    MAGIC,
    REPLY,
    REQUEST,
    Frame,
    FrameParser,
    Hello,
    choose_version,
    decode_error,
    encode_error,
    pack_error,
    pack_frame,
    pack_hello,
    pack_hello_reply,
    parse_hello,
    parse_hello_reply,
)

BODY_BYTES_MAX = 100_000

u32 = st.integers(0, 2**32 - 1)
bodies = st.one_of(
    st.binary(max_size=40),
    st.integers(0, BODY_BYTES_MAX).map(lambda n: bytes([n % 251]) * n),
)
frames = st.tuples(st.integers(HELLO, ERROR), u32, st.integers(0, 0xFFFF), u32, bodies)


def pack(frame: Frame) -> bytes:
    kind, call_id, method, word, body = frame
    return pack_frame(kind, call_id, method, word, body)


def parse_all(parser: FrameParser) -> list[Frame]:
    found = []
    while (frame := parser.next()) is not None:
        found.append(frame)
    return found


def test_layout_is_the_documented_one() -> None:
    raw = pack_frame(REQUEST, 0x01020304, 0x0506, 0x0708090A, b"xy")
    assert raw == bytes.fromhex("02000000 04030201 0605 03 00 0a090807") + b"xy"
    assert HEADER_BYTES == 16


@given(st.lists(frames, max_size=6), st.data())
def test_a_stream_cut_anywhere_gives_the_same_frames(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(map(pack, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    parser = FrameParser(BODY_BYTES_MAX)
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        parser.feed(stream[start:end])
        # Taking fewer than there are must lose nothing, either.
        if data.draw(st.booleans()):
            got += parse_all(parser)
        elif (frame := parser.next()) is not None:
            got.append(frame)
    got += parse_all(parser)
    assert got == sent
    assert parser.idle
    assert parser.buffered_bytes == 0


def test_a_stream_of_single_bytes() -> None:
    sent = [(REPLY, n, n, n, b"b" * n) for n in range(20)]
    parser = FrameParser()
    got: list[Frame] = []
    for byte in b"".join(map(pack, sent)):
        parser.feed(bytes([byte]))
        got += parse_all(parser)
    assert got == sent


def test_an_unfinished_frame_is_accounted_for() -> None:
    raw = pack_frame(REQUEST, 1, 1, 0, b"x" * 50_000)
    parser = FrameParser()
    parser.feed(raw[:10])
    assert parser.next() is None
    assert parser.buffered_bytes == 10
    parser.feed(raw[10:40_000])
    assert parser.next() is None
    assert parser.buffered_bytes == 40_000 - HEADER_BYTES
    assert not parser.idle
    parser.feed(raw[40_000:])
    assert parser.next() == (REQUEST, 1, 1, 0, b"x" * 50_000)
    assert parser.idle


def test_few_bytes_do_not_keep_a_large_chunk_alive() -> None:
    parser = FrameParser()
    chunk = pack_frame(REQUEST, 1, 1, 0, b"x" * 200_000) + pack_frame(REQUEST, 2, 1, 0, b"y" * 99)
    parser.feed(chunk[:-50])
    parse_all(parser)
    assert sum(piece.obj is chunk for piece in parser._pieces if isinstance(piece, memoryview)) == 0
    assert [type(piece) for piece in parser._pieces] == [bytes]


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdefgh", "kind 3 "),
        (b"\x00" * 16, "kind 0"),
        (HEADER.pack(0, 1, 0, GOODBYE, 0, 0), "GOODBYE"),
        (HEADER.pack(0, 1, 0, REQUEST, 4, 0), "flags 0x04"),
        (HEADER.pack(BODY_BYTES_MAX + 1, 1, 0, REQUEST, 0, 0), "100001 bytes exceeds the limit"),
    ],
)
def test_what_is_no_frame_is_refused_by_name(raw: bytes, what: str) -> None:
    parser = FrameParser(BODY_BYTES_MAX)
    parser.feed(raw)
    with pytest.raises(ProtocolError) as caught:
        parser.next()
    if what == "kind 3 ":  # a TLS hello happens to look like a REQUEST with flags or a long body
        assert "frame" in str(caught.value)
    else:
        assert what in str(caught.value)
    parser.feed(pack_frame(REQUEST, 1))
    with pytest.raises(ProtocolError):
        parser.next()


def test_an_oversized_frame_is_refused_before_its_body_arrives() -> None:
    parser = FrameParser(10)
    parser.feed(HEADER.pack(11, 77, 0, REQUEST, 0, 0))
    with pytest.raises(ProtocolError):
        parser.next()
    assert parser.rejected_call_id == 77


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_garbage_gives_frames_or_a_protocol_error(chunks: list[bytes]) -> None:
    parser = FrameParser(1000)
    fed_bytes = 0
    try:
        for chunk in chunks:
            fed_bytes += len(chunk)
            parser.feed(chunk)
            parse_all(parser)
            assert parser.buffered_bytes <= min(fed_bytes, 1000 + HEADER_BYTES)
    except ProtocolError:
        assert parser.buffered_bytes == 0


# --- errors -------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(ERRORS_BY_CODE)),
    st.text(max_size=200),
    st.text(min_size=1, max_size=200),
)
def test_errors_keep_class_message_and_remedy(code: int, message: str, remedy: str) -> None:
    error = ERRORS_BY_CODE[code](message, remedy=remedy)
    again = decode_error(code, encode_error(error))
    assert type(again) is type(error)
    clean = error.message.encode("utf-8", "replace").decode()
    assert again.message == clean.replace("\0", "\\0")
    assert again.remedy == remedy.encode("utf-8", "replace").decode().replace("\0", "\\0")


def test_errors_keep_what_their_class_carries() -> None:
    leader = decode_error(
        NotLeader.code, encode_error(NotLeader("no", addresses=["tcp://a:1", "unix:///b"], epoch=7))
    )
    assert isinstance(leader, NotLeader)
    assert (leader.addresses, leader.epoch) == (("tcp://a:1", "unix:///b"), 7)
    for same_bytes in (True, False, None):
        exists = decode_error(
            AlreadyExists.code, encode_error(AlreadyExists("k", same_bytes=same_bytes))
        )
        assert isinstance(exists, AlreadyExists)
        assert exists.same_bytes is same_bytes


def test_an_error_without_a_remedy_gets_the_default_one() -> None:
    again = decode_error(NoSpace.code, b"full")
    assert (again.message, again.remedy) == ("full", NoSpace.default_remedy)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=100))
def test_any_error_frame_gives_an_error_to_raise(code: int, body: bytes) -> None:
    assert isinstance(decode_error(code, body), CenoteError)


def test_an_endless_message_is_cut() -> None:
    frame = pack_error(1, NoSpace("ä" * 100_000, remedy="b" * 100_000))
    assert len(frame) < 3000
    assert frame[HEADER_BYTES:].decode().count("\0") == 2


# --- hello --------------------------------------------------------------------------------------


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.binary(max_size=50))
def test_hello_round_trip(a: int, b: int, payload: bytes) -> None:
    low, high = sorted((a, b))
    assert parse_hello(pack_hello(payload, low, high)) == Hello(low, high, payload)
    assert parse_hello_reply(pack_hello_reply(a, payload)) == (a, payload)


@pytest.mark.parametrize("body", [b"", MAGIC, b"mooncake\x01\x00\x01\x00", pack_hello(b"", 3, 2)])
def test_a_wrong_hello_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_hello(body)


def test_the_highest_common_version_is_chosen() -> None:
    assert choose_version(Hello(1, 9, b""), 2, 5) == 5
    assert choose_version(Hello(1, 3, b""), 2, 5) == 3
    for low, high in ((6, 9), (0, 1)):
        with pytest.raises(ProtocolVersionMismatch, match="2 to 5"):
            choose_version(Hello(low, high, b""), 2, 5)


def test_the_greeting_of_a_grpc_port_is_recognised() -> None:
    parser = FrameParser(BODY_BYTES_MAX)
    parser.feed(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00" + bytes(24))
    with pytest.raises(ProtocolError, match=r"HTTP/2.*address of the lane"):
        parser.next()
