"""Replies of a data server with bytes changed, missing or added: a result or a typed error, and no
byte beside the buffers of the caller."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.errors import CenoteError
from cenote.transport import wire
from cenote.transport.testing_support import LocalMemory, batch
from promptness import ends_within
from unit.transport.test_connection import call_id_of, channel_to, greet, receive, reply

ITEM_BYTES = 100
GAP = 64
ROOM = 3 * GAP + 2 * ITEM_BYTES

changes = st.lists(
    st.tuples(st.integers(0, wire.REPLY_BYTES + 2 + 2 * ITEM_BYTES - 1), st.integers(1, 255)),
    max_size=4,
)


@settings(max_examples=60)
@given(changed=changes, cut=st.integers(0, 260), added=st.binary(max_size=40), one=st.booleans())
def test_any_reply_to_a_read(
    changed: list[tuple[int, int]], cut: int, added: bytes, one: bool
) -> None:
    items = 1 if one else 2

    def answer(sock: socket.socket) -> None:
        greet(sock)
        call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
        body = b"\x00" * items + b"d" * ITEM_BYTES * items
        whole = bytearray(reply(wire.OP_READ, call_id, items, len(body)) + body)
        for at, flip in changed:
            if at < len(whole):
                whole[at] ^= flip
        with contextlib.suppress(ConnectionError):
            sock.sendall(bytes(whole[: cut if cut < 200 else len(whole)]) + added)

    memory = LocalMemory(ROOM)
    first, second = GAP, 2 * GAP + ITEM_BYTES
    with channel_to(answer) as channel, ends_within(5.0), contextlib.suppress(CenoteError):
        if one:
            status, _ = channel.read_one(1, 0, ITEM_BYTES, memory.address + first, 5.0, True)
            assert 0 <= status <= 255
        else:
            extents = batch([(1, 0, ITEM_BYTES), (1, 4096, ITEM_BYTES)])
            addresses = np.array([memory.address + first, memory.address + second], np.uint64)
            sums = np.zeros(2, np.uint64)
            assert len(channel.read(extents, addresses, 5.0, sums)) == 2
    assert memory.untouched(0, first)
    assert memory.untouched(first + ITEM_BYTES, second)
    assert memory.untouched(second + ITEM_BYTES, ROOM)


@settings(max_examples=40)
@given(changed=changes, cut=st.integers(0, 60), added=st.binary(max_size=40))
def test_any_reply_to_a_write(changed: list[tuple[int, int]], cut: int, added: bytes) -> None:
    def answer(sock: socket.socket) -> None:
        greet(sock)
        call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
        receive(sock, ITEM_BYTES)
        whole = bytearray(reply(wire.OP_WRITE, call_id, 1, 1) + b"\x00")
        for at, flip in changed:
            whole[at % len(whole)] ^= flip
        with contextlib.suppress(ConnectionError):
            sock.sendall(bytes(whole[: cut if cut < 40 else len(whole)]) + added)

    memory = LocalMemory(ITEM_BYTES)
    with channel_to(answer) as channel, ends_within(5.0), contextlib.suppress(CenoteError):
        status, _ = channel.write_one(1, 0, ITEM_BYTES, memory.address, 7, 5.0, True)
        assert 0 <= status <= 255
    assert memory.untouched(0, ITEM_BYTES)
