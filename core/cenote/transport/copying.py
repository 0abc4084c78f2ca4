"""Long copies by several threads, a batch at a time.

One core's loads and stores don't reach what the memory can do, so helpers take pieces from the same
list as the caller. A helper that wakes up late costs nothing, since the caller does not wait for it
to begin; a caller that finds the helpers busy copies alone.

Where the cores are busy otherwise, a helper that is not let run in the middle of a piece makes its
caller wait. So the team compares what it measures with helpers and without, and now and then tries
what it takes for the slower way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter
from typing import Final, final

import numpy as np
import xxhash

from cenote.api.errors import DeadlineExceeded

from .base import U64Array
from .gil import RELEASES
from .memory_access import (
    MEMORY,
    SLICE_COPY_BYTES_MAX,
    breaks_between,
    copy,
    copy_hashed,
    groups_of,
    hash_step_bytes,
    lay_side_by_side,
)

__all__ = ["SHARED_BYTES_MIN", "CopyTeam"]

SHARED_BYTES_MIN: Final = 2 << 20
_LONG_BYTES: Final = 32 << 20
_HELPED_FIRST: Final = 3
"""Copies with helpers before any is made without."""
_CLEARLY: Final = 0.9
"""Helpers are done without when they are this much slower."""
_RETRY_FIRST: Final = 8
_RETRY_MAX: Final = 32
_SHARED_PIECE_BYTES: Final = 1 << 20
_LARGE_PIECE_BYTES: Final = 128 << 20
"""Between pieces the deadline is looked at. Very long copies (from 100 MiB with two cores and a
large cache, from less elsewhere) are made by glibc around the cache, nearly twice as fast: as good
as two threads. So they are cut only where there are more than two threads."""

_CLOSE_S: Final = 1.0

_digest: Final = xxhash.xxh3_64_intdigest

Piece = tuple[int, int, int]


class _Work:
    """A list of pieces that one or more threads work off.

    Every thread runs `run`; `finish` raises what went wrong in any of them.
    """

    __slots__ = ("_deadline", "_error", "_pieces")

    def __init__(self, pieces: deque[Piece], deadline: float) -> None:
        self._pieces = pieces
        self._deadline = deadline
        self._error: Exception | None = None

    def run(self) -> None:
        """Take pieces until none is left. Raises nothing but interrupts: see `finish`."""
        try:
            self.work_off(self._pieces.popleft)
        except Exception as error:  # whatever it was: `finish` raises it in the caller's thread
            self._error = error
            self.stop()
        except BaseException:  # interrupted: the helpers need not go on either
            self.stop()
            raise

    def stop(self) -> None:
        """Let no further piece begin."""
        self._pieces.clear()

    def work_off(self, take: Callable[[], Piece]) -> None:
        """Do pieces until `take` raises IndexError."""
        raise NotImplementedError

    def look_at_clock(self) -> None:
        if monotonic() > self._deadline:
            raise DeadlineExceeded("the copy did not end before the deadline")

    def finish(self) -> None:
        if self._error is not None:
            raise self._error


@final
class _Copies(_Work):
    """Pieces are (target, source, length)."""

    __slots__ = ()

    def work_off(self, take: Callable[[], Piece]) -> None:
        while True:
            try:
                target, source, length = take()
            except IndexError:
                return
            if length < SLICE_COPY_BYTES_MAX:  # as in `copy`, without a call
                MEMORY[target : target + length] = MEMORY[source : source + length]
            else:
                copy(target, source, length)
                self.look_at_clock()


@final
class _HashedCopies(_Work):
    """Pieces are groups of items: (first, last, whether they lie back to back)."""

    __slots__ = ("_checksums", "_lengths", "_sources", "_targets")

    def __init__(
        self,
        targets: U64Array,
        sources: U64Array,
        lengths: U64Array,
        deadline: float,
        checksums: U64Array,
    ) -> None:
        breaks = breaks_between(targets, lengths) | breaks_between(sources, lengths)
        seams: list[int] = [0, *np.cumsum(breaks).tolist()]
        firsts = groups_of(lengths, hash_step_bytes())
        groups = zip(firsts, [*firsts[1:], len(lengths)], strict=True)
        super().__init__(deque((a, z, seams[a] == seams[z - 1]) for a, z in groups), deadline)
        self._targets: list[int] = targets.tolist()
        self._sources: list[int] = sources.tolist()
        self._lengths: list[int] = lengths.tolist()
        self._checksums = checksums

    def work_off(self, take: Callable[[], Piece]) -> None:
        targets, sources, lengths = self._targets, self._sources, self._lengths
        while True:
            try:
                first, last, joined = take()
            except IndexError:
                return
            if last == first + 1:
                self._checksums[first] = copy_hashed(
                    targets[first], sources[first], lengths[first], self._deadline
                )
                continue
            group = range(first, last)
            if joined:
                length = targets[last - 1] + lengths[last - 1] - targets[first]
                copy(targets[first], sources[first], length)
            else:
                for i in group:
                    copy(targets[i], sources[i], lengths[i])
            self._checksums[first:last] = [
                _digest(MEMORY[targets[i] : targets[i] + lengths[i]]) for i in group
            ]
            self.look_at_clock()


def _copies(
    targets: U64Array,
    sources: U64Array,
    lengths: U64Array,
    deadline: float,
    cut: Callable[[int, int, int], Iterator[Piece]],
) -> _Copies:
    """Copies without checksums: neighbours joined, long ones cut."""
    breaks = breaks_between(targets, lengths) | breaks_between(sources, lengths)
    firsts, sizes = lay_side_by_side(breaks, lengths)
    if len(firsts) < len(lengths):
        targets, sources = targets[firsts], sources[firsts]
    runs = zip(targets.tolist(), sources.tolist(), sizes, strict=True)
    if max(sizes) <= _SHARED_PIECE_BYTES:
        return _Copies(deque(runs), deadline)
    pieces: deque[Piece] = deque()
    for target, source, size in runs:
        pieces.extend(cut(target, source, size))
    return _Copies(pieces, deadline)


def _whole(target: int, source: int, size: int) -> Iterator[Piece]:
    """Pieces for one thread."""
    for offset in range(0, size, _LARGE_PIECE_BYTES):
        yield target + offset, source + offset, min(_LARGE_PIECE_BYTES, size - offset)


def _halves(target: int, source: int, size: int) -> Iterator[Piece]:
    """Pieces for two threads."""
    large = size // _LARGE_PIECE_BYTES * _LARGE_PIECE_BYTES
    yield from _whole(target, source, large)
    yield from _small(target + large, source + large, size - large)


def _small(target: int, source: int, size: int) -> Iterator[Piece]:
    """Pieces for many threads."""
    for offset in range(0, size, _SHARED_PIECE_BYTES):
        yield target + offset, source + offset, min(_SHARED_PIECE_BYTES, size - offset)


@final
class CopyTeam:
    """Threads that help with long copies. They start at the first use and end with `close`.

    One caller at a time has the helpers; others copy alone rather than wait.
    """

    def __init__(self, helpers: int | None = None) -> None:
        if helpers is None:
            helpers = min(3, (os.cpu_count() or 1) // 2)
        self._helpers_wanted = helpers
        self._cut = _halves if helpers == 1 else _small
        self._helpers: list[_Helper] = []
        self._owner = threading.Lock()
        self._choices = [_Choice() for _ in range(4)]
        self._closed = False

    def copy(
        self,
        targets: U64Array,
        sources: U64Array,
        lengths: U64Array,
        deadline: float,
        checksums: U64Array | None = None,
    ) -> None:
        """Copy each item; XXH3-64 of each goes to `checksums` where that is given.

        Returns or raises only when no thread touches the memory any more. Raises DeadlineExceeded.
        """
        if not len(lengths):
            return
        size = int(lengths.sum())
        with _Turn(self, size, checksums is not None) as shared:
            work: _Work
            if checksums is not None:
                work = _HashedCopies(targets, sources, lengths, deadline, checksums)
            else:
                work = _copies(targets, sources, lengths, deadline, self._cut if shared else _whole)
            self._do(work, shared)

    def copy_one(self, target: int, source: int, length: int, deadline: float) -> None:
        """As `copy`, for one piece."""
        with _Turn(self, length, False) as shared:
            pieces = deque((self._cut if shared else _whole)(target, source, length))
            self._do(_Copies(pieces, deadline), shared)

    def begin(self, size: int, hashed: bool) -> tuple[_Choice | None, bool]:
        """Whether to use the helpers for a copy of this size; they are taken until `end`."""
        if size < SHARED_BYTES_MIN or not self._helpers_wanted or RELEASES.gives_way:
            return None, False  # helpers would want the GIL for each piece
        choice = self._choices[2 * hashed + (size >= _LONG_BYTES)]
        if not choice.prefers_helpers():
            return choice, False
        shared = self._owner.acquire(blocking=False)
        # Alone only since the helpers were busy: that says nothing about being alone.
        return (choice if shared else None), shared

    def end(self, shared: bool) -> None:
        """The copy is done."""
        if shared:
            self._owner.release()

    def _do(self, work: _Work, shared: bool) -> None:
        if shared and not self._closed:
            if not self._helpers:
                self._helpers = [_Helper() for _ in range(self._helpers_wanted)]
            self._do_together(work, self._helpers)
        else:
            work.run()
        work.finish()

    def _do_together(self, work: _Work, helpers: list[_Helper]) -> None:
        """Returns or raises when the helpers are done, also when interrupted (Ctrl-C), be it again
        and again: only then nothing touches the memory any more."""
        interrupted: KeyboardInterrupt | None = None
        try:
            for helper in helpers:
                helper.begin(work.run)
            work.run()
        finally:
            # Python handles signals at the end of calls, so none is made here outside of the `try`.
            while True:
                try:
                    if interrupted is not None:
                        work.stop()
                    for helper in helpers:
                        helper.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupted = interrupt
            if interrupted is not None:
                raise interrupted

    def close(self) -> None:
        """End the helpers; waits for a copy under way. Later copies are their caller's alone."""
        # Bounded: whoever was interrupted just as it took the helpers never gives them back.
        alone = self._owner.acquire(timeout=_CLOSE_S)
        try:
            self._closed = True
            for helper in self._helpers:
                helper.end()
            self._helpers = []
        finally:
            if alone:
                self._owner.release()


@final
class _Choice:
    """With helpers or without, for copies of one kind: whichever was faster lately.

    With helpers until being alone was clearly faster. The other way is tried after 8 copies, then
    after 16, 32 and so on while it stays the slower one, so that what one copy met by chance (pages
    touched for the first time, a busy core) is soon corrected.
    """

    __slots__ = ("_helped_seen", "_rates", "_retry_after", "_until_retry")

    def __init__(self) -> None:
        self._rates = [0.0, 0.0]  # bytes per second: alone, with helpers
        self._helped_seen = 0
        self._retry_after = _RETRY_FIRST
        self._until_retry = _RETRY_FIRST

    @property
    def _helpers_win(self) -> bool:
        alone, helped = self._rates
        return helped >= alone * _CLEARLY

    def prefers_helpers(self) -> bool:
        if self._helped_seen < _HELPED_FIRST:
            return True
        self._until_retry -= 1
        if self._until_retry <= 0:
            return not self._helpers_win
        return self._helpers_win

    def learn(self, shared: bool, rate: float) -> None:
        won = self._helpers_win
        if shared:
            self._helped_seen += 1
            if self._helped_seen == 1:
                return  # the helpers' threads were started meanwhile
        known = self._rates[shared]
        retried = self._until_retry <= 0
        # What was known of the way that is tried again is old: things may be different now.
        self._rates[shared] = (known + rate) / 2 if known and not retried else rate
        if retried:
            same = self._helpers_win == won
            self._retry_after = min(2 * self._retry_after, _RETRY_MAX) if same else _RETRY_FIRST
            self._until_retry = self._retry_after


@final
class _Turn:
    """One copy: claims the helpers if they pay, gives them back, and notes how fast it went."""

    __slots__ = ("_begun", "_choice", "_hashed", "_shared", "_size", "_team")

    def __init__(self, team: CopyTeam, size: int, hashed: bool) -> None:
        self._team = team
        self._size = size
        self._hashed = hashed

    def __enter__(self) -> bool:
        self._choice, self._shared = self._team.begin(self._size, self._hashed)
        self._begun = perf_counter()
        return self._shared

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._team.end(self._shared)
        if self._choice is not None and error is None:
            self._choice.learn(self._shared, self._size / (perf_counter() - self._begun))


@final
class _Helper:
    """A thread and two locks: the cheapest way to hand it work and to learn that it is done.

    The locks only wake who sleeps. How far things are is told by numbers: an interrupt between
    being woken and taking note of it loses nothing.
    """

    __slots__ = ("_asked", "_done", "_ended", "_ending", "_finished", "_go", "_thread", "_work")

    def __init__(self) -> None:
        self._work: Callable[[], None] = _nothing
        self._asked = self._finished = 0
        self._ending = self._ended = False
        self._go = threading.Lock()
        self._done = threading.Lock()
        self._go.acquire()
        self._done.acquire()
        # A daemon thread: a program that forgot to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name="cenote-copy", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> None:
        self._work = work
        self._asked += 1
        self._go.release()  # no other call comes between: no interrupt does

    def wait(self) -> None:
        """Until it is done with what it was asked for. May be called again after an interrupt."""
        while self._finished != self._asked and not self._ended:
            self._done.acquire()

    def end(self) -> None:
        self._ending = True
        _wake(self._go)
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._finished != self._asked:
                self._work()
                self._work = _nothing
                self._finished = self._asked
            self._ended = self._ending
            _wake(self._done)
            if self._ended:
                return


def _nothing() -> None:
    pass


def _wake(lock: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it was woken before, and has not slept since
        lock.release()
