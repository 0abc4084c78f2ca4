"""Replies on the lane with bytes changed, missing or added: a reply, or a typed error in time."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.errors import CenoteError, Unavailable
from cenote.rpc.frames import HEADER_BYTES, REPLY, pack_error, pack_frame
from cenote.rpc.lane_client import LaneClient
from promptness import ends_within
from unit.rpc.lane_testing import ECHO, ScriptedServer

BODY = b"what was asked for"
FIRST_CALL = 2
"""1 is the hello."""

changes = st.lists(
    st.tuples(st.integers(0, HEADER_BYTES + len(BODY) - 1), st.integers(1, 255)), max_size=3
)


@settings(max_examples=30)
@given(
    changed=changes,
    cut=st.integers(0, 80),
    added=st.binary(max_size=60),
    refuses=st.booleans(),
    many=st.booleans(),
    hangs_up=st.booleans(),
)
def test_any_answer(
    changed: list[tuple[int, int]],
    cut: int,
    added: bytes,
    refuses: bool,
    many: bool,
    hangs_up: bool,
) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        frame = pack_frame(REPLY, FIRST_CALL, body=BODY)
        if refuses:
            frame = pack_error(FIRST_CALL, Unavailable("not today"))
        whole = bytearray(frame)
        for at, flip in changed:
            whole[at % len(whole)] ^= flip
        sock.sendall(bytes(whole[: cut if cut < 40 else len(whole)]) + added)
        if not hangs_up:
            sock.recv(1)

    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedServer(Path(folder), answer) as server,
        LaneClient(server.address, b"") as client,
        ends_within(0.3),
        contextlib.suppress(CenoteError),
    ):
        if many:
            (result,) = client.call_many(ECHO, [b"x"], 0.2)
            assert isinstance(result, bytes | CenoteError)
        else:
            assert isinstance(client.call(ECHO, b"x", 0.2), bytes)
