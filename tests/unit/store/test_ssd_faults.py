"""An SSD that fails, tears, is full or gone, or is written for a leader of before."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.api.rows import CopyStatus
from cenote.store.copier import Copier
from cenote.store.device import BLOCK_BYTES, open_device
from cenote.store.ssd import DISK_ADDRESS, FAILURES_MAX, SsdFile, plan_ssd
from faulty_device import FaultyDevice, io_error, no_fault
from ssd_node import SSD_ID, SsdNode, fill, payload_of, read
from waiting import wait_until

MIB = 1 << 20
LONG_KEY = bytes(range(200))


def test_a_slot_whose_flush_fails_does_not_count(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        node.put(0, payload_of(1, MIB), [(0, MIB)])
        table_end = node.ssd.plan.data_at

        def on_write(offset: int, length: int) -> OSError | None:
            if offset < table_end:  # the payload is flushed: from now on nothing is
                node.device.flush_error = OSError(errno.EIO, "injected")
            return None

        node.device.on_write = on_write
        first = node.copy([0], 0, 0, MIB)
        assert node.results(1) == {first: CopyStatus.FAILED}
        assert not node.table_slots
        assert node.ssd.table.sealed == 0
        node.device.on_write, node.device.flush_error = no_fault, None
        again = node.copy([0], 0, 0, MIB)
        assert node.results(1) == {again: CopyStatus.DONE}
        assert node.table_slots == [0]


@pytest.mark.parametrize("torn_bytes", [0, 512, 1000])
def test_a_torn_slot_is_no_slot_and_harms_no_other(tmp_path: Path, torn_bytes: int) -> None:
    with SsdNode(tmp_path) as node:
        fill(node)
        before = node.table_slots
        node.device.torn_bytes = torn_bytes
        table_end = node.ssd.plan.data_at
        node.device.on_write = lambda offset, length: (
            OSError(errno.EIO, "power cut") if offset < table_end else None
        )
        data = payload_of(50, 10_000)
        node.put(50, data, [(12 * MIB, 10_000)])
        copy_id = node.copy([50], 93, 12 * MIB, 12_288)  # a page with others around it
        assert node.results(1) == {copy_id: CopyStatus.FAILED}
        assert node.table_slots == before
    with SsdNode(tmp_path) as again:
        assert set(again.table_slots) - {93} == set(before)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_device_that_fails_makes_no_copy(tmp_path: Path, number: int) -> None:
    with SsdNode(tmp_path) as node:
        node.put(0, payload_of(1, MIB), [(0, MIB)])
        node.device.on_write = lambda offset, length: OSError(number, "injected")
        first = node.copy([0], 0, 0, MIB)
        assert node.results(1) == {first: CopyStatus.FAILED}
        node.device.on_write = no_fault
        node.device.flush_error = OSError(number, "injected")
        second = node.copy([0], 0, 0, MIB)
        assert node.results(1) == {second: CopyStatus.FAILED}
        assert not node.table_slots
        node.device.flush_error = None
        third = node.copy([0], 0, 0, MIB)
        assert node.results(1) == {third: CopyStatus.DONE}


def test_copies_of_an_earlier_leader_do_not_land(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        node.put(0, payload_of(1, MIB), [(0, MIB)])
        node.device.hang.clear()
        node.copy([0], 0, 0, MIB)
        wait_until(lambda: node.copier.under_way == 1, what="a copy to begin")
        node.copy([0], 1, MIB, MIB)
        node.copier.fence(4)
        node.device.hang.set()
        last = node.copy([0], 2, 2 * MIB, MIB, epoch=4)
        assert node.results(1) == {last: CopyStatus.DONE}
        assert node.table_slots == [2]


def test_a_write_of_an_earlier_leader_does_not_land_over_a_later_copy(tmp_path: Path) -> None:
    """The next leader knows nothing of it, and may give the same place to another."""
    size = 3 * MIB
    with SsdNode(tmp_path, start=False) as node:
        for slot in range(3):
            node.put(slot, payload_of(slot, size), [(slot * size, size)])
        begin = node.ssd.address - DISK_ADDRESS
        begun, go_on, last_of_first = threading.Event(), threading.Event(), threading.Event()
        written = node.ssd.disk.counters

        def slow(offset: int, length: int) -> None:
            if offset == begin:
                begun.wait(30)
            elif offset + length == begin + 2 * size and not last_of_first.is_set():
                last_of_first.set()
                go_on.wait(30)

        node.device.on_write = slow
        node.copy([0], 0, 0, size)
        node.copy([1], 1, size, size)
        node.copier.start()
        assert last_of_first.wait(10)
        node.copier.fence(4)
        before = written.writes
        last = node.copy([2], 2, size, size, epoch=4)
        begun.set()
        # It is not written before the other has ended: this waits in vain, unless it is.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: written.writes >= before + 3, 0.3, what="it to be written")
        go_on.set()
        assert node.results(1) == {last: CopyStatus.DONE}
        assert read(node, [(size, size)], shm=False) == [payload_of(2, size)]


def test_what_an_earlier_leader_ordered_and_was_not_begun_is_not_written(tmp_path: Path) -> None:
    """Copies are taken from the queue many at a time: these are not in it any more."""
    with SsdNode(tmp_path, start=False) as node:
        for slot in range(4):
            node.put(slot, payload_of(slot, MIB), [(slot * MIB, MIB)])
        begin = node.ssd.plan.data_at
        written: set[int] = set()

        def on_write(offset: int, length: int) -> None:
            if offset >= begin:
                written.update(range((offset - begin) // MIB, (offset + length - begin) // MIB))

        def others_lead(seconds: float) -> bool:
            assert seconds > 0
            node.copier.fence(4)
            return False

        node.copier.stop()
        node.copier = Copier(node.segments, write_limit=1, wait=others_lead)
        node.device.on_write = on_write
        for slot in range(4):
            node.copy([slot], slot, slot * MIB, MIB)
        node.copier.start()  # the first has no need to wait, and the second is begun by then
        last = node.copy([0], 5, 5 * MIB, MIB, epoch=4)
        assert node.results(1) == {last: CopyStatus.DONE}
        assert written == {0, 1, 5}
        assert node.table_slots == [5]


def test_what_can_not_be_read_comes_as_zeros_and_others_as_they_are(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        bad = node.ssd.plan.data_at + made[3][1]
        node.device.on_read = lambda offset, length: (
            OSError(errno.EIO, "injected") if offset <= bad < offset + length else None
        )
        places = [made[3], made[5]]
        got = read(node, [(at, len(data)) for data, at in places], shm=False)
        assert got[0] != made[3][0]
        assert not any(got[0][:4096])
        assert node.ssd.disk.counters.errors > 0


def test_a_truncated_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        data, at = made[0]
        with node.path.open("r+b") as file:
            file.truncate(node.ssd.plan.data_at + at + BLOCK_BYTES)
        got = read(node, [(at, 1), (made[5][1], 5 * MIB // 2)], shm=True)
        assert got[0] == data
        assert not any(got[1])


def test_a_dead_device_is_given_up(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        fill(node)
        node.device.on_read = io_error
        while node.ssd.disk.failures < FAILURES_MAX:
            assert not node.segments.give_up_failed()
            read(node, [(0, 1)], shm=False)
        assert node.segments.give_up_failed()
        assert node.segments.ssd() == ()
        assert node.segments.by_id(SSD_ID) is None
        assert not node.segments.give_up_failed()


def test_what_can_not_be_read_at_the_start_is_not_begun_anew(tmp_path: Path) -> None:
    """An error that passes costs no contents."""
    with SsdNode(tmp_path) as node:
        made = fill(node)
    device = FaultyDevice(open_device(tmp_path / "ssd", 24 * MIB))
    device.on_read = io_error
    with pytest.raises(ResourceUnavailable, match="can't read"):
        SsdFile(tmp_path / "ssd", 24 * MIB, 8 * MIB, device=device)
    with SsdNode(tmp_path) as again:
        assert len(again.table_slots) == len(made)


def test_a_disk_without_room_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ResourceUnavailable, match="are free there"):
        open_device(tmp_path / "ssd", 1 << 50)
    assert not (tmp_path / "ssd").exists()
    with pytest.raises(InvalidArgument):
        open_device(tmp_path / "other", 0)
    with pytest.raises(ResourceUnavailable, match="can't open"):
        open_device(tmp_path / "none" / "ssd", MIB)
    with pytest.raises(InvalidArgument):
        plan_ssd(MIB)


def test_two_daemons_do_not_share_a_file(tmp_path: Path) -> None:
    first = open_device(tmp_path / "ssd", MIB)
    with pytest.raises(ResourceUnavailable, match="another process"):
        open_device(tmp_path / "ssd", MIB)
    first.close()
    open_device(tmp_path / "ssd", MIB).close()


@pytest.mark.parametrize("size", [100, 8192, MIB])
def test_a_file_with_other_contents_is_refused_and_left_as_it_is(tmp_path: Path, size: int) -> None:
    path = tmp_path / "precious.tar"
    contents = bytes(size - 1) + b"x" if size < MIB else bytes(70_000) + b"btrfs" * 1000
    path.write_bytes(contents)
    with pytest.raises(InvalidArgument, match="no store daemon wrote"):
        open_device(path, 24 * MIB)
    assert path.read_bytes() == contents


def test_a_file_of_zeros_and_one_whose_headers_are_damaged_are_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_bytes(bytes(24 * MIB))
    with SsdNode(tmp_path) as node:
        fill(node)
    with (tmp_path / "ssd").open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 20)
            file.write(b"\xff" * 40)
    with SsdNode(tmp_path) as again:
        assert not again.table_slots
