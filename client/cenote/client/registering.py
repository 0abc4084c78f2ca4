"""Memory that transports know, and registering by itself what a caller uses again and again without
having registered it.

A device that was told of memory goes on writing there, whoever has it meanwhile. So only memory
whose end can be told is taken: a NumPy array that owns its data, or a view of one. A weak reference
to the owner lets go of the registration before the data is freed; and NumPy resizes no array that
has one. All else (bytes, tensors, maps) is staged, unless the caller registers it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, final

import numpy as np

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.transport.base import Region, Transport

__all__ = ["Registration", "RegistrationCache", "register_everywhere"]

_log = get_logger(__name__)

ARRAY_BYTES_MIN: Final = 256 << 10
"""To pin less than this costs more than to copy it."""
CACHE_BYTES_MAX: Final = 4 << 30
_SEEN_MAX: Final = 1_024
_USES: Final = 2
"""An array is registered when it is used for this time."""


class Registration:
    """Memory made known to every transport; `deregister` when it isn't used any more."""

    def __init__(
        self,
        parts: list[tuple[Transport, Region]],
        forget: Callable[[], None] | None = None,
    ) -> None:
        self._parts = parts
        self._forget = forget

    @property
    def is_direct(self) -> bool:
        """Whether some transport moves its bytes without a copy (of memory of a GPU: a NIC)."""
        return bool(self._parts)

    def deregister(self) -> None:
        """Undo; twice does no harm."""
        parts, self._parts = self._parts, []
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        for transport, region in parts:
            transport.deregister(region)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.deregister()


def register_everywhere(
    transports: Sequence[Transport], address: int, length: int, keeper: object
) -> Registration:
    """Make host memory known to those transports that can."""
    parts: list[tuple[Transport, Region]] = []
    try:
        for transport in transports:
            try:
                parts.append((transport, transport.register(address, length, keeper)))
            except ResourceUnavailable as error:  # what isn't registered is copied once more
                _log.warning("memory can't be registered", size_bytes=length, why=error)
    except BaseException:  # whatever it was, nothing may stay registered
        Registration(parts).deregister()
        raise
    return Registration(parts)


@final
class RegistrationCache:
    """Of one client; for several threads. `close` before its transport."""

    def __init__(self, transport: Transport, *, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._transport = transport
        self._bytes_max = bytes_max
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, tuple[Region, Callable[[], object]]] = {}
        self.held_bytes = 0
        self._refused = False
        self._closed = False

    def note(self, buffers: Any) -> None:
        """These are about to be used: a buffer, or a list of them. Raises nothing."""
        if type(buffers) is np.ndarray:
            self._note(buffers)
        elif type(buffers) is list or type(buffers) is tuple:
            before = None
            for buffer in buffers:
                if type(buffer) is np.ndarray:
                    owner = _owner_of(buffer)
                    if owner is not before:  # rows of one array follow each other
                        before = owner
                        self._note(buffer)

    def _note(self, array: np.ndarray[Any, Any]) -> None:
        owner = _owner_of(array)
        if owner is None or owner.nbytes < ARRAY_BYTES_MIN or self._refused:
            return
        number = id(owner)
        with self._lock:
            if number in self._held:
                return
            uses = self._seen.pop(number, 0) + 1
            if uses < _USES:
                self._seen[number] = uses
                if len(self._seen) > _SEEN_MAX:
                    self._seen.popitem(last=False)
                return
            self._register(number, owner)

    def _register(self, number: int, owner: np.ndarray[Any, Any]) -> None:
        """Under the lock."""
        if self._closed or self.held_bytes + owner.nbytes > self._bytes_max:
            return  # what is held may be in use by another call: nothing is let go for it
        try:
            # Nothing is kept alive: the finalizer ends it first.
            region = self._transport.register(owner.ctypes.data, owner.nbytes, None)
        except CenoteError:
            self._refused = True  # it is staged, which always works
            return
        finalizer = weakref.finalize(owner, self._let_go, number)
        finalizer.atexit = False
        self._held[number] = region, finalizer.detach
        self.held_bytes += owner.nbytes

    def _let_go(self, number: int) -> None:
        with self._lock:
            region, detach = self._held.pop(number, (None, None))
            if region is None or detach is None:
                return
            detach()
            self.held_bytes -= region.length
            self._transport.deregister(region)

    def close(self) -> None:
        """Let all go."""
        with self._lock:
            self._closed = True
            for number in list(self._held):
                self._let_go(number)


def _owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The array that owns the data; None where none does (a map, a tensor, foreign memory)."""
    found: Any = array
    while type(found.base) is np.ndarray:
        found = found.base
    return found if found.base is None and found.flags.owndata else None
