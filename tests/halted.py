"""Writers that halt at a step of a put, seen from the test: see `halting_writer` for their side."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from cluster import Cluster
from halting_writer import WriterSpec
from programs import read_message, write_message
from remote import Remote
from waiting import stop_process

__all__ = ["Halted", "Outcome", "halted_writers"]

_TIMEOUT_S: Final = 60.0

Outcome = list[tuple[str, Any]]
"""By key: ("stored" | "existed", same_bytes) or ("error", the error)."""


class Halted:
    """One writer, which stands at its step."""

    def __init__(self, spec: WriterSpec, pid: int, stream: BinaryIO) -> None:
        self.spec = spec
        self.pid = pid
        self.warm: list[str] = []
        """Keys that it put before, one by one as large."""
        self._stream: Any = stream

    def hear(self) -> Any:
        """The next value that it says. Raises EOFError where it is gone."""
        if not select.select([self._stream], [], [], _TIMEOUT_S)[0]:
            raise AssertionError(f"writer {self.spec.name} said nothing for {_TIMEOUT_S} s")
        try:
            return read_message(self._stream)
        except ConnectionResetError:
            raise EOFError(f"writer {self.spec.name} is gone") from None

    def say(self, value: object) -> None:
        write_message(self._stream, value)

    def until_halted(self) -> None:
        """Wait until it stands at its step."""
        what, said = self.hear()
        while what == "warm":
            self.warm += said
            what, said = self.hear()
        assert what == "at", f"{self.spec.name} said {said!r}"
        self.spec = said  # the keys that it puts at last

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError):
            self.hear()
            raise AssertionError(f"writer {self.spec.name} spoke after its end")

    def stop(self) -> None:
        """SIGSTOP; returns when all of its threads stand still."""
        stop_process(self.pid)
        self.say("go on")  # which it hears when it is resumed

    def resume(self) -> None:
        """SIGCONT: it goes on with its put."""
        os.kill(self.pid, signal.SIGCONT)

    def outcome(self) -> Outcome:
        """How its put ended."""
        what, outcome = self.hear()
        assert what == "done"
        return cast(Outcome, outcome)

    def call(self, method: str, *arguments: object) -> Any:
        """Have it make one more call."""
        self.say((method, arguments))
        return self.hear()

    def close(self) -> None:
        """Have it close its client and end."""
        self.say(None)
        assert self.hear() == "closed"


@contextmanager
def halted_writers(
    cluster: Cluster, transport: str, specs: Sequence[WriterSpec]
) -> Iterator[list[Halted]]:
    """All of these, each at its step; they end with the block at the latest."""
    path = Path(cluster.directory) / "writers.sock"
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen(len(specs))
        listener.settimeout(_TIMEOUT_S)
        parent = stack.enter_context(Remote("halting_writers", cluster.lane, transport, str(path)))
        parent.expect("ready")
        writers: list[Halted] = []
        for spec in specs:  # one after the other: a crowd would be too much for two cores
            parent.say(spec)
            connection, _ = listener.accept()
            stream = cast(BinaryIO, stack.enter_context(connection.makefile("rwb", buffering=0)))
            connection.close()
            said, pid = read_message(stream)
            assert said == "ready"
            writers.append(Halted(spec, pid, stream))
            writers[-1].say("go")
            writers[-1].until_halted()
        yield writers
        parent.say(None)
        parent.expect("ended")
