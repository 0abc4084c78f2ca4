"""What is sampled of the use of objects, for miss-ratio curves and for the policy `auto`.

Requests only note sampled keys (`Pool.sample_mask` says which); shadow caches follow them in the
tick, a bounded number at a time. What they tell is not journaled: after a restart it is learned
anew, and `auto` begins with LRU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES
from cenote.policy.names import AUTO, successor

from .effects import Notice
from .objects import LIVE
from .pool import NO_SAMPLES, Pool
from .segments import DRAM

__all__ = ["follow_samples", "note", "note_one"]

_REFERENCES_PER_TICK: int = 128
"""At most about 1 ms."""
_BATCHES_PER_TICK: int = 2
"""Likewise: where few objects fit, a batch is one reference, and takes as long as a full one."""
_USED_SHARE_MIN = 0.1
"""Of the capacity: below it is not known how many objects fit."""


def note(pool: Pool, digests: NDArray[np.uint64], incarnation: int) -> None:
    """These were read, or put and were not there: one chain or any keys, in order."""
    if pool.sample_mask != NO_SAMPLES:
        pool.advisor.note(digests, incarnation)


def note_one(pool: Pool, low: int, incarnation: int) -> None:
    """`note` for one key whose first word has no bit of `sample_mask`."""
    if pool.sample_mask != NO_SAMPLES:
        pool.advisor.note_one(low, incarnation)


def _in_memory(pool: Pool) -> tuple[int, int]:
    """(objects, units) in memory. What lies on SSDs is neither: capacities are memory's."""
    units = int(pool.namespaces.units.sum())
    if not pool.segments.has_ssd:
        return pool.objects.live_count, units
    end = pool.objects.high_water
    live = (pool.state[:end] & LIVE) != 0
    live &= ~pool.segments.on_ssd[pool.objects.segment]
    copying = sum(one.units for one in pool.copies.by_id.values() if not one.is_promotion)
    on_ssd = sum(s.used_units for s in pool.segments.by_id.values() if s.tier != DRAM) - copying
    return int(np.count_nonzero(live)), max(0, units - max(0, on_ssd))


def follow_samples(pool: Pool, now_s: float) -> None:
    """Part of the tick: follow samples; under `auto`, take the policy that they speak for."""
    advisor = pool.advisor
    if not pool.config.sampling:
        return
    # Until it is known how much fits, nothing is sampled: then look often, where looking is cheap.
    every_s = 1.0 if advisor.capacity or pool.segments.has_ssd else 0.0
    if now_s >= pool.sampled_s + every_s:
        pool.sampled_s = now_s
        objects, units = _in_memory(pool)
        used_bytes = units * UNIT_BYTES
        if used_bytes > _USED_SHARE_MIN * pool.capacity_bytes:
            advisor.resize(pool.capacity_bytes * objects // used_bytes)
    advisor.work(_REFERENCES_PER_TICK, _BATCHES_PER_TICK)
    pool.sample_mask = advisor.mask
    if pool.config.policy == AUTO and advisor.choice != pool.policy.name:
        rates = advisor.hit_rates()
        before, after = pool.policy.name, advisor.choice
        pool.take_policy(successor(pool.policy, after))
        pool.effects.append(
            Notice(
                f"eviction policy {after} instead of {before}: of sampled keys it would hit"
                f" {100 * rates[after]:.1f} %, not {100 * rates[before]:.1f} %"
            )
        )
