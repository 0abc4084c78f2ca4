"""What a worker asks of the process that moves its bytes, and what that answers.

They travel over socket pairs that nobody else has an end of, pickled as plain tuples of numbers and
bytes: each call into Python that the engine's process spends here, it spends with the GIL.
"""

from __future__ import annotations

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
from cenote.transport.gil import held_send

from .options import ConnectorOptions
from .orders import SpaceName

__all__ = ["LANES", "Answer", "Batch", "Lane", "Setting"]

LANES: tuple[Literal["get", "put"], ...] = ("get", "put")
"""Each is a connection of its own with a thread behind it: reads don't wait for writes."""
_HEAD: Final = Struct("=I")
_CHUNK_BYTES: Final = 64 << 10
_TIMEVAL: Final = Struct("@ll")
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_lease_values: Final = attrgetter(*(each.name for each in fields(AcquiredLease)))


@dataclass(frozen=True, slots=True)
class Setting:
    """The first message: who the process is."""

    options: ConnectorOptions
    name: str
    size_bytes: int
    """Of the staging memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects to read into staging memory (`get`) or to save from there (`put`)."""

    what: Literal["get", "put"]
    space: SpaceName
    keys: list[bytes]
    offsets: NDArray[np.uint64]
    """Where each lies in the staging memory."""
    lengths: NDArray[np.uint64]
    deadline_s: float
    """Seconds from when it is read."""
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
                self.deadline_s,
                None if lease is None else _lease_values(lease),
                self.chain,
            ),
            pickle.HIGHEST_PROTOCOL,
        )

    @classmethod
    def unpacked(cls, message: bytes) -> Batch:
        what, name, fingerprint, keys, offsets, lengths, deadline_s, lease, chain = pickle.loads(
            message
        )
        return cls(
            what,
            SpaceName(name, fingerprint),
            keys,
            np.frombuffer(offsets, np.uint64),
            np.frombuffer(lengths, np.uint64),
            deadline_s,
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

    def packed(self) -> bytes:
        counts = self.existed_count, self.failed_count
        return pickle.dumps((self.done.tobytes(), self.stored.tobytes(), *counts))

    @classmethod
    def unpacked(cls, message: bytes) -> Answer:
        """Raises the error that the message is instead."""
        found: Any = pickle.loads(message)
        if isinstance(found, CenoteError):
            raise found
        done, stored, existed_count, failed_count = found
        done, stored = np.frombuffer(done, np.bool_), np.frombuffer(stored, np.bool_)
        return cls(done, stored, existed_count, failed_count)


@final
class Lane:
    """One end of a socket pair, for one thread: messages with their length before them.

    It is closed when nobody has it any more: until then another thread may be waiting on it.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        self._fd = sock.detach()
        self._timeout_s = 0.0
        self._rest = b""

    def __del__(self) -> None:
        os.close(self._fd)

    def send(self, message: bytes) -> None:
        """Raises OSError; after that the connection must not be used again."""
        whole = _HEAD.pack(len(message)) + message
        # Most go out at once, in microseconds; who gives up the GIL for them waits to have it back.
        sent: int = held_send(self._fd, whole, len(whole), _AT_ONCE)
        left = memoryview(whole)[max(0, sent) :]
        while left:
            left = left[os.write(self._fd, left) :]

    def receive(self, timeout_s: float = 0.0) -> bytes:
        """The next message, which is waited for as long as that, or up to a half longer; 0: for as
        long as it takes. Raises TimeoutError (the connection must not be used again), EOFError
        where the other end is closed, OSError."""
        if not timeout_s <= self._timeout_s <= 1.5 * timeout_s:
            self._set_timeout(1.25 * timeout_s)
        found = self._rest
        while len(found) < _HEAD.size or len(found) < (end := _end_of(found)):
            try:
                chunk = os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                raise TimeoutError from None
            if not chunk:
                raise EOFError
            found = found + chunk if found else chunk
        self._rest = found[end:]
        return found[_HEAD.size : end]

    def _set_timeout(self, timeout_s: float) -> None:
        micros = max(1, round(1e6 * timeout_s)) if timeout_s else 0
        value = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._timeout_s = timeout_s


def _end_of(found: bytes) -> int:
    length: int = _HEAD.unpack_from(found)[0]
    return _HEAD.size + length
