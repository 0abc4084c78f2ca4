"""What is particular to shared memory; the rest is in the contract suite."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import GrantRevoked, Unavailable
from cenote.store.claims import ClaimFile, ClaimTable
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable, is_mapped
from cenote.transport import populating
from cenote.transport.base import SessionIdentity
from cenote.transport.claims import VOID
from cenote.transport.copying import CopyTeam
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.shm import ShmChannel, ShmTransport
from cenote.transport.testing_support import LocalMemory, batch, payload
from cenote.v1 import common_pb2
from waiting import wait_until

SHM = common_pb2.TRANSPORT_KIND_SHM
IDENTITY = SessionIdentity(b"0123456789abcdef", "this boot", 1, common_pb2.Credentials())


@dataclass
class Far:
    claims: ClaimTable
    segment: FakeSegment
    segments: FakeSegments
    sessions: SessionTable
    server: DataServer
    node: common_pb2.NodeView
    transport: ShmTransport
    channel: ShmChannel


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    segment = FakeSegment(1, 1 << 20, ready_bytes=1 << 16)
    segments = FakeSegments([segment])
    sessions = SessionTable(segments)
    path = str(tmp_path / "data.sock")
    claims = ClaimFile.in_memory()
    server = DataServer(segments, sessions, unix_path=path, claims=claims)
    server.start()
    node = common_pb2.NodeView(
        node_id=1, boot_id="this boot", endpoints=[common_pb2.Endpoint(kind=SHM, address=path)]
    )
    transport = ShmTransport()
    channel = transport.connect(node, IDENTITY, 1, 10.0)
    yield Far(claims.table, segment, segments, sessions, server, node, transport, channel)
    transport.close()
    server.close()
    claims.close()


@pytest.mark.parametrize("several", [False, True])
def test_a_write_is_claimed_for_as_long_as_it_lasts(
    far: Far, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def stopped_copy(*_: object) -> int:
        began.set()
        assert may_end.wait(20)
        return 0

    monkeypatch.setattr("cenote.transport.shm.copy_hashed", stopped_copy)
    monkeypatch.setattr(CopyTeam, "copy", stopped_copy)
    memory = LocalMemory(256)
    pieces = [(1, 64, 64), (1, 512, 32)] if several else [(1, 64, 64)]
    ends: list[object] = []

    def write(grant_id: int) -> None:
        extents = batch(pieces)
        addresses = np.full(len(pieces), memory.address, np.uint64)
        if several:
            ends.append(far.channel.write(extents, addresses, grant_id, 20.0).tolist())
        else:
            place = pieces[0]
            ends.append(far.channel.write_one(*place, memory.address, grant_id, 20.0, True)[0])

    writer = threading.Thread(target=write, args=(7,))
    writer.start()
    assert began.wait(20)
    far.claims.shut(8)
    (claim,) = far.claims.older()
    assert claim.session_id == IDENTITY.session_id
    assert list(claim.ranges) == [(0, offset, length) for _, offset, length in pieces]
    write(7)  # under the same grant: it does not begin
    assert ends == [[VOID] * 2 if several else VOID]
    assert far.claims.older() == [claim]
    may_end.set()
    writer.join(20)
    assert ends[1:] == [[0, 0] if several else 0]
    assert far.claims.older() == []
    far.claims.admit(8)
    write(8)
    assert ends[2:] == [[0, 0] if several else 0]


def test_a_lease_proves_nothing_once_the_daemon_follows_another_leader(far: Far) -> None:
    """Also to a channel that only reads, and has no page of its own."""
    lease_id = 5 << 40 | 9
    assert far.channel.proves(lease_id)  # no grant was made void yet
    assert not far.channel.proves(0)
    for first_grant_id, proven in (
        (5 << 40 | 77, True),  # a daemon that was restarted under the same leader
        (6 << 40, False),
        ((1 << 64) - 1, False),  # restarted, not attached yet
        (5 << 40, True),
    ):
        far.claims.shut(first_grant_id)
        assert far.channel.proves(lease_id) is proven
    far.claims.admit(6 << 40)
    assert not far.channel.proves(lease_id)
    assert far.channel.proves(6 << 40 | 1)
    far.channel.close()
    assert not far.channel.proves(6 << 40 | 1)


def test_the_word_for_readers_is_that_of_the_file_after_it_grew(far: Far) -> None:
    others = [
        ShmTransport().connect(far.node, replace(IDENTITY, session_id=b"%016d" % i), 1, 10.0)
        for i in range(9)  # more pages than there are at first
    ]
    for other in others:
        memory = LocalMemory(64)
        assert other.write_one(1, 64, 64, memory.address, 7, 10.0, True)[0] == 0
    far.claims.shut(8 << 40)
    for other in others:
        assert not other.proves(7 << 40 | 1)
        assert other.proves(8 << 40 | 1)
        other.close()


def test_a_closed_channels_page_is_free_for_another(far: Far) -> None:
    memory = LocalMemory(64)
    assert far.channel.write_one(1, 0, 64, memory.address, 7, 10.0, False) == (0, 0)
    assert far.claims._is_held(0)
    far.channel.close()
    wait_until(lambda: not far.claims._is_held(0), what="the page to be free")


def test_it_works_on_the_same_boot_with_a_socket(far: Far, tmp_path: Path) -> None:
    def node(boot_id: str, address: str) -> common_pb2.NodeView:
        endpoint = common_pb2.Endpoint(kind=SHM, address=address)
        return common_pb2.NodeView(node_id=1, boot_id=boot_id, endpoints=[endpoint])

    path = far.node.endpoints[0].address
    plain = tmp_path / "file"
    plain.touch()
    obstacle = far.transport.obstacle
    assert obstacle(node("this boot", path), IDENTITY) is None
    for other, identity, why in (
        (node("another boot", path), IDENTITY, "on another host"),
        (node("this boot", str(plain)), IDENTITY, "is no socket"),
        (node("this boot", path + ".other"), IDENTITY, "No such file"),
        (node("", path), replace(IDENTITY, boot_id=""), "on another host"),
        (common_pb2.NodeView(boot_id="this boot"), IDENTITY, "no Unix socket"),
    ):
        assert why in str(obstacle(other, identity))


def test_readers_have_nothing_mapped_for_writing_until_they_write(far: Far) -> None:
    inode = f" {os.fstat(far.segment.fd).st_ino} "

    def writable_maps() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        # The fake segment's own mapping is writable, too.
        return sum(inode in line and " rw-s " in line for line in lines) - 1

    memory = LocalMemory(64)
    assert far.channel.read_one(1, 0, 64, memory.address, 10.0, False) == (0, 0)
    assert writable_maps() == 0
    assert far.channel.write_one(1, 0, 64, memory.address, 7, 10.0, False) == (0, 0)
    assert writable_maps() == 1
    far.channel.close()
    # The thread that fills the page tables lets go after the step that it is in.
    wait_until(lambda: writable_maps() == 0, what="the writable mapping to go")
    wait_until(lambda: not is_mapped(far.segment, IDENTITY.session_id), what="the other, too")


def test_a_segment_that_grows_and_one_that_comes_later(far: Far) -> None:
    memory = LocalMemory(128)
    place = (1, 1 << 17, 64)
    assert far.channel.read_one(*place, memory.address, 10.0, False)[0] == 3
    assert far.channel.view(batch([place]), 7, 10.0).views == [None]
    far.segment.ready_bytes = 1 << 20
    later = FakeSegment(2, 1 << 16)
    later.view[:64] = b"l" * 64
    far.segments.add(later)
    # Asked again, though not for every miss within a moment.
    read = far.channel.read
    extents = batch([place, (2, 0, 64)])
    addresses = np.array([memory.address, memory.address + 64], np.uint64)
    wait_until(lambda: not read(extents, addresses, 10.0).any(), what="both to be found")
    assert memory.bytes.tobytes() == bytes(64) + b"l" * 64
    assert far.channel.view(batch([place]), 7, 10.0).views != [None]
    assert not far.channel.write(extents, addresses, 7, 10.0).any()
    assert bytes(later.view[:64]) == b"l" * 64
    later.close()


def test_another_incarnation_of_a_segment_is_mapped_anew(far: Far) -> None:
    memory = LocalMemory(64)
    (old_view,) = far.channel.view(batch([(1, 0, 1)]), 7, 10.0).views
    assert old_view is not None
    far.segment.view[0] = 1
    fresh = FakeSegment(1, 1 << 20)
    fresh.view[0] = 2
    far.segments.add(fresh)  # in place of the other one
    far.segments.add(FakeSegment(3, 4096))
    read_one = far.channel.read_one
    wait_until(
        lambda: read_one(3, 0, 1, memory.address, 10.0, False)[0] == 0, what="the new segments"
    )
    assert read_one(1, 0, 1, memory.address, 10.0, False)[0] == 0
    assert memory.bytes[0] == 2
    assert bytes(old_view) == b"\x01"


def test_close_while_others_copy_does_not_unmap_under_them(far: Far) -> None:
    far.segment.ready_bytes = 1 << 20
    data = payload(1 << 16, 1)
    far.segment.view[: 1 << 16] = data
    ends: list[str] = []

    def work() -> None:
        memory = LocalMemory(1 << 16)
        extents = batch([(1, i * 4096, 4096) for i in range(16)])
        addresses = np.arange(16, dtype=np.uint64) * np.uint64(4096) + np.uint64(memory.address)
        try:
            while not far.channel.read(extents, addresses, 10.0).any():
                assert memory.bytes.tobytes() == data
            ends.append("bad status")
        except Exception as error:  # shown below
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    far.channel.close()
    for thread in threads:
        thread.join(10)
    assert ends == ["ClientClosed"] * 3


def test_page_tables_are_filled_in_up_to_what_is_ready(far: Far) -> None:
    mapping = far.channel._readable[1]
    wait_until(lambda: mapping.populated_bytes == 1 << 16, what="the ready part")
    far.segment.ready_bytes = (1 << 20) - 100
    memory = LocalMemory(64)
    wait_until(
        lambda: far.channel.read_one(1, 1 << 18, 64, memory.address, 10.0, False)[0] == 0,
        what="the segment to be seen growing",
    )
    whole_pages = ((1 << 20) - 100) // 4096 * 4096
    wait_until(lambda: mapping.populated_bytes == whole_pages, what="the rest")


def test_a_closed_channel_keeps_no_mapping_that_was_yet_to_be_filled_in(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def populate(address: int, size_bytes: int, *, write: bool) -> bool:
        begun.set()
        return go_on.wait(10)

    monkeypatch.setattr(populating, "populate", populate)
    identity = replace(IDENTITY, session_id=b"another session!")
    channel = far.transport.connect(far.node, identity, 1, 10.0)
    memory = LocalMemory(64)
    assert begun.wait(10)
    assert channel.write_one(1, 0, 64, memory.address, 7, 10.0, False) == (0, 0)
    channel.close()  # the thread is busy with one mapping, the other one waits
    go_on.set()
    wait_until(lambda: not is_mapped(far.segment, identity.session_id), what="both to be gone")


def test_reads_go_on_without_the_daemon_and_writes_do_not(far: Far) -> None:
    memory = LocalMemory(64)
    assert far.channel.write_one(1, 0, 64, memory.address, 7, 10.0, False) == (0, 0)
    far.server.close()
    assert far.channel.read_one(1, 0, 64, memory.address, 10.0, False) == (0, 0)
    for _ in range(2):
        with pytest.raises(Unavailable):
            far.channel.write_one(1, 0, 64, memory.address, 7, 10.0, False)
    with pytest.raises(Unavailable):
        wait_until(
            lambda: far.channel.read_one(9, 0, 64, memory.address, 10.0, False)[0] != 21,
            what="the daemon to be asked for a segment that is unknown",
        )


def test_a_cut_session_maps_nothing_new(far: Far) -> None:
    far.sessions.cut([IDENTITY.session_id])
    memory = LocalMemory(64)
    with pytest.raises(GrantRevoked):
        far.channel.write_one(1, 0, 64, memory.address, 7, 10.0, False)
    assert far.channel._writable == {}
    assert is_mapped(far.segment, IDENTITY.session_id)
    far.channel.close()
    wait_until(lambda: far.sessions.poll() == [IDENTITY.session_id], what="the mapping to go")
