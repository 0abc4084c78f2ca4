"""A trace through a cache without bytes, under a policy or `auto`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .advisor import Advisor
from .base import Keys, Positions
from .model import CacheModel
from .names import AUTO, new_policy, successor

__all__ = ["Outcome", "simulate"]

_WORK_REFERENCES: Final = 256
_WORK_MAX: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulation. Blocks are counted as often as requests have them."""

    policy: str
    capacity_blocks: int
    requests: int
    blocks: int
    hit_blocks: int
    """In the longest prefix that is there without a gap."""
    evicted_blocks: int
    switches: int
    """Of the policy, by `auto`."""
    last_policy: str

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0


def simulate(requests: Iterable[Positions], keys: Keys, policy: str, capacity: int) -> Outcome:
    """Requests one after the other, each the numbers of its blocks, root first.

    `keys`: of each block, evenly spread (`model.spread`). `policy`: one of POLICIES, or AUTO, which
    sees what it would see in a pool. Raises KeyError for other policies.
    """
    advisor = Advisor() if policy == AUTO else None
    first = "lru" if advisor is not None else policy
    cache = CacheModel(new_policy(first), capacity, keys, linked=advisor is not None)
    if advisor is not None:
        advisor.resize(capacity)
    count = blocks = hits = 0
    for request in requests:
        found = cache.access(request)
        count += 1
        blocks += len(request)
        hits += found
        if advisor is not None:
            advisor.note(keys[request[:found]], 0)
            advisor.note(keys[request[found:]], 0)
            if advisor.waiting >= _WORK_REFERENCES:
                advisor.work(_WORK_MAX)
            if advisor.choice != cache.policy.name:
                cache.follow(successor(cache.policy, advisor.choice))
    return Outcome(
        policy,
        capacity,
        count,
        blocks,
        hits,
        cache.evicted_blocks,
        0 if advisor is None else advisor.switches,
        cache.policy.name,
    )
