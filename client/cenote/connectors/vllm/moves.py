"""What a worker asks of the process that moves its bytes, and what that answers.

They travel over socket pairs that nobody else has an end of, pickled as plain tuples of numbers and
bytes: each call into Python that the engine's process spends here, it spends with the GIL. Moments
are of the monotonic clock, which both processes share.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
from dataclasses import dataclass, fields
from operator import attrgetter
from struct import Struct
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.types import AcquiredLease
from cenote.transport.gil import held_recv, held_send

from .options import ConnectorOptions
from .orders import SpaceName

__all__ = ["LANES", "Answer", "Batch", "Lane", "NowaitLane", "Setting"]

LANES: tuple[Literal["get", "put"], ...] = ("get", "put")
"""Each is a connection of its own with a thread behind it: reads don't wait for writes."""
_HEAD: Final = Struct("=I")
_CHUNK_BYTES: Final = 64 << 10
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_lease_values: Final = attrgetter(*(each.name for each in fields(AcquiredLease)))


@dataclass(frozen=True, slots=True)
class Setting:
    """The first message: who the process is."""

    options: ConnectorOptions
    name: str
    size_bytes: int
    """Of the staging memory."""
    gives_way: bool
    """It does not spin, and copies in one thread: see `Client`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects to read into staging memory (`get`) or to save from there (`put`)."""

    what: Literal["get", "put"]
    space: SpaceName
    keys: list[bytes]
    offsets: NDArray[np.uint64]
    """Where each lies in the staging memory."""
    lengths: NDArray[np.uint64]
    until_s: float
    """When the call is to have ended."""
    lease: AcquiredLease | None = None
    chain: bool = False

    def packed(self) -> bytes:
        space, lease = self.space, self.lease
        return pickle.dumps(
            (
                self.what,
                space.name,
                space.fingerprint,
                self.keys,
                self.offsets.tobytes(),
                self.lengths.tobytes(),
                self.until_s,
                None if lease is None else _lease_values(lease),
                self.chain,
            ),
            pickle.HIGHEST_PROTOCOL,
        )

    @classmethod
    def unpacked(cls, message: bytes) -> Batch:
        what, name, fingerprint, keys, offsets, lengths, until_s, lease, chain = pickle.loads(
            message
        )
        return cls(
            what,
            SpaceName(name, fingerprint),
            keys,
            np.frombuffer(offsets, np.uint64),
            np.frombuffer(lengths, np.uint64),
            until_s,
            None if lease is None else AcquiredLease(*lease),
            chain,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`done`: of each key, whether its bytes are now where they should be, in whole. `stored`: of
    each key of a put, whether this did it."""

    done: NDArray[np.bool_]
    stored: NDArray[np.bool_]
    existed_count: int = 0
    failed_count: int = 0
    took_s: float = 0.0
    """How long the process was at it."""

    def packed(self, took_s: float) -> bytes:
        counts = self.existed_count, self.failed_count
        return pickle.dumps((self.done.tobytes(), self.stored.tobytes(), *counts, took_s))

    @classmethod
    def unpacked(cls, message: bytes) -> Answer | CenoteError:
        """It, or the error that the message is instead."""
        found: Any = pickle.loads(message)
        if isinstance(found, CenoteError):
            return found
        done, stored, *rest = found
        return cls(np.frombuffer(done, np.bool_), np.frombuffer(stored, np.bool_), *rest)


class _End:
    """One end of a socket pair. It is closed when nobody has it any more: until then another thread
    may be using it."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        self._fd = sock.detach()

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd


@final
class Lane(_End):
    """For one thread, which waits: messages with their length before them."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        super().__init__(sock)
        self._rest = b""

    def send(self, message: bytes) -> None:
        """Raises OSError; after that the connection must not be used again."""
        whole = _HEAD.pack(len(message)) + message
        sent: int = held_send(self._fd, whole, len(whole), _AT_ONCE)
        left = memoryview(whole)[max(0, sent) :]
        while left:
            left = left[os.write(self._fd, left) :]

    def receive(self) -> bytes:
        """The next message. Raises EOFError where the other end is closed, OSError."""
        found = self._rest
        while len(found) < _HEAD.size or len(found) < (end := _end_of(found)):
            chunk = os.read(self._fd, _CHUNK_BYTES)
            if not chunk:
                raise EOFError
            found = found + chunk if found else chunk
        self._rest = found[end:]
        return found[_HEAD.size : end]


@final
class NowaitLane(_End):
    """The engine's end: never waits, and never gives up the GIL. (Who gives it up for what takes
    microseconds has to wait to have it back.) That the other end is gone, it does not tell."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        super().__init__(sock)
        self._unsent = b""
        self._rest = b""
        chunk = bytearray(_CHUNK_BYTES)
        self._chunk = memoryview(chunk)
        self._place = (ctypes.c_char * _CHUNK_BYTES).from_buffer(chunk)

    def send(self, message: bytes) -> None:
        """What does not go out now, goes with a later `flush`."""
        self._unsent += _HEAD.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        if self._unsent:
            sent: int = held_send(self._fd, self._unsent, len(self._unsent), _AT_ONCE)
            self._unsent = self._unsent[max(0, sent) :]

    def receive(self) -> bytes | None:
        """A message that is there in whole; None: not yet."""
        found = self._rest
        while len(found) < _HEAD.size or len(found) < (end := _end_of(found)):
            count: int = held_recv(self._fd, self._place, _CHUNK_BYTES, _AT_ONCE)
            if count <= 0:
                self._rest = found
                return None
            found += bytes(self._chunk[:count])
        self._rest = found[end:]
        return found[_HEAD.size : end]


def _end_of(found: bytes) -> int:
    length: int = _HEAD.unpack_from(found)[0]
    return _HEAD.size + length
