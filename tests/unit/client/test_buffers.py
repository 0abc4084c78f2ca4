"""Buffers: what is taken, what is refused and how that is named."""

from __future__ import annotations

import array
import ctypes
import mmap
import sys
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from cenote.api.errors import InvalidArgument, InvalidBuffer
from cenote.api.types import RawBuffer
from cenote.client.buffers import (
    Buffer,
    bytes_pieces,
    column_pieces,
    hash_pieces,
    new_bytes,
    pieces_of,
    readable_memory,
    writable_memory,
)
from cenote.client.device_buffers import DeviceMemory
from cenote.client.plan.device_rows import ON_HOST
from cenote.client.plan.pieces import Pieces
from cenote.runtime.gpu_copies import NO_STREAM
from fake_gpu import FakeArray, FakeTensor


def content(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def test_readable_memory_is_where_the_bytes_are() -> None:
    readonly = np.frombuffer(b"abcdef", np.uint8)
    for buffer in (
        b"abcdef",
        bytearray(b"abcdef"),
        memoryview(b"abcdef"),
        memoryview(b"xabcdefx")[1:-1],
        readonly,
        readonly.copy(),
        readonly.copy().reshape(2, 3),
        array.array("B", b"abcdef"),
    ):
        address, length, _ = readable_memory(buffer)
        assert content(address, length) == b"abcdef"


def test_writable_memory_is_written_in_place() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        for buffer in (
            bytearray(8),
            np.zeros(2, np.float32),
            np.zeros((2, 2), np.float16),
            memoryview(bytearray(8)),
            array.array("q", [0]),
            memoryview(mapped)[:8],
        ):
            address, length, keeper = writable_memory(buffer)
            assert length == 8
            ctypes.memmove(address, b"12345678", 8)
            assert bytes(memoryview(cast("Any", buffer)).cast("B")) == b"12345678"
            del keeper
            if isinstance(buffer, memoryview):
                buffer.release()


def test_a_buffer_can_not_move_while_it_is_used() -> None:
    growing = bytearray(8)
    _, _, keeper = writable_memory(growing)
    with pytest.raises(BufferError):
        growing.extend(b"x" * 4096)
    del keeper
    growing.extend(b"x")


def test_types_without_a_buffer_protocol_of_their_own() -> None:
    class Custom(np.ndarray[tuple[int], np.dtype[np.uint8]]):
        pass

    special = np.zeros(4, np.dtype("datetime64[s]"))
    assert writable_memory(special)[:2] == (special.ctypes.data, 32)
    assert readable_memory(special)[:2] == (special.ctypes.data, 32)
    custom = np.zeros(4, np.uint8).view(Custom)
    assert writable_memory(custom)[:2] == (custom.ctypes.data, 4)


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        (b"abc", "read-only"),
        (np.frombuffer(b"abc", np.uint8), "read-only"),
        (np.zeros((4, 4), np.uint8)[:, :2], "not C-contiguous"),
        (np.zeros((4, 4), np.uint8).T[:3], "not C-contiguous"),
        (memoryview(bytearray(8))[::2], "not C-contiguous"),
        ("text", "no buffer protocol"),
        (5, "no buffer protocol"),
        (None, "no buffer protocol"),
        (bytearray(), "is empty"),
        (np.zeros(0, np.uint8), "is empty"),
        (np.array([{}]), "Python objects"),
        (RawBuffer(0, 8), "can lie at"),
        (RawBuffer(4096, 0), "can lie at"),
        (RawBuffer(-1, 8), "can lie at"),
        (RawBuffer(4096, 1 << 60), "can lie at"),
        (RawBuffer("x", 8), "are ints"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_buffer_is_named(buffer: object, reason: str) -> None:
    with pytest.raises(InvalidBuffer, match="the buffer") as caught:
        writable_memory(buffer)
    assert reason in caught.value.message
    with pytest.raises(InvalidBuffer, match="buffer 1") as caught:
        pieces_of([bytearray(1), buffer], 2, writable=True)
    assert reason in caught.value.message


def test_empty_values_are_refused() -> None:
    for empty in (b"", bytearray(), np.zeros(0, np.uint8), memoryview(b"")):
        with pytest.raises(InvalidBuffer, match=r"buffer 1 is empty .*at least 1 byte"):
            bytes_pieces([b"x", empty], 2)


def test_pieces_of_plain_buffers_need_no_starts() -> None:
    buffers = [bytearray(b"ab"), np.arange(3, dtype=np.uint8)]
    pieces = pieces_of(buffers, 2, writable=True)
    assert pieces.starts is None
    assert pieces.lengths.tolist() == [2, 3]
    assert pieces.totals().tolist() == [2, 3]
    assert content(int(pieces.addresses[1]), 3) == b"\0\1\2"


def test_lists_are_scattered_objects() -> None:
    pieces = pieces_of([b"ab", [b"cd", b"efg"], b"h", (b"i",)], 4, writable=False)
    assert pieces.starts is not None
    assert pieces.starts.tolist() == [0, 1, 3, 4, 5]
    assert pieces.totals().tolist() == [2, 5, 1, 1]
    with pytest.raises(InvalidBuffer, match="buffer 1 is empty"):
        pieces_of([b"ab", []], 2, writable=False)
    with pytest.raises(InvalidBuffer, match="buffer 1 is read-only"):
        pieces_of([bytearray(1), [bytearray(1), b"x"]], 2, writable=True)


def test_rows_of_an_array_are_buffers() -> None:
    blocks = np.arange(24, dtype=np.int32).reshape(3, 2, 4)
    pieces = pieces_of(blocks, 3, writable=True)
    assert pieces.lengths.tolist() == [32, 32, 32]
    for i in range(3):
        assert content(int(pieces.addresses[i]), 32) == blocks[i].tobytes()
    readonly = blocks.copy()
    readonly.flags.writeable = False
    for wrong in (blocks[0, 0], blocks[:, ::2], readonly):
        with pytest.raises(InvalidBuffer):
            pieces_of(wrong, len(wrong), writable=True)
    with pytest.raises(InvalidBuffer, match="3 rows for 2 keys"):
        pieces_of(blocks, 2, writable=True)


def test_mismatched_counts_are_refused() -> None:
    with pytest.raises(InvalidBuffer, match="1 buffers for 2 keys"):
        pieces_of([bytearray(1)], 2, writable=True)
    with pytest.raises(InvalidBuffer, match="sequence"):
        pieces_of(5, 1, writable=True)  # type: ignore[arg-type]


def test_columns_of_addresses() -> None:
    memory = np.zeros(100, np.uint8)
    base = memory.ctypes.data
    flat = column_pieces(np.array([base, base + 10], np.uint64), 10, 2)
    assert flat.starts is None
    assert flat.lengths.tolist() == [10, 10]
    table = np.array([[base, base + 50], [base + 20, base + 70]], np.int64)
    scattered = column_pieces(table, [5, 7], 2)
    assert scattered.starts is not None
    assert scattered.starts.tolist() == [0, 2, 4]
    assert scattered.lengths.tolist() == [5, 7, 5, 7]
    assert column_pieces([base], [4], 1).lengths.tolist() == [4]
    assert len(column_pieces(np.zeros(0, np.uint64), 4, 0)) == 0


@pytest.mark.parametrize(
    ("addresses", "lengths", "reason"),
    [
        ([1.5], 4, "addresses"),
        (["x"], 4, "addresses"),
        ([-1], 4, "addresses"),
        ([4096], None, "without lengths"),
        ([4096], [4, 5], "lengths of the shape"),
        ([4096], -4, "lengths"),
        ([4096], 1 << 50, "a length of"),
        ([0], 4, "buffer 0 has no address"),
        ([4096], 0, "no address or no length"),
        ([4096, 8192], 4, "for 1 keys"),
        (4096, 4, "for 1 keys"),
    ],
)
def test_wrong_columns_are_named(addresses: object, lengths: object, reason: str) -> None:
    with pytest.raises(InvalidBuffer) as caught:
        column_pieces(addresses, lengths, 1)
    assert reason in caught.value.message


def test_small_values_are_joined_and_large_ones_pointed_at() -> None:
    values = [b"a" * 10, b"b" * 20, b"c"]
    pieces = bytes_pieces(values, 3)
    assert len(pieces.keepers) == 1
    for i, value in enumerate(values):
        assert content(int(pieces.addresses[i]), int(pieces.lengths[i])) == value
    large = [b"x" * 100_000, b"y" * 100_000]
    assert bytes_pieces(large, 2).keepers == large
    with pytest.raises(InvalidBuffer, match="3 buffers for 2 keys"):
        bytes_pieces(values, 2)


def test_hashes_run_over_pieces_in_order() -> None:
    data = np.frombuffer(b"abcdefghij", np.uint8)
    base = data.ctypes.data
    whole = Pieces(np.array([base], np.uint64), np.array([10], np.uint64), None)
    assert hash_pieces(whole, np.array([7], np.uint64)).tolist() == [
        xxhash.xxh3_64_intdigest(b"abcdefg")
    ]
    scattered = Pieces(
        np.array([base + 5, base], np.uint64),
        np.array([5, 5], np.uint64),
        np.array([0, 2], np.int64),
    )
    assert hash_pieces(scattered, np.array([8], np.uint64)).tolist() == [
        xxhash.xxh3_64_intdigest(b"fghijabc")
    ]


def test_new_bytes_are_distinct_objects() -> None:
    one, address = new_bytes(1)
    ctypes.memmove(address, b"z", 1)
    assert one == b"z"
    assert new_bytes(1)[1] != address
    assert bytes([122]) == b"z"


def test_an_allocated_buffer() -> None:
    buffer = Buffer(10_000)
    assert buffer.address % mmap.PAGESIZE == 0
    assert len(buffer) == 10_000
    buffer.array[:4] = [1, 2, 3, 4]
    assert bytes(buffer[1:3]) == b"\2\3"
    assert np.asarray(buffer)[3] == 4
    assert np.asarray(buffer).ctypes.data == buffer.address
    assert writable_memory(buffer)[:2] == (buffer.address, 10_000)
    assert readable_memory(buffer)[:2] == (buffer.address, 10_000)
    view = buffer[:2]
    buffer.close()
    assert bytes(view) == b"\1\2"  # still exported, so still there
    for use in (lambda: writable_memory(buffer), lambda: buffer[:1], lambda: np.asarray(buffer)):
        with pytest.raises(InvalidBuffer, match="closed"):
            use()


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", True, None])
def test_a_buffer_has_a_size(size: object) -> None:
    with pytest.raises(InvalidArgument, match="size_bytes"):
        Buffer(size)  # type: ignore[arg-type]


def test_tensors_are_taken_by_their_interface() -> None:
    memory = np.zeros(6, np.float32)
    assert writable_memory(FakeTensor(memory))[:2] == (memory.ctypes.data, 24)
    assert readable_memory(FakeTensor(memory))[:2] == (memory.ctypes.data, 24)
    for device in ("xpu", "mps"):
        with pytest.raises(InvalidBuffer, match=f"lies on {device}:0") as caught:
            writable_memory(FakeTensor(memory, device))
        assert "tensor.cpu()" in caught.value.remedy
    with pytest.raises(InvalidBuffer, match="not contiguous"):
        writable_memory(FakeTensor(memory, contiguous=False))
    with pytest.raises(InvalidBuffer, match="empty"):
        writable_memory(FakeTensor(memory[:0]))


# ---- on GPUs ------------------------------------------------------------------------------------


class Told:
    """What tells of itself by the CUDA array interface."""

    def __init__(self, **told: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 3),
            "typestr": "<f4",
            "data": (0x7000, False),
            "version": 3,
        } | told


def test_tensors_on_a_gpu() -> None:
    array = FakeArray(4096)
    for tensor in (FakeTensor(array, "cuda"), array):
        address, length, keeper = writable_memory(tensor)
        assert (address, length) == (array.address, 4096)
        assert isinstance(keeper, DeviceMemory)
        assert keeper.device == 0
        assert keeper.keeper is tensor
    with pytest.raises(InvalidBuffer, match="not contiguous"):
        writable_memory(FakeTensor(array, "cuda", contiguous=False))
    pieces = pieces_of([array, bytearray(5)], 2, writable=True)
    assert pieces.devices is not None
    assert pieces.devices.numbers.tolist() == [0, ON_HOST]
    assert pieces_of([bytearray(5)], 1, writable=True).devices is None


def test_raw_memory_of_a_gpu() -> None:
    keeper = writable_memory(RawBuffer(0x7000, 5, None, 3))[2]
    assert keeper == DeviceMemory(0x7000, 5, 3, NO_STREAM, None)
    for device in (-1, 1 << 16, True, "0"):
        with pytest.raises(InvalidBuffer, match="there is no device"):
            writable_memory(RawBuffer(0x7000, 5, None, device))  # type: ignore[arg-type]


def test_the_cuda_array_interface() -> None:
    assert writable_memory(Told())[:2] == (0x7000, 48)
    assert writable_memory(Told(strides=(12, 4)))[:2] == (0x7000, 48)
    streams: list[tuple[dict[str, Any], int]] = [
        ({}, NO_STREAM),
        ({"stream": None}, NO_STREAM),
        ({"stream": 2}, 2),
        ({"version": 2}, 1),
    ]
    for told, stream in streams:
        keeper = writable_memory(Told(**told))[2]
        assert isinstance(keeper, DeviceMemory)
        assert keeper.stream == stream, told
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"strides": (24, 4)}, "not contiguous"),
        ({"data": (0x7000, True)}, "read-only"),
        ({"shape": (0, 3)}, "empty"),
        ({"shape": None}, "incomplete"),
    ]
    for told, what in wrong:
        with pytest.raises(InvalidBuffer, match=what):
            writable_memory(Told(**told))
    assert readable_memory(Told(data=(0x7000, True)))[:2] == (0x7000, 48)


class Packed:
    """What tells of itself by DLPack: host memory that says it lies elsewhere."""

    def __init__(self, array: np.ndarray, kind: int = 2) -> None:
        self.array, self.kind = array, kind
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()


def test_dlpack() -> None:
    array = np.zeros((4, 3), np.float32)
    packed = Packed(array)
    users = sys.getrefcount(array)
    address, length, keeper = writable_memory(packed)
    assert (address, length) == (array.ctypes.data, 48)
    assert isinstance(keeper, DeviceMemory)
    assert packed.streams == [keeper.stream] == [1]
    del keeper
    assert sys.getrefcount(array) == users  # let go of
    assert writable_memory(Packed(array[1:3]))[:2] == (array.ctypes.data + 12, 24)
    with pytest.raises(InvalidBuffer, match="not contiguous"):
        writable_memory(Packed(array[:, :2]))
    with pytest.raises(InvalidBuffer, match="lies on ROCm"):
        writable_memory(Packed(array, 10))
    with pytest.raises(InvalidBuffer, match="no buffer protocol"):
        writable_memory(Packed(array, 1))
