"""GPU memory as a dma-buf, which a NIC's driver can be given: asked of the CUDA driver by ctypes.

It takes an NVIDIA driver with the open kernel modules (R515 or later) and Linux 5.12 or later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from cenote.api.errors import InvalidBuffer, ResourceUnavailable

__all__ = ["GPU_REMEDY", "DmaBuf", "export_dmabuf"]

GPU_REMEDY: Final = (
    "GPU memory takes a driver that exports dma-bufs (NVIDIA's open kernel modules, R515 or later),"
    " a NIC whose driver takes them (mlx5 since Linux 5.12) and verbs=ibverbs; where it can't be"
    " had, copy to pinned host memory first (tensor.cpu())"
)
_LIBRARY: Final = "libcuda.so.1"
_HANDLE_TYPE_DMA_BUF: Final = 1
_NOT_SUPPORTED: Final = 801
_INVALID_VALUE: Final = 1


@dataclass(slots=True)
class DmaBuf:
    """A descriptor, and where in its buffer the wanted memory begins. To be closed once it was
    registered: the registration keeps the memory."""

    fd: int
    offset: int

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def export_dmabuf(address: int, length: int, driver: Any = None) -> DmaBuf:
    """The pages of GPU memory that hold `[address, address + length)`.

    `driver`: the CUDA driver's library (tests). Raises InvalidBuffer (that is no GPU memory),
    ResourceUnavailable (there is no CUDA driver, or it exports none); both say what would help.
    """
    cuda = _load() if driver is None else driver
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = cuda.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if code or address + length > base.value + size.value:
        raise InvalidBuffer(
            f"{length} bytes at {address:#x} are not memory of a GPU (CUDA error {code})",
            remedy="pass memory that CUDA has allocated, in this process",
        )
    page = mmap.PAGESIZE
    first = address // page * page
    last = -(-(address + length) // page) * page
    if first < base.value or last > base.value + size.value:
        raise InvalidBuffer(
            f"{length} bytes at {address:#x} share a page of {page} bytes with other allocations",
            remedy="register the whole allocation, of at least a page",
        )
    fd = ctypes.c_int(-1)
    code = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(fd),
        ctypes.c_uint64(first),
        ctypes.c_size_t(last - first),
        _HANDLE_TYPE_DMA_BUF,
        ctypes.c_uint64(0),
    )
    if code or fd.value < 0:
        why = {_NOT_SUPPORTED: "not supported", _INVALID_VALUE: "invalid value"}.get(code, "")
        raise ResourceUnavailable(
            f"the CUDA driver exports no dma-buf (error {code}{why and ', ' + why})",
            remedy=GPU_REMEDY,
        )
    return DmaBuf(fd.value, address - first)


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ResourceUnavailable(
            f"there is no CUDA driver here ({error})", remedy=GPU_REMEDY
        ) from error
