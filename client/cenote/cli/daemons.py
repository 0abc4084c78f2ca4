"""Daemon processes on this machine: started, ready, stopped within a bound.

A daemon says `ready name=value ... pid=N` on standard output once it serves, and logs to standard
error; both go to files, so that nothing it writes can block it. It is no member of the terminal's
foreground group: Ctrl-C reaches whoever started it, who then stops its daemons in the right order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from cenote.api.errors import CenoteError, InvalidArgument, ResourceUnavailable, Unavailable

from .interrupts import Interrupts

__all__ = ["Daemon", "DaemonSpec", "clean_environment", "stop_all"]

_POLL_S: Final = 0.005
_LOG_TAIL_BYTES: Final = 16_384
_LOG_PREFIX: Final = re.compile(r"^[\d-]{10} [\d:.]+ [A-Z]+ +\S+ ")
_LOG_TROUBLE: Final = re.compile(r"^[\d-]{10} [\d:.]+ (WARNING|ERROR|CRITICAL) ")
_LOG_REASON: Final = re.compile(r" reason=\w+$")
_EXIT_USAGE: Final = 2
_EXIT_UNAVAILABLE: Final = 3


def clean_environment() -> dict[str, str]:
    """This process's environment without CENOTE_ variables: they are meant for other daemons."""
    return {k: v for k, v in os.environ.items() if not k.startswith("CENOTE_")}


@final
class DaemonSpec:
    """What to start: a module such as `cenote.master`, and its flags."""

    __slots__ = ("before", "flags", "launcher", "module", "name", "title")

    def __init__(
        self,
        name: str,
        module: str,
        flags: Mapping[str, object],
        *,
        before: Sequence[str] = (),
        title: str = "",
    ) -> None:
        self.name = name
        self.title = title or name
        """What it is called where it does not start."""
        self.module = module
        self.before = tuple(before)
        """Words in front of the flags."""
        self.flags = dict(flags)
        """By name with dashes, without the two in front; a value of None leaves a flag out."""
        self.launcher: tuple[str, ...] = ()
        """A command that becomes the daemon, in the same process, such as `ip netns exec NAME`."""

    def arguments(self) -> list[str]:
        """The flags as a command line has them."""
        given = ((k, v) for k, v in self.flags.items() if v is not None)
        words = [word for name, value in given for word in (f"--{name}", str(value))]
        return [*self.before, *words]


@final
class Daemon:
    """One daemon process; its directory has `NAME.out` and `NAME.log`, added to by each start."""

    def __init__(
        self,
        spec: DaemonSpec,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        outlive_parent: bool = False,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.log_path = directory / f"{spec.name}.log"
        self._out_path = directory / f"{spec.name}.out"
        self._environment = clean_environment() if environment is None else dict(environment)
        self._outlive_parent = outlive_parent
        self._process: subprocess.Popen[bytes] | None = None
        self._out_start = 0
        self._log_start = 0
        self.ready: dict[str, str] = {}
        """What its readiness line told, such as {"lane": "tcp://127.0.0.1:5110"}."""

    # ---- state -------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the process started last; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """What it logged since it was started last, the end of it where that is long."""
        return _tail(self.log_path, self._log_start)

    def last_line(self) -> str:
        """The last thing that it logged, without the time and the logger's name."""
        lines = self.log_text().strip().splitlines()
        if not lines:
            return f"it {self.how_it_ended()} and logged nothing"
        return _message_of(lines[-1])

    def last_trouble(self) -> str:
        """The last warning or error that it logged, like `last_line`; empty where there is none."""
        lines = [line for line in self.log_text().splitlines() if _LOG_TROUBLE.match(line)]
        return _message_of(lines[-1]) if lines else ""

    def how_it_ended(self) -> str:
        """Such as "was killed by SIGKILL" or "ended with exit code 1"."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        cause = " (by somebody, or by the kernel for lack of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{cause}"

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it. Raises ResourceUnavailable."""
        assert not self.is_running, f"{self.name} runs already"
        if self._outlive_parent:
            command = [sys.executable, "-m", self.spec.module]
        else:
            command = [sys.executable, "-m", "cenote.cli.child", str(os.getpid()), self.spec.module]
        self.ready = {}
        try:
            with self._out_path.open("ab") as out, self.log_path.open("ab") as log:
                self._out_start, self._log_start = out.tell(), log.tell()
                self._process = subprocess.Popen(
                    [*self.spec.launcher, *command, *self.spec.arguments()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    env=self._environment,
                    process_group=0,
                )
        except OSError as error:
            raise ResourceUnavailable(f"can't start {self.name}: {error.strerror}") from error

    def wait_ready(self, timeout_s: float = 15.0) -> dict[str, str]:
        """Wait for the readiness line; its fields.

        Raises the kind of error that its exit code stands for, with the last line of its log;
        Unavailable after `timeout_s`.
        """
        from cenote.runtime.harness import parse_ready_line

        end_s = time.monotonic() + timeout_s
        while True:
            exit_code = self.exit_code  # before the look at its output, so that nothing is missed
            lines = _tail(self._out_path, self._out_start).split("\n")[:-1]
            for fields in map(parse_ready_line, lines):
                if fields is not None:
                    self.ready = fields
                    return fields
            if exit_code is not None:
                raise self._failure(exit_code)
            if time.monotonic() > end_s:
                raise Unavailable(
                    f"{self.name} (pid {self.pid}) was not ready after {timeout_s:g} s",
                    remedy=f"its log is {self.log_path}",
                )
            time.sleep(_POLL_S)

    def _failure(self, exit_code: int) -> CenoteError:
        kind: type[CenoteError] = CenoteError
        if exit_code == _EXIT_USAGE:
            kind = InvalidArgument
        elif exit_code == _EXIT_UNAVAILABLE:
            kind = ResourceUnavailable
        return kind(f"{self.spec.title} did not start: {self.last_line()}", remedy="")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; the exit code, or None where it did not come in time."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float = 2.5) -> int:
        """SIGTERM, and SIGKILL after `timeout_s`; the exit code."""
        self.send_signal(signal.SIGTERM)
        code = self.wait(timeout_s)
        return self.kill() if code is None else code

    def kill(self) -> int:
        """SIGKILL, also to a stopped process; the exit code."""
        self.send_signal(signal.SIGKILL)
        code = self.wait(10.0)
        return -int(signal.SIGKILL) if code is None else code


def stop_all(daemons: Sequence[Daemon], end_s: float, interrupts: Interrupts | None = None) -> None:
    """SIGTERM to all, SIGKILL to those that live at `end_s` (of time.monotonic()).

    A KeyboardInterrupt, or another signal that `interrupts` caught, counts as the end.
    """
    running = [daemon for daemon in daemons if daemon.is_running]
    try:
        for daemon in running:
            daemon.send_signal(signal.SIGTERM)
        while any(daemon.is_running for daemon in running):
            if time.monotonic() >= end_s or (interrupts is not None and interrupts.hurry):
                break
            time.sleep(_POLL_S)
    finally:
        for daemon in running:
            if daemon.is_running:
                daemon.kill()


def _message_of(line: str) -> str:
    """What a log line says, without the time, the logger's name and the error's reason."""
    text = _LOG_PREFIX.sub("", line).removeprefix("cenote: ").removeprefix("failed: ")
    return _LOG_REASON.sub("", text)


def _tail(path: Path, start: int) -> str:
    """The text of a file from `start` on, or its last part where that is long."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
