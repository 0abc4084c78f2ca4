"""What computing costs here: learned from the engine's steps, to know how long a load is worth.

A load that waits for a node which has just died ends by its deadline, and its tokens are computed
after it. So the deadline is a share of what computing them takes: then no failure of the pool makes
a request take more than that share longer, on a large machine or a small one.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

__all__ = ["ComputePace"]

_STEP_TOKENS_MIN: Final = 64
"""A step of fewer is all fixed cost, and says little about a token's."""
_UNDER_WAY_MAX: Final = 8
"""Steps whose end is waited for: an engine has two of them, a pipeline one for each stage."""
_FASTER_WEIGHT: Final = 0.5
_SLOWER_WEIGHT: Final = 0.1
"""Steps are slowed down by much that will be over next time, and sped up by nothing."""


@final
class ComputePace:
    """Of one engine; all calls are of one thread."""

    def __init__(self) -> None:
        self.token_s: float | None = None
        """None until a step was measured."""
        self._number = 0
        self._under_way: deque[tuple[int, float, int]] = deque(maxlen=_UNDER_WAY_MAX)
        """(number, when it was ordered, tokens)."""
        self._ended_s = 0.0

    def began(self, now_s: float, tokens: int) -> int:
        """A step of so many tokens is ordered: its number, 0 where it is not measured."""
        if tokens < _STEP_TOKENS_MIN:
            return 0
        self._number += 1
        self._under_way.append((self._number, now_s, tokens))
        return self._number

    def ended(self, now_s: float, number: int) -> None:
        """The step of that number has ended, and all before it."""
        while self._under_way and self._under_way[0][0] <= number:
            found, began_s, tokens = self._under_way.popleft()
            if found == number:
                # One that was ordered early has waited for the one before it.
                self._learn((now_s - max(began_s, self._ended_s)) / tokens)
                self._ended_s = now_s

    def _learn(self, token_s: float) -> None:
        known_s = self.token_s
        if known_s is None:
            self.token_s = token_s
            return
        weight = _FASTER_WEIGHT if token_s < known_s else _SLOWER_WEIGHT
        self.token_s = known_s + weight * (token_s - known_s)

    def compute_s(self, tokens: int) -> float | None:
        """What computing so many tokens takes; None: not known yet."""
        return None if self.token_s is None else self.token_s * tokens
