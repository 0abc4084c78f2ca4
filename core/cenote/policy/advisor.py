"""What another policy, or another capacity, would do: shadow caches over sampled keys.

A key is sampled if some bits of it are 0, always or never (spatial sampling: C. Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015); with one key in r sampled, a cache of capacity
c / r behaves as one of c does with all ("Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017). r is a power of two, the least that leaves a shadow cache about
`_SHADOW_BLOCKS` places; and twice as large for as long as more is used than the tick can follow.

From the same samples come

* the hit rate that each policy would have, with the very classes that evict (`CacheModel`), and
  which one is best, with hysteresis: another one is recommended once it is better by
  `_ADVANTAGE` over at least `_PATIENCE` turnovers of a shadow cache, the first time over
  `_PATIENCE_FIRST`: nothing chose the one that is in force at the start;
* for each namespace the hit rate that LRU would have with other capacities of the pool.

A *reference* is what the pool itself sees: an object that is read, or put and was not there. What
is read in vain and never put can't be told from what nobody wants, and does not count. In what is
read or put at once as one chain nothing is a hit behind the first miss. Old references count less:
all counts are halved every `_HALF_LIFE` turnovers.

All bounds: `_LOG_MAX` references wait to be worked on, later ones are dropped (and r is doubled);
`_NAMESPACES_MAX` namespaces are told apart; some 5 MiB in all.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .base import Keys, Positions, key_words
from .model import CacheModel
from .names import POLICIES, new_policy

__all__ = ["CURVE_FACTORS", "Advisor", "Curve"]

CURVE_FACTORS: Final = (0.125, 0.25, 0.354, 0.5, 0.707, 1.0, 1.414, 2.0, 2.828, 4.0, 8.0)
"""Of the capacity: where the curve is known."""
CANDIDATES: Final = tuple(name for name in POLICIES if name != "lru-chain")
"""LRU with the root newest has no need of a chain mode."""
_SHADOW_BLOCKS: Final = 4096
_IDS_MAX: Final = 12 * _SHADOW_BLOCKS
_LOG_MAX: Final = 1 << 14
_BATCH_MAX: Final = 256
_NAMESPACES_MAX: Final = 64
_HALF_LIFE: Final = 16
_PATIENCE_FIRST: Final = 2
_PATIENCE: Final = 6
_ADVANTAGE: Final = 0.007
_RATE_BITS_MAX: Final = 20
_HIGH: Final = 32
_NOTHING: Final = (1 << 64) - 1


Curve = NDArray[np.float64]
"""Hit rates, one for each of `CURVE_FACTORS`."""


@final
class Advisor:
    """Follows references; `mask` says which keys: those without a bit of it."""

    def __init__(self, current: str = "lru", *, compares: bool = True) -> None:
        """`current`: the policy in force. `compares`: it is one of CANDIDATES, which are to be
        compared; else there is but the curve, at a fifth of the work."""
        self._candidates = CANDIDATES if compares else ()
        self.choice = current
        """The policy to use."""
        self.switches = 0
        self.mask = _NOTHING
        """0 bits in a key's word that make it a sample."""
        self.capacity = 0
        """Objects that the pool holds."""
        self.dropped = 0
        """References that came too fast."""
        self._rate_bits = self._rate_bits_min = 0
        self._log = np.zeros(_LOG_MAX, np.uint64)
        self._log_owner = np.zeros(_LOG_MAX, np.uint16)
        self._log_start = np.zeros(_LOG_MAX, np.bool_)
        self._logged = 0
        self._worked = 0
        self._dropped_before = 0
        self._owner_row: dict[int, int] = {}
        self._restart()

    # ---- what happens ---------------------------------------------------------------------------

    def resize(self, capacity: int) -> None:
        """The pool holds about so many objects. Shadow caches begin anew where that is news."""
        if not self.capacity * 0.8 <= capacity <= self.capacity * 1.25:
            self.capacity = capacity
            self._rate_bits_min = max(0, (max(1, capacity) // _SHADOW_BLOCKS).bit_length() - 1)
            self._rate_bits = max(self._rate_bits_min, self._rate_bits_extra())
            self._restart()

    def _rate_bits_extra(self) -> int:
        return self._rate_bits if self._rate_bits > self._rate_bits_min else 0

    def note(self, keys: Keys, owner: int) -> None:
        """These were read, or put and were not there: one chain (or any keys), root first."""
        words = key_words(keys)
        words = words[(words & np.uint64(self.mask)) == 0]
        n = len(words)
        if n:
            self._add(words[::-1], n, owner)

    def note_one(self, word: int, owner: int) -> None:
        """`note` for one key of which the caller knows that it is a sample."""
        at = self._logged
        if at == _LOG_MAX:
            self.dropped += 1
            return
        self._log[at] = word
        self._log_owner[at] = owner
        self._log_start[at] = True
        self._logged = at + 1

    def _add(self, words: Keys, n: int, owner: int) -> None:
        at = self._logged
        if at + n > _LOG_MAX:
            self.dropped += n
            return
        # Tails first, so that of what was used at once the root was used last.
        self._log[at : at + n] = words
        self._log_owner[at : at + n] = owner
        self._log_start[at] = True
        self._log_start[at + 1 : at + n] = False
        self._logged = at + n

    @property
    def waiting(self) -> int:
        """References that were noted and not followed yet."""
        return self._logged - self._worked

    # ---- following ------------------------------------------------------------------------------

    def work(self, references_max: int, batches_max: int = _LOG_MAX) -> int:
        """Follow up to about so many references; how many it were.

        2 us each, or 8 where policies are compared; but 0.1 ms for each batch, however few it has:
        in a pool of few objects they are short. What isn't followed makes the samples fewer.
        """
        if self._dropped_before != self.dropped and self._rate_bits < _RATE_BITS_MAX:
            self._rate_bits += 1
            self._restart()
        self._dropped_before = self.dropped
        done = batches = 0
        while self._worked < self._logged and done < references_max and batches < batches_max:
            batches += 1
            end = min(self._worked + self._batch, self._logged)
            self._follow(slice(self._worked, end))
            done += end - self._worked
            self._worked = end
        if self._worked == self._logged:
            self._worked = self._logged = 0
        return done

    def _restart(self) -> None:
        """Everything about references so far is forgotten: the rate is another one."""
        self.mask = ((1 << self._rate_bits) - 1) << _HIGH if self.capacity else _NOTHING
        self._logged = self._worked = 0
        self._blocks = max(1, self.capacity >> self._rate_bits)
        self._batch = max(1, min(_BATCH_MAX, self._blocks >> 4))
        self._ids: dict[int, int] = {}
        self._keys = np.zeros(_IDS_MAX, np.uint64)
        self._free_ids = list(range(_IDS_MAX - 1, -1, -1))
        self._used = np.zeros(_IDS_MAX, np.int64)
        """When each id was referenced last; 0 = never."""
        self._clock = 1
        self._shadows = [
            CacheModel(new_policy(n), self._blocks, self._keys) for n in self._candidates
        ]
        self._hits = np.zeros(len(self._candidates))
        self._references = 0.0
        self._since_switch = 0
        self._curve_hits = np.zeros((_NAMESPACES_MAX, len(CURVE_FACTORS)))
        self._curve_references = np.zeros(_NAMESPACES_MAX)
        self._capacities = [max(1, int(self._blocks * factor)) for factor in CURVE_FACTORS]
        self._thresholds = np.zeros(len(CURVE_FACTORS), np.int64)

    def _follow(self, part: slice) -> None:
        words, owners, starts = self._log[part], self._log_owner[part], self._log_start[part]
        ids = self._ids_of(words)
        # A key that comes twice in so short a time is a hit for every cache.
        order = np.arange(len(ids))
        _, last = np.unique(ids[::-1], return_index=True)
        once = np.zeros(len(ids), np.bool_)
        once[len(ids) - 1 - last] = True
        repeated = ~once
        groups = np.cumsum(starts)
        groups = groups - groups[0]
        ends = np.append(np.flatnonzero(starts[1:]), len(ids) - 1)[groups]
        parents = np.append(ids[1:], -1)
        parents[order == ends] = -1
        ids_once, parents_once = ids[once], parents[once]
        for at, shadow in enumerate(self._shadows):
            hit = shadow.is_kept(ids) | repeated
            self._hits[at] += np.count_nonzero(_before_miss(hit, ends, order))
            shadow.reference(ids_once, parents_once)
        self._references += len(ids)
        self._since_switch += len(ids)
        self._count_curve(ids, repeated, owners, ends, order)
        if self._references > _HALF_LIFE * max(self._blocks, 512):
            self._halve()
        self._choose()

    def _ids_of(self, words: Keys) -> Positions:
        known = self._ids
        if len(self._free_ids) < len(words):
            self._recycle()
        out = np.empty(len(words), np.int64)
        for at, word in enumerate(words.tolist()):
            found = known.get(word)
            if found is None:
                found = known[word] = self._free_ids.pop()
                self._keys[found] = word
                self._used[found] = 0
            out[at] = found
        return out

    def _recycle(self) -> None:
        """The quarter of ids that was used longest ago, and that no shadow cache keeps, is free."""
        every = np.fromiter(self._ids.values(), np.int64, len(self._ids))
        idle = np.ones(len(every), np.bool_)
        for shadow in self._shadows:
            idle &= ~shadow.is_kept(every)
        every = every[idle]
        old = every[np.argsort(self._used[every])[: _IDS_MAX // 4]]
        for word, found in zip(self._keys[old].tolist(), old.tolist(), strict=True):
            del self._ids[word]
            self._free_ids.append(found)
        self._used[old] = 0

    # ---- the curve ------------------------------------------------------------------------------

    def _count_curve(
        self,
        ids: Positions,
        repeated: NDArray[np.bool_],
        owners: NDArray[np.uint16],
        ends: Positions,
        order: Positions,
    ) -> None:
        """LRU of any capacity keeps what was used last: a key hits where few others came since."""
        used = self._used[ids]
        rows = self._rows_of(owners)
        np.add.at(self._curve_references, rows, 1.0)
        for at, threshold in enumerate(self._thresholds.tolist()):
            hit = ((used > threshold) & (used > 0)) | repeated
            np.add.at(self._curve_hits[:, at], rows[_before_miss(hit, ends, order)], 1.0)
        self._used[ids] = self._clock + order
        self._clock += len(ids)
        every = self._used
        ranks = [_IDS_MAX - capacity - 1 for capacity in self._capacities]
        fits = [rank for rank in ranks if rank >= 0]
        if fits:
            ordered = np.partition(every, sorted(set(fits)))
            self._thresholds = np.array([ordered[rank] if rank >= 0 else 0 for rank in ranks])

    def _rows_of(self, owners: NDArray[np.uint16]) -> Positions:
        rows = self._owner_row
        for owner in set(owners.tolist()):
            if owner not in rows:
                # Row 0 is for all that come later.
                rows[owner] = len(rows) + 1 if len(rows) < _NAMESPACES_MAX - 1 else 0
        return np.array([rows[owner] for owner in owners.tolist()], np.int64)

    def curve(self, owner: int | None = None) -> Curve | None:
        """LRU's hit rates in one namespace (None: in all); None where nothing is known yet."""
        if owner is None:
            references, hits = self._curve_references.sum(), self._curve_hits.sum(axis=0)
        elif owner in self._owner_row:
            row = self._owner_row[owner]
            references, hits = self._curve_references[row], self._curve_hits[row]
        else:
            return None
        return hits / references if references else None

    def references(self, owner: int | None = None) -> int:
        """Sampled references that the curve stands on, old ones counting less."""
        if owner is None:
            return int(self._curve_references.sum())
        row = self._owner_row.get(owner)
        return 0 if row is None else int(self._curve_references[row])

    # ---- the choice -----------------------------------------------------------------------------

    def hit_rates(self) -> dict[str, float]:
        """Of each policy at the pool's capacity; empty where nothing is known yet."""
        if not self._references:
            return {}
        rates = self._hits / self._references
        return dict(zip(self._candidates, rates.tolist(), strict=True))

    @property
    def sampling_rate(self) -> float:
        """Which share of the keys is sampled; 0 while nothing is."""
        return 0.5**self._rate_bits if self.capacity else 0.0

    def _choose(self) -> None:
        patience = _PATIENCE if self.switches else _PATIENCE_FIRST
        if not self._candidates or self._since_switch < patience * self._blocks:
            return
        best = int(self._hits.argmax())
        current = CANDIDATES.index(self.choice)
        if (self._hits[best] - self._hits[current]) >= _ADVANTAGE * self._references:
            self.choice = CANDIDATES[best]
            self.switches += 1
            self._since_switch = 0

    def _halve(self) -> None:
        self._hits *= 0.5
        self._references *= 0.5
        self._curve_hits *= 0.5
        self._curve_references *= 0.5

    def memory_bytes(self) -> int:
        """About what all of this takes; 100 bytes for each entry of the dictionary of ids."""
        arrays = (self._log, self._log_owner, self._log_start, self._keys, self._used)
        fixed = sum(int(array.nbytes) for array in arrays) + 100 * len(self._ids)
        return fixed + sum(shadow.memory_bytes() for shadow in self._shadows)


def _before_miss(hit: NDArray[np.bool_], ends: Positions, order: Positions) -> NDArray[np.bool_]:
    """Which hits count: those without a miss nearer to the root, which is at the end of each chain.

    `ends`: for each place where its chain ends. `order`: 0, 1, 2 ...
    """
    misses = np.where(hit, len(order), order)
    next_miss = np.minimum.accumulate(misses[::-1])[::-1]
    counted: NDArray[np.bool_] = hit & (next_miss > ends)
    return counted
