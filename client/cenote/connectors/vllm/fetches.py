"""What becomes of one request's prompt: looked up, brought to the workers, loaded. Decides only.

    LOOKING ──found──► FOUND ──gain──► STAGING ──arrived──► READY ──blocks given──► LOADING ─► OVER
       │ late, nothing    │ no gain       │ late, lost         │ not wanted             any more
       └──────────────────┴───────────────┴────────────────────┴──────────────────────────► OVER

The engine is promised only what is in its workers' own memory (READY): from there nothing can fail
any more, so a node that dies costs a miss and never a failed load, under either of vLLM's policies
for those. Until then the answer is "ask again", for no longer than the deadlines; OVER answers 0
for good, so that no request is fetched for twice (but anew after a preemption).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .pace import ComputePace

__all__ = ["Fetch", "FetchLimits", "Found", "Outcome", "Phase", "Want"]

L = TypeVar("L")

_LOOKUPS_MAX: Final = 3
"""A found prefix that waits for its turn until its lease has ended is looked up again, so often."""
_GRACE_SHARE: Final = 0.5
_GRACE_MAX_S: Final = 0.25
"""For the workers' report of a transfer that they ended at its deadline: so much of its time."""
_LIMIT_LEAST_S: Final = 0.05
"""Shorter, and a busy machine would fail loads that have nothing wrong with them."""


class Phase(Enum):
    LOOKING = "looking"
    FOUND = "found"
    STAGING = "staging"
    READY = "ready"
    LOADING = "loading"
    OVER = "over"


class Want(Enum):
    """What the owner of a fetch is to do for it."""

    LOOK_UP = "look up"
    STAGE = "stage"
    DROP = "drop"
    """The workers are to free what they hold for it."""
    RELEASE = "release"
    """The lease isn't needed any more."""


class Outcome(Enum):
    """Why a fetch is over, for the metrics."""

    LOADED = "loaded"
    MISS = "miss"
    NO_GAIN = "no_gain"
    LOOKUP_LATE = "lookup_late"
    LOOKUP_FAILED = "lookup_failed"
    TRANSFER_LATE = "transfer_late"
    TRANSFER_FAILED = "transfer_failed"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Durations in seconds, sizes in bytes."""

    lookup_s: float
    transfer_s: float
    bytes_per_s: float
    hold_s: float
    """For how long bytes are kept for a request that gets no blocks."""
    gain_tokens_min: int
    compute_share: float
    """Of what computing takes, as far as that is known, a transfer may take so much; 0: it may take
    longer than that."""
    pace: ComputePace = field(default_factory=ComputePace)

    def transfer_limit_s(self, size_bytes: int, gain_tokens: int) -> float:
        """For a transfer that saves the computing of so many tokens."""
        limit_s = self.transfer_s + size_bytes / self.bytes_per_s
        compute_s = self.pace.compute_s(gain_tokens)
        if not self.compute_share or compute_s is None:
            return limit_s
        return min(limit_s, max(_LIMIT_LEAST_S, self.compute_share * compute_s))


@dataclass(frozen=True, slots=True)
class Found(Generic[L]):
    """What the pool has of a prompt. `tokens`: so many can be resumed from, 0 for a miss."""

    tokens: int
    lease: L | None
    end_s: float
    """Of the lease, on the caller's clock."""
    places: NDArray[np.uint8] | None = field(default=None, compare=False)
    """Where the blocks of the main group lie (`places.MEMORY` ...), by their indices."""


class Fetch(Generic[L]):
    """See the module's docstring. `wants` fills with what is to be done; the owner empties it."""

    def __init__(self, ticket: int, now_s: float, limits: FetchLimits) -> None:
        self.ticket = ticket
        self.phase = Phase.LOOKING
        self.outcome: Outcome | None = None
        self.found: Found[L] | None = None
        self.from_tokens = 0
        """The engine had so many itself when the transfer began."""
        self.tokens = 0
        """Up to here the workers have the bytes."""
        self.limit_s = 0.0
        """What the transfer may take."""
        self.began_s = now_s
        self.wants: list[Want] = [Want.LOOK_UP]
        self._limits = limits
        self._until_s = now_s + limits.lookup_s
        self._lookups = 1
        self._leased = False

    @property
    def over(self) -> bool:
        return self.phase is Phase.OVER

    def looked_up(self, found: Found[L] | None) -> None:
        """The answer of the pool; None: it gave none."""
        if self.phase is not Phase.LOOKING:
            if found is not None and found.lease is not None:
                self.found = found  # an answer that came late: its lease is to be given back
                self._leased = True
                self._release()
            return
        if found is None:
            self._end(Outcome.LOOKUP_FAILED)
        elif not found.tokens:
            self.found = found
            self._leased = found.lease is not None  # of blocks that are of no use by themselves
            self._end(Outcome.MISS)
        else:
            self.found = found
            self._leased = found.lease is not None
            self.phase = Phase.FOUND

    def ask(self, now_s: float, have_tokens: int, size_bytes: int) -> int | None:
        """How many tokens beyond `have_tokens` can be loaded; None: ask again.

        `size_bytes`: of what lies between `have_tokens` and what was found.
        """
        if self.phase is Phase.LOOKING and now_s > self._until_s:
            self._end(Outcome.LOOKUP_LATE)
        elif self.phase is Phase.FOUND:
            self._begin_transfer(now_s, have_tokens, size_bytes)
        elif self.phase is Phase.STAGING and now_s > self._until_s:
            self._end(Outcome.TRANSFER_LATE)
        elif self.phase is Phase.READY:
            # Blocks that the engine had when the transfer began may be gone: then there is a gap.
            if self.from_tokens <= have_tokens < self.tokens and now_s <= self._until_s:
                return self.tokens - have_tokens
            self._end(Outcome.UNUSED)
        if self.phase in (Phase.LOADING, Phase.OVER):
            return 0
        return None

    def _begin_transfer(self, now_s: float, have_tokens: int, size_bytes: int) -> None:
        assert self.found is not None
        gain_tokens = self.found.tokens - have_tokens
        if gain_tokens < self._limits.gain_tokens_min:
            self._end(Outcome.NO_GAIN)
        elif now_s > self.found.end_s and self._lookups == _LOOKUPS_MAX:
            self._end(Outcome.UNUSED)
        elif now_s > self.found.end_s:
            self._lookups += 1
            self.phase = Phase.LOOKING
            self._until_s = now_s + self._limits.lookup_s
            self._release()
            self.wants.append(Want.LOOK_UP)
        else:
            self.phase = Phase.STAGING
            self.from_tokens = have_tokens
            self.limit_s = self._limits.transfer_limit_s(size_bytes, gain_tokens)
            grace_s = min(_GRACE_MAX_S, _GRACE_SHARE * self.limit_s)
            self._until_s = now_s + self.limit_s + grace_s
            self.wants.append(Want.STAGE)

    def staged(self, now_s: float, tokens: int) -> None:
        """All workers have reported: the prompt can be resumed after `tokens`, 0 for none."""
        if self.phase is not Phase.STAGING:
            return  # it was given up; the workers were told
        if tokens - self.from_tokens < self._limits.gain_tokens_min:
            self._end(Outcome.TRANSFER_FAILED)
            return
        self.phase = Phase.READY
        self.tokens = tokens
        self._until_s = now_s + self._limits.hold_s
        self._release()

    def allocated(self, external_tokens: int) -> bool:
        """The engine gave blocks for so many tokens; whether they are to be loaded."""
        if self.phase is not Phase.READY:
            return False
        if external_tokens <= 0:
            self._end(Outcome.UNUSED)
            return False
        self.phase = Phase.LOADING
        return True

    def loaded(self) -> None:
        """The workers are done, and have freed what they held."""
        if self.phase is Phase.LOADING:
            self.phase = Phase.OVER
            self.outcome = Outcome.LOADED

    def expire(self, now_s: float) -> None:
        """Give up what has been held for too long."""
        if self.phase in (Phase.STAGING, Phase.READY) and now_s > self._until_s:
            staging = self.phase is Phase.STAGING
            self._end(Outcome.TRANSFER_LATE if staging else Outcome.UNUSED)

    def abandon(self) -> None:
        """The request has ended. What is being loaded is loaded to its end: the blocks wait."""
        if self.phase not in (Phase.LOADING, Phase.OVER):
            self._end(Outcome.UNUSED)

    def _end(self, outcome: Outcome) -> None:
        if self.phase in (Phase.STAGING, Phase.READY):
            self.wants.append(Want.DROP)
        self._release()
        self.phase = Phase.OVER
        self.outcome = outcome

    def _release(self) -> None:
        if self._leased:
            self._leased = False
            self.wants.append(Want.RELEASE)
