"""A writer that halts at a given step of a put, for the test to stop or kill it there.

`halting_writers` is a program (see `programs.py`): it forks a process for each writer that it is
told of, which takes less than to start one, and kills them all when the test is over. A writer
talks with the test over a Unix socket of its own: see `halted.py` for the other side.

The steps are seams of the client that are wrapped here, in this process: the production code knows
nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, cast

from cenote.api.errors import CenoteError
from cenote.client import Client
from cenote.client.plan.steps import Ask, AskRaw, Move, MoveOne, Seals
from cenote.rpc.lane_socket import LaneSocket
from cenote.transport import copying, memory_access, wire
from cenote.transport.connection import DataConnection
from payloads import payload_of
from waiting import wait_until

if TYPE_CHECKING:
    from programs import Control

__all__ = ["STEPS", "WriterSpec", "halting_writers"]

STEPS: Final = (
    "before start",
    "start sent",
    "granted",
    "in payload",
    "in last replica",
    "payload sent",
    "payload written",
    "commit sent",
    "decided",
    "half sealed",
    "seal sent",
    "sealed",
)
"""In the order in which a put comes by them. `sent`: and its answer has not been read."""

_PR_SET_PDEATHSIG: Final = 1
_PAYLOAD_BYTES_MIN: Final = 1000
"""Smaller messages are no payload."""
_PATIENCE_S: Final = 30.0
"""A busy machine may let nodes look dead for a while: then things are tried again."""


@dataclass(frozen=True, slots=True)
class WriterSpec:
    """What one writer is to put, and where it halts."""

    name: str
    keys: tuple[str, ...]
    """Several: in one batch."""
    size: int
    step: str
    deadline_s: float
    replicas: int = 1
    spares: bool = False
    """In space that was granted ahead."""
    salt: str = "v1"
    """What the payloads depend on, beside their keys."""

    def payloads(self, salt: str = "") -> list[bytes]:
        return [payload_of(f"{key}/{salt or self.salt}", self.size) for key in self.keys]


class _Line:
    """The writer's side of its conversation with the test."""

    def __init__(self, path: str) -> None:
        from programs import read_message, write_message

        self._read, self._write = read_message, write_message
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
        self._stream = cast(BinaryIO, sock.makefile("rwb", buffering=0))

    def say(self, value: object) -> None:
        self._write(self._stream, value)

    def hear(self) -> Any:
        return self._read(self._stream)


class _Halt:
    """Halts the main thread the first time that it comes by the step, once `armed`."""

    def __init__(self, line: _Line, step: str) -> None:
        self._line = line
        self._step = step
        self._thread = threading.get_ident()
        self.spec: WriterSpec | None = None
        """What is being put."""
        self.armed = False
        self.method = ""
        """The request to the master that is under way."""
        self.replica = 0
        """Which replica's payload is being written, from 1."""
        self.seals = 0

    def at(self, step: str) -> None:
        if self.armed and step == self._step and threading.get_ident() == self._thread:
            self.armed = False
            self._line.say(("at", self.spec))
            self._line.hear()

    def in_payload(self) -> bool:
        """Whether the thread is to halt in the payload that it is writing now."""
        if not self.armed or threading.get_ident() != self._thread:
            return False
        wanted = {"in payload": 1, "in last replica": 2}.get(self._step)
        return bool(self.replica) and self.replica == wanted


def _wrap_steps(driver: Any, halt: _Halt) -> None:
    """Halt between the steps of a plan."""
    do = driver.do

    def asking(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(call: Any, step: Any) -> Any:
            if step.method == "put_start":
                halt.at("before start")
            halt.method = step.method
            try:
                reply = real(call, step)
            finally:
                halt.method = ""
            return reply

        return ask

    def moving(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(call: Any, step: Any) -> Any:
            halt.at("granted")
            halt.replica = 0  # also where it is tried again
            reply = real(call, step)
            halt.replica = 0
            halt.at("payload written")
            return reply

        return move

    def sealing(call: Any, step: Any) -> None:
        halt.at("decided")
        halt.seals = 0
        real_seals(call, step)
        halt.at("sealed")

    real_seals, real_part, real_seal = do[Seals], driver.move_part, driver.seal_part

    def move_part(part: Any) -> None:
        halt.replica += 1
        real_part(part)

    def move_one(call: Any, step: Any) -> Any:
        halt.replica += 1
        return real_one(call, step)

    def seal_part(part: Any) -> None:
        halt.seals += 1
        if halt.seals == 2:
            halt.at("half sealed")
        real_seal(part)

    real_one = do[MoveOne]
    driver.move_part, driver.seal_part = move_part, seal_part
    do[Ask], do[AskRaw] = asking(do[Ask]), asking(do[AskRaw])
    do[Move], do[MoveOne] = moving(do[Move]), moving(move_one)
    do[Seals] = sealing


def _wrap_transports(halt: _Halt) -> None:
    """Halt in the middle of payloads, and between a request and its answer."""
    real_spin, real_copy = LaneSocket._spin, memory_access.copy
    real_send, real_views = DataConnection.send, DataConnection.send_views
    real_reply = DataConnection.receive_reply

    def spin(lane: LaneSocket, size: int) -> int:
        """The first thing after a request was sent."""
        if halt.method:
            halt.at(f"{halt.method.removeprefix('put_')} sent")
        return real_spin(lane, size)

    def copy(target: int, source: int, length: int) -> None:
        half = length // 2
        if not half or not halt.in_payload():
            real_copy(target, source, length)
            return
        real_copy(target, source, half)
        halt.at("in payload")
        halt.at("in last replica")
        real_copy(target + half, source + half, length - half)

    def send(connection: DataConnection, address: int, length: int) -> None:
        if length < _PAYLOAD_BYTES_MIN or not halt.in_payload():
            real_send(connection, address, length)
            return
        half = length // 2
        real_send(connection, address, half)
        halt.at("in payload")
        halt.at("in last replica")
        real_send(connection, address + half, length - half)

    def send_views(
        connection: DataConnection, views: Sequence[bytes | memoryview], flags: int = 0
    ) -> None:
        if sum(map(len, views)) < _PAYLOAD_BYTES_MIN or not halt.in_payload():
            real_views(connection, views, flags)
            return
        joined = b"".join(views)
        half = len(joined) // 2
        real_views(connection, [joined[:half]], flags)
        halt.at("in payload")
        halt.at("in last replica")
        real_views(connection, [joined[half:]], flags)

    def receive_reply(
        connection: DataConnection, op: int, call_id: int, count: int
    ) -> tuple[int, bytearray]:
        if op == wire.OP_WRITE:
            halt.at("payload sent")
        if op == wire.OP_SEAL:
            halt.at("seal sent")
        return real_reply(connection, op, call_id, count)

    classes: Any = LaneSocket
    classes._spin = spin
    modules: Any = memory_access
    modules.copy = copy
    modules = copying
    modules.copy = copy
    classes = DataConnection
    classes.send, classes.send_views, classes.receive_reply = send, send_views, receive_reply


def _put(client: Client, spec: WriterSpec, **options: Any) -> list[tuple[str, object]]:
    """Put what is wanted: (stored, existed or error; how it ended) by key."""
    values = spec.payloads()
    options |= {"replicas": spec.replicas, "min_replicas": spec.replicas}
    if len(spec.keys) == 1:
        try:
            results = [client.put(spec.keys[0], values[0], **options)]
        except CenoteError as error:
            return [("error", error)]
    else:
        try:
            results = list(client.put_batch(list(spec.keys), values, **options))
        except CenoteError as error:
            return [("error", error)] * len(spec.keys)
    return [
        ("error", result.error)
        if result.error is not None
        else ("stored" if result.stored else "existed", result.same_bytes)
        for result in results
    ]


def _warm_up(client: Client, spec: WriterSpec) -> list[str]:
    """Put until space is granted ahead; the keys that were put."""
    made: list[str] = []
    spares = client._space.spares
    until_s = time.monotonic() + _PATIENCE_S
    while not spares.held and time.monotonic() < until_s:
        keys = [f"{key}+{len(made)}" for key in spec.keys]
        values = [payload_of(key, spec.size) for key in keys]
        if len(keys) == 1:
            assert client.put(keys[0], values[0]).stored
        else:
            client.put_batch(keys, values).raise_for_errors()
        made += keys
    return made


def _write(lane: str, transport: str, path: str, spec: WriterSpec) -> None:
    line = _Line(path)
    halt = _Halt(line, spec.step)
    _wrap_transports(halt)
    client = Client(lane, transports=(transport,), deadline_s=30.0, name=spec.name)
    _wrap_steps(client._driver, halt)
    line.say(("ready", os.getpid()))
    line.hear()
    numbers = itertools.count()
    outcome: list[tuple[str, object]] = []

    def has_halted() -> bool:
        """Put, under keys that nobody has used; whether it came by the step."""
        number = next(numbers)
        now = replace(spec, keys=tuple(f"{key}~{number}" for key in spec.keys))
        with contextlib.suppress(CenoteError):  # what is put first, for channels and mappings
            client.put(f"{spec.name}/first{number}", b"\x01" * 100, replicas=2)
            if spec.spares:
                line.say(("warm", _warm_up(client, now)))
            halt.spec, halt.armed = now, True
            outcome[:] = _put(client, now, deadline_s=spec.deadline_s)
        return not halt.armed and bool(outcome)

    wait_until(has_halted, _PATIENCE_S, what=f"{spec.name} to come by its step")
    line.say(("done", outcome))
    while (message := line.hear()) is not None:
        method, arguments = message
        line.say(getattr(client, method)(*arguments))
    client.close()
    line.say("closed")


def _child(parent_pid: int, lane: str, transport: str, path: str, spec: WriterSpec) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent_pid:
            with contextlib.suppress(EOFError, ConnectionError):  # the test is over
                _write(lane, transport, path, spec)
            code = 0
    except BaseException:  # the parent's handlers are not this process's
        traceback.print_exc()
    finally:
        os._exit(code)


def halting_writers(control: Control, lane: str, transport: str, path: str) -> None:
    """Fork a writer for each spec that is heard, until None; then end those that are left."""
    parent_pid = os.getpid()
    children: list[int] = []
    control.say("ready")
    try:
        while (spec := control.hear()) is not None:
            pid = os.fork()
            if not pid:
                _child(parent_pid, lane, transport, path, spec)
            children.append(pid)
    finally:
        for pid in children:  # none was waited for, so that no number has become another's
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    control.say("ended")
