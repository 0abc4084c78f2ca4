"""The daemon's side of claims: which ranges a session may be writing into, or looking at.

See `cenote.transport.claims` for the page and the protocol. All pages lie in one file beside the
slot tables, so that a daemon that was restarted knows them, too:

    0      head: magic, format; at WORD_AT the word once more, for readers, who map this page alone
    4 KiB  page 0, page 1, ...    CLAIM_PAGE_BYTES each, one for each channel that writes

A page is somebody's as long as a descriptor or mapping of it is left, which the kernel tells: each
one is opened for that channel alone and carries a read lock on the byte of the page's number. So
nobody has to give a page back, and what a dead process claimed counts no more.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, final

import numpy as np

from cenote.api.errors import ResourceUnavailable
from cenote.api.rows import CLAIM
from cenote.runtime.log import get_logger
from cenote.runtime.memory import PAGE_BYTES
from cenote.transport.claims import (
    CLAIM_PAGE_BYTES,
    EVERYWHERE,
    PEN_WORDS,
    PENS,
    RANGES_MAX,
    VIEW_PEN_WORDS,
    VIEW_PENS,
    VIEW_RANGES_MAX,
    VIEWS_WORD,
    WORD_AT,
    first_pen_word,
)
from cenote.v1 import store_pb2

__all__ = [
    "CLAIM_PAGES_MAX",
    "CLAIM_ROWS_MAX",
    "Claim",
    "ClaimFile",
    "ClaimTable",
    "claim_rows",
    "open_claims",
    "survived",
]

_FIRST_PAGES: Final = 8
CLAIM_PAGES_MAX: Final = 1024
CLAIM_ROWS_MAX: Final = 65_536
"""In one attach; more are told as one range for each session and segment."""
_MAGIC: Final = b"CENOTECL"
_FORMAT: Final = 2
_HEAD: Final = Struct("<8sI")
_FLOCK: Final = Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, process id (0)."""
_WORDS: Final = CLAIM_PAGE_BYTES // 8
_SESSION_BYTES: Final = 16

_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}.get(os.uname().machine)
_MEMBARRIER_GLOBAL: Final = 1
_BARRIER_WAIT_S: Final = 0.05
"""Where there is no such call: ages for a store to become visible."""

_log = get_logger(__name__)
_libc: Final = ctypes.CDLL(None, use_errno=True)


def membarrier() -> None:
    """A full memory barrier in every thread of every process that runs now."""
    if _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _MEMBARRIER_GLOBAL, 0, 0):
        threading.Event().wait(_BARRIER_WAIT_S)


@dataclass(frozen=True, slots=True)
class Claim:
    """One pen of a page, as it was when the word was raised."""

    page: int
    pen: int
    state: int
    session_id: bytes
    ranges: tuple[tuple[int, int, int], ...]
    """(segment index, offset, length)."""

    @property
    def is_view(self) -> bool:
        """It is looked at, which may last; else it is written."""
        return self.pen >= PENS


@final
class ClaimTable:
    """Pages in `memory`, which all writers see. Safe from several threads.

    `is_held(page)`: whether a channel has it still. `grow(pages)`: the same memory with room for
    more than so many pages, None where there is none; it may raise ResourceUnavailable. `barrier`
    is `membarrier`.
    """

    def __init__(
        self,
        memory: memoryview,
        is_held: Callable[[int], bool],
        *,
        grow: Callable[[int], memoryview | None] = lambda pages: None,
        barrier: Callable[[], None] = membarrier,
        head: memoryview | None = None,
    ) -> None:
        """`head`: a page that has the word, too."""
        self._head = None if head is None else head.cast("B").cast("Q")
        self._use(memory)
        self._is_held = is_held
        self._grow = grow
        self._barrier = barrier
        self._lock = threading.Lock()
        self._word = 0
        self._older: list[Claim] = []

    def _use(self, memory: memoryview) -> None:
        self._memory = memory.cast("B")
        self._words = np.frombuffer(memory, np.uint64)

    @property
    def pages(self) -> int:
        """How many there are room for."""
        return len(self._words) // _WORDS

    def take_page(self, session_id: bytes, mark: Callable[[int], None]) -> int:
        """A free page, for one channel of this session; `mark(page)` makes it held, and may raise.

        Raises ResourceUnavailable where all are taken.
        """
        with self._lock:
            pages = self.pages
            page = next((p for p in range(pages) if not self._is_held(p)), pages)
            if page == pages:
                memory = self._grow(pages)
                if memory is None:
                    raise ResourceUnavailable(
                        f"{pages} channels write over shared memory to this daemon",
                        remedy="close clients that are not used, or let some use TCP",
                    )
                self._use(memory)
            mark(page)
            at = page * CLAIM_PAGE_BYTES
            self._memory[at : at + CLAIM_PAGE_BYTES] = bytes(CLAIM_PAGE_BYTES)
            self._memory[at : at + _SESSION_BYTES] = session_id
            self._words[page * _WORDS + WORD_AT] = self._word
            return page

    def shut(self, first_grant_id: int) -> None:
        """Older grants are void from now on. What is under way under them shows in `older`."""
        with self._lock:
            self._set_words(first_grant_id)
            self._barrier()
            self._older = self._claims()
            self._barrier()  # for the last stores of those that are not in it any more

    def admit(self, first_grant_id: int) -> None:
        """This and later grants are valid; what was shut out before stays in `older`."""
        with self._lock:
            self._set_words(first_grant_id)

    def older(self) -> list[Claim]:
        """Claims that were there when `shut` was called last, and still are: their writers may be
        touching what they claim. Once a claim is not in it any more, nothing comes of it."""
        with self._lock:
            left = [claim for claim in self._older if self._is_claimed(claim)]
            if len(left) < len(self._older):
                # Withdrawn after the writer's last store: that must have arrived, too.
                self._barrier()
                self._older = left
            return list(left)

    def _set_words(self, first_grant_id: int) -> None:
        self._word = first_grant_id
        self._words[WORD_AT::_WORDS][: self.pages] = first_grant_id
        if self._head is not None:
            self._head[WORD_AT] = first_grant_id

    def _is_claimed(self, claim: Claim) -> bool:
        at = claim.page * _WORDS + first_pen_word(claim.pen)
        same = int(self._words[at]) == claim.state
        return (
            same and self._session_of(claim.page) == claim.session_id and self._is_held(claim.page)
        )

    def _session_of(self, page: int) -> bytes:
        at = page * CLAIM_PAGE_BYTES
        return bytes(self._memory[at : at + _SESSION_BYTES])

    def _claims(self) -> list[Claim]:
        table = self._words.reshape(self.pages, _WORDS)
        first = first_pen_word(0)
        writes = table[:, first : first + PENS * PEN_WORDS : PEN_WORDS]
        views = table[:, VIEWS_WORD : VIEWS_WORD + VIEW_PENS * VIEW_PEN_WORDS : VIEW_PEN_WORDS]
        found = []
        for page, pen in np.argwhere(np.hstack((writes, views)) != 0).tolist():
            at, is_view = first_pen_word(pen), pen >= PENS
            words = table[page, at : at + (VIEW_PEN_WORDS if is_view else PEN_WORDS)].copy()
            state = int(words[0])
            count = min(state & 0xFF, VIEW_RANGES_MAX if is_view else RANGES_MAX)
            if not count or not self._is_held(page):
                continue
            session_id = self._session_of(page)
            rows = words[1 : 1 + 3 * count].reshape(count, 3).tolist()
            ranges = tuple((index, offset, length) for index, offset, length in rows)
            found.append(Claim(page, pen, state, session_id, ranges))
        return found


def claim_rows(claims: list[Claim], sizes_bytes: dict[int, int]) -> bytes:
    """The claims as packed rows.CLAIM; `sizes_bytes` of the segments, by index."""
    rows: list[tuple[bytes, int, bool, int, int]] = []
    for claim in claims:
        session_id, is_view = claim.session_id, claim.is_view
        for index, offset, length in claim.ranges:
            if index == EVERYWHERE:
                rows += [(session_id, i, is_view, 0, size) for i, size in sizes_bytes.items()]
            elif index in sizes_bytes:
                end = min(offset + length, sizes_bytes[index])
                rows.append((session_id, index, is_view, min(offset, end), max(0, end - offset)))
    if len(rows) > CLAIM_ROWS_MAX:
        widest: dict[tuple[bytes, int, bool], tuple[int, int]] = {}
        for session_id, index, is_view, offset, length in rows:
            low, high = widest.get((session_id, index, is_view), (offset, offset))
            widest[session_id, index, is_view] = min(low, offset), max(high, offset + length)
        rows = [(*whose, low, high - low) for whose, (low, high) in widest.items()]
    packed = np.zeros(len(rows), CLAIM)
    for at, (session_id, index, is_view, offset, length) in enumerate(rows):
        packed[at] = (np.void(session_id), index, is_view, offset, length)
    return packed.tobytes()


@final
class ClaimFile:
    """A ClaimTable in a file, of which writers map their pages. `close` leaves the file there."""

    def __init__(self, fd: int) -> None:
        """Take over a descriptor; the file is empty or a table of an earlier life.

        Raises ResourceUnavailable.
        """
        self._fd = fd
        have = max(0, os.fstat(fd).st_size - PAGE_BYTES) // CLAIM_PAGE_BYTES
        try:
            memory = self._backed(max(have, _FIRST_PAGES))
            self.table = ClaimTable(
                memory[PAGE_BYTES:], self._is_held, grow=self._grow, head=memory[:PAGE_BYTES]
            )
            os.pwrite(fd, _HEAD.pack(_MAGIC, _FORMAT), 0)
        except BaseException:
            self.close()
            raise

    @classmethod
    def in_memory(cls) -> ClaimFile:
        """One that ends with this process."""
        return cls(os.memfd_create("cenote-claims", os.MFD_CLOEXEC))

    def open_page(self, session_id: bytes) -> tuple[int, int]:
        """A page for one channel of a session: its descriptor, which the caller closes or passes,
        and where it begins in the file. Raises ResourceUnavailable."""
        opened: list[int] = []
        try:
            page = self.table.take_page(session_id, lambda page: opened.append(self._marked(page)))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened[0], PAGE_BYTES + page * CLAIM_PAGE_BYTES

    def offer(
        self,
        session_id: bytes,
        hello: store_pb2.DataHelloRequest,
        answer: store_pb2.DataHelloResponse,
        descriptors: list[int],
    ) -> None:
        """Append what a channel is to have of this file: a page, if it wants one, and the head,
        for reading. Raises ResourceUnavailable."""
        if hello.wants_claims:
            page_fd, answer.claims_offset = self.open_page(session_id)
            descriptors.append(page_fd)
            answer.has_claims = True
        if not hello.has_head:
            try:
                head_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _no_descriptor(error) from error
            descriptors.append(head_fd)
            answer.has_head = True

    def _marked(self, page: int) -> int:
        try:
            descriptor = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _no_descriptor(error) from error
        wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, page, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            os.close(descriptor)
            raise ResourceUnavailable(f"a page of claims can't be marked: {error}") from error
        return descriptor

    def _is_held(self, page: int) -> bool:
        if self._fd < 0:
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, page, 1, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK

    def _grow(self, pages: int) -> memoryview | None:
        return None if pages >= CLAIM_PAGES_MAX else self._backed(2 * pages)[PAGE_BYTES:]

    def _backed(self, pages: int) -> memoryview:
        """The memory of the head and so many pages, with something behind it: nobody can meet
        SIGBUS."""
        size = PAGE_BYTES + pages * CLAIM_PAGE_BYTES
        try:
            os.posix_fallocate(self._fd, 0, size)
            return memoryview(mmap.mmap(self._fd, size))
        except OSError as error:
            raise ResourceUnavailable(
                f"can't get {size} bytes for writers' claims: {error.strerror}",
                remedy="make room in the memory file system (--dram-dir)",
            ) from error

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _no_descriptor(error: OSError) -> ResourceUnavailable:
    return ResourceUnavailable(
        f"the claims can't be opened for a client: {error}",
        remedy="raise the daemon's limit of open files (ulimit -n), and mount /proc",
    )


def survived(path: Path) -> bool:
    """Whether a table of claims of an earlier life is there, and can be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD.size) == _HEAD.pack(_MAGIC, _FORMAT)
    except OSError:
        return False


def open_claims(path: Path) -> ClaimFile:
    """The table in this file, made anew where there is none. Raises ResourceUnavailable."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ResourceUnavailable(f"can't open {path}: {error.strerror}") from error
    return ClaimFile(fd)
