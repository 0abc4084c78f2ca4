"""What is used again and again is registered, and let go before its memory is freed."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.client.registering import ARRAY_BYTES_MIN, RegistrationCache
from cenote.transport.base import Region


class Device:
    """Counts what is registered."""

    kind = 3

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.refuses = False

    def register(self, address: int, length: int, keeper: object) -> Region:
        if self.refuses:
            raise ResourceUnavailable("no more can be pinned")
        region = Region(address, length, keeper)
        self.regions.append(region)
        return region

    def deregister(self, region: Region) -> None:
        self.regions.remove(region)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def cache(device: Device) -> RegistrationCache:
    return RegistrationCache(device)  # type: ignore[arg-type]


def test_an_array_that_is_used_twice_is_registered_until_it_ends(
    device: Device, cache: RegistrationCache
) -> None:
    array = np.zeros((4, ARRAY_BYTES_MIN), np.uint8)
    cache.note(array[1])
    assert not device.regions
    cache.note([array[2], array[3]])
    [region] = device.regions
    assert (region.address, region.length) == (array.ctypes.data, array.nbytes)
    cache.note(array)
    assert len(device.regions) == 1
    row = array[0]
    del array
    assert len(device.regions) == 1  # the data is used still
    del row
    assert not device.regions
    assert not cache.held_bytes


def test_memory_whose_end_can_not_be_told_is_not(device: Device, cache: RegistrationCache) -> None:
    pages = mmap.mmap(-1, ARRAY_BYTES_MIN)
    mapped = np.frombuffer(pages, np.uint8)
    for buffer in (mapped, bytearray(ARRAY_BYTES_MIN), bytes(ARRAY_BYTES_MIN), [b"x"], 1):
        for _ in range(5):
            cache.note(buffer)
    small = np.zeros(ARRAY_BYTES_MIN - 1, np.uint8)
    for _ in range(5):
        cache.note(small)
    assert not device.regions


def test_what_is_refused_is_not_asked_for_again(device: Device, cache: RegistrationCache) -> None:
    device.refuses = True
    array = np.zeros(ARRAY_BYTES_MIN, np.uint8)
    for _ in range(3):
        cache.note(array)
    device.refuses = False
    for _ in range(3):
        cache.note(array)
    assert not device.regions


def test_it_is_bounded_and_lets_all_go_at_the_end(device: Device) -> None:
    cache = RegistrationCache(device, bytes_max=2 * ARRAY_BYTES_MIN)  # type: ignore[arg-type]
    arrays = [np.zeros(ARRAY_BYTES_MIN, np.uint8) for _ in range(4)]
    for _ in range(3):
        cache.note(arrays)
    assert len(device.regions) == 2
    cache.close()
    assert not device.regions
    cache.note(arrays[3])
    cache.note(arrays[3])
    assert not device.regions
