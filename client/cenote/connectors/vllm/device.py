"""What copies between the KV cache and host memory need of the device that the cache is on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, final

import torch

__all__ = ["Device", "HostDevice", "StreamDevice", "device_of"]

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: for all devices of the process."""


class Device(Protocol):
    """Where a KV cache is."""

    @property
    def is_host(self) -> bool:
        """Copies are done when a call returns, and are to be made by the engine's own thread."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """What is begun in it goes beside what the engine computes."""
        ...

    def order_beside(self) -> None:
        """What goes beside from now on begins after all that this thread has begun so far."""
        ...

    def wait_beside(self) -> None:
        """Until all that went beside is done."""
        ...

    def mark(self) -> Callable[[], None]:
        """What waits, in any thread, until all is done that this thread has begun so far."""
        ...

    def pin(self, address: int, size_bytes: int) -> bool:
        """Have the device reach this host memory by itself, for good. False where it can't."""
        ...


@final
class HostDevice:
    """The host's own memory: nothing goes beside, and nothing has to be waited for."""

    @property
    def is_host(self) -> bool:
        return True

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def order_beside(self) -> None:
        return

    def wait_beside(self) -> None:
        return

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def pin(self, address: int, size_bytes: int) -> bool:
        return True


@final
class StreamDevice:
    """A GPU, by CUDA's calls as torch has them (others' have the same names).

    Made in the engine's thread: threads of ours begin on the first GPU, whichever the engine's is.
    """

    def __init__(self, index: int | None, cuda: Any = torch.cuda) -> None:
        """`cuda`: `torch.cuda`, or what stands for it in a test."""
        self._cuda = cuda
        self._index = cuda.current_device() if index is None else index
        self._stream = cuda.Stream(device=self._index)

    @property
    def is_host(self) -> bool:
        return False

    def beside(self) -> AbstractContextManager[object]:
        found: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return found

    def order_beside(self) -> None:
        # The engine may have given a block away while what it computes for the one before, which
        # had it, still runs.
        self._stream.wait_stream(self._cuda.current_stream(self._index))

    def wait_beside(self) -> None:
        self._stream.synchronize()

    def mark(self) -> Callable[[], None]:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._index))
        wait: Callable[[], None] = event.synchronize
        return wait

    def pin(self, address: int, size_bytes: int) -> bool:
        if not hasattr(self._cuda, "cudart"):
            return False
        with self._cuda.device(self._index):
            return not int(self._cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))


def device_of(device: torch.device) -> Device:
    """Of tensors that lie on it."""
    if device.type == "cpu":
        return HostDevice()
    return StreamDevice(device.index, getattr(torch, device.type))
