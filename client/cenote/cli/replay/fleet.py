"""The clients of a replay as processes: requests dealt in trace order, results added up."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from cenote.api.errors import CenoteError, DeadlineExceeded, InternalError, ResourceUnavailable

from .player import Tally
from .trace import Trace
from .worker import READY, TICKET, Job, MessageBuffer, write_message

__all__ = ["Fleet", "Outcome"]

_READY_TIMEOUT_S: Final = 30.0
_SILENCE_MAX_S: Final = 120.0
_STOP_S: Final = 0.4  # of the two seconds that Ctrl-C may take
_POLL_S: Final = 0.1
_READ_BYTES: Final = 1 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a replay."""

    tally: Tally
    wall_s: float
    """From the first request until the last client had finished."""
    interrupted: bool
    unheard_clients: int
    """Those that did not tell what they had done when it was interrupted: the tally lacks it."""


@final
class _Worker:
    def __init__(self, number: int, tickets_fd: int) -> None:
        self.number = number
        self.played = 0
        self.ready = False
        self.tally: Tally | None = None
        command = [sys.executable, "-m", "cenote.cli.child", str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                [*command, "cenote.cli.replay", str(tickets_fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(tickets_fd,),
                process_group=0,  # Ctrl-C is for the parent, which then ends the clients in order
            )
        except OSError as error:
            raise ResourceUnavailable(f"can't start a client: {error.strerror}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._messages = MessageBuffer()

    def listen(self) -> None:
        """Take what there is that it says. Raises what kept it from playing."""
        data = os.read(self.stdout.fileno(), _READ_BYTES)
        if not data and self.tally is None:
            code = self.process.wait()
            raise InternalError(
                f"replay client {self.number} ended with exit code {code}",
                remedy="what it printed above says why",
            )
        for message in self._messages.feed(data):
            self._take(message)

    def _take(self, message: object) -> None:
        if isinstance(message, int):
            self.played = message
        elif isinstance(message, Tally):
            self.tally = message
            self.played = message.requests
        elif isinstance(message, CenoteError):
            raise message
        else:
            assert message == READY
            self.ready = True

    def close(self) -> None:
        """Kill it where it lives still."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()


@final
class Fleet:
    """`clients` processes that play `job`. Use once, as a context manager."""

    def __init__(self, job: Job, clients: int, *, silence_max_s: float = _SILENCE_MAX_S) -> None:
        """`silence_max_s`: clients that have work and say nothing for so long hang."""
        self._job = job
        self._silence_max_s = silence_max_s
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._tickets_out, self._tickets_in = os.pipe()
        os.set_blocking(self._tickets_in, False)
        try:
            for number in range(clients):
                self._workers.append(_Worker(number, self._tickets_out))
        except BaseException:  # whatever it was, no process may stay
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever lives."""
        for worker in self._workers:
            worker.close()
        self._selector.close()
        for fd in (self._tickets_out, self._tickets_in):
            if fd >= 0:
                os.close(fd)
        self._tickets_out = self._tickets_in = -1

    # ---- the play ----------------------------------------------------------------------------

    def start(self) -> None:
        """Until all clients are connected. Raises what kept one from it."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # it ended: the next message says so
                write_message(worker.stdin, self._job)
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        self._pump(lambda: all(worker.ready for worker in self._workers), _READY_TIMEOUT_S)

    def play(
        self,
        speed_up: float | None,
        on_progress: Progress,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Deal all requests, `speed_up` times as fast as in the trace or as fast as can be (None).

        Ends early soon after `interrupted`, with what came of the requests played so far. Raises
        DeadlineExceeded where the clients fall silent, and what kept one from going on.
        """
        dealer = _Dealer(self._job.trace, speed_up, self._tickets_in)

        def told() -> bool:
            if dealer.done:
                self._end_tickets()
            return interrupted() or self._all_told()

        try:
            self._pump(told, self._silence_max_s, on_progress, dealer)
        except CenoteError:
            if not interrupted():  # else it may have been told to end, too
                raise
        cut_short = not self._all_told()
        if cut_short:
            self._wind_down()
        total = Tally()
        for worker in self._workers:
            if worker.tally is not None:
                total.add(worker.tally)
        unheard = sum(worker.tally is None for worker in self._workers)
        return Outcome(total, time.monotonic() - dealer.began_s, cut_short, unheard)

    def _all_told(self) -> bool:
        return all(worker.tally is not None for worker in self._workers)

    def _end_tickets(self) -> None:
        if self._tickets_in >= 0:
            os.close(self._tickets_in)
            self._tickets_in = -1

    def _wind_down(self) -> None:
        """Hear what was done, from those that tell in time; whoever is late is killed."""
        self._end_tickets()
        # Those that nobody took yet. Now that the pipe has an end neither this nor a client waits.
        while os.read(self._tickets_out, _READ_BYTES):
            pass
        end_s = time.monotonic() + _STOP_S
        while self._selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                worker = key.data
                try:
                    worker.listen()
                    ended = worker.tally is not None
                except CenoteError:
                    ended = True
                if ended:
                    self._selector.unregister(worker.stdout)

    def _pump(
        self,
        done: Callable[[], bool],
        silence_s: float,
        on_progress: Progress | None = None,
        dealer: _Dealer | None = None,
    ) -> None:
        """Take messages (and deal requests) until `done`.

        Raises DeadlineExceeded where nobody says anything for `silence_s`.
        """
        end_s = time.monotonic() + silence_s
        while not done():
            wait_s = _POLL_S
            if dealer is not None:
                dealer.deal()
                pause_s = dealer.wait_s()
                if pause_s > 0:  # nothing is due: nobody has to say anything
                    wait_s = min(pause_s, _POLL_S)
                    end_s = time.monotonic() + silence_s
            for key, _ in self._selector.select(wait_s):
                worker = key.data
                worker.listen()
                if worker.tally is not None:
                    self._selector.unregister(worker.stdout)
                end_s = time.monotonic() + silence_s
            if on_progress is not None:
                on_progress(sum(worker.played for worker in self._workers))
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(
                    f"the replay's clients said nothing for {silence_s:g} s",
                    remedy="`cenote status` tells whether the pool is alive",
                )


@final
class _Dealer:
    """Puts the numbers of due requests into the pipe."""

    def __init__(self, trace: Trace, speed_up: float | None, fd: int) -> None:
        self._count = len(trace)
        self._fd = fd
        self._next = 0
        self.began_s = time.monotonic()
        self._due_s: list[float] | None = None
        if speed_up is not None:
            offsets = (trace.timestamps_ms - trace.timestamps_ms[0]) / (1e3 * speed_up)
            self._due_s = (self.began_s + offsets).tolist()

    @property
    def done(self) -> bool:
        return self._next >= self._count

    def wait_s(self) -> float:
        """Until the next request is due; 0 or less where one is, or none is left."""
        if self._due_s is None or self.done:
            return 0.0
        return self._due_s[self._next] - time.monotonic()

    def deal(self) -> None:
        """Write what is due and has room."""
        while not self.done and self.wait_s() <= 0:
            try:
                os.write(self._fd, TICKET.pack(self._next))
            except BlockingIOError:
                return
            self._next += 1
