"""The metadata lane's frames as bytes: layout, limits, errors and hello. No I/O in here.

A frame is a 16-byte little-endian header and a body:

    u32 body_length | u32 call_id | u16 method | u8 kind | u8 flags | u32 word

`word` is the remaining deadline in milliseconds in a REQUEST (0: the server's default), the code of
`cenote.api.errors` in an ERROR, otherwise 0. `flags` is 0: a later protocol version may give it a
meaning, and hello settles the version, so a set flag is a mistake and not a hint to be ignored.
Call ids are chosen by the client and start at 1; an ERROR with call id 0 is about the connection.

HELLO       magic `cenote\\0\\1`, u16 lowest and u16 highest protocol version, opaque credentials
HELLO_REPLY magic, u16 chosen protocol version, u16 0, opaque reply
ERROR       UTF-8 `message \\0 remedy \\0 extra`; extra is what the error class carries besides

The magic stands first in a connection in both directions, so that whoever talks to a wrong port is
told so instead of waiting for a body of half a gigabyte (which is what `GET ` reads as).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from cenote.api.errors import (
    AlreadyExists,
    CenoteError,
    DeadlineExceeded,
    NotLeader,
    ProtocolError,
    ProtocolVersionMismatch,
    TenureEnded,
    Unavailable,
    error_from_code,
)
from cenote.api.master import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

__all__ = [
    "BODY_BYTES_MAX_DEFAULT",
    "CALL_ID_MAX",
    "DEADLINE_MS_MAX",
    "ERROR",
    "GOODBYE",
    "HEADER",
    "HEADER_BYTES",
    "HELLO",
    "HELLO_REPLY",
    "KIND_NAMES",
    "MAGIC",
    "METHOD_MAX",
    "PROTOCOL_VERSION_MAX",
    "PROTOCOL_VERSION_MIN",
    "REPLY",
    "REQUEST",
    "Frame",
    "FrameParser",
    "Hello",
    "HelloReply",
    "check_header",
    "choose_version",
    "decode_error",
    "encode_error",
    "error_extra",
    "pack_error",
    "pack_frame",
    "pack_hello",
    "pack_hello_reply",
    "parse_hello",
    "parse_hello_reply",
    "rebuild_error",
]

HEADER: Final = struct.Struct("<IIHBBI")
HEADER_BYTES: Final = HEADER.size

HELLO: Final = 1
HELLO_REPLY: Final = 2
REQUEST: Final = 3
REPLY: Final = 4
ERROR: Final = 5
GOODBYE: Final = 6  # reserved: no version sends it yet, so whoever does is refused
KIND_NAMES: Final = {
    HELLO: "HELLO",
    HELLO_REPLY: "HELLO_REPLY",
    REQUEST: "REQUEST",
    REPLY: "REPLY",
    ERROR: "ERROR",
    GOODBYE: "GOODBYE",
}

MAGIC: Final = b"cenote\x00\x01"

BODY_BYTES_MAX_DEFAULT: Final = 16 << 20
CALL_ID_MAX: Final = 0xFFFF_FFFF
METHOD_MAX: Final = 0xFFFF
DEADLINE_MS_MAX: Final = 0xFFFF_FFFF

_HELLO_HEAD: Final = struct.Struct("<8sHH")
# A gRPC server greets with a SETTINGS frame: its length, then this type, flags and stream.
_HTTP2_SETTINGS: Final = b"\x04\0\0\0\0\0"
_ERROR_TEXT_BYTES_MAX: Final = 1024  # each; gRPC carries them in 8 KiB of metadata
# Pieces of an unfinished frame shorter than this are copied, so that a peer who sends a few bytes
# of a frame behind a large chunk does not keep that whole chunk in memory.
_COPY_BELOW_BYTES: Final = 16 << 10


# One parsed frame: kind, call_id, method, word, body. A plain tuple, since a named one costs 0.2 µs
# more to make; the body is bytes of its own, valid for as long as it is referenced.
Frame: TypeAlias = tuple[int, int, int, int, bytes]


class Hello(NamedTuple):
    """What a client opens a connection with."""

    version_min: int
    version_max: int
    payload: bytes


class HelloReply(NamedTuple):
    """What the server answers to it."""

    version: int
    payload: bytes


def pack_frame(kind: int, call_id: int, method: int = 0, word: int = 0, body: bytes = b"") -> bytes:
    """Header and body in one piece."""
    return HEADER.pack(len(body), call_id, method, kind, 0, word) + body


def check_header(length: int, kind: int, flags: int, body_bytes_max: int, head: bytes) -> None:
    """Refuse a header that can't be right. `head` are the first bytes seen, for the message.

    Raises ProtocolError.
    """
    if length > body_bytes_max and head[3:9] == _HTTP2_SETTINGS:
        raise ProtocolError(
            "the other end speaks HTTP/2, as a gRPC port does, not the lane's protocol",
            remedy="give the address of the lane: a master's gRPC port is by default the one after",
        )
    if not HELLO <= kind <= ERROR:
        if kind == GOODBYE:
            raise ProtocolError("frame kind 6 (GOODBYE) is reserved and not sent by any version")
        raise ProtocolError(f"not a cenote frame: kind {kind}, it begins with {head[:16]!r}")
    if flags:
        raise ProtocolError(f"{KIND_NAMES[kind]} frame with unknown flags {flags:#04x}")
    if length > body_bytes_max:
        raise ProtocolError(
            f"{KIND_NAMES[kind]} frame of {length} bytes exceeds the limit of {body_bytes_max}",
            remedy="send less in one call",
        )


# --- errors -------------------------------------------------------------------------------------

_MAYBE_EXECUTED: Final = "maybe_executed"
_LEADER_ADDRESSES_MAX: Final = 8
_TRISTATE: Final[dict[str, bool | None]] = {"1": True, "0": False}


def _extra_of_already_exists(error: AlreadyExists) -> str:
    return "" if error.same_bytes is None else str(int(error.same_bytes))


def _extra_of_not_leader(error: NotLeader) -> str:
    return " ".join((str(error.epoch), *error.addresses))


def _extra_of_maybe_executed(error: CenoteError) -> str:
    return _MAYBE_EXECUTED if error.maybe_executed else ""


def _set_maybe_executed(error: CenoteError, extra: str) -> None:
    error.maybe_executed = extra == _MAYBE_EXECUTED


def _set_same_bytes(error: AlreadyExists, extra: str) -> None:
    error.same_bytes = _TRISTATE.get(extra)


def _set_leader(error: NotLeader, extra: str) -> None:
    epoch, *addresses = extra.split()[: 1 + _LEADER_ADDRESSES_MAX] or ["0"]
    error.epoch = int(epoch) if epoch.isascii() and epoch.isdigit() and len(epoch) < 20 else 0
    error.addresses = tuple(addresses)


# What an error class carries besides message and remedy: how to write it as text, how to read it.
_EXTRAS: Final[dict[type[CenoteError], tuple[Callable[..., str], Callable[..., None]]]] = {
    AlreadyExists: (_extra_of_already_exists, _set_same_bytes),
    DeadlineExceeded: (_extra_of_maybe_executed, _set_maybe_executed),
    NotLeader: (_extra_of_not_leader, _set_leader),
    TenureEnded: (_extra_of_not_leader, _set_leader),
    Unavailable: (_extra_of_maybe_executed, _set_maybe_executed),
}


def error_extra(error: CenoteError) -> str:
    """The attributes of `error` beyond message and remedy as one text, "" where it has none."""
    entry = _EXTRAS.get(type(error))
    return entry[0](error) if entry else ""


def rebuild_error(code: int, message: str, remedy: str, extra: str) -> CenoteError:
    """The typed error for what came over a wire; an unknown code gives a plain CenoteError."""
    error = error_from_code(code, message, remedy)
    entry = _EXTRAS.get(type(error))
    if entry:
        entry[1](error, extra)
    return error


def _wire_text(text: str) -> bytes:
    """UTF-8 without NUL (the separator) and of bounded length."""
    raw = text.replace("\x00", "\\0").encode("utf-8", "replace")
    if len(raw) > _ERROR_TEXT_BYTES_MAX:
        raw = raw[:_ERROR_TEXT_BYTES_MAX].decode("utf-8", "ignore").encode() + "…".encode()
    return raw


def encode_error(error: CenoteError) -> bytes:
    """The body of an ERROR frame."""
    return b"\x00".join(
        (_wire_text(error.message), _wire_text(error.remedy), _wire_text(error_extra(error)))
    )


def decode_error(code: int, body: bytes) -> CenoteError:
    """The typed error that an ERROR frame stands for. Total: any bytes give an error to raise."""
    parts = body.decode("utf-8", "replace").split("\x00", 2)
    parts += [""] * (3 - len(parts))
    return rebuild_error(code, *parts)


def pack_error(call_id: int, error: CenoteError, method: int = 0) -> bytes:
    """A whole ERROR frame."""
    return pack_frame(ERROR, call_id, method, error.code, encode_error(error))


# --- hello --------------------------------------------------------------------------------------


def pack_hello(
    payload: bytes,
    version_min: int = PROTOCOL_VERSION_MIN,
    version_max: int = PROTOCOL_VERSION_MAX,
) -> bytes:
    """The body of a HELLO frame."""
    return _HELLO_HEAD.pack(MAGIC, version_min, version_max) + payload


def parse_hello(body: bytes) -> Hello:
    """Raises ProtocolError where this is no hello of ours."""
    version_min, version_max = _parse_hello_head(body, "HELLO")
    if version_min > version_max:
        raise ProtocolError(f"HELLO offers protocol versions {version_min} to {version_max}")
    return Hello(version_min, version_max, body[_HELLO_HEAD.size :])


def pack_hello_reply(version: int, payload: bytes) -> bytes:
    """The body of a HELLO_REPLY frame."""
    return _HELLO_HEAD.pack(MAGIC, version, 0) + payload


def parse_hello_reply(body: bytes) -> HelloReply:
    """Raises ProtocolError where this is no hello reply of ours."""
    version, _ = _parse_hello_head(body, "HELLO_REPLY")
    return HelloReply(version, body[_HELLO_HEAD.size :])


def _parse_hello_head(body: bytes, name: str) -> tuple[int, int]:
    if len(body) < _HELLO_HEAD.size:
        raise ProtocolError(f"{name} of {len(body)} bytes, at least {_HELLO_HEAD.size} are due")
    magic, first, second = _HELLO_HEAD.unpack_from(body)
    if magic != MAGIC:
        raise ProtocolError(f"{name} begins with {magic!r} instead of {MAGIC!r}")
    return first, second


def choose_version(
    hello: Hello,
    version_min: int = PROTOCOL_VERSION_MIN,
    version_max: int = PROTOCOL_VERSION_MAX,
) -> int:
    """The highest protocol version that both ends speak. Raises ProtocolVersionMismatch."""
    version = min(hello.version_max, version_max)
    if version < max(hello.version_min, version_min):
        raise ProtocolVersionMismatch(
            f"no common protocol version: the client speaks {hello.version_min} to "
            f"{hello.version_max}, this server {version_min} to {version_max}"
        )
    return version


# --- parsing ------------------------------------------------------------------------------------


class FrameParser:
    """Frames out of a byte stream that is cut anywhere.

    `feed` takes a chunk as it came from the socket, `next` gives one frame at a time, so that the
    caller decides how many to work off now. A body inside one chunk is sliced out of it, a body
    over several chunks is joined: one copy in either case. `buffered_bytes` is what it holds on to:
    at most one frame under construction plus what was fed and not yet taken.

    After a ProtocolError the stream can't be understood any more: `next` raises it again.
    """

    __slots__ = (
        "_chunk",
        "_error",
        "_have",
        "_head",
        "_header",
        "_pieces",
        "_pos",
        "body_bytes_max",
        "rejected_call_id",
    )

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX_DEFAULT) -> None:
        self.body_bytes_max = body_bytes_max
        self.rejected_call_id = 0  # of the frame that was refused, where its header is credible
        self._chunk = b""
        self._pos = 0
        self._head = b""  # an unfinished header
        self._header: tuple[int, int, int, int, int, int] | None = None  # its body is unfinished
        self._pieces: list[bytes | memoryview] = []
        self._have = 0
        self._error: ProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes held: the unfinished frame and the fed bytes that are not yet taken."""
        return len(self._chunk) - self._pos + len(self._head) + self._have

    @property
    def idle(self) -> bool:
        """True between two frames with nothing left to take."""
        return self._pos == len(self._chunk) and not self._head and self._header is None

    def feed(self, chunk: bytes) -> None:
        """Take over the next bytes of the stream."""
        if self._pos < len(self._chunk):
            chunk = self._chunk[self._pos :] + chunk
        self._chunk = chunk
        self._pos = 0

    def next(self) -> Frame | None:
        """The next frame, or None when more bytes are needed. Raises ProtocolError."""
        if self._header is not None:
            return self._continue_body()
        if self._error is not None:
            raise self._error
        chunk, pos = self._chunk, self._pos
        if self._head:
            missing = HEADER_BYTES - len(self._head)
            head = self._head + chunk[pos : pos + missing]
            pos += missing
        else:
            head = chunk[pos : pos + HEADER_BYTES]
            pos += HEADER_BYTES
        if len(head) < HEADER_BYTES:
            self._head = head
            self._chunk, self._pos = b"", 0
            return None
        length, call_id, method, kind, flags, word = header = HEADER.unpack(head)
        if flags or length > self.body_bytes_max or not HELLO <= kind <= ERROR:
            raise self._refuse(header, head)
        end = pos + length
        if end <= len(chunk):
            self._head = b""
            self._pos = end
            return kind, call_id, method, word, chunk[pos:end]
        self._head = b""
        self._header = header
        self._pos = pos
        return self._continue_body()

    def _continue_body(self) -> Frame | None:
        assert self._header is not None
        length, call_id, method, kind, _, word = self._header
        chunk, pos = self._chunk, self._pos
        missing = length - self._have
        available = len(chunk) - pos
        if available < missing:
            if available:
                piece: bytes | memoryview = (
                    chunk[pos:] if available < _COPY_BELOW_BYTES else memoryview(chunk)[pos:]
                )
                self._pieces.append(piece)
                self._have += available
            self._chunk, self._pos = b"", 0
            return None
        self._pieces.append(memoryview(chunk)[pos : pos + missing])
        self._pos = pos + missing
        body = b"".join(self._pieces)
        self._header = None
        self._pieces = []
        self._have = 0
        return kind, call_id, method, word, body

    def _refuse(self, header: tuple[int, int, int, int, int, int], head: bytes) -> ProtocolError:
        length, call_id, _, kind, flags, _ = header
        if HELLO <= kind <= ERROR and not flags:
            self.rejected_call_id = call_id
        self._chunk, self._pos, self._head = b"", 0, b""
        try:
            check_header(length, kind, flags, self.body_bytes_max, head)
        except ProtocolError as error:
            self._error = error
            return error
        raise AssertionError(f"a header that is right was refused: {header}")
