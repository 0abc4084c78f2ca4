"""Which segments get new bytes: shares, credits, failure domains. Pure; knows no object.

Each segment has a share of the new bytes, and a virtual time that advances by what it got over its
share. The segment that is furthest behind is next, so bytes are spread without dice and without
long runs on one node. Shares follow the free space relative to the pool's mean (at most twice), so
nodes of different size fill evenly; no segment's share is more than twice that of its size, so
that a fresh node in a full pool is not flooded with everything that is new. One that was away and
is back starts with little, and has its whole share after SLOW_START_S: it may go away again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from cenote.api.rows import UNIT_BYTES

from .segments import Segment

__all__ = ["Entry", "Placement", "Wanted"]

FREE_RATIO_MAX = 2.0
FREE_RATIO_MIN = 0.02
SLOW_START_S = 10.0
SLOW_START_SHARE = 0.1
"""Of what a segment would get, at the moment when it comes back."""
SHARE_MAX = 1.8
"""Times the share by size. Twice is promised; runs that find no room elsewhere come on top."""


@dataclass(slots=True)
class Wanted:
    """What a batch asks of the segments that it may be placed on."""

    tier: int = 1
    local_boot_id: str = ""
    """Prefer this host; empty = no preference."""
    avoid_node_ids: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Any segment of the tier will do."""
        return not self.local_boot_id and not self.avoid_node_ids


class Entry:
    __slots__ = ("behind", "full_s", "segment", "share")

    def __init__(self, segment: Segment, behind: float, full_s: float) -> None:
        self.segment = segment
        self.full_s = full_s
        """When it is to have its whole share."""
        self.behind = behind
        """Virtual time: what it got over its share."""
        self.share = 1.0

    def __lt__(self, other: Entry) -> bool:
        if self.behind != other.behind:
            return self.behind < other.behind
        return self.segment.segment_id < other.segment.segment_id


class Placement:
    __slots__ = (
        "_by_id",
        "_gone",
        "_heap",
        "_now",
        "_since",
        "_time_s",
        "_total_units",
        "domains",
        "smallest_units",
    )

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._by_id: dict[int, Entry] = {}
        self._gone: set[int] = set()
        """Segments that were usable before, and are not now."""
        self._time_s = 0.0
        self._now = 0.0
        self._since = 0
        self._total_units = 1
        self.smallest_units = 0
        """Capacity of the smallest usable segment."""
        self.domains: dict[int, int] = {}
        """Tier -> failure domains with a usable segment."""

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def entries(self) -> list[Entry]:
        """Of all usable segments, also in the middle of a `pick`."""
        return list(self._by_id.values())

    def refresh(self, usable: list[Segment], now_s: float = 0.0) -> None:
        """The usable segments, and how free they are, have changed: deal the shares anew."""
        known = self._by_id
        self._time_s = now_s
        self._gone.update(known)
        self._by_id = {}
        domains: dict[int, set[str]] = {}
        for segment in usable:
            entry = known.get(segment.segment_id)
            if entry is None or entry.segment is not segment:
                is_back = segment.segment_id in self._gone
                entry = Entry(segment, self._now, now_s + SLOW_START_S if is_back else 0.0)
            self._gone.discard(segment.segment_id)
            self._by_id[segment.segment_id] = entry
            domains.setdefault(segment.tier, set()).add(segment.node.domain)
        self._heap = list(self._by_id.values())
        self.domains = {tier: len(names) for tier, names in domains.items()}
        self._deal()

    def _deal(self) -> None:
        entries = self._heap
        self._since = 0
        sizes = [entry.segment.capacity_units or 1 for entry in entries]
        self.smallest_units = min(sizes, default=0)
        self._total_units = total = sum(sizes) or 1
        free = [e.segment.free_units / size for e, size in zip(entries, sizes, strict=True)]
        mean = sum(f * size for f, size in zip(free, sizes, strict=True)) / total or 1.0
        ratios = [min(max(f / mean, FREE_RATIO_MIN), FREE_RATIO_MAX) for f in free]
        starts = [self._start(entry) for entry in entries]
        weights = [s * ratio * start for s, ratio, start in zip(sizes, ratios, starts, strict=True)]
        caps = [SHARE_MAX * size / total for size in sizes]
        for entry, share in zip(entries, _capped_shares(weights, caps), strict=True):
            entry.share = share
            # Credit is not saved up: who had no room, or was avoided, does not catch up later.
            entry.behind = max(entry.behind, self._now)
        heapify(entries)

    def _start(self, entry: Entry) -> float:
        """How much of its share an entry gets: less than all shortly after it came back."""
        left_s = entry.full_s - self._time_s
        if left_s <= 0:
            return 1.0
        return max(SLOW_START_SHARE, 1.0 - left_s / SLOW_START_S)

    def note(self, entry: Entry, units: int) -> None:
        """A candidate (out of the heap just now) got so many units."""
        entry.behind += units / entry.share
        self._since += units

    @property
    def stale(self) -> bool:
        """So much was placed that the shares should be dealt anew."""
        return self._since * 128 > self._total_units

    def redeal(self) -> None:
        self._deal()

    def note_back(self, entry: Entry, units: int) -> None:
        """What was charged did not come about."""
        entry.behind -= units / entry.share
        self._since -= units
        heapify(self._heap)

    def first(self, tier: int) -> Entry | None:
        """The entry that is furthest behind, where it is of this tier."""
        heap = self._heap
        return heap[0] if heap and heap[0].segment.tier == tier else None

    def charge_first(self, entry: Entry, units: int) -> None:
        """`first` got so many units."""
        self._now = entry.behind
        entry.behind += units / entry.share
        self._since += units
        heapreplace(self._heap, entry)

    def eligible(self, wanted: Wanted) -> list[Entry]:
        return [
            e
            for e in self._heap
            if e.segment.tier == wanted.tier and e.segment.node.node_id not in wanted.avoid_node_ids
        ]

    def domains_for(self, wanted: Wanted) -> int:
        """Failure domains that this may be placed on."""
        if not wanted.avoid_node_ids:
            return self.domains.get(wanted.tier, 0)
        return len({e.segment.node.domain for e in self.eligible(wanted)})

    def capacity_for(self, wanted: Wanted) -> int:
        """Units of all segments that this may be placed on, once all their memory is there."""
        return sum(
            max(0, e.segment.size_bytes // UNIT_BYTES - e.segment.retired_units)
            for e in self.eligible(wanted)
        )

    def largest_for(self, wanted: Wanted) -> int:
        """Units of the largest segment that this may be placed on."""
        return max((e.segment.capacity_units for e in self.eligible(wanted)), default=0)

    def pick(
        self, count: int, wanted: Wanted, units: int, try_entry: Callable[[Entry], bool]
    ) -> list[Entry]:
        """Up to `count` entries in distinct failure domains for which `try_entry` succeeded.

        Those furthest behind come first; each that is picked is charged `units`.
        """
        picked: list[Entry] = []
        domains: set[str] = set()
        passed: list[Entry] = []
        for entry in self._candidates(wanted, passed):
            segment = entry.segment
            if segment.tier != wanted.tier or segment.node.node_id in wanted.avoid_node_ids:
                continue
            domain = segment.node.domain
            if domain in domains or not try_entry(entry):
                continue
            picked.append(entry)
            if len(picked) == count:
                break
            domains.add(domain)
        if picked:
            self._now = max(self._now, min(entry.behind for entry in picked))
        for entry in picked:
            self.note(entry, units)
        for entry in passed:
            heappush(self._heap, entry)
        return picked

    def _candidates(self, wanted: Wanted, passed: list[Entry]) -> Iterator[Entry]:
        """Entries in order; each is out of the heap, in `passed`, once it was yielded."""
        heap = self._heap
        boot_id = wanted.local_boot_id
        if boot_id:
            local = sorted(e for e in heap if e.segment.node.boot_id == boot_id)
            if local:
                rest = [e for e in heap if e.segment.node.boot_id != boot_id]
                heapify(rest)
                self._heap = heap = rest
                passed.extend(local)
                yield from local
        while heap:
            entry = heappop(heap)
            passed.append(entry)
            yield entry


def _capped_shares(weights: list[float], caps: list[float]) -> list[float]:
    """Shares as weights are, adding up to 1, none above its cap where that is possible."""
    shares = [0.0] * len(weights)
    open_ = list(range(len(weights)))
    left = 1.0
    while open_:
        total = sum(weights[i] for i in open_)
        over = [i for i in open_ if weights[i] / total * left > caps[i]]
        if not over:
            for i in open_:
                shares[i] = weights[i] / total * left
            break
        for i in over:
            shares[i] = caps[i]
            left -= caps[i]
        open_ = [i for i in open_ if i not in over]
        left = max(left, 1e-9)
    return [max(share, 1e-9) for share in shares]
