"""A daemon's life: start, say that it is ready, work, and end when told to, whatever it is doing.

The event loop runs in a thread of its own and the main thread only waits, so that a signal is taken
at once, also while the loop is busy in a long call (replaying a journal, touching memory). Then:

- The first SIGTERM, SIGINT or SIGHUP cancels `start` or `wait` and runs `stop`; exit code 0.
- A second one ends the process at once; exit code 128 + its number.
- A stop that takes longer than `stop_timeout_s` is cut short, with all stacks on standard error and
  exit code 4. Should the interpreter itself hang by then (a thread that never ends, or does not
  give up the GIL), faulthandler's own thread, which needs no GIL, ends the process a moment later
  with exit code 1. In all it takes less than 2 s.

A signal before `run_daemon` (while modules load) ends the process in the operating system's way:
see `begin_program`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType
from typing import Final, final

import uvloop

from cenote.api.errors import CenoteError, InvalidArgument, ResourceUnavailable, Unavailable

from .log import get_logger

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_STOP_TIMEOUT",
    "EXIT_UNAVAILABLE",
    "EXIT_USAGE",
    "begin_program",
    "exit_code_of",
    "parse_ready_line",
    "ready_line",
    "run_daemon",
]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # a bug, or an error that fits no other code
EXIT_USAGE: Final = 2  # wrong flags, environment or configuration file
EXIT_UNAVAILABLE: Final = 3  # the machine or another daemon can't give what is needed
EXIT_STOP_TIMEOUT: Final = 4  # told to stop, but did not in time

STOP_TIMEOUT_S: Final = 1.5
_LOOK_S: Final = 0.2
_BACKSTOP_AFTER_S: Final = 0.4  # after stop_timeout_s; together below the promised 2 s
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READY: Final = "ready"

_log = get_logger("cenote.daemon")


def exit_code_of(error: BaseException) -> int:
    """The exit code for a program that ends with `error`."""
    if isinstance(error, InvalidArgument):
        return EXIT_USAGE
    if isinstance(error, ResourceUnavailable | Unavailable):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED


def ready_line(fields: Mapping[str, object]) -> str:
    """`ready name=value ...`, ending in the pid. Raises ValueError where a value isn't one word."""
    words = [_READY]
    for name, value in [*fields.items(), ("pid", os.getpid())]:
        word = f"{name}={value}"
        if word.split() != [word] or "=" in name:
            raise ValueError(f"{word!r} can't stand in a readiness line")
        words.append(word)
    return " ".join(words)


def parse_ready_line(line: str) -> dict[str, str] | None:
    """The fields of a readiness line, or None where `line` is none."""
    first, *words = line.split() or [""]
    if first != _READY or not all("=" in word for word in words):
        return None
    return dict(word.split("=", 1) for word in words)


def begin_program() -> None:
    """Let SIGINT end this process at once, until `run_daemon`: for a program's first lines.

    KeyboardInterrupt, which is Python's own way, is lost where it meets a destructor or a callback,
    of which loading modules has many, or is turned into another error by what it meets.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_daemon(
    start: Callable[[], Awaitable[Mapping[str, object]]],
    stop: Callable[[], Awaitable[None]],
    *,
    wait: Callable[[], Awaitable[None]] | None = None,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Run a daemon on a uvloop event loop until a signal; returns the exit code for sys.exit().

    `start` brings the daemon up and returns what the readiness line on standard output is to tell,
    such as {"lane": "tcp://127.0.0.1:5111"}. `stop` takes down whatever `start` got to, also when
    it was cancelled halfway or failed. `wait`, if given, runs in between: when it returns the
    daemon stops with exit code 0, when it raises, with that of the error.

    To be called from the main thread, once, as the last thing before the program exits: the
    backstop that bounds the end covers the interpreter's own shutdown, too.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run_daemon needs the main thread, since only that one gets signals")
    return _Life(start, stop, wait, stop_timeout_s).run()


@final
class _Life:
    def __init__(
        self,
        start: Callable[[], Awaitable[Mapping[str, object]]],
        stop: Callable[[], Awaitable[None]],
        wait: Callable[[], Awaitable[None]] | None,
        stop_timeout_s: float,
    ) -> None:
        self._start = start
        self._stop = stop
        self._wait = wait
        self._stop_timeout_s = stop_timeout_s
        self._exit_code = EXIT_OK
        self._stopping = False
        self._told_to_stop = False
        # Wakes the main thread. Unlike an Event, it may be put to by a handler of the same thread.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="cenote-loop", daemon=True)

    # -- the main thread ---------------------------------------------------------------------------

    def run(self) -> int:
        for number in _SIGNALS:
            # nohup and the like: who asked to survive the terminal's end does.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._thread.start()
        self._wait_for_the_end()
        self._thread.join(self._stop_timeout_s)
        if self._thread.is_alive():
            self._give_up()
        return self._exit_code

    def _wait_for_the_end(self) -> None:
        """Until _begin_stopping, in a signal handler or in the loop's thread.

        Handlers run in this thread, but the kernel may hand a signal to another one, as it does
        when it came while the process was stopped (SIGSTOP, Ctrl-Z): it does not wake this one.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self._wake.get(timeout=_LOOK_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._told_to_stop:
            os._exit(128 + number)
        self._told_to_stop = True
        self._begin_stopping()
        if self._loop is not None:
            # RuntimeError: the loop has just been closed, so the daemon is at its end anyway.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_main)
        _log.info("stopping", signal=signal.Signals(number).name)

    def _begin_stopping(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        after_s = self._stop_timeout_s + _BACKSTOP_AFTER_S
        faulthandler.dump_traceback_later(after_s, exit=True, file=sys.__stderr__ or 2)
        self._wake.put(None)

    def _give_up(self) -> None:
        _log.error("stopping took too long: ended by force", timeout_s=self._stop_timeout_s)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        os._exit(EXIT_STOP_TIMEOUT)

    # -- the loop's thread -------------------------------------------------------------------------

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._live())
        except BaseException:  # the thread's last words, whatever it is: there is nobody above it
            self._exit_code = self._exit_code or EXIT_FAILED
            _log.exception("the event loop failed")
        finally:
            self._begin_stopping()

    def _cancel_main(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        self._main_task = loop.create_task(self._work())
        if self._told_to_stop:  # before the loop was there to be told
            self._main_task.cancel()
        await asyncio.wait([self._main_task])
        self._begin_stopping()
        self._note_end(self._main_task, "failed")
        self._main_task = None  # a signal from here on must not cancel the stop
        stopped = loop.create_task(self._await(self._stop))
        await asyncio.wait([stopped])
        self._note_end(stopped, "stop failed")

    async def _work(self) -> None:
        fields = await self._start()
        if self._told_to_stop:  # a start that took no notice of being cancelled
            return
        _announce(ready_line(fields))
        if self._wait is not None:
            await self._wait()
        else:
            await asyncio.get_running_loop().create_future()

    @staticmethod
    async def _await(function: Callable[[], Awaitable[None]]) -> None:
        await function()

    def _note_end(self, task: asyncio.Task[None], what: str) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._exit_code = self._exit_code or exit_code_of(error)
        if isinstance(error, CenoteError):
            _log.error(f"{what}: {error}", reason=error.reason)
            return
        try:
            raise error
        except BaseException:  # only to log it, whatever it is: the daemon ends here
            _log.exception(f"{what}: unexpected error")


def _announce(line: str) -> None:
    if sys.stdout is None:
        return
    try:
        # Not by print(): a line left in its buffer by a closed pipe would spoil the exit code.
        os.write(sys.stdout.fileno(), line.encode() + b"\n")
    except OSError as error:
        # Nobody listens on standard output: no reason not to serve.
        _log.warning("can't print the readiness line", error=error.strerror, line=line)
