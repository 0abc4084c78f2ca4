"""Reads through a daemon's staging memory: bytes where they belong, whatever it says of them."""

from __future__ import annotations

import mmap
import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cenote.api.errors import CenoteError, ProtocolError
from cenote.runtime.memory import address_of
from cenote.transport import wire
from cenote.transport.mapping import Mapping
from cenote.transport.pool import ConnectionPool, hello_for
from cenote.transport.staged import Landing, StagedReader
from cenote.transport.testing_support import LocalMemory, batch
from promptness import ends_within
from unit.transport.test_connection import (
    IDENTITY,
    Script,
    call_id_of,
    greet,
    receive,
    reply,
    serving,
)

ITEM_BYTES = 1000
STAGING_BYTES = 2 * mmap.PAGESIZE


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.lists(st.integers(1, 2500), min_size=1, max_size=30),
)
def test_a_stream_lands_in_its_items_however_it_is_cut(sizes: list[int], cuts: list[int]) -> None:
    total = sum(sizes)
    source = bytearray(np.random.default_rng(total).integers(0, 256, total, np.uint8).tobytes())
    items = [bytearray(size) for size in sizes]
    landing = Landing([address_of(item) for item in items], sizes, hashed=True)
    at = step = 0
    while at < total:
        length = min(cuts[step % len(cuts)], total - at)
        assert not landing.is_full
        landing.take(address_of(source) + at, length)
        at, step = at + length, step + 1
    assert landing.is_full
    assert b"".join(items) == source
    assert landing.sums == [xxh3_64_intdigest(item) for item in items]
    with pytest.raises(ProtocolError):
        landing.take(address_of(source), 1)


def read_from(script: Script, memory: LocalMemory) -> None:
    """Two items from a daemon that does what the script says."""
    descriptor = os.memfd_create("staging")
    try:
        os.ftruncate(descriptor, STAGING_BYTES)
        staging = Mapping(descriptor, STAGING_BYTES, STAGING_BYTES, b"", writable=False)
    finally:
        os.close(descriptor)
    with serving(script) as server:
        hello = hello_for(IDENTITY, 1, writer=False)
        pool = ConnectionPool(("127.0.0.1", server.port), "a daemon", hello, 1)
        try:
            rows = batch([(1, 0, ITEM_BYTES), (1, 4096, ITEM_BYTES)])
            places = np.array([memory.address, memory.address + ITEM_BYTES], np.uint64)
            sums = np.zeros(2, np.uint64)
            StagedReader(pool, staging, 7).read(rows, places, 5.0, sums)
        finally:
            pool.close()


def telling(runs: list[tuple[int, int]], count: int | None = None) -> Script:
    def answer(sock: socket.socket) -> None:
        greet(sock)
        request = receive(sock, wire.REQUEST_BYTES + 2 * wire.EXTENT_BYTES)
        whole = reply(wire.OP_STAGED, call_id_of(request[: wire.HEAD_BYTES]), 2, 2 + 2 * ITEM_BYTES)
        whole += b"\x00\x00"
        whole += wire.STAGED_GROUP.pack(len(runs) if count is None else count, 0, *runs[0])
        whole += b"".join(wire.STAGED_RUN.pack(*run) for run in runs[1:])
        sock.sendall(whole)
        receive(sock, 1)

    return answer


def test_runs_of_a_group_are_copied_in_order() -> None:
    memory = LocalMemory(3 * ITEM_BYTES)
    read_from(telling([(4096, 700), (0, 2 * ITEM_BYTES - 700)]), memory)
    assert not memory.bytes[: 2 * ITEM_BYTES].any()
    assert memory.untouched(2 * ITEM_BYTES, 3 * ITEM_BYTES)


@pytest.mark.parametrize(
    ("runs", "count"),
    [
        ([(STAGING_BYTES - 10, 2 * ITEM_BYTES)], None),
        ([(1 << 63, 10)], None),
        ([(0, 1 << 63)], None),
        ([(0, 0)], None),
        ([(0, 2 * ITEM_BYTES + 1)], None),
        ([(0, 10)], 0),
        ([(0, 10)], 1 << 31),
    ],
)
def test_a_daemon_that_tells_of_other_places_is_not_believed(
    runs: list[tuple[int, int]], count: int | None
) -> None:
    memory = LocalMemory(3 * ITEM_BYTES)
    with ends_within(5.0), pytest.raises(CenoteError) as told:
        read_from(telling(runs, count), memory)
    assert isinstance(told.value, ProtocolError)
    assert memory.untouched(2 * ITEM_BYTES, 3 * ITEM_BYTES)
