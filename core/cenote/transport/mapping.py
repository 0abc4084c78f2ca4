"""A daemon's segment, mapped into this process.

The mapping goes away when nobody can see it any more: the channel let go of it, no call works on
it, no view of it is exported. Reference counting does that: the memory's owner is a ctypes object
that every view keeps alive, and its finalizer unmaps. The daemon notices by itself (it asks the
kernel whether the descriptor that it made for this session still exists): nothing needs to be told.

Python's own mmap keeps a duplicate of the descriptor, which a forked child would inherit and hold
for as long as it lives. Here the descriptor is closed, and a writable mapping does not pass a fork.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final, final

from cenote.api.errors import ResourceUnavailable

__all__ = ["Mapping"]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final[Any] = _libc.mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_mmap.restype = ctypes.c_void_p
_munmap: Final[Any] = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise: Final[Any] = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@final
class Mapping:
    """`size_bytes` of a file. The descriptor may be closed afterwards.

    Raises ResourceUnavailable.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "address",
        "incarnation",
        "index",
        "memory",
        "populated_bytes",
        "ready_bytes",
        "view",
    )

    def __init__(
        self,
        descriptor: int,
        size_bytes: int,
        ready_bytes: int,
        incarnation: bytes,
        *,
        writable: bool,
        index: int = 0,
        offset: int = 0,
    ) -> None:
        """`offset`: where in the file, a multiple of the page size."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _mmap(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, offset)
        if address == _MAP_FAILED or address is None:
            reason = os.strerror(ctypes.get_errno())
            raise ResourceUnavailable(
                f"can't map a segment of {size_bytes} bytes: {reason}",
                remedy="raise the limit of virtual memory (ulimit -v), or use TCP",
            )
        self._owner = (ctypes.c_char * size_bytes).from_address(address)
        # At the interpreter's end views may still be in use: the kernel unmaps then.
        weakref.finalize(self._owner, _munmap, address, size_bytes).atexit = False
        if writable:
            _madvise(address, size_bytes, mmap.MADV_DONTFORK)
        self.address = int(address)
        self.ready_bytes = ready_bytes
        """How much of it may be touched; grows when the daemon says so."""
        self.populated_bytes = 0
        self.incarnation = incarnation
        self.index = index
        """Which of the daemon's segments it is, there."""
        self.memory = memoryview(self._owner).cast("B")
        self.view = self.memory.toreadonly()
