"""Which blocks lie on this host, for routers that send a prompt where its blocks are.

A block that was saved, or found, is looked for once: where all its shards are on this host it is
*here*, which is told. From then on the pool is asked from time to time, oldest answer first,
whether it still has it; where it does not, that is told, too. No more is claimed than is known:
what there is no room to remember is told as gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

import numpy as np

from cenote.api.errors import CenoteError
from cenote.client import Namespace
from cenote.runtime.log import get_logger

from .places import DISK, MEMORY, HostView

__all__ = ["Change", "Noted", "Residency", "ResidencyWatch", "Survey", "survey"]

_log: Final = get_logger("cenote.vllm")
SURVEY_S: Final = 1.0
"""Between two surveys."""
_LOOKS_MAX: Final = 5
"""A block that is not here after so many surveys (its save failed, or it lies elsewhere) is
forgotten."""
_FRESH_MAX: Final = 512
_AGAIN_MAX: Final = 2048
_WAITING_MAX: Final = 1 << 14
_KNOWN_MAX: Final = 1 << 16
_LEASE_S: Final = 1.0
_DEADLINE_S: Final = 0.5

Medium = Literal["memory", "disk"]
_MEDIUMS: Final[dict[int, Medium]] = {MEMORY: "memory", DISK: "disk"}


@dataclass(frozen=True, slots=True)
class Noted:
    """A block that may be here."""

    key_hash: bytes
    """As it stands in keys."""
    block_hash: bytes
    """As vLLM knows it."""


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that are here now (`here`), or not any more."""

    here: bool
    medium: Medium
    block_hashes: tuple[bytes, ...]


@dataclass(slots=True)
class Survey:
    """What the pool is asked, and what it answers."""

    epoch: int
    fresh: list[Noted]
    again: list[bytes]
    """Key hashes of blocks that were here."""
    found: list[Medium | None] | None = None
    """Of `fresh`: where each is on this host, None for elsewhere or nowhere."""
    present: list[bool] | None = None
    """Of `again`."""


@final
class Residency:
    """The books. Decides only; of one thread."""

    def __init__(self, known_max: int = _KNOWN_MAX) -> None:
        self._known_max = known_max
        self._waiting: deque[tuple[Noted, int]] = deque(maxlen=_WAITING_MAX)
        """And how often it was looked for."""
        self._queued: set[bytes] = set()
        self._known: dict[bytes, tuple[bytes, Medium]] = {}
        """Hash and medium by key hash; whose answer is oldest comes first."""
        self._changes: list[Change] = []
        self._epoch = 0
        self._asked = False
        self._next_s = 0.0

    def note(self, blocks: Iterable[Noted]) -> None:
        """They may be here, now or in a moment."""
        for block in blocks:
            if block.key_hash not in self._known and block.key_hash not in self._queued:
                if len(self._waiting) == _WAITING_MAX:
                    self._queued.discard(self._waiting[0][0].key_hash)
                self._queued.add(block.key_hash)
                self._waiting.append((block, 0))

    def due(self, now_s: float) -> Survey | None:
        """What is to be asked now; None: nothing, or an answer is awaited."""
        if self._asked or now_s < self._next_s or not (self._waiting or self._known):
            return None
        self._asked = True
        self._next_s = now_s + SURVEY_S
        fresh = [self._waiting[i][0] for i in range(min(_FRESH_MAX, len(self._waiting)))]
        again = [key for key, _ in zip(self._known, range(_AGAIN_MAX), strict=False)]
        return Survey(self._epoch, fresh, again)

    def answered(self, answer: Survey) -> None:
        """What came of a survey: its answers, or none where the pool did not answer."""
        self._asked = False
        if answer.epoch != self._epoch:
            return
        if answer.found is not None:
            self._take_fresh(answer.fresh, answer.found)
        if answer.present is not None:
            gone: dict[Medium, list[bytes]] = {}
            for key_hash, present in zip(answer.again, answer.present, strict=True):
                known = self._known.pop(key_hash, None)
                if known is not None and present:
                    self._known[key_hash] = known
                elif known is not None:
                    gone.setdefault(known[1], []).append(known[0])
            self._tell(False, gone)

    def _take_fresh(self, asked: Sequence[Noted], found: Sequence[Medium | None]) -> None:
        mediums = {block.key_hash: medium for block, medium in zip(asked, found, strict=True)}
        here: dict[Medium, list[bytes]] = {}
        for _ in range(min(len(asked), len(self._waiting))):
            block, looks = self._waiting.popleft()
            medium = mediums.get(block.key_hash)
            if medium is not None:
                self._queued.discard(block.key_hash)
                self._known[block.key_hash] = block.block_hash, medium
                here.setdefault(medium, []).append(block.block_hash)
            elif looks + 1 < _LOOKS_MAX:
                self._waiting.append((block, looks + 1))
            else:
                self._queued.discard(block.key_hash)
        self._tell(True, here)
        dropped: dict[Medium, list[bytes]] = {}
        while len(self._known) > self._known_max:
            block_hash, medium = self._known.pop(next(iter(self._known)))
            dropped.setdefault(medium, []).append(block_hash)
        self._tell(False, dropped)

    def _tell(self, here: bool, blocks: dict[Medium, list[bytes]]) -> None:
        self._changes += [Change(here, medium, tuple(found)) for medium, found in blocks.items()]

    def clear(self) -> None:
        """None of them is of use any more."""
        gone: dict[Medium, list[bytes]] = {}
        for block_hash, medium in self._known.values():
            gone.setdefault(medium, []).append(block_hash)
        self._tell(False, gone)
        self._known.clear()
        self._waiting.clear()
        self._queued.clear()
        self._epoch += 1

    def take(self) -> list[Change]:
        """What has changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes


def survey(
    space: Namespace, asked: Survey, suffixes: Sequence[bytes], until_s: float, view: HostView
) -> None:
    """Ask the pool. `suffixes`: what keys end in, one for each shard. Raises what the calls do.

    Whether a block is still there is asked without keeping it: that is no use of it.
    """
    count = len(suffixes)
    if asked.again:
        keys = [key_hash + suffix for key_hash in asked.again for suffix in suffixes]
        present = space.exists_batch(keys, deadline_s=max(0.001, until_s - time.monotonic()))
        asked.present = np.all(present.reshape(-1, count), axis=1).tolist()
    if asked.fresh:
        keys = [block.key_hash + suffix for block in asked.fresh for suffix in suffixes]
        deadline_s = max(0.001, until_s - time.monotonic())
        lease = space.acquire(keys, _LEASE_S, deadline_s=deadline_s)
        try:
            places = view.places(space, lease, count)
            asked.found = [_MEDIUMS.get(place) for place in places.tolist()]
        finally:
            if lease.lease_id:
                space.release(lease)


@final
class ResidencyWatch:
    """The books, and the surveys that fill them, each a job of the lookups' thread."""

    def __init__(
        self,
        number: int,
        suffixes: Sequence[bytes],
        space: Callable[[float], Namespace | None],
        submit: Callable[[Callable[[], None]], bool],
        view: HostView,
    ) -> None:
        """`number`: of the KV group whose blocks are told. `space`: the namespace, within so many
        seconds; None where there is none yet."""
        self.number = number
        self._suffixes = suffixes
        self._space = space
        self._submit = submit
        self._view = view
        self._books = Residency()
        self._answers: deque[Survey] = deque()

    def note(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Blocks, each as a hash as in keys, and as vLLM's, may be here soon."""
        self._books.note(Noted(*block) for block in blocks)

    def clear(self) -> None:
        self._books.clear()

    def poll(self, now_s: float) -> list[Change]:
        """Go on; what has changed since the last call."""
        while self._answers:
            self._books.answered(self._answers.popleft())
        asked = self._books.due(now_s)
        if asked is not None and not self._submit(lambda: self._ask(asked)):
            self._books.answered(asked)
        return self._books.take()

    def _ask(self, asked: Survey) -> None:
        """In the lookups' thread."""
        try:
            space = self._space(_DEADLINE_S)
            if space is not None:
                until_s = time.monotonic() + _DEADLINE_S
                survey(space, asked, self._suffixes, until_s, self._view)
        except CenoteError as error:
            _log.debug("where blocks are was not answered", why=error)
        finally:
            self._answers.append(asked)
