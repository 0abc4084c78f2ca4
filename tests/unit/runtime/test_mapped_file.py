"""Mappings of files in memory: where they lie, how long they last, and huge pages behind them."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.runtime import mapped_file
from cenote.runtime.mapped_file import HUGE_PAGE_BYTES, MappedFile, collapse, huge_part
from cenote.runtime.memory import PAGE_BYTES, create_memfd, populate

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_memfd("mapped-file-test", 8 * MIB)
    yield made
    os.close(made)


def lines_of(address: int) -> dict[str, int]:
    """What the kernel tells of the mapping at an address, in KiB; nothing where there is none."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found is not None:
                return found
            start, end = (int(each, 16) for each in match.groups())
            found = {} if start <= address < end else None
        elif found is not None and line.endswith(" kB"):
            name, number, _ = line.split()
            found[name.rstrip(":")] = int(number)
    return found or {}


@pytest.mark.parametrize("offset", [0, PAGE_BYTES, HUGE_PAGE_BYTES, 3 * MIB])
@pytest.mark.parametrize("size_bytes", [PAGE_BYTES, 2 * MIB, 4 * MIB + 100, 5 * MIB])
def test_it_shows_the_file_and_lies_as_huge_pages_want_it(
    fd: int, offset: int, size_bytes: int
) -> None:
    os.pwrite(fd, b"first", offset)
    os.pwrite(fd, b"last", offset + size_bytes - 4)
    mapped = MappedFile(fd, size_bytes, offset=offset)
    assert len(mapped.memory) == size_bytes
    assert bytes(mapped.memory[:5]) == b"first"
    assert bytes(mapped.memory[-4:]) == b"last"
    mapped.memory[:3] = b"new"
    assert os.pread(fd, 3, offset) == b"new"
    if size_bytes >= HUGE_PAGE_BYTES:
        assert (mapped.address - offset) % HUGE_PAGE_BYTES == 0
    # What was reserved around it, to have a choice, is given back.
    end = mapped.address + -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    for outside in (mapped.address - 1, end):
        assert lines_of(outside).get("Size", 0) * 1024 != HUGE_PAGE_BYTES - PAGE_BYTES
    assert lines_of(mapped.address)["Size"] * 1024 == end - mapped.address


def test_it_lasts_as_long_as_a_view_of_it(fd: int) -> None:
    mapped = MappedFile(fd, 4 * MIB)
    address, view = mapped.address, mapped.memory[: 2 * MIB]
    view[:4] = b"here"
    del mapped
    gc.collect()
    assert bytes(view[:4]) == b"here"
    assert lines_of(address)["Size"] == 4096
    del view
    gc.collect()
    assert lines_of(address).get("Size") != 4096


def test_one_that_may_not_be_written(fd: int) -> None:
    mapped = MappedFile(fd, 4 * MIB, writable=False)
    assert lines_of(mapped.address)["Size"] == 4096
    permissions = next(
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{mapped.address:x}-")
    )
    assert permissions == "r--s"


def test_contents_stay_when_huge_pages_are_put_behind_them(fd: int) -> None:
    """And another mapping of the file, a client's, has them then, too."""
    written = os.urandom(8 * MIB)
    os.pwrite(fd, written, 0)
    mapped = MappedFile(fd, 8 * MIB)
    assert huge_part(mapped.address, 8 * MIB) == 8 * MIB
    if collapse(mapped.address, 8 * MIB) < 8 * MIB:
        pytest.skip("this kernel has no MADV_COLLAPSE of files in memory, or no huge page is free")
    assert bytes(mapped.memory) == written
    other = MappedFile(fd, 8 * MIB, writable=False)
    for each in (mapped, other):
        populate(each.address, 8 * MIB, write=each is mapped)
        assert lines_of(each.address)["ShmemPmdMapped"] == 8192
    assert bytes(other.memory) == written


def test_what_is_less_than_a_huge_page_is_left_alone(fd: int) -> None:
    mapped = MappedFile(fd, 8 * MIB)
    assert huge_part(mapped.address + PAGE_BYTES, HUGE_PAGE_BYTES) == 0
    assert collapse(mapped.address + PAGE_BYTES, HUGE_PAGE_BYTES) == 0
    assert not lines_of(mapped.address)["ShmemPmdMapped"]


@pytest.mark.parametrize(
    ("number", "calls", "huge_bytes"),
    [(errno.ENOMEM, 5, 3 * HUGE_PAGE_BYTES), (errno.EINVAL, 1, 0)],
)
def test_pages_that_could_be_had_are_told_from_those_that_could_not(
    fd: int, monkeypatch: pytest.MonkeyPatch, number: int, calls: int, huge_bytes: int
) -> None:
    mapped = MappedFile(fd, 8 * MIB)
    asked: list[tuple[int, int]] = []

    def scarce(address: int, size_bytes: int, _: int) -> int:
        asked.append((address - mapped.address, size_bytes))
        if address - mapped.address <= 2 * MIB < address - mapped.address + size_bytes:
            ctypes.set_errno(number)
            return -1
        return 0

    monkeypatch.setattr(mapped_file, "_madvise", scarce)
    assert collapse(mapped.address, 8 * MIB) == huge_bytes
    assert len(asked) == calls
    assert asked[0] == (0, 8 * MIB)


def test_where_no_address_space_is_left_to_choose_from(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mapped_file._map

    def scarce(place: int | None, size_bytes: int, *rest: int) -> int:
        if size_bytes > 4 * MIB:
            raise OSError(12, "Cannot allocate memory")
        return real(place, size_bytes, *rest)

    monkeypatch.setattr(mapped_file, "_map", scarce)
    mapped = MappedFile(fd, 4 * MIB)
    mapped.memory[-1] = 1
    with pytest.raises(OSError, match="allocate"):
        MappedFile(fd, 5 * MIB)


def test_a_descriptor_that_can_not_be_mapped_says_so() -> None:
    with pytest.raises(OSError, match="descriptor"):
        MappedFile(-1, 4 * MIB)
    with pytest.raises(OSError, match="descriptor"):
        MappedFile(-1, PAGE_BYTES)
