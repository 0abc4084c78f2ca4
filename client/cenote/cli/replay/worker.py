"""The process of one replay client.

    python -m cenote.cli.replay TICKETS_FD

Standard input brings the `Job`; the pipe TICKETS_FD, which all clients read, the numbers of the
requests to play, four bytes each, in trace order to whoever is free. Standard output tells READY,
then counts of played requests, at last the `Tally`, or the CenoteError that kept it from playing.
No more tickets: the end.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final, final

from cenote.api.errors import CenoteError

from .trace import Trace

__all__ = ["READY", "TICKET", "Job", "MessageBuffer", "main", "read_message", "write_message"]

READY: Final = "ready"
TICKET: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<Q")
_REPORT_S: Final = 0.1
_WINDOW_BYTES: Final = 64 << 20
_WINDOW_BLOCKS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """What all clients of a replay are told."""

    master: str
    namespace: str
    fingerprint: str
    trace: Trace
    block_bytes: int
    replicas: int
    deadline_s: float
    transports: tuple[str, ...]


@final
class MessageBuffer:
    """Messages out of the pieces in which they come: whoever reads never waits for the rest."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`."""
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            body = bytes(memoryview(self._received)[_LENGTH.size : end])
            del self._received[:end]
            yield pickle.loads(body)


def read_message(stream: IO[bytes]) -> Any:
    """The next message, once it is there; None at the stream's end (also in the middle of one)."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return pickle.loads(body) if len(body) == length else None


def write_message(stream: IO[bytes], message: object) -> None:
    """Send one message. Raises BrokenPipeError where nobody listens any more."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def main(tickets_fd: int) -> None:
    """Play until the tickets end."""
    job = read_message(sys.stdin.buffer)
    if not isinstance(job, Job):
        return  # whoever was to send it has ended
    try:
        _play(job, tickets_fd, sys.stdout.buffer)
    except CenoteError as error:
        write_message(sys.stdout.buffer, error)


def _play(job: Job, tickets_fd: int, out: IO[bytes]) -> None:
    # Imported here: the package's documentation and the parent need none of it.
    from cenote.client import Client

    from .player import Player

    with (
        Client(
            job.master,
            name="replay",
            deadline_s=job.deadline_s,
            transports=job.transports,
            replicas=job.replicas,
        ) as client,
        client.alloc(_window(job) * job.block_bytes) as memory,
    ):
        cache = client.namespace(job.namespace, fingerprint=job.fingerprint)
        rows = memory.array.reshape(-1, job.block_bytes)
        player = Player(cache, job.trace, rows, replicas=job.replicas)
        write_message(out, READY)
        reported_s = time.monotonic()
        while ticket := os.read(tickets_fd, TICKET.size):
            player.play(*TICKET.unpack(ticket))
            if player.hopeless:
                player.tally.gave_up = 1
                break
            if time.monotonic() - reported_s > _REPORT_S:
                write_message(out, player.tally.requests)
                reported_s = time.monotonic()
        player.tally.ssd_hit_blocks = min(client.stats().ssd_hits, player.tally.hit_blocks)
        write_message(out, player.tally)


def _window(job: Job) -> int:
    """Rows of the buffer."""
    longest = max(1, job.trace.blocks_per_request_max)
    return max(1, min(longest, _WINDOW_BLOCKS_MAX, _WINDOW_BYTES // job.block_bytes))
