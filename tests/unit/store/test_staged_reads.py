"""Reads from the SSD through staging memory that is lent to readers: whose it is, and when."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cenote.runtime.memory import address_of
from cenote.store import served_connection
from cenote.store.disk_reads import group_bytes_for
from cenote.transport import wire
from cenote.transport.base import Channel
from cenote.v1 import store_pb2
from ssd_node import MIB, SSD_ID, SsdNode, fill, payload_of, read, rows_of
from waiting import wait_until

NO_STAGING = "bytes went through the socket"


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that would go through the socket are an error."""

    def refuse(*_: object) -> None:
        raise AssertionError(NO_STAGING)

    monkeypatch.setattr(served_connection, "send_items", refuse)


@pytest.mark.usefixtures("no_sockets")
def test_readers_on_this_host_take_bytes_from_staging_memory(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        assert read(node, [(at, len(d)) for d, at in made], shm=True) == [d for d, _ in made]
        staging = node.ssd.disk.staging
        wait_until(lambda: staging.free == staging.buffers, what="all buffers to be given back")


@pytest.mark.usefixtures("no_sockets")
def test_several_readers_share_little_staging_memory(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        data = payload_of(9, 9 * MIB)  # more than there is staging memory
        node.put(0, data, [(0, len(data))])
        node.copy([0], 0, 0, len(data))
        assert set(node.results(1).values()) == {0}
        channel = node.channel(shm=True)

        def one(_: int) -> bool:
            buffer = bytearray(len(data))
            status, _ = channel.read_one(SSD_ID, 0, len(data), address_of(buffer), 20.0, True)
            return status == 0 and buffer == data

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(one, range(12)))


def test_a_reader_of_an_earlier_process_maps_that_of_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SsdNode(tmp_path) as node:
        data, at = fill(node)[5]
        channel = node.channel(shm=True)
        read_one(channel, data, at)
        node.ssd.disk.staging.staging_id += 2  # as after a restart
        read_one(channel, data, at)  # through the socket
        with monkeypatch.context() as patch:
            patch.setattr(served_connection, "send_items", None)
            read_one(channel, data, at)


def read_one(channel: Channel, data: bytes, at: int) -> None:
    buffer = bytearray(len(data))
    status, _ = channel.read_one(SSD_ID, at, len(data), address_of(buffer), 10.0, True)
    assert (status, bytes(buffer)) == (0, data)


def test_what_was_lent_to_a_reader_that_is_gone_comes_back(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        staging = node.ssd.disk.staging
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(node.server.unix_path or "")
            sock.sendall(wire.encode_hello(store_pb2.DataHelloRequest(session_id=b"s" * 16)))
            head = sock.recv(wire.HELLO_REPLY.size, socket.MSG_WAITALL)
            code, length = wire.hello_reply_length(head)
            wire.decode_hello_reply(code, sock.recv(length, socket.MSG_WAITALL))
            rows = rows_of(*((at, len(data)) for data, at in made))
            body = rows.tobytes()
            ask = wire.REQUEST.pack(
                wire.OP_STAGED, 0, 0, len(rows), 1, 0, staging.staging_id, len(body)
            )
            sock.sendall(ask + body)
            expected = wire.REPLY_BYTES + len(rows) + wire.STAGED_GROUP.size
            assert len(sock.recv(expected, socket.MSG_WAITALL)) == expected
            assert staging.free < staging.buffers  # told, and not copied yet
        wait_until(lambda: staging.free == staging.buffers, what="its buffers to come back")


def test_what_is_in_memory_is_not_read_this_way(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(node.server.unix_path or "")
            sock.sendall(wire.encode_hello(store_pb2.DataHelloRequest(session_id=b"s" * 16)))
            head = sock.recv(wire.HELLO_REPLY.size, socket.MSG_WAITALL)
            sock.recv(wire.hello_reply_length(head)[1], socket.MSG_WAITALL)
            rows = np.concatenate((rows_of((made[0][1], 1)), rows_of((0, 64))))
            rows["segment"][1] = node.dram.segment_id
            staging_id, body = node.ssd.disk.staging.staging_id, rows.tobytes()
            sock.sendall(wire.REQUEST.pack(wire.OP_STAGED, 0, 0, 2, 1, 0, staging_id, len(body)))
            sock.sendall(body)
            answer = sock.recv(wire.REPLY_BYTES + 2, socket.MSG_WAITALL)
            assert answer[-2] == 0
            assert answer[-1] != 0


def test_a_read_that_takes_long_leaves_no_thread_of_the_device_without_work(tmp_path: Path) -> None:
    """What comes first is sent first; what comes behind it is read meanwhile."""
    with SsdNode(tmp_path, staging_bytes=64 * MIB) as node:
        data = payload_of(9, 12 * MIB)
        node.put(0, data, [(0, len(data))])
        node.copy([0], 0, 0, len(data))
        assert set(node.results(1).values()) == {0}
        begins, begun, first_may_end = node.ssd.plan.data_at, set(), threading.Event()

        def slow(offset: int, _: int) -> None:
            begun.add(offset)
            if offset == begins:
                first_may_end.wait(20)

        node.device.on_read = slow
        channel, buffer = node.channel(shm=True), bytearray(len(data))
        place = address_of(buffer)
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(channel.read_one, SSD_ID, 0, len(data), place, 20.0, True)
            groups = len(data) // group_bytes_for([len(data)], node.ssd.disk.threads)
            assert groups > node.ssd.disk.threads
            wait_until(lambda: len(begun) == groups, what="all others to be read")
            first_may_end.set()
            assert read.result(20)[0] == 0
        assert buffer == data


def test_a_long_read_is_cut_so_that_not_all_ends_at_once() -> None:
    assert group_bytes_for([MIB * 5 // 2], 16) == 640 << 10
    assert group_bytes_for([64 << 10] * 256, 16) == 512 << 10
    assert group_bytes_for([MIB * 5 // 2] * 64, 16) == MIB
    assert group_bytes_for([100], 16) == 128 << 10
