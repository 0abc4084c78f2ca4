from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.transport.fake_segment import FakeSegment
from cenote.transport.mapping import Mapping
from cenote.transport.memory_access import MEMORY


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


@pytest.fixture
def segment() -> Iterator[FakeSegment]:
    segment = FakeSegment(1, 1 << 16)
    yield segment
    segment.close()


def test_it_shows_the_file_and_goes_with_its_last_user(segment: FakeSegment) -> None:
    mapping = Mapping(segment.fd, 1 << 16, 1 << 16, b"i", writable=True)
    address = mapping.address
    MEMORY[address + 5 : address + 8] = b"abc"
    assert bytes(segment.view[4:9]) == b"\x00abc\x00"
    assert mapping.view.readonly
    view = mapping.view[5:8]
    del mapping
    assert is_mapped(address)
    assert bytes(view) == b"abc"
    del view
    assert not is_mapped(address)


def test_a_writable_mapping_does_not_pass_a_fork(segment: FakeSegment) -> None:
    writable = Mapping(segment.fd, 1 << 16, 1 << 16, b"i", writable=True)
    readable = Mapping(segment.fd, 1 << 16, 1 << 16, b"i", writable=False)
    pid = os.fork()
    if pid == 0:
        os._exit(2 * is_mapped(writable.address) + is_mapped(readable.address))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_what_cannot_be_mapped(segment: FakeSegment) -> None:
    with pytest.raises(ResourceUnavailable):
        Mapping(-1, 1 << 16, 0, b"", writable=False)
    with pytest.raises(ResourceUnavailable):
        Mapping(segment.fd, 1 << 60, 0, b"", writable=False)
