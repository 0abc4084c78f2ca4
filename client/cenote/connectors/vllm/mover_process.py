"""The process that moves a worker's bytes: see `mover.py`, which starts it. No torch and no vLLM.

    python -m cenote.connectors.vllm.mover_process MEMORY STATUS GET PUT      # file descriptors

It ends when the other end of STATUS is closed, which the kernel does when the engine dies.
"""

from __future__ import annotations

import mmap
import pickle
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from cenote.api.errors import CenoteError
from cenote.api.types import PutStatus
from cenote.client import Client
from cenote.runtime.log import get_logger, log_if_nobody_listens
from cenote.runtime.memory import address_of, allocate_file, populate

from .link import PoolLink, remaining_s
from .moves import LANES, Answer, Batch, Lane, Setting

__all__ = ["main"]

_log: Final = get_logger("cenote.vllm")


class _Mover:
    """Staging memory, and a client that moves what is asked for."""

    def __init__(self, setting: Setting, memory_fd: int, status: Connection) -> None:
        self._fd = memory_fd
        self._map = mmap.mmap(memory_fd, setting.size_bytes)
        self._array = np.frombuffer(self._map, np.uint8)
        self._address = np.uint64(address_of(self._array))
        self._status = status
        self._link = PoolLink(
            setting.options, setting.name, self._prepare, self._tell, setting.gives_way
        )

    def start(self) -> None:
        self._link.start()

    def close(self) -> None:
        self._link.close()

    def _prepare(self, client: Client) -> None:
        """Pages are taken now: later they would cost the first transfers, or not be there."""
        allocate_file(self._fd, 0, len(self._array), name="staging memory")
        populate(int(self._address), len(self._array), write=True)
        client.register(self._array)

    def _tell(self, connected: bool) -> None:
        try:
            self._status.send(connected)
        except OSError:  # the engine is gone: the main thread hears it, too
            _log.debug("nobody listens any more")

    def serve(self, lane: Lane) -> None:
        """Until the lane is closed."""
        while True:
            try:
                message = lane.receive()
            except (EOFError, OSError):
                return
            began_s = time.monotonic()
            try:
                answer = self._move(Batch.unpacked(message)).packed(time.monotonic() - began_s)
            except CenoteError as error:
                answer = pickle.dumps(error)
            except Exception as error:  # a bug of ours: the worker is to hear of it, not to wait
                _log.exception("a transfer failed")
                answer = pickle.dumps(CenoteError(f"{type(error).__name__}: {error}"))
            try:
                lane.send(answer)
            except OSError:
                return

    def _move(self, batch: Batch) -> Answer:
        until_s = batch.until_s
        space = self._link.space(batch.space, remaining_s(until_s))
        addresses = batch.offsets + self._address
        places: dict[str, Any] = {"addresses": addresses, "lengths": batch.lengths}
        if batch.what == "get":
            read = space.get_into_batch(
                batch.keys, lease=batch.lease, deadline_s=remaining_s(until_s), **places
            )
            done = read.hits & (read.sizes == batch.lengths)
            return Answer(done, done)
        written = space.put_from_batch(
            batch.keys, chain=batch.chain, deadline_s=remaining_s(until_s), **places
        )
        stored = np.asarray(written.statuses == PutStatus.STORED)
        done = np.asarray(written.statuses != PutStatus.FAILED)
        return Answer(done, stored, written.existed_count, written.failed_count)


def main(arguments: list[str]) -> None:
    """Serve until the engine is gone."""
    memory_fd, status_fd, *lane_fds = map(int, arguments)
    log_if_nobody_listens()
    status = Connection(status_fd)
    setting: Setting = status.recv()
    mover = _Mover(setting, memory_fd, status)
    for name, fd in zip(LANES, lane_fds, strict=True):
        threading.Thread(
            target=mover.serve,
            args=(Lane(socket.socket(fileno=fd)),),
            name=f"cenote-{name}",
            daemon=True,
        ).start()
    mover.start()
    try:
        status.recv()  # nothing comes: it ends with the engine's end of it
    except (EOFError, OSError):
        mover.close()


if __name__ == "__main__":
    main(sys.argv[1:])
