"""SSD segments: copies, reads, restarts, and what a device can do to them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import InvalidArgument
from cenote.api.rows import CopyStatus
from cenote.api.slot_sums import add_sums, slot_hashes
from cenote.runtime.memory import address_of
from cenote.store import demoter
from cenote.store.copy_writer import REQUEST_BYTES
from cenote.store.device import BLOCK_BYTES
from cenote.store.disk_io import BUFFER_BYTES
from cenote.store.disk_reads import plan_groups
from cenote.store.ssd import DISK_ADDRESS
from faulty_device import no_fault
from ssd_node import SIZES, SSD_ID, SsdNode, fill, payload_of, read, rows_of
from waiting import wait_until

MIB = 1 << 20


@pytest.mark.parametrize("shm", [False, True])
def test_copies_are_read_back(tmp_path: Path, shm: bool) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        assert read(node, [(at, len(data)) for data, at in made], shm=shm) == [d for d, _ in made]
        # Parts of an object, too, that begin and end anywhere.
        big, at = made[5]
        parts = [(7, 4096), (4000, 200), (MIB - 3, MIB), (0, len(big))]
        got = read(node, [(at + start, length) for start, length in parts], shm=shm)
        assert got == [big[start : start + length] for start, length in parts]


def test_a_restart_finds_the_copies_and_reads_no_payload(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        made = fill(node)
        slots, incarnation = node.table_slots, node.ssd.incarnation
    looked_at: list[int] = []
    with SsdNode(tmp_path) as again:
        again.device.on_read = lambda offset, length: looked_at.append(offset)
        assert again.ssd.reopened
        assert (again.table_slots, again.ssd.incarnation) == (slots, incarnation)
        assert not looked_at
        again.device.on_read = no_fault
        assert read(again, [(at, len(d)) for d, at in made], shm=False) == [d for d, _ in made]


def test_sums_are_of_what_is_on_the_ssd_also_after_a_restart(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        fill(node)
        sums = node.ssd.table.sums(4)
        (rows,) = node.ssd.table.inventory(node.ssd.index)
        names = ("slot", "epoch", "seq", "offset", "replica")
        hashes = slot_hashes(*(rows[name].astype(np.uint64) for name in names))
        expected, counts = np.zeros(len(sums), np.uint64), np.zeros(len(sums), np.uint64)
        add_sums(expected, counts, rows["slot"].astype(np.int64) // 4, hashes)
        assert sums["sum"].tolist() == expected.tolist()
        assert sums["count"].tolist() == counts.tolist()
        assert int(counts.sum()) == len(SIZES)
    with SsdNode(tmp_path) as again:
        assert again.ssd.table.sums(4).tolist() == sums.tolist()


def test_another_size_begins_anew(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        fill(node)
        incarnation = node.ssd.incarnation
    with SsdNode(tmp_path, ssd_bytes=32 * MIB) as again:
        assert not again.table_slots
        assert again.ssd.incarnation != incarnation


def test_an_object_in_pieces_becomes_one_extent(tmp_path: Path) -> None:
    data = payload_of(1, 3 * MIB)
    with SsdNode(tmp_path) as node:
        node.put(4, data, [(0, MIB), (8 * MIB, MIB), (4 * MIB, MIB)])
        node.copy([4, 5, 6], 9, MIB, 3 * MIB)
        assert node.results(1) == {1: CopyStatus.DONE}
        assert read(node, [(MIB, len(data))], shm=True) == [data]


def test_a_payload_is_flushed_before_its_slot(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        payload_at = node.ssd.plan.data_at
        seen: list[bool] = []

        def on_write(offset: int, length: int) -> OSError | None:
            if offset < payload_at:
                flushed = [o for o, _ in node.device.flushed_before]
                seen.append(any(o >= payload_at for o in flushed))
            return None

        node.device.on_write = on_write
        fill(node)
        assert seen
        assert all(seen)


def test_a_source_that_changed_makes_no_copy(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        node.put(0, payload_of(1, 5 * MIB // 2), [(0, 5 * MIB // 2)])
        node.put(1, payload_of(2, 4096), [(4 * MIB, 4096)])
        node.dram.view[2 * MIB] ^= 1  # given to somebody else meanwhile
        stale = node.copy([0], 0, 0, 3 * MIB)
        other = node.copy([1], 1, 4 * MIB, 4096)
        unknown = node.copy([1], 2, 8 * MIB, 4096, seq=77)
        assert node.results(3) == {
            stale: CopyStatus.SOURCE_CHANGED,
            other: CopyStatus.DONE,
            unknown: CopyStatus.SOURCE_CHANGED,
        }
        assert node.table_slots == [1]


def test_promotion_brings_the_bytes_back(tmp_path: Path) -> None:
    data = payload_of(3, 5 * MIB // 2)
    with SsdNode(tmp_path) as node:
        node.put(0, data, [(0, len(data))])
        node.copy([0], 7, MIB, 3 * MIB)
        assert node.results(1) == {1: CopyStatus.DONE}
        back = node.copy([7], 3, 8 * MIB, len(data), seq=1, promote=True)
        assert node.results(1) == {back: CopyStatus.DONE}
        assert node.dram.view[8 * MIB : 8 * MIB + len(data)] == data
        assert node.dram.table.record(3, 3, 1) is not None
        # A bit that flipped on the device: found, and no slot made.
        with node.path.open("r+b") as file:
            file.seek(node.ssd.plan.data_at + MIB + 1000)
            file.write(b"X")
        node.device.on_read = no_fault
        damaged = node.copy([7], 4, 12 * MIB, len(data), seq=1, promote=True)
        assert node.results(1) == {damaged: CopyStatus.SOURCE_CHANGED}
        assert node.dram.table.record(4, 3, 1) is None


def test_nobody_writes_there_but_the_daemon(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        channel = node.channel(shm=False)
        data = bytearray(4096)
        places = rows_of((0, 2048), (4096, 2048))
        addresses = np.array([address_of(data), address_of(data) + 2048], np.uint64)
        grant_id = 1 << 62
        statuses = channel.write(places, addresses, grant_id, 5.0)
        assert statuses.tolist() == [InvalidArgument.code] * 2
        one = channel.write_one(SSD_ID, 0, 4096, address_of(data), grant_id, 5.0, checksum=False)
        assert one[0] == InvalidArgument.code


PLACES = st.lists(
    st.tuples(st.integers(0, 4 * MIB), st.integers(1, 3 * MIB), st.booleans()), max_size=20
)


@given(PLACES, st.integers(1, 16), st.sampled_from([128 << 10, 384 << 10, BUFFER_BYTES]))
def test_groups_have_every_byte_once_and_in_order(
    items: list[tuple[int, int, bool]], threads: int, group_bytes: int
) -> None:
    addresses = [offset + DISK_ADDRESS if disk else 64 + offset for offset, _, disk in items]
    lengths = [length for _, length, _ in items]
    groups = plan_groups(addresses, lengths, threads, group_bytes)
    sent: list[tuple[int, int]] = []
    for group in groups:
        if group.memory is not None:
            sent.append(group.memory)
            continue
        end = 0
        for offset, length, at in group.pieces:
            assert offset % BLOCK_BYTES == length % BLOCK_BYTES == 0
            assert (at, length > 0) == (end, True)
            end = at + length
        assert end <= group_bytes
        for start, length in group.sends:
            while length:
                piece = next(p for p in group.pieces if p[2] <= start < p[2] + p[1])
                step = min(length, piece[2] + piece[1] - start)
                sent.append((DISK_ADDRESS + piece[0] + start - piece[2], step))
                start, length = start + step, length - step
    joined: list[list[int]] = []
    for address, length in sent:
        if joined and sum(joined[-1]) == address:
            joined[-1][1] += length
        else:
            joined.append([address, length])
    wanted: list[list[int]] = []
    for address, length in zip(addresses, lengths, strict=True):
        if wanted and sum(wanted[-1]) == address:
            wanted[-1][1] += length
        else:
            wanted.append([address, length])
    assert joined == wanted


@pytest.mark.parametrize("shift", [0, 64])
def test_what_lies_as_the_device_wants_it_is_written_from_there(tmp_path: Path, shift: int) -> None:
    """Else it goes through staging memory; either way neighbours on the device are one write."""
    with SsdNode(tmp_path, start=False) as node:
        writes: list[int] = []
        payload_at = node.ssd.plan.data_at

        def on_write(offset: int, length: int) -> OSError | None:
            writes.extend([length] if offset >= payload_at else [])
            return None

        made = [payload_of(slot, 64 << 10) for slot in range(8)]
        for slot, data in enumerate(made):
            node.put(slot, data, [(MIB * (7 - slot) + shift, len(data))])
            node.copy([slot], slot, slot * len(data), len(data))
        node.device.on_write = on_write
        node.copier.start()
        assert set(node.results(8).values()) == {CopyStatus.DONE}
        assert sum(writes) == 8 * (64 << 10)
        assert len(writes) < 8
        places = [(slot * (64 << 10), 64 << 10) for slot in range(8)]
        assert read(node, places, shm=True) == made


def test_a_request_that_fails_costs_what_it_was_of_alone(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        bad = node.ssd.plan.data_at + 4 * MIB
        node.device.on_write = lambda offset, length: (
            OSError(errno.EIO, "injected") if offset <= bad < offset + length else None
        )
        for slot in range(3):
            data = payload_of(slot, REQUEST_BYTES)
            node.put(slot, data, [(4 * MIB * slot, len(data))])
            node.copy([slot], slot, 4 * MIB * slot, len(data))
        assert node.results(3) == {
            1: CopyStatus.DONE,
            2: CopyStatus.FAILED,
            3: CopyStatus.DONE,
        }
        assert node.table_slots == [0, 2]


def test_a_flush_waits_for_what_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is flushed does little else."""
    monkeypatch.setattr(demoter, "FLUSH_WAIT_S", 30.0)
    with SsdNode(tmp_path) as node:
        data_at, size = node.ssd.plan.data_at, 5 * MIB // 2
        may_end, waits = threading.Event(), threading.Event()

        def slow(offset: int, _: int) -> None:
            if offset >= data_at + size:
                waits.set()
                may_end.wait(20)

        node.device.on_write = slow
        for slot in range(2):
            node.put(slot, payload_of(slot, size), [(slot * size, size)])
        flushes = node.ssd.disk.counters.flushes
        for slot in range(2):
            node.copy([slot], slot, slot * size, size)
        assert waits.wait(20)
        wait_until(lambda: node.copier._demoter._written, what="the first one to be written")
        assert node.ssd.disk.counters.flushes == flushes
        may_end.set()
        assert set(node.results(2).values()) == {0}
        # Of both payloads, and of both slots.
        assert node.ssd.disk.counters.flushes == flushes + 2
