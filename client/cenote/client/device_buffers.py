"""Buffers that lie in the memory of a GPU, told by what they say of themselves.

torch tensors are asked as such; all else by `__cuda_array_interface__`, then by DLPack. Memory that
the GPU's maker calls the host's (pinned memory) is host memory.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any, Final, cast

from cenote.api.errors import InvalidBuffer
from cenote.runtime.gpu_copies import NO_STREAM

__all__ = ["DeviceMemory", "device_memory"]

_DL_CPU: Final = (1, 3, 11)
_DL_CUDA: Final = (2, 13)
_DL_NAMES: Final = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI"}
_LEGACY_STREAM: Final = 1


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`[address, address + length)` on a GPU."""

    address: int
    length: int
    device: int
    stream: int
    """CUDA handle of what its owner works on it with; NO_STREAM: nothing is under way."""
    keeper: object
    """Keeps the memory valid."""


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer: Final = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


def device_memory(buffer: Any, name: str, *, writable: bool) -> DeviceMemory | None:
    """What lies on a GPU; None where it does not. `name`: of the buffer, in errors.

    Raises InvalidBuffer: it is not contiguous, read-only, empty, or on a device that isn't CUDA's.
    """
    if type(buffer).__module__.partition(".")[0] == "torch" and hasattr(buffer, "data_ptr"):
        return _of_tensor(buffer, name)
    try:
        told = getattr(buffer, "__cuda_array_interface__", None)
    except (AttributeError, RuntimeError, TypeError):  # of an array that lies elsewhere
        told = None
    if isinstance(told, dict):
        return _of_interface(buffer, told, name, writable)
    if hasattr(buffer, "__dlpack_device__") and hasattr(buffer, "__dlpack__"):
        return _of_dlpack(buffer, name)
    return None


def _of_tensor(tensor: Any, name: str) -> DeviceMemory | None:
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise _elsewhere(name, str(tensor.device))
    if not tensor.is_contiguous():
        raise _scattered(name, "pass tensor.contiguous(), or its pieces as a list")
    length = int(tensor.numel()) * int(tensor.element_size())
    if not length:
        raise _empty(name)
    index = getattr(tensor.device, "index", None) or 0
    return DeviceMemory(int(tensor.data_ptr()), length, index, _torch_stream(index), tensor)


def _torch_stream(device: int) -> int:
    """What the calling thread computes on that device with."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return _LEGACY_STREAM
    return int(cuda.current_stream(device).cuda_stream) or _LEGACY_STREAM


def _of_interface(
    buffer: Any, told: dict[str, Any], name: str, writable: bool
) -> DeviceMemory | None:
    try:
        address, read_only = told["data"]
        shape = tuple(int(each) for each in told["shape"])
        item_bytes = int(str(told["typestr"])[2:])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidBuffer(f"{name}: its __cuda_array_interface__ is incomplete") from error
    length = math.prod(shape) * item_bytes
    if not length or not address:
        raise _empty(name)
    strides = told.get("strides")
    if strides is not None and not _is_packed(shape, strides, item_bytes):
        raise _scattered(name, "pass a contiguous copy, or its pieces as a list")
    if writable and read_only:
        raise InvalidBuffer(f"{name} is read-only", remedy="pass a writable buffer")
    # Interfaces older than version 3 say nothing: what the legacy stream has to do comes first.
    stream = told.get("stream", None if int(told.get("version", 0)) >= 3 else _LEGACY_STREAM)
    device = _device_of(buffer)
    return DeviceMemory(
        int(address), length, device, NO_STREAM if stream is None else int(stream), buffer
    )


def _device_of(buffer: Any) -> int:
    """Which GPU: the interface does not tell, its makers do."""
    if hasattr(buffer, "__dlpack_device__"):
        return int(buffer.__dlpack_device__()[1])
    device = getattr(buffer, "device", 0)
    return int(getattr(device, "id", device) if not isinstance(device, str) else 0)


def _of_dlpack(buffer: Any, name: str) -> DeviceMemory | None:
    kind, _ = buffer.__dlpack_device__()
    if int(kind) in _DL_CPU:
        return None
    if int(kind) not in _DL_CUDA:
        raise _elsewhere(name, _DL_NAMES.get(int(kind), f"a device of DLPack's type {int(kind)}"))
    try:
        capsule = buffer.__dlpack__(stream=_LEGACY_STREAM)
        pointer = _capsule_pointer(capsule, b"dltensor")
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidBuffer(f"{name} can't be used by DLPack: {error}") from None
    tensor = _DlTensor.from_address(cast("int", pointer))
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    item_bytes = -(-tensor.bits * tensor.lanes // 8)
    length = math.prod(shape) * item_bytes
    if not length or not tensor.data:
        raise _empty(name)
    if tensor.strides:
        strides = tuple(each * item_bytes for each in tensor.strides[: tensor.ndim])
        if not _is_packed(shape, strides, item_bytes):
            raise _scattered(name, "pass a contiguous copy, or its pieces as a list")
    # The capsule is not taken over: when it goes, the memory is let go of.
    return DeviceMemory(
        tensor.data + tensor.byte_offset, length, tensor.device_id, _LEGACY_STREAM, capsule
    )


def _is_packed(shape: tuple[int, ...], strides: Any, item_bytes: int) -> bool:
    """Whether it is C-contiguous."""
    step = item_bytes
    for size, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if size != 1 and int(stride) != step:
            return False
        step *= size
    return True


def _empty(name: str) -> InvalidBuffer:
    return InvalidBuffer(f"{name} is empty", remedy="objects have at least 1 byte")


def _scattered(name: str, remedy: str) -> InvalidBuffer:
    return InvalidBuffer(f"{name} is not contiguous", remedy=remedy)


def _elsewhere(name: str, where: str) -> InvalidBuffer:
    return InvalidBuffer(
        f"{name} lies on {where}, and only memory of CUDA devices can be used",
        remedy="copy it to the host first (tensor.cpu()) and pass that",
    )
