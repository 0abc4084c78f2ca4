"""Programs in other processes, and what they say: the test's side of `programs`."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
from types import TracebackType
from typing import Any, Self, cast

from cluster import start_program
from network import Place
from programs import read_message, write_message
from promptness import wait_ended

__all__ = ["Peer", "Remote"]

_SAY_TIMEOUT_S = 60.0


class Remote:
    """The program `name` of `programs.py`, running with these arguments.

    with Remote("look", cluster.lane, keys, {}) as looker:
        looker.expect("ready")
        looker.say("stop")
        report = looker.hear()
    """

    def __init__(self, name: str, *arguments: object, place: Place | None = None) -> None:
        """`place`: where it runs, instead of where the test does."""
        self._name = name
        self._place = place
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = start_program(self._name, place=self._place, bufsize=0)
        self.say(self._arguments)
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def say(self, value: object) -> None:
        write_message(cast(Any, self.process.stdin), value)

    def hear(self, timeout_s: float = _SAY_TIMEOUT_S) -> Any:
        """The next value that it says. Fails where it ends, or says nothing for so long."""
        stream: Any = self.process.stdout
        if not select.select([stream], [], [], timeout_s)[0]:
            raise AssertionError(f"program {self._name} said nothing for {timeout_s} s")
        try:
            return read_message(stream)
        except EOFError:
            code = self.process.wait(_SAY_TIMEOUT_S)
            raise AssertionError(f"program {self._name} ended with exit code {code}") from None

    def expect(self, value: object, timeout_s: float = _SAY_TIMEOUT_S) -> None:
        said = self.hear(timeout_s)
        assert said == value, f"program {self._name} said {said!r} instead of {value!r}"

    def signalled(self, number: signal.Signals) -> int:
        """Send a signal that is to end it; the exit code."""
        self.process.send_signal(number)
        code = wait_ended(self.process.pid, self.process.poll)
        assert code is not None, f"program {self._name} does not end"
        return code

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self.process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            code = process.wait(0.001 if error is not None else 10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
            if error is None:
                raise AssertionError(f"program {self._name} did not end") from None
        else:
            expected = error is not None or code <= 0 or code == 130
            assert expected, f"program {self._name} ended with exit code {code}"


class Peer(Remote):
    """Another client of the pool, in a process of its own; calls go to it and come back.

    with Peer(cluster.lane, transports=("tcp",)) as peer:
        peer.call("put", "key", b"bytes")
    """

    def __init__(self, lane: str, **options: object) -> None:
        super().__init__("peer", lane, options)

    def __enter__(self) -> Self:
        super().__enter__()
        self.expect("ready")
        return self

    def begin(self, method: str, *arguments: object, **keywords: object) -> None:
        """Make it call the method; `result` waits for what comes of it."""
        self.say((method, arguments, keywords))

    def result(self) -> Any:
        """Returns or raises what the call did there."""
        done, value = self.hear()
        if done:
            return value
        raise value

    def call(self, method: str, *arguments: object, **keywords: object) -> Any:
        self.begin(method, *arguments, **keywords)
        return self.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.say(None)
        super().__exit__(kind, error, trace)
