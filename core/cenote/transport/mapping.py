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
from typing import Any, Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.mapped_file import MappedFile

__all__ = ["Mapping"]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_madvise: Final[Any] = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@final
class Mapping:
    """`size_bytes` of a file. The descriptor may be closed afterwards.

    Raises ResourceUnavailable.
    """

    __slots__ = (
        "__weakref__",
        "_mapped",
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
        try:
            self._mapped = MappedFile(descriptor, size_bytes, writable=writable, offset=offset)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't map a segment of {size_bytes} bytes: {error.strerror}",
                remedy="raise the limit of virtual memory (ulimit -v), or use TCP",
            ) from error
        address = self._mapped.address
        if writable:
            _madvise(address, size_bytes, mmap.MADV_DONTFORK)
        self.address = int(address)
        self.ready_bytes = ready_bytes
        """How much of it may be touched; grows when the daemon says so."""
        self.populated_bytes = 0
        self.incarnation = incarnation
        self.index = index
        """Which of the daemon's segments it is, there."""
        self.memory = self._mapped.memory
        self.view = self.memory.toreadonly()
