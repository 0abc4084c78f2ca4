"""Moves a worker's bytes between the pool and its staging memory, in a process beside the engine's.

The engine's process computes in Python all the time, and a transfer in a thread of it would want
the GIL for each of its steps: a message, a copy, a checksum, hundreds of times for a long prompt,
and each time one of the two waits for the other. Here a batch costs the engine's process a message
and its answer, however many blocks it has; the staging memory is mapped by both. No thread waits
for the answer, which would be woken and wait for the GIL: the engine's own looks for it, in steps.

The process is started anew where it ended. Nothing writes into staging memory any more once it is
gone, so its slots are free then; a batch whose answer does not come in time ends it for that.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, DeadlineExceeded, Unavailable
from cenote.runtime.log import get_logger
from cenote.runtime.memory import address_of

from .moves import LANES, Answer, Batch, NowaitLane, Setting
from .options import ConnectorOptions

__all__ = ["Mover"]

_log: Final = get_logger("cenote.vllm")
_GRACE_S: Final = {"get": 1.0, "put": 10.0}
"""Calls in the process end by their deadlines; so much later it is taken for stuck. Nobody waits
for a put; on a machine without a core to spare ending it would cost the reads beside it, too."""
_KILL_S: Final = 5.0
_PAUSE_MIN_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_HEALTHY_S: Final = 60.0
_CLOSE_S: Final = 4.0
_DRAIN_STEP_S: Final = 0.02
_CALLS_MAX: Final = 256
"""Under way at once, of each kind."""

Done = Callable[[Answer | CenoteError], None]


@dataclass(frozen=True, slots=True)
class _Call:
    """A batch that is under way."""

    until_s: float
    done: Done


class _Helper:
    """One such process, our ends of its connections, and what it was asked for."""

    def __init__(self, setting: Setting, memory_fd: int) -> None:
        """Raises OSError."""
        self.status, theirs = Pipe()
        pairs = {name: socket.socketpair() for name in LANES}
        self.lanes = {name: NowaitLane(pair[0]) for name, pair in pairs.items()}
        self.calls: dict[Literal["get", "put"], deque[_Call]] = {name: deque() for name in LANES}
        """They are answered in order."""
        self._ending = False
        self._stuck = False
        given = [memory_fd, theirs.fileno(), *(pair[1].fileno() for pair in pairs.values())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cenote.connectors.vllm.mover_process", *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine, which ends this one
            )
        finally:
            theirs.close()
            for _, end in pairs.values():
                end.close()
        self.status.send(setting)

    def dismiss(self) -> None:
        """It is to end after what it is at. (A connection that a thread reads from is not closed by
        `close`, which is left to the last who has it.)"""
        with _socket_of(self.status) as sock, suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def begin(self, what: Literal["get", "put"], message: bytes, call: _Call) -> None:
        """Raises Unavailable where too much is under way."""
        calls = self.calls[what]
        if len(calls) >= _CALLS_MAX:
            raise Unavailable(f"{_CALLS_MAX} transfers are under way", remedy="wait")
        calls.append(call)
        self.lanes[what].send(message)

    def collect(self, now_s: float) -> list[tuple[Done, Answer | CenoteError]]:
        """What has ended. A process that does not answer in time is killed; its calls end once it
        is gone, for until then it may write."""
        gone = self._ending and self.process.poll() is not None
        ended: list[tuple[Done, Answer | CenoteError]] = []
        for name, calls in self.calls.items():
            lane = self.lanes[name]
            lane.flush()
            while calls and (message := lane.receive()) is not None:
                ended.append((calls.popleft().done, Answer.unpacked(message)))
            if calls and gone:
                ended += [(call.done, self._why()) for call in calls]
                calls.clear()
            elif calls and not self._ending and now_s > calls[0].until_s + _GRACE_S[name]:
                self._ending = self._stuck = True
                self.process.kill()
        return ended

    def _why(self) -> CenoteError:
        if self._stuck:
            return DeadlineExceeded("the process that moves blocks did not answer, and was ended")
        return Unavailable("the process that moves blocks ended in a transfer")

    def kill(self) -> bool:
        """Whether it is gone: then nothing touches the staging memory any more."""
        self._ending = True
        self.process.kill()
        try:
            self.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _socket_of(connection: Connection) -> socket.socket:
    """Another descriptor of the same socket."""
    return socket.socket(fileno=os.dup(connection.fileno()))


@final
class Mover:
    """See the module's docstring."""

    def __init__(
        self,
        options: ConnectorOptions,
        name: str,
        size_bytes: int,
        ready: Callable[[], None] = lambda: None,
        gives_way: bool = False,
    ) -> None:
        """`size_bytes`: of the staging memory. `ready`: called in a thread of this, once, when a
        pool was reached and the memory has its pages. `gives_way`: the engine computes on this
        host's cores, so that the process never spins on one of them. Raises OSError."""
        self._setting = Setting(options, name, size_bytes, gives_way)
        self._fd = os.memfd_create(f"cenote-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size_bytes)  # it has no pages before there is a pool
        self._map = mmap.mmap(self._fd, size_bytes)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = address_of(self.array)
        self._ready = ready
        self._told_ready = False
        self._helper: _Helper | None = None
        self._connected = False
        self._starting = True
        """Nothing is known yet of a pool: the first attempt to reach one is under way."""
        self._early: list[tuple[Batch, Done]] = []
        self._lock = threading.Lock()
        """Of lanes and calls."""
        self._asked: list[_Helper] = []
        """Those with calls under way; also such as have ended since."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"{name}-mover", daemon=True)

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        helper = self._helper
        return None if helper is None else helper.process.pid

    def close(self) -> None:
        """End the process; what it is at, it may finish, for some seconds."""
        self._ended.set()
        helper = self._helper
        if helper is not None:
            helper.dismiss()
            try:
                helper.process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                helper.kill()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        os.close(self._fd)

    def _keep(self) -> None:
        """Have a process, as long as this is wanted."""
        pause_s = _PAUSE_MIN_S
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                helper = _Helper(self._setting, self._fd)
            except OSError as error:
                _log.error("the process that moves blocks can't be started", why=error)
            else:
                self._helper = helper
                self._listen(helper)
                self._connected = False
                gone = helper.kill()
                if not self._ended.is_set():
                    _log.error(
                        "the process that moves blocks ended, and is started anew",
                        exit_code=helper.process.returncode if gone else None,
                    )
            self._starting = False
            if time.monotonic() - began_s > _HEALTHY_S:
                pause_s = _PAUSE_MIN_S
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _listen(self, helper: _Helper) -> None:
        """To what it says of the pool, until it ends."""
        while True:
            try:
                connected: bool = helper.status.recv()
            except (EOFError, OSError):
                return
            if connected and not self._told_ready:
                self._told_ready = True
                try:
                    self._ready()
                except Exception:  # a driver's error: the engine goes on without a pool
                    _log.exception("the pool can't be used")
                    return
            self._connected = connected
            self._starting = False

    # ---- batches -----------------------------------------------------------------------------

    def begin(self, batch: Batch, done: Done) -> None:
        """Have it moved; in any thread. `done` hears in a `poll` what came of it: an answer, or the
        error that there was; from then on nothing touches the batch's memory.

        Before it is known whether there is a pool it waits for that: an engine's first prompts are
        worth it. Raises Unavailable where there is nobody to move it: then `done` hears nothing.
        """
        helper = self._helper
        if helper is None or not self._connected:
            with self._lock:
                if self._starting and len(self._early) < _CALLS_MAX:
                    self._early.append((batch, done))
                    return
            raise Unavailable("no pool was reached yet", remedy="start one, or check `master`")
        message = batch.packed()
        with self._lock:
            helper.begin(batch.what, message, _Call(batch.until_s, done))
            if helper not in self._asked:
                self._asked.append(helper)

    def poll(self) -> None:
        """Tell of what has ended. Never waits."""
        if self._early:
            self._begin_early()
        if not self._asked:
            return
        with self._lock:
            now_s = time.monotonic()
            ended = [each for helper in self._asked for each in helper.collect(now_s)]
            if ended:
                self._asked = [helper for helper in self._asked if any(helper.calls.values())]
        for done, found in ended:
            done(found)

    def _begin_early(self) -> None:
        waiting, now_s = not self._connected and self._starting, time.monotonic()
        with self._lock:
            found = self._early
            self._early = [each for each in found if waiting and now_s <= each[0].until_s]
        for batch, done in found:
            if waiting and now_s <= batch.until_s:
                continue
            try:
                if waiting:
                    raise DeadlineExceeded("no pool was reached in time")
                self.begin(batch, done)
            except CenoteError as error:
                done(error)

    def drain(self, timeout_s: float) -> None:
        """Wait until all that has begun has ended, or for so long."""
        until_s = time.monotonic() + timeout_s
        self.poll()
        while (self._asked or self._early) and (left_s := until_s - time.monotonic()) > 0:
            lanes = [lane for helper in self._asked for lane in helper.lanes.values()]
            select.select(lanes, [], [], min(left_s, _DRAIN_STEP_S))
            self.poll()
