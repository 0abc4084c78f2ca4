import array
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import InvalidBuffer, ResourceUnavailable
from cenote.runtime import memory
from cenote.runtime.memory import (
    PAGE_BYTES,
    address_of,
    allocate_file,
    available_bytes,
    create_memfd,
    populate,
)


@pytest.fixture
def mapped() -> Iterator[mmap.mmap]:
    fd = create_memfd("test", 64 * PAGE_BYTES)
    try:
        with mmap.mmap(fd, 64 * PAGE_BYTES) as mapping:
            yield mapping
    finally:
        os.close(fd)


def test_the_address_of_buffers() -> None:
    values = np.arange(10, dtype=np.int64)
    assert address_of(values) == values.ctypes.data
    assert address_of(values[3:]) == values.ctypes.data + 24
    own = array.array("q", range(10))
    assert address_of(own) == own.buffer_info()[0]
    view = memoryview(bytearray(100))
    assert address_of(view[40:]) - address_of(view) == 40


def test_the_address_of_read_only_buffers() -> None:
    values = np.arange(10, dtype=np.int64)
    expected = values.ctypes.data
    values.flags.writeable = False
    assert address_of(values) == expected
    raw = bytes(100)
    assert address_of(memoryview(raw)[7:]) - address_of(raw) == 7


def test_the_address_of_nothing() -> None:
    assert address_of(b"") == 0
    assert address_of(bytearray()) == 0


def test_asking_for_an_address_does_not_hold_on_to_the_buffer() -> None:
    buffer = bytearray(10)
    references = sys.getrefcount(buffer)
    address_of(buffer)
    assert sys.getrefcount(buffer) == references
    buffer.extend(b"x" * 10_000)  # BufferError, were it still exported


@pytest.mark.parametrize("bad", [3, "text", None, np.zeros((4, 4))[:, 1], np.zeros((4, 4)).T])
def test_what_has_no_address(bad: object) -> None:
    with pytest.raises(InvalidBuffer):
        address_of(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [False, True])
def test_populating_keeps_the_contents(mapped: mmap.mmap, write: bool) -> None:
    mapped[0:5] = b"hello"
    assert populate(address_of(mapped), len(mapped), write=write) in (True, False)
    assert mapped[0:5] == b"hello"


def test_populating_makes_pages_present(mapped: mmap.mmap) -> None:
    address = address_of(mapped)
    if not populate(address, len(mapped), write=True):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(64 * 8), dtype=np.uint64)
    assert (entries >> np.uint64(63) == 1).all()


def test_populating_what_is_not_mapped_is_an_error() -> None:
    with mmap.mmap(-1, PAGE_BYTES) as mapping:
        address = address_of(mapping)
    with pytest.raises(ResourceUnavailable, match="can't populate"):
        populate(address + 1, PAGE_BYTES, write=True)


def test_a_page_that_can_not_be_had_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    # A mapping beyond the end of its file: what a touch would turn into SIGBUS.
    with (tmp_path / "short").open("w+b") as file:
        file.truncate(2 * PAGE_BYTES)
        with mmap.mmap(file.fileno(), 2 * PAGE_BYTES) as mapping:
            file.truncate(PAGE_BYTES)
            try:
                supported = populate(address_of(mapping), PAGE_BYTES, write=True)
                assert not supported or populate(address_of(mapping), PAGE_BYTES, write=True)
                if supported:
                    with pytest.raises(ResourceUnavailable, match="Bad address"):
                        populate(address_of(mapping), 2 * PAGE_BYTES, write=True)
            finally:
                file.truncate(2 * PAGE_BYTES)


def test_populating_lets_other_threads_run() -> None:
    size_bytes = 64 << 20
    ran = threading.Event()
    waiting = threading.Event()

    def other() -> None:
        waiting.set()
        while not ran.is_set():
            ran.set()

    with mmap.mmap(-1, size_bytes) as mapping:
        thread = threading.Thread(target=other)
        old = sys.getswitchinterval()
        sys.setswitchinterval(100)  # so that only a released GIL lets the other one run
        try:
            thread.start()
            populate(address_of(mapping), size_bytes, write=True)
            seen = ran.is_set()
        finally:
            sys.setswitchinterval(old)
            thread.join()
    assert seen


def test_allocated_space_is_there(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        allocate_file(file.fileno(), 4096, 8192, name="file")
        assert os.fstat(file.fileno()).st_size == 12288
        assert os.fstat(file.fileno()).st_blocks * 512 >= 8192
        allocate_file(file.fileno(), 0, 0, name="file")


def test_a_memfd_has_its_size_and_leaves_no_descriptor_behind_on_failure() -> None:
    fd = create_memfd("test", 1 << 20)
    try:
        assert os.fstat(fd).st_size == os.fstat(fd).st_blocks * 512 == 1 << 20
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ResourceUnavailable, match="can't get 1024 PiB for big: not enough"):
        create_memfd("big", 1 << 60)
    assert os.listdir("/proc/self/fd") == before


def test_too_much_is_refused_before_it_is_taken_and_says_what_could_be_had() -> None:
    fd = os.memfd_create("test")
    try:
        could_bytes = available_bytes(fd)
        assert 0 < could_bytes < 1 << 60
        with pytest.raises(ResourceUnavailable, match=r"\(\d+ bytes\) could be had \(ask for less"):
            allocate_file(fd, 0, 1 << 60, name="segment")
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_the_limit_of_a_control_group_bounds_what_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert memory._room_in(tmp_path, *names) == 350_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._room_in(tmp_path, *names) is None
    assert memory._room_in(tmp_path / "none", *names) is None
    monkeypatch.setattr(memory, "_control_group_rooms_bytes", lambda: iter([12345, 1 << 50]))
    fd = os.memfd_create("test")
    try:
        assert available_bytes(fd) == 12345
    finally:
        os.close(fd)


def test_a_bad_descriptor_is_an_error() -> None:
    with pytest.raises(ResourceUnavailable, match="Bad file descriptor"):
        available_bytes(10_000_000)
