"""Local memory as columns of addresses, from whatever a caller holds.

A transfer names memory by address and length, so a batch becomes two uint64 columns (`Pieces`) and
a list of what keeps the memory alive. What is wrong with a buffer is found here, before anything is
sent, and named with its position in the batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128

from cenote.api.errors import InvalidArgument, InvalidBuffer, ResourceUnavailable
from cenote.api.types import RawBuffer
from cenote.runtime.gpu_copies import NO_STREAM
from cenote.runtime.memory import PAGE_BYTES, address_of, populate
from cenote.runtime.units import format_size

from .device_buffers import DeviceMemory, device_memory
from .plan.device_rows import ON_HOST, Devices
from .plan.pieces import Pieces

__all__ = [
    "AnyBuffer",
    "Buffer",
    "Buffers",
    "bytes_address",
    "bytes_pieces",
    "column_pieces",
    "hash_memory",
    "hash_pieces",
    "new_bytes",
    "pieces_of",
    "readable_memory",
    "writable_memory",
]

AnyBuffer: TypeAlias = Any
"""Anything with the buffer protocol, a NumPy array, a torch tensor, a `Buffer`, a `RawBuffer`, or
what lies on a GPU and says so (`__cuda_array_interface__`, DLPack); where one object is put
together from several of these: a list or tuple of them."""

Buffers: TypeAlias = Sequence[AnyBuffer] | NDArray[Any]
"""Buffers of a batch: one (or a list of several) a key, or an array with one buffer a row."""

_HUGE_PAGE_BYTES: Final = 2 << 20
_JOIN_BYTES_MAX: Final = (
    16 << 10
)  # values of this size on average are joined, larger ones pointed at
_ONE: Final = np.uint64(1)
_LENGTH_MAX: Final = np.uint64((1 << 48) - 1)
_PIECES_MAX: Final = 1 << 20

_from_buffer: Final = ctypes.c_char.from_buffer
_addressof: Final = ctypes.addressof
bytes_address: Final = ctypes.pythonapi.PyBytes_AsString
bytes_address.argtypes = (ctypes.py_object,)
bytes_address.restype = ctypes.c_void_p
_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_new_bytes.restype = ctypes.py_object
_memory_view: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object
_PYBUF_READ: Final = 0x100

Memory: TypeAlias = tuple[int, int, object]
"""Address, length in bytes, and what keeps it alive (and unresized) meanwhile."""


class Buffer:
    """Memory that every local transport can use without a copy: page aligned, populated.

    Made by `Client.alloc`. `array` is it as uint8[size_bytes]; `buffer[a:b]` is a writable
    memoryview of a part. Also a NumPy array interface (`np.asarray(buffer)`). Free it with `close`
    or a `with` block; memory that is still exported then is freed with its last user.
    """

    __slots__ = ("_map", "address", "array", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes <= 0:
            raise InvalidArgument(f"size_bytes is a positive int, not {size_bytes!r}")
        rounded = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, rounded)
        except (OSError, OverflowError) as error:
            raise ResourceUnavailable(
                f"can't allocate {format_size(size_bytes)}: {error}", remedy="allocate less"
            ) from error
        if rounded >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do as well
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[:size_bytes]
        self.address = address_of(self.array)
        self.size_bytes = size_bytes
        populate(self.address, rounded, write=True)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return cast("dict[str, object]", self._live().__array_interface__)

    def _live(self) -> NDArray[np.uint8]:
        if self._map is None:
            raise InvalidBuffer("this Buffer was closed")
        return self.array

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, part: slice) -> memoryview:
        return memoryview(cast("Any", self._live()))[part]

    def close(self) -> None:
        """Give the memory back (when nobody uses it any more)."""
        self._map = None
        self.array = np.zeros(0, np.uint8)
        self.address = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cenote Buffer of {format_size(self.size_bytes)} at {self.address:#x}>"


# ---- one buffer ------------------------------------------------------------------------------


def writable_memory(buffer: AnyBuffer, position: int | None = None) -> Memory:
    """The memory of a buffer that a read will fill. Raises InvalidBuffer."""
    if type(buffer) is Buffer:
        return _live_address(buffer, position), buffer.size_bytes, buffer
    try:
        anchor = _from_buffer(buffer)
        if type(buffer) is np.ndarray:
            length = buffer.nbytes
            if buffer.dtype.hasobject:
                raise InvalidBuffer(f"{_name(position)} is an array of Python objects")
        elif type(buffer) is bytearray:
            length = len(buffer)
        else:
            length = memoryview(buffer).nbytes
    except (TypeError, ValueError, BufferError):
        return _other_memory(buffer, position, writable=True)
    return _addressof(anchor), length, anchor


def readable_memory(buffer: AnyBuffer, position: int | None = None) -> Memory:
    """The memory of a buffer that a put will send. Raises InvalidBuffer."""
    if type(buffer) is bytes:
        if not buffer:
            raise _empty(position)
        return bytes_address(buffer), len(buffer), buffer
    if type(buffer) is Buffer:
        return _live_address(buffer, position), buffer.size_bytes, buffer
    try:
        anchor = _from_buffer(buffer)
        view = memoryview(buffer)
        if view.format == "O":
            raise InvalidBuffer(f"{_name(position)} is an array of Python objects")
        return _addressof(anchor), view.nbytes, anchor
    except (TypeError, ValueError, BufferError):
        return _other_memory(buffer, position, writable=False)


def _live_address(buffer: Buffer, position: int | None) -> int:
    if not buffer.address:
        raise InvalidBuffer(f"{_name(position)} was closed")
    return buffer.address


def _name(position: int | None) -> str:
    return "the buffer" if position is None else f"buffer {position}"


def _empty(position: int | None) -> InvalidBuffer:
    return InvalidBuffer(f"{_name(position)} is empty", remedy="objects have at least 1 byte")


def _other_memory(buffer: AnyBuffer, position: int | None, *, writable: bool) -> Memory:
    """What `ctypes` does not take at once: tensors, read-only memory, and all that is wrong."""
    if isinstance(buffer, RawBuffer):
        return _raw_memory(buffer, position)
    on_device = device_memory(buffer, _name(position), writable=writable)
    if on_device is not None:
        return on_device.address, on_device.length, on_device
    if type(buffer).__module__.partition(".")[0] == "torch":
        return _tensor_memory(buffer, position)
    if isinstance(buffer, np.ndarray) and not buffer.dtype.hasobject and buffer.flags.c_contiguous:
        buffer = _as_bytes_array(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidBuffer(
            f"{_name(position)} is a {type(buffer).__name__}, which has no buffer protocol",
            remedy="pass bytes, bytearray, memoryview, a NumPy array, torch tensor or RawBuffer",
        ) from None
    except (ValueError, BufferError) as error:
        raise InvalidBuffer(f"{_name(position)} can't be used: {error}") from None
    if view.format == "O":
        raise InvalidBuffer(f"{_name(position)} is an array of Python objects")
    if not view.c_contiguous:
        raise InvalidBuffer(
            f"{_name(position)} is not C-contiguous",
            remedy="pass a contiguous copy, or its pieces as a list",
        )
    if writable and view.readonly:
        raise InvalidBuffer(f"{_name(position)} is read-only", remedy="pass a writable buffer")
    if not view.nbytes:
        raise _empty(position)
    return address_of(view), view.nbytes, view


def _as_bytes_array(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The same memory as uint8: types such as bfloat16 have no buffer protocol."""
    return array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)


def _raw_memory(buffer: RawBuffer, position: int | None) -> Memory:
    if not isinstance(buffer.address, int) or not isinstance(buffer.length, int):
        raise InvalidBuffer(f"{_name(position)}: address and length are ints")
    if not 0 < buffer.address < 1 << 63 or not 0 < buffer.length < 1 << 48:
        raise InvalidBuffer(
            f"{_name(position)}: no {buffer.length} bytes can lie at {buffer.address:#x}"
        )
    if buffer.device is None:
        return buffer.address, buffer.length, buffer.keeper
    if type(buffer.device) is not int or not 0 <= buffer.device < 1 << 16:
        raise InvalidBuffer(f"{_name(position)}: there is no device {buffer.device!r}")
    place = DeviceMemory(buffer.address, buffer.length, buffer.device, NO_STREAM, buffer.keeper)
    return buffer.address, buffer.length, place


def _tensor_memory(tensor: Any, position: int | None) -> Memory:
    if not hasattr(tensor, "data_ptr"):
        raise InvalidBuffer(f"{_name(position)} is a {type(tensor).__name__}, not a tensor")
    if not tensor.is_contiguous():
        raise InvalidBuffer(
            f"{_name(position)} is not contiguous",
            remedy="pass tensor.contiguous(), or its pieces as a list",
        )
    length = int(tensor.numel()) * int(tensor.element_size())
    if not length:
        raise _empty(position)
    return int(tensor.data_ptr()), length, tensor


# ---- batches ---------------------------------------------------------------------------------


def pieces_of(buffers: Buffers, count: int, *, writable: bool) -> Pieces:
    """The memory of a batch: a buffer, or a list of buffers (scattered), for each of `count` keys.

    A C-contiguous NumPy array of two or more dimensions is taken as one buffer a row. Raises
    InvalidBuffer naming the position and what is wrong.
    """
    if isinstance(buffers, np.ndarray):
        return _row_pieces(buffers, count, writable)
    try:
        given = len(buffers)
    except TypeError:
        raise InvalidBuffer(f"buffers are a sequence, not a {type(buffers).__name__}") from None
    if given != count:
        raise InvalidBuffer(f"{given} buffers for {count} keys", remedy="pass one for each key")
    memory = writable_memory if writable else readable_memory
    found: list[Memory] = []
    starts: list[int] | None = None
    for position, buffer in enumerate(buffers):
        if type(buffer) is list or type(buffer) is tuple:
            if starts is None:
                starts = list(range(position))
            starts.append(len(found))
            if not buffer:
                raise _empty(position)
            for piece in buffer:
                found.append(memory(piece, position))
        else:
            if starts is not None:
                starts.append(len(found))
            found.append(memory(buffer, position))
    addresses = np.array([each[0] for each in found], np.uint64)
    lengths = np.array([each[1] for each in found], np.uint64)
    keepers = [each[2] for each in found]
    devices = _devices_of(keepers) if DeviceMemory in set(map(type, keepers)) else None
    if starts is None:
        return Pieces(addresses, lengths, None, keepers, devices)
    starts.append(len(found))
    return Pieces(addresses, lengths, np.array(starts, np.int64), keepers, devices)


def _devices_of(keepers: Sequence[object]) -> Devices:
    rows = [
        (each.device, each.stream) if isinstance(each, DeviceMemory) else (ON_HOST, -1)
        for each in keepers
    ]
    numbers, streams = np.array(rows, np.int64).T
    return Devices(np.ascontiguousarray(numbers), np.ascontiguousarray(streams))


def _row_pieces(array: NDArray[Any], count: int, writable: bool) -> Pieces:
    if array.ndim < 2 or array.dtype.hasobject:
        raise InvalidBuffer(
            f"buffers are an array {array.dtype}{list(array.shape)}",
            remedy="pass a list of buffers, or an array with one buffer a row",
        )
    if len(array) != count:
        raise InvalidBuffer(f"{len(array)} rows for {count} keys", remedy="pass one for each key")
    if not array.flags.c_contiguous:
        raise InvalidBuffer("the array of buffers is not C-contiguous")
    if writable and not array.flags.writeable:
        raise InvalidBuffer("the array of buffers is read-only", remedy="pass a writable array")
    width = array.nbytes // count if count else 0
    if count and not width:
        raise _empty(0)
    start = address_of(array) if count else 0
    addresses = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(width)
    return Pieces(addresses, np.full(count, width, np.uint64), None, [array])


def column_pieces(addresses: Any, lengths: Any, count: int) -> Pieces:
    """The memory of a batch by address: uint64[n], or uint64[n, p] for p pieces a key.

    `lengths` in bytes: one number, or an array that broadcasts to the shape of `addresses`. Nothing
    is known about such memory: the caller answers for it. Raises InvalidBuffer.
    """
    if lengths is None:
        raise InvalidBuffer("addresses without lengths", remedy="pass lengths=")
    if type(addresses) is list and type(lengths) is list:
        plain = _plain_pieces(addresses, lengths, count)
        if plain is not None:
            return plain
    at = _column(addresses, "addresses")
    if at.ndim not in (1, 2) or len(at) != count:
        raise InvalidBuffer(
            f"addresses have the shape {list(at.shape)} for {count} keys",
            remedy="pass uint64[n], or uint64[n, pieces]",
        )
    try:
        if type(lengths) is int and 0 < lengths < 1 << 48:
            long = np.full(at.shape, lengths, np.uint64)
        else:
            long = np.broadcast_to(_column(lengths, "lengths"), at.shape)
    except ValueError:
        raise InvalidBuffer(
            f"lengths of the shape {list(np.shape(lengths))} for addresses of {list(at.shape)}"
        ) from None
    if at.size and (not at.all() or not long.all()):
        where = np.argwhere((at == 0) | (long == 0))[0]
        raise InvalidBuffer(f"buffer {int(where[0])} has no address or no length")
    if at.size and int(long.max()) >= 1 << 48:
        raise InvalidBuffer(f"a length of {int(long.max())} bytes")
    if at.size > _PIECES_MAX:
        raise InvalidBuffer(f"{at.size} pieces in one call", remedy=f"at most {_PIECES_MAX}")
    keepers: list[object] = [addresses]
    if at.ndim == 1:
        return Pieces(at, np.ascontiguousarray(long), None, keepers)
    starts = np.arange(count + 1, dtype=np.int64) * at.shape[1]
    return Pieces(at.ravel(), np.ascontiguousarray(long).ravel(), starts, keepers)


def _plain_pieces(addresses: list[int], lengths: list[int], count: int) -> Pieces | None:
    """Two lists of ints, one piece a key: None where that is not what they are."""
    try:
        at = np.frombuffer(array("Q", addresses), np.uint64)
        long = np.frombuffer(array("Q", lengths), np.uint64)
    except (TypeError, OverflowError):
        return None
    if (
        not len(at) == len(long) == count <= _PIECES_MAX
        or not count
        or np.count_nonzero(at) < count
        or np.count_nonzero(long - _ONE >= _LENGTH_MAX)
    ):
        return None
    return Pieces(at, long, None, [])


def _column(values: Any, name: str) -> NDArray[np.uint64]:
    try:
        column = np.asarray(values)
        if column.dtype == np.uint64:
            return np.ascontiguousarray(column)
        if np.issubdtype(column.dtype, np.integer) and (not column.size or column.min() >= 0):
            return column.astype(np.uint64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidBuffer(f"{name} are no array of addresses or lengths", remedy="pass uint64")


def bytes_pieces(values: Buffers, count: int) -> Pieces:
    """The memory of a batch of values to put.

    Small `bytes` are joined, which is cheaper than asking each for its address.
    """
    if type(values) is list and len(values) == count and set(map(type, values)) == {bytes}:
        sizes = np.fromiter(map(len, values), np.uint64, count)
        total = int(sizes.sum())
        if int(sizes.min()) and total <= _JOIN_BYTES_MAX * count:
            joined = b"".join(values)
            addresses = np.cumsum(sizes) - sizes + np.uint64(bytes_address(joined))
            return Pieces(addresses, sizes, None, [joined])
    return pieces_of(values, count, writable=False)


# ---- memory ----------------------------------------------------------------------------------


def new_bytes(length: int) -> tuple[bytes, int]:
    """Uninitialised `bytes` and their address: filled before anyone else sees them."""
    value: bytes = _new_bytes(None, length)
    return value, bytes_address(value)


def hash_memory(address: int, length: int) -> int:
    """XXH3-64 of memory by address."""
    return xxh3_64_intdigest(_memory_view(address, length, _PYBUF_READ))


def hash_pieces(pieces: Pieces, sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH3-64 of the first `sizes[i]` bytes of each object, over its pieces in order."""
    sums = np.empty(len(sizes), np.uint64)
    starts = pieces.starts
    if starts is None:
        for i, (address, size) in enumerate(
            zip(pieces.addresses.tolist(), sizes.tolist(), strict=True)
        ):
            sums[i] = hash_memory(address, size)
        return sums
    for i, size in enumerate(sizes.tolist()):
        state = xxh3_64()
        left = size
        for j in range(int(starts[i]), int(starts[i + 1])):
            step = min(left, int(pieces.lengths[j]))
            if step:
                state.update(_memory_view(int(pieces.addresses[j]), step, _PYBUF_READ))
            left -= step
        sums[i] = state.intdigest()
    return sums


def hash_pieces_wide(
    pieces: Pieces, sizes: NDArray[np.uint64], seed: int, key: bytes = b""
) -> bytes:
    """XXH3-128 of the first `sizes[i]` bytes of each object, 16 bytes each in canonical order; or,
    with a key, BLAKE2b."""
    starts = pieces.starts
    digests = []
    for i, left in enumerate(sizes.tolist()):
        state: Any = blake2b(digest_size=16, key=key) if key else xxh3_128(seed=seed)
        first, last = (i, i + 1) if starts is None else (int(starts[i]), int(starts[i + 1]))
        for j in range(first, last):
            step = min(left, int(pieces.lengths[j]))
            if step:
                state.update(_memory_view(int(pieces.addresses[j]), step, _PYBUF_READ))
            left -= step
        digests.append(state.digest())
    return b"".join(digests)
