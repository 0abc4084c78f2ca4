"""Which blocks lie on this host, for routers that send a prompt where its blocks are.

A block that was saved, or found, is looked for once: where all its shards are on this host it is
*here*, which is told. From then on the pool is asked from time to time, oldest answer first,
whether it still has it; where it does not, that is told, too. No more is claimed than is known:
what there is no room to remember is told as gone. Decides only: `residency_watch.py` asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

__all__ = ["Change", "Medium", "Noted", "Residency", "Survey"]

SURVEY_S: Final = 1.0
"""Between two surveys."""
_LOOKS_MAX: Final = 5
"""A block that is not here after so many surveys (its save failed, or it lies elsewhere) is
forgotten."""
_FRESH_MAX: Final = 512
_AGAIN_MAX: Final = 2048
_WAITING_MAX: Final = 1 << 14
_KNOWN_MAX: Final = 1 << 16

Medium = Literal["memory", "disk"]


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
    """The books. Of one thread."""

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
