"""Cutting sessions off: after it nothing of theirs can reach a segment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from cenote.api.errors import GrantRevoked, InvalidArgument
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable, is_mapped, open_marked
from cenote.transport import wire
from cenote.transport.base import SessionIdentity
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.opening import close_all, connect, greet
from cenote.transport.tcp import TcpChannel, TcpTransport
from cenote.transport.testing_support import LocalMemory, batch
from cenote.v1 import common_pb2, store_pb2
from data_daemon import SEGMENT_ID, MappingClient
from promptness import ends_within
from waiting import wait_until

SESSION = b"0123456789abcdef"
OTHER = b"another session!"


class FakeConnection:
    def __init__(self, quiet: bool = True, older: bool = False) -> None:
        self.quiet = quiet
        self.older = older
        self.revoked = False

    def revoke(self) -> None:
        self.revoked = True

    def supersede(self, epoch: int) -> None:
        """Nothing of it lands by itself."""

    def writes_of_older(self, epoch: int) -> bool:
        return self.older

    def wait_quiet(self, timeout_s: float) -> bool:
        return self.quiet


@pytest.fixture
def segment() -> Iterator[FakeSegment]:
    segment = FakeSegment(SEGMENT_ID, 1 << 20)
    yield segment
    segment.close()


@dataclass
class Daemon:
    segment: FakeSegment
    segments: FakeSegments
    sessions: SessionTable
    server: DataServer
    node: common_pb2.NodeView


@pytest.fixture
def daemon(segment: FakeSegment, tmp_path: Path) -> Iterator[Daemon]:
    segments = FakeSegments([segment])
    sessions = SessionTable(segments)
    path = str(tmp_path / "data.sock")
    server = DataServer(segments, sessions, tcp=("127.0.0.1", 0), unix_path=path)
    server.start()
    assert server.tcp_address is not None
    tcp, shm = common_pb2.TRANSPORT_KIND_TCP, common_pb2.TRANSPORT_KIND_SHM
    endpoints = [
        common_pb2.Endpoint(kind=tcp, address=f"127.0.0.1:{server.tcp_address[1]}"),
        common_pb2.Endpoint(kind=shm, address=path),
    ]
    node = common_pb2.NodeView(node_id=1, boot_id="this boot", endpoints=endpoints)
    yield Daemon(segment, segments, sessions, server, node)
    server.close()


# ---- the table ------------------------------------------------------------------------------


def test_sessions_are_counted_and_named(segment: FakeSegment) -> None:
    table = SessionTable(FakeSegments([segment]))
    first, second = FakeConnection(), FakeConnection()
    with pytest.raises(InvalidArgument):
        table.admit(b"short", first)
    table.admit(SESSION, first)
    table.admit(SESSION, second)
    table.admit(OTHER, second)
    assert table.session_count() == 2
    table.leave(SESSION, first)
    table.leave(SESSION, first)
    assert table.session_count() == 2
    table.leave(SESSION, second)
    assert table.session_count() == 1


def test_a_cut_session_is_refused_for_good_and_others_are_not(segment: FakeSegment) -> None:
    table = SessionTable(FakeSegments([segment]))
    mine, others = FakeConnection(), FakeConnection()
    table.admit(SESSION, mine)
    table.admit(OTHER, others)
    unknown = b"never seen here!"
    assert table.cut([SESSION, unknown]) == ([SESSION, unknown], [])
    assert (mine.revoked, others.revoked) == (True, False)
    for session_id in (SESSION, unknown):
        with pytest.raises(GrantRevoked):
            table.admit(session_id, FakeConnection())
    table.admit(OTHER, FakeConnection())
    assert table.cut([SESSION]) == ([SESSION], [])
    assert table.poll() == []


def test_a_thread_that_does_not_leave_keeps_its_session_quarantined(segment: FakeSegment) -> None:
    table = SessionTable(FakeSegments([segment]))
    stuck = FakeConnection(quiet=False)
    table.admit(SESSION, stuck)
    assert table.cut([SESSION, OTHER], 0.01) == ([OTHER], [SESSION])
    assert table.quarantined() == [SESSION]
    assert table.poll() == []
    stuck.quiet = True
    assert table.poll() == [SESSION]
    assert table.poll() == []
    assert table.quarantined() == []


def test_only_older_changes_are_ended_by_a_new_epoch(segment: FakeSegment) -> None:
    table = SessionTable(FakeSegments([segment]))
    older, newer = FakeConnection(older=True), FakeConnection()
    table.admit(SESSION, older)
    table.admit(OTHER, newer)
    assert table.end_older_writes(2)
    assert (older.revoked, newer.revoked) == (True, False)
    table.admit(OTHER, FakeConnection(older=True, quiet=False))
    assert not table.end_older_writes(2, 0.01)


# ---- marks ----------------------------------------------------------------------------------


def test_a_mark_is_one_session_s_and_ends_with_the_last_descriptor(segment: FakeSegment) -> None:
    assert not is_mapped(segment, SESSION)
    first = open_marked(segment, SESSION, writable=True)
    second = open_marked(segment, SESSION, writable=False)
    third = open_marked(segment, OTHER, writable=False)
    assert is_mapped(segment, SESSION)
    assert is_mapped(segment, OTHER)
    copy = os.dup(first)
    os.close(first)
    os.close(second)
    assert is_mapped(segment, SESSION)
    os.close(copy)
    assert not is_mapped(segment, SESSION)
    assert is_mapped(segment, OTHER)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(third, b"a reader's")
    os.close(third)


def test_another_daemon_process_sees_the_marks_of_its_forerunner(segment: FakeSegment) -> None:
    held = open_marked(segment, SESSION, writable=True)
    successor = FakeSegment(SEGMENT_ID, 4096)
    os.close(successor.fd)
    successor.fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    table = SessionTable(FakeSegments([successor]))
    assert table.cut([SESSION]) == ([], [SESSION])
    os.close(held)
    assert table.poll() == [SESSION]
    successor.close()


# ---- over sockets ---------------------------------------------------------------------------


@contextlib.contextmanager
def half_a_write(daemon: Daemon, epoch: int = 1) -> Iterator[socket.socket]:
    """A client that has sent the first half of a write: 1000 of 2000 bytes, all of them 'x'."""
    target = daemon.server.tcp_address
    assert target is not None
    connection = connect(target, "daemon", monotonic() + 10)
    try:
        greet(connection, store_pb2.DataHelloRequest(session_id=SESSION, writer=True))
        head = wire.REQUEST.pack(wire.OP_WRITE, 0, 0, 1, 1, epoch, 7, 24 + 2000)
        row = batch([(SEGMENT_ID, 0, 2000)]).tobytes()
        connection.sock.sendall(head + row + b"x" * 1000)
        wait_until(lambda: daemon.segment.view[999] == ord("x"), what="the first half")
        assert isinstance(connection.sock, socket.socket)
        yield connection.sock
    finally:
        connection.close()


def test_a_cut_in_the_middle_of_a_frame(daemon: Daemon) -> None:
    with half_a_write(daemon) as sock:
        with ends_within(0.9):
            assert daemon.sessions.cut([SESSION]) == ([SESSION], [])
        daemon.segment.view[:2000] = b"n" * 2000  # the next one's bytes
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * 1000)
        wait_until(lambda: not daemon.server.counters().connections, what="the thread to end")
        assert bytes(daemon.segment.view[:2000]) == b"n" * 2000


def write_until_revoked(channel: TcpChannel, first: int) -> None:
    memory = LocalMemory(1 << 19)
    extents = batch([(SEGMENT_ID, first + (i << 13), 8000) for i in range(60)])
    addresses = np.arange(60, dtype=np.uint64) * np.uint64(8192) + np.uint64(memory.address)
    with contextlib.suppress(GrantRevoked):
        while not channel.write(extents, addresses, 7, 10.0).any():
            pass
        raise AssertionError("an item failed")


def test_cuts_while_a_client_writes_as_fast_as_it_can(daemon: Daemon) -> None:
    """However the cut falls, not a byte lands after it."""
    view = daemon.segment.view
    for turn in range(12):
        session_id = SESSION[:-1] + bytes([turn])
        identity = SessionIdentity(session_id, "this boot", 1, common_pb2.Credentials())
        transport = TcpTransport(connections_per_peer=2)
        channel = transport.connect(daemon.node, identity, 1, 10.0)
        view[:] = bytes(1 << 20)
        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write_until_revoked, channel, i << 19) for i in range(2)]
            wait_until(lambda: view[0] and view[1 << 19], what="bytes of both to land")
            assert daemon.sessions.cut([session_id]) == ([session_id], [])
            view[:] = bytes(1 << 20)
            for writer in writers:
                writer.result(10)
        assert not np.frombuffer(view, np.uint8).any()
        transport.close()


@pytest.mark.parametrize("named", [1, 2])
def test_a_new_epoch_ends_older_writes_that_are_under_way(daemon: Daemon, named: int) -> None:
    """Also one of a client that knows of the new epoch already, under a grant of the old one."""
    with half_a_write(daemon, epoch=named) as sock:
        daemon.segments.epoch = 2
        assert daemon.sessions.end_older_writes(2)
        daemon.segment.view[:2000] = b"n" * 2000
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * 1000)
        wait_until(lambda: not daemon.server.counters().connections, what="the thread to end")
        assert bytes(daemon.segment.view[:2000]) == b"n" * 2000
    # The session itself goes on, in the new epoch.
    with half_a_write(daemon, epoch=2) as sock:
        assert daemon.sessions.end_older_writes(2)
        sock.sendall(b"x" * 1000)
        wait_until(lambda: daemon.segment.view[1999] == ord("x"), what="the second half")


# ---- mapped ---------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [False, True])
def test_a_stopped_process_keeps_its_session_quarantined(daemon: Daemon, write: bool) -> None:
    client = MappingClient(daemon.node, SESSION, write=write)
    try:
        os.kill(client.pid, signal.SIGSTOP)
        assert daemon.sessions.cut([SESSION]) == ([], [SESSION])
        assert daemon.sessions.poll() == []
        assert daemon.sessions.quarantined() == [SESSION]
    finally:
        client.kill()
    wait_until(lambda: daemon.sessions.poll() == [SESSION], what="the mapping to be gone")
    assert daemon.sessions.quarantined() == []


def test_a_client_that_closes_need_not_die_but_its_views_count(daemon: Daemon) -> None:
    client = MappingClient(daemon.node, SESSION, write=True)
    try:
        assert client.ask("close") is True
        assert daemon.sessions.cut([SESSION]) == ([], [SESSION])
        assert client.ask("drop view") is False
        wait_until(lambda: daemon.sessions.poll() == [SESSION], what="the mapping to be gone")
    finally:
        client.kill()


def test_a_forked_child_can_touch_no_more_than_it_was_left(daemon: Daemon) -> None:
    client = MappingClient(daemon.node, SESSION, write=True)
    child = client.ask("fork")
    try:
        client.kill()
        # It has the view that its parent had: the bytes must stay.
        assert daemon.sessions.cut([SESSION]) == ([], [SESSION])
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: daemon.sessions.poll() == [SESSION], what="the child to be gone")


def test_descriptors_are_not_writable_for_readers_and_come_for_hundreds_of_segments(
    segment: FakeSegment, tmp_path: Path
) -> None:
    segments = FakeSegments([segment, *(FakeSegment(100 + i, 4096) for i in range(450))])
    path = str(tmp_path / "data.sock")
    server = DataServer(segments, SessionTable(segments), unix_path=path)
    server.start()
    before = len(os.listdir("/proc/self/fd"))
    for writer in (False, True):
        connection = connect(path, "daemon", monotonic() + 10)
        answer, descriptors = greet(
            connection,
            store_pb2.DataHelloRequest(
                session_id=SESSION, want_descriptors=True, writer=writer, wants_claims=writer
            ),
        )
        assert answer.has_claims == writer
        assert answer.has_head
        head = descriptors.pop()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(head, b"r", 0)
        os.close(head)
        if writer:
            os.close(descriptors.pop())
        assert len(descriptors) == len(answer.segments) == 451
        for shared, descriptor in zip(answer.segments, descriptors, strict=True):
            found = segments.by_id(shared.segment_id)
            assert found is not None
            assert os.fstat(descriptor).st_ino == os.fstat(found.fd).st_ino
            if writer:
                assert os.pwrite(descriptor, b"w", 0) == 1
            else:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(descriptor, b"r", 0)
            assert not os.get_inheritable(descriptor)
        assert is_mapped(segment, SESSION)
        close_all(descriptors)
        # The server's thread may not have come to closing its copies yet.
        wait_until(lambda: not is_mapped(segment, SESSION), what="the last descriptor to go")
        connection.close()
    wait_until(lambda: not server.counters().connections, what="the connections to end")
    server.close()
    assert len(os.listdir("/proc/self/fd")) < before  # the listener is closed, too
    for extra in segments.all()[1:]:
        extra.close()
