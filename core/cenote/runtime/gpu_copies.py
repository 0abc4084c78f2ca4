"""Copies between memory of a GPU and of this host, on a stream of their own.

What is asked of a GPU is little: pin host memory, copy, say when it is done. `GpuCopies` is that,
`CudaCopies` does it by the CUDA driver's own calls (ctypes), in each device's primary context: the
one that torch, CuPy, JAX and Numba use. None of these has to be installed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

from cenote.api.errors import CenoteError, InvalidBuffer, ResourceUnavailable

__all__ = ["NO_STREAM", "STAGING_REMEDY", "CopyTicket", "CudaCopies", "GpuCopies", "open_cuda"]

STAGING_REMEDY: Final = (
    "memory of a GPU takes NVIDIA's driver (libcuda.so.1) in this process's environment;"
    " where there is none, copy to the host first (tensor.cpu()) and pass that"
)
NO_STREAM: Final = -1
"""Nothing has to be waited for."""

Copy = tuple[int, int, int]
"""Address on the device, address on the host, bytes."""

_LIBRARY: Final = "libcuda.so.1"
_NOT_READY: Final = 600
_WRONG_ARGUMENTS: Final = (1, 101, 700)
_PORTABLE: Final = 1
_NON_BLOCKING: Final = 1
_NO_TIMING: Final = 2
_DMA_BUF_SUPPORTED: Final = 124
_FLUSH_TARGET_CONTEXT: Final = 0
_FLUSH_TO_OWNER: Final = 100


class CopyTicket(Protocol):
    """Copies that were begun."""

    def done(self) -> bool:
        """Whether they have ended, and touch no memory any more. Raises what went wrong, then."""
        ...


class GpuCopies(Protocol):
    """For several threads."""

    def bus_address(self, device: int) -> str:
        """Where the device sits on PCIe, as in "0000:3b:00.0"; "" where that is not told."""
        ...

    def pin(self, device: int, address: int, length: int) -> bool:
        """Let GPUs reach host memory by themselves, which is faster; False where it can't be.
        `device`: one that is in use."""
        ...

    def unpin(self, device: int, address: int) -> None: ...

    def begin(
        self, device: int, lane: int, copies: Sequence[Copy], streams: Sequence[int], to_host: bool
    ) -> CopyTicket:
        """Begin to copy, once what was queued on `streams` (CUDA handles) until now has ended.

        Copies of one `lane` follow each other. Raises InvalidBuffer, ResourceUnavailable.
        """
        ...

    def settle(self, device: int, streams: Sequence[int]) -> CopyTicket:
        """Done when what was queued on `streams` until now has ended."""
        ...

    def flush(self, device: int) -> None:
        """What a NIC has written into the device's memory is seen by what starts there now."""
        ...

    def close(self) -> None: ...


@final
class _Event:
    """A `CopyTicket`: what was queued before it, on one stream or several."""

    def __init__(
        self, cuda: CudaCopies, device: int, handles: list[int], error: CenoteError | None = None
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._handles = handles
        self._error = error

    def done(self) -> bool:
        while self._handles:
            try:
                if not self._cuda.is_over(self._device, self._handles[-1]):
                    return False
            except CenoteError as error:
                self._error = error
            self._handles.pop()
        if self._error is not None:
            raise self._error
        return True


@final
class CudaCopies:
    """`GpuCopies` by the CUDA driver. `driver`: its library (tests).

    Raises ResourceUnavailable where there is none, or no device.
    """

    def __init__(self, driver: Any = None) -> None:
        self._cuda = _load() if driver is None else driver
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[tuple[int, int], ctypes.c_void_p] = {}
        self._check(self._cuda.cuInit(ctypes.c_uint(0)), "there is no GPU that can be used")

    def bus_address(self, device: int) -> str:
        handle, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        code = self._cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device))
        code = code or self._cuda.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), handle)
        return "" if code else text.value.decode()

    def device_count(self) -> int:
        count = ctypes.c_int()
        code = self._cuda.cuDeviceGetCount(ctypes.byref(count))
        return 0 if code else count.value

    def exports_dmabufs(self, device: int) -> bool:
        """Whether NICs can be given the device's memory."""
        handle, value = ctypes.c_int(), ctypes.c_int()
        code = self._cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device))
        code = code or self._cuda.cuDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(_DMA_BUF_SUPPORTED), handle
        )
        return not code and value.value == 1

    def pin(self, device: int, address: int, length: int) -> bool:
        with self._current(device):
            code: int = self._cuda.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(_PORTABLE)
            )
        return code == 0

    def unpin(self, device: int, address: int) -> None:
        with self._current(device):
            self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def begin(
        self, device: int, lane: int, copies: Sequence[Copy], streams: Sequence[int], to_host: bool
    ) -> CopyTicket:
        cuda = self._cuda
        with self._current(device):
            side = self._side_stream(device, lane)
            error: CenoteError | None = None
            try:
                for stream in set(streams):
                    self._follow(side, stream)
                for remote, local, length in copies:
                    size = ctypes.c_size_t(length)
                    there, here = ctypes.c_uint64(remote), ctypes.c_void_p(local)
                    if to_host:
                        code = cuda.cuMemcpyDtoHAsync_v2(here, there, size, side)
                    else:
                        code = cuda.cuMemcpyHtoDAsync_v2(there, here, size, side)
                    self._check(code, f"{length} bytes at {remote:#x} can't be copied")
            except CenoteError as refused:  # told when what was begun before it has ended
                error = refused
            return _Event(self, device, [self._recorded(side)], error)

    def settle(self, device: int, streams: Sequence[int]) -> CopyTicket:
        with self._current(device):
            streams = sorted(set(streams))
            return _Event(self, device, [self._recorded(ctypes.c_void_p(s)) for s in streams])

    def flush(self, device: int) -> None:
        with self._current(device):
            # Not supported (801) where the device orders what NICs write by itself.
            self._cuda.cuFlushGPUDirectRDMAWrites(_FLUSH_TARGET_CONTEXT, _FLUSH_TO_OWNER)

    def is_over(self, device: int, event: int) -> bool:
        """Whether what was queued before an event has ended; then the event is gone, too."""
        with self._current(device):
            code = self._cuda.cuEventQuery(ctypes.c_void_p(event))
            if code == _NOT_READY:
                return False
            self._cuda.cuEventDestroy_v2(ctypes.c_void_p(event))
            self._check(code, "a copy failed")
            return True

    def close(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, {}
            contexts, self._contexts = self._contexts, {}
        for (device, _), stream in streams.items():
            with self._pushed(contexts[device]):
                self._cuda.cuStreamDestroy_v2(stream)
        for device in contexts:
            self._cuda.cuDevicePrimaryCtxRelease_v2(ctypes.c_int(device))

    # ---- contexts, streams and events -------------------------------------------------------

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                code = self._cuda.cuDevicePrimaryCtxRetain(
                    ctypes.byref(context), ctypes.c_int(device)
                )
                self._check(code, f"GPU {device} can't be used")
                self._contexts[device] = context
        with self._pushed(context):
            yield

    @contextmanager
    def _pushed(self, context: ctypes.c_void_p) -> Iterator[None]:
        """The calling thread's context is as before afterwards."""
        self._check(self._cuda.cuCtxPushCurrent_v2(context), "a context can't be used")
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _side_stream(self, device: int, lane: int) -> ctypes.c_void_p:
        with self._lock:
            stream = self._streams.get((device, lane))
            if stream is None:
                stream = ctypes.c_void_p()
                code = self._cuda.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
                self._check(code, "a stream can't be made")
                self._streams[device, lane] = stream
            return stream

    def _follow(self, side: ctypes.c_void_p, stream: int) -> None:
        """What comes on `side` waits for what is on `stream` now."""
        event = self._recorded(ctypes.c_void_p(stream))
        try:
            code = self._cuda.cuStreamWaitEvent(side, ctypes.c_void_p(event), ctypes.c_uint(0))
            self._check(code, "a stream can't be waited for")
        finally:
            self._cuda.cuEventDestroy_v2(ctypes.c_void_p(event))

    def _recorded(self, stream: ctypes.c_void_p) -> int:
        event = ctypes.c_void_p()
        code = self._cuda.cuEventCreate(ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
        self._check(code, "an event can't be made")
        code = self._cuda.cuEventRecord(event, stream)
        if code:
            self._cuda.cuEventDestroy_v2(event)
        self._check(code, "an event can't be recorded")
        return event.value or 0

    def _check(self, code: int, what: str) -> None:
        if code:
            kind = InvalidBuffer if code in _WRONG_ARGUMENTS else ResourceUnavailable
            raise kind(f"{what} (CUDA error {code})", remedy=STAGING_REMEDY)


def open_cuda() -> CudaCopies:
    """Raises ResourceUnavailable where there is no driver or no device."""
    return CudaCopies()


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ResourceUnavailable(
            f"there is no CUDA driver here ({error})", remedy=STAGING_REMEDY
        ) from error
