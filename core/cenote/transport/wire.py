"""Bytes on data connections (TCP and a daemon's Unix socket alike), little-endian throughout.

Opening: HELLO (magic, lowest and highest version, length) and a `DataHelloRequest`; the answer is
HELLO_REPLY (code, length) and a `DataHelloResponse`, or for code > 0 an error's text. On a Unix
socket that asked for descriptors they ride with the answer: up to DESCRIPTORS_PER_MESSAGE with its
first byte, each further chunk with one byte of its own behind the answer.

Then requests, of which several may be under way; they are answered in order:

    READ    header, n EXTENT rows              -> header, n status bytes, payload of the OK items
    WRITE   header, n EXTENT rows, payload     -> header, n status bytes
    SEAL    header, SEAL_PREFIX, n SEAL rows,
            keys back to back                  -> header, n status bytes
    PING    header, 24 bytes of nothing        -> header, one status byte
    RDMA    header, length u32, RdmaRequest,
            padding up to 24 bytes             -> header, one status byte, RdmaReply
    GRANT   header, namespace u32, bytes of
            signatures u32, SIGNATURE rows,
            n EXTENT rows
                                       -> header, one status byte
    SLOTS   header, n SLOT_WANTED rows         -> header, n status bytes, records of the OK items
    STAGED  header, n EXTENT rows              -> header, n status bytes, groups (see below)
    PROVE   header, n PROOF rows               -> header, n status bytes, n tickets of 16 bytes

STAGED is a READ from an SSD by a reader that has mapped the daemon's staging memory (which it names
as the grant id). Instead of payload come groups: each says in which runs of that memory the next
bytes of the payload lie. To each the reader answers with one byte, once it has copied them.

A body has at least 24 bytes, so that header and first row are always 56 bytes: the server takes
them in one call, which is all there is to a small read. A reply with code > 0 refuses the whole
request: no statuses, its body is the error's text (message, NUL, remedy). A reply's body is never
empty.

Nothing here does I/O; every number that came over a wire is bounded before it is used.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from google.protobuf.message import DecodeError

from cenote.api.errors import CenoteError, ProtocolError, ProtocolVersionMismatch, error_from_code
from cenote.v1 import store_pb2

__all__ = [
    "BODY_BYTES_MIN",
    "DESCRIPTORS_PER_MESSAGE",
    "EXTENT_BYTES",
    "GRANT_BYTES_MAX",
    "GRANT_PREFIX",
    "HEAD_BYTES",
    "HELLO",
    "HELLO_BYTES_MAX",
    "HELLO_REPLY",
    "ITEMS_MAX",
    "ITEM_BYTES_MAX",
    "MAGIC",
    "OP_GRANT",
    "OP_NONE",
    "OP_PING",
    "OP_PROVE",
    "OP_RDMA",
    "OP_READ",
    "OP_SEAL",
    "OP_SLOTS",
    "OP_STAGED",
    "OP_WRITE",
    "PROOF_ROW_BYTES",
    "RDMA_BYTES_MAX",
    "RDMA_REPLY_BYTES_MAX",
    "REPLY",
    "REPLY_BYTES",
    "REPLY_BYTES_MAX",
    "REPLY_ONE",
    "REQUEST",
    "REQUEST_BYTES",
    "REQUEST_ONE",
    "SEAL_BYTES_MAX",
    "SEAL_PREFIX",
    "SEAL_ROW_BYTES",
    "SLOT_RECORD_BYTES",
    "SLOT_WANTED_BYTES",
    "STAGED_GROUP",
    "STAGED_RUN",
    "STAGED_RUNS_MAX",
    "TEXT_BYTES_MAX",
    "VERSION_MAX",
    "VERSION_MIN",
    "decode_error",
    "decode_hello",
    "decode_hello_reply",
    "decode_rdma_reply",
    "decode_rdma_request",
    "encode_error",
    "encode_hello",
    "encode_hello_error",
    "encode_hello_reply",
    "encode_rdma_request",
    "hello_length",
    "hello_reply_length",
]

MAGIC: Final = b"cenote\x00D"
VERSION_MIN: Final = 1
VERSION_MAX: Final = 1

HELLO: Final = Struct("<8sHHI")
HELLO_REPLY: Final = Struct("<II")
HELLO_BYTES_MAX: Final = 64 << 10
DESCRIPTORS_PER_MESSAGE: Final = 200  # the kernel's limit is 253

OP_NONE: Final = 0
"""In an error that answers no request: the session was cut off, the daemon stops."""
OP_READ: Final = 1
OP_WRITE: Final = 2
OP_SEAL: Final = 3
OP_PING: Final = 4
OP_RDMA: Final = 5
OP_SLOTS: Final = 6
OP_STAGED: Final = 7
OP_PROVE: Final = 8
OP_GRANT: Final = 9

REQUEST: Final = Struct("<BBHIIIQQ")
"""op, flags, reserved, items, call id, epoch, grant id, body length."""
REQUEST_ONE: Final = Struct("<BBHIIIQQIIQQ")
"""A request header and the EXTENT row of its only item."""
REPLY: Final = Struct("<BBHIIIQ")
"""op, flags, code (0: done), items, call id, the daemon's epoch, body length."""
REPLY_ONE: Final = Struct("<BBHIIIQB")
"""A reply header and the first byte of its body, which has at least one."""
STAGED_GROUP: Final = Struct("<IIQQ")
"""runs, reserved, and the first run (where in the staging memory, length); the others follow."""
STAGED_RUN: Final = Struct("<QQ")
STAGED_RUNS_MAX: Final = 16_384
SEAL_PREFIX: Final = Struct("<II")
"""namespace id, generation."""

GRANT_PREFIX: Final = Struct("<II")
"""namespace id, bytes of proofs."""

REQUEST_BYTES: Final = REQUEST.size
REPLY_BYTES: Final = REPLY.size
HEAD_BYTES: Final = REQUEST_ONE.size
EXTENT_BYTES: Final = 24
SEAL_ROW_BYTES: Final = 76
PROOF_ROW_BYTES: Final = 40
SLOT_WANTED_BYTES: Final = 24
SLOT_RECORD_BYTES: Final = 192
"""A record as it stands in a slot table."""
BODY_BYTES_MIN: Final = HEAD_BYTES - REQUEST_BYTES

ITEMS_MAX: Final = 16_384
ITEM_BYTES_MAX: Final = 1 << 40  # keeps sums of 16,384 lengths far from the end of 64 bits
SEAL_BYTES_MAX: Final = SEAL_PREFIX.size + ITEMS_MAX * (SEAL_ROW_BYTES + 512)
GRANT_BYTES_MAX: Final = 32 << 20
"""A grant of 16,384 objects may have 64 extents of each; most have one."""
TEXT_BYTES_MAX: Final = 4_096
RDMA_BYTES_MAX: Final = 64 << 10
RDMA_REPLY_BYTES_MAX: Final = 8 << 20
"""An answer names each registration, one a GiB or so, with a key for each device."""
_RDMA_LENGTH: Final = Struct("<I")
REPLY_BYTES_MAX: Final = ITEMS_MAX * (ITEM_BYTES_MAX + 1)


def encode_error(error: CenoteError) -> bytes:
    """The text of an error as it travels; its code goes in the header."""
    text = f"{error.message}\x00{error.remedy}".encode()
    return text[:TEXT_BYTES_MAX]


def decode_error(code: int, text: bytes) -> CenoteError:
    """The typed error for a code and a text from the wire."""
    message, _, remedy = text.decode(errors="replace").partition("\x00")
    return error_from_code(code, message, remedy)


def encode_hello(request: store_pb2.DataHelloRequest) -> bytes:
    """What a client sends first."""
    body = request.SerializeToString()
    return HELLO.pack(MAGIC, VERSION_MIN, VERSION_MAX, len(body)) + body


def hello_length(head: bytes | bytearray) -> int:
    """How many bytes follow a client's HELLO.

    Raises ProtocolError (another protocol, or too long) and ProtocolVersionMismatch.
    """
    magic, version_min, version_max, length = HELLO.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("the connection did not begin with cenote's data protocol")
    if version_min > VERSION_MAX or version_max < VERSION_MIN:
        raise ProtocolVersionMismatch(
            f"data protocol versions {version_min} to {version_max} were offered,"
            f" {VERSION_MIN} to {VERSION_MAX} are spoken here"
        )
    if length > HELLO_BYTES_MAX:
        raise ProtocolError(f"a hello of {length} bytes; {HELLO_BYTES_MAX} are allowed")
    return int(length)


def decode_hello(body: bytes | bytearray) -> store_pb2.DataHelloRequest:
    """The hello behind HELLO. Raises ProtocolError."""
    try:
        return store_pb2.DataHelloRequest.FromString(bytes(body))
    except DecodeError as error:
        raise ProtocolError("the hello is no DataHelloRequest") from error


def encode_hello_reply(response: store_pb2.DataHelloResponse) -> bytes:
    """The server's answer to a hello that it accepts."""
    body = response.SerializeToString()
    return HELLO_REPLY.pack(0, len(body)) + body


def encode_hello_error(error: CenoteError) -> bytes:
    """The server's answer to a hello that it refuses."""
    text = encode_error(error)
    return HELLO_REPLY.pack(error.code, len(text)) + text


def hello_reply_length(head: bytes | bytearray) -> tuple[int, int]:
    """(code, length of what follows). Raises ProtocolError where it can't be cenote's."""
    code, length = HELLO_REPLY.unpack(head)
    # An answer names each segment of a daemon, of which there may be thousands.
    if length > (HELLO_BYTES_MAX << 6) or code > 0xFFFF:
        raise ProtocolError(f"the answer to the hello has code {code} and {length} bytes")
    return int(code), int(length)


def decode_hello_reply(code: int, body: bytes | bytearray) -> store_pb2.DataHelloResponse:
    """The daemon's answer. Raises the error that it carries, or ProtocolError."""
    if code:
        raise decode_error(code, bytes(body))
    try:
        return store_pb2.DataHelloResponse.FromString(bytes(body))
    except DecodeError as error:
        raise ProtocolError("the answer to the hello is no DataHelloResponse") from error


def encode_rdma_request(request: store_pb2.RdmaRequest) -> bytes:
    """The body of a request RDMA."""
    body = request.SerializeToString()
    return (_RDMA_LENGTH.pack(len(body)) + body).ljust(BODY_BYTES_MIN, b"\x00")


def decode_rdma_request(body: bytes | bytearray | memoryview) -> store_pb2.RdmaRequest:
    """The reverse of `encode_rdma_request`. Raises ProtocolError."""
    (length,) = _RDMA_LENGTH.unpack_from(body)
    first = _RDMA_LENGTH.size
    if length > len(body) - first:
        raise ProtocolError(f"an RDMA request of {length} bytes in a body of {len(body)}")
    try:
        return store_pb2.RdmaRequest.FromString(bytes(body[first : first + length]))
    except DecodeError as error:
        raise ProtocolError("the RDMA request is no RdmaRequest") from error


def decode_rdma_reply(body: bytes | bytearray) -> store_pb2.RdmaReply:
    """What follows the status byte. Raises ProtocolError."""
    try:
        return store_pb2.RdmaReply.FromString(bytes(body))
    except DecodeError as error:
        raise ProtocolError("the answer to an RDMA request is no RdmaReply") from error
