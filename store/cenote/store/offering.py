"""What a hello is answered with on the Unix socket: descriptors of what may be mapped."""

from __future__ import annotations

from collections.abc import Sequence

from cenote.transport import wire
from cenote.transport.opening import close_all
from cenote.v1 import store_pb2

from .claims import ClaimFile
from .segment import Segment, SegmentSet
from .served_socket import ServedSocket
from .serving import introduction
from .sessions import open_marked
from .staged_reads import offer_staging

__all__ = ["answer_with_descriptors"]


def answer_with_descriptors(
    io: ServedSocket,
    daemon: SegmentSet,
    offered: Sequence[Segment],
    hello: store_pb2.DataHelloRequest,
    claims: ClaimFile,
    server_version: str,
) -> None:
    """To be called while whoever would cut this session waits: so that it sees either the
    descriptors' marks or none. Raises ResourceUnavailable."""
    greeting = introduction(daemon, offered, server_version)
    descriptors = list[int]()
    try:
        for segment in offered:
            if segment.fd >= 0:
                marked = open_marked(segment, hello.session_id, writable=hello.writer)
                descriptors.append(marked)
        claims.offer(hello.session_id, hello, greeting, descriptors)
        offer_staging(daemon.disk, hello, greeting, descriptors)
        io.send_descriptors(wire.encode_hello_reply(greeting), descriptors)
    finally:
        close_all(descriptors)
