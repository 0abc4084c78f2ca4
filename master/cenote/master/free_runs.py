"""The free space of a segment as runs: by address, to coalesce; by size, to find one that fits.

By address, the runs lie sorted in chunks of at most 1,024 (an array of starts and one of ends, 8
bytes a run). Two bisections find a run's neighbours, so freeing what is free is always noticed.

By size, the starts of runs lie in bins, 8 for each doubling of length, and a bit mask says which
bins have any: two-level segregated fit, as in TLSF, but without headers in the memory it manages.
Bins are stacks that are cleaned lazily: an entry counts if a run starts there and its length
belongs here; one that doesn't is dropped when met, and all bins are made anew when most entries
may be stale.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from cenote.api.errors import InternalError

__all__ = ["FreeRuns", "Units"]

Units = npt.NDArray[np.int64]

_CHUNK_RUNS_MAX = 1024
_BINS = 31 * 8
_OWN_BIN_TRIES = 8
_STALE_ENTRIES_MIN = 1024
_SCALAR_ENTRIES = 256
_NOWHERE = 1 << 62
_second = itemgetter(1)


def bin_of(length: int) -> int:
    """Bin of a run of that length: exact below 16, then 8 a doubling."""
    if length < 8:
        return length
    shift = length.bit_length() - 4
    return (shift << 3) + (length >> shift)


def longest_in(number: int) -> int:
    """Longest run of a bin."""
    if number < 16:
        return number
    shift = (number >> 3) - 1
    return (((number & 7) + 9) << shift) - 1


def bins_of(lengths: Units) -> Units:
    """`bin_of` of each."""
    exponents = np.frexp(lengths)[1].astype(np.int64)
    shifts = np.maximum(exponents - 4, 0)
    return (shifts << 3) + (lengths >> shifts)


def overlap_error(offset: int, length: int) -> InternalError:
    return InternalError(f"units [{offset}, {offset + length}) are freed twice")


class FreeRuns:
    """Disjoint, non-adjacent runs [start, end) of free units below 2**32."""

    __slots__ = ("_bins", "_ends", "_entries", "_firsts", "_mask", "_starts", "count", "units")

    def __init__(self) -> None:
        self._starts: list[array[int]] = [array("I")]
        self._ends: list[array[int]] = [array("I")]
        self._firsts: list[int] = [0]
        """Where the address range of each chunk begins."""
        self._bins: list[array[int]] = [array("I") for _ in range(_BINS)]
        self._mask = 0
        self._entries = 0
        self.count = 0
        """Runs."""
        self.units = 0
        """Free units."""

    # ---- by address ---------------------------------------------------------------------------

    def _at(self, offset: int) -> tuple[int, int]:
        """Chunk and index of the last run that starts at or before offset; index -1 for none."""
        chunk = bisect_right(self._firsts, offset) - 1
        index = bisect_right(self._starts[chunk], offset) - 1
        if index < 0 and chunk:
            chunk -= 1
            index = len(self._starts[chunk]) - 1
        return chunk, index

    def run_at(self, offset: int) -> tuple[int, int] | None:
        """The run that holds unit `offset`, as (start, end)."""
        chunk, index = self._at(offset)
        if index < 0 or self._ends[chunk][index] <= offset:
            return None
        return self._starts[chunk][index], self._ends[chunk][index]

    def insert(self, start: int, end: int) -> None:
        """Free [start, end), coalescing. Raises InternalError, changing nothing, if part is."""
        chunk = bisect_right(self._firsts, start) - 1
        starts, ends = self._starts[chunk], self._ends[chunk]
        after = bisect_right(starts, start)
        before_chunk, before = chunk, after - 1
        if before < 0 and chunk:
            before_chunk = chunk - 1
            before = len(self._starts[before_chunk]) - 1
        before_end = self._ends[before_chunk][before] if before >= 0 else -1
        after_chunk = chunk
        if after < len(starts):
            after_start = starts[after]
        elif chunk + 1 < len(self._starts):
            after_chunk, after = chunk + 1, 0
            after_start = self._starts[after_chunk][0]
        else:
            after_start = _NOWHERE
        if before_end > start or after_start < end:
            raise overlap_error(start, end - start)
        self.units += end - start
        if before_end == start:
            before_start = self._starts[before_chunk][before]
            if after_start == end:
                self._ends[before_chunk][before] = end = self._ends[after_chunk][after]
                self._delete(after_chunk, after)
            else:
                self._ends[before_chunk][before] = end
            new_bin = bin_of(end - before_start)
            if new_bin != bin_of(before_end - before_start):
                self._push(new_bin, before_start)
        elif after_start == end:
            self._starts[after_chunk][after] = start
            if start < self._firsts[after_chunk]:
                self._firsts[after_chunk] = start
            self._push(bin_of(self._ends[after_chunk][after] - start), start)
        else:
            at = before + 1 if before_chunk == chunk else 0
            starts.insert(at, start)
            ends.insert(at, end)
            self.count += 1
            if len(starts) > _CHUNK_RUNS_MAX:
                self._split(chunk)
            self._push(bin_of(end - start), start)

    def take_at(self, start: int, end: int) -> bool:
        """Take [start, end) if all of it is free."""
        chunk, index = self._at(start)
        if index < 0 or self._ends[chunk][index] < end:
            return False
        run_start, run_end = self._starts[chunk][index], self._ends[chunk][index]
        if run_start == start:
            self._carve(chunk, index, end)
            return True
        self.units -= end - start
        self._ends[chunk][index] = start
        new_bin = bin_of(start - run_start)
        if new_bin != bin_of(run_end - run_start):
            self._push(new_bin, run_start)
        if run_end > end:
            self._starts[chunk].insert(index + 1, end)
            self._ends[chunk].insert(index + 1, run_end)
            self._keep_apart(chunk, end)
            self.count += 1
            if len(self._starts[chunk]) > _CHUNK_RUNS_MAX:
                self._split(chunk)
            self._push(bin_of(run_end - end), end)
        return True

    def _carve(self, chunk: int, index: int, new_start: int) -> None:
        """Take a run's beginning, up to new_start."""
        start, end = self._starts[chunk][index], self._ends[chunk][index]
        self.units -= new_start - start
        if new_start == end:
            self._delete(chunk, index)
        else:
            self._starts[chunk][index] = new_start
            self._keep_apart(chunk, new_start)
            self._push(bin_of(end - new_start), new_start)

    def _keep_apart(self, chunk: int, start: int) -> None:
        """A run of this chunk begins at `start` now: the next chunk's range begins behind it.

        That range may begin before the next chunk's first run, where one was that is gone, and a
        run of this chunk may have grown over it.
        """
        following = chunk + 1
        if following < len(self._firsts) and self._firsts[following] <= start:
            self._firsts[following] = self._starts[following][0]

    def _split(self, chunk: int) -> None:
        half = len(self._starts[chunk]) // 2
        for parts in (self._starts, self._ends):
            parts.insert(chunk + 1, parts[chunk][half:])
            del parts[chunk][half:]
        self._firsts.insert(chunk + 1, self._starts[chunk + 1][0])

    def _delete(self, chunk: int, index: int) -> None:
        del self._starts[chunk][index]
        del self._ends[chunk][index]
        self.count -= 1
        rest = len(self._starts[chunk])
        if rest < _CHUNK_RUNS_MAX // 8 and len(self._starts) > 1:
            into = max(chunk - 1, 0)
            if len(self._starts[into]) + len(self._starts[into + 1]) < _CHUNK_RUNS_MAX // 2:
                for parts in (self._starts, self._ends):
                    parts[into].extend(parts.pop(into + 1))
                del self._firsts[into + 1]
            elif not rest:
                del self._starts[chunk], self._ends[chunk], self._firsts[chunk]
                self._firsts[0] = 0
        self._drop_stale()

    # ---- by size ------------------------------------------------------------------------------

    def _push(self, number: int, start: int) -> None:
        self._bins[number].append(start)
        self._mask |= 1 << number
        self._entries += 1
        self._drop_stale()

    def _drop_stale(self) -> None:
        if self._entries > 4 * self.count + _STALE_ENTRIES_MIN:
            self._make_bins(*self.columns())

    def take(self, length: int) -> int:
        """Take `length` units from the beginning of a run that fits well; its offset, or -1.

        Runs of the length's own bin may be too short, so only some of them are looked at before the
        next bins; all of them when nothing else fits.
        """
        if length > self.units:  # there is no bin for what no segment can hold
            return -1
        own = number = bin_of(length)
        mask = self._mask >> own
        while mask:
            step = (mask & -mask).bit_length()
            number += step - 1
            start = self._take_from(number, length, _OWN_BIN_TRIES)
            if start >= 0:
                return start
            mask >>= step
            number += 1
        if len(self._bins[own]) <= _OWN_BIN_TRIES:
            return -1
        if len(self._bins[own]) <= _SCALAR_ENTRIES:
            return self._take_from(own, length, _SCALAR_ENTRIES)
        starts, ends = self.columns()
        fits = np.flatnonzero(ends - starts >= length)
        if not len(fits):
            return -1
        start = int(starts[fits[0]])
        self.take_at(start, start + length)
        return start

    def _take_from(self, number: int, length: int, tries: int) -> int:
        """Take from one of a bin's `tries` last runs that is long enough; its offset, or -1."""
        entries = self._bins[number]
        at = len(entries) - 1
        while at >= 0 and tries:
            start = entries[at]
            chunk = bisect_right(self._firsts, start) - 1
            starts = self._starts[chunk]
            index = bisect_left(starts, start)
            size = 0
            if index < len(starts) and starts[index] == start:
                size = self._ends[chunk][index] - start
                if bin_of(size) != number:
                    size = 0
            if 0 < size < length:
                tries -= 1
                at -= 1
                continue
            last = entries.pop()
            if at < len(entries):
                entries[at] = last
            self._entries -= 1
            if size:
                if not entries:
                    self._mask &= ~(1 << number)
                self._carve(chunk, index, start + length)
                return start
            at -= 1
        if not entries:
            self._mask &= ~(1 << number)
        return -1

    def longest(self, length: int, count_max: int, length_min: int) -> list[tuple[int, int]]:
        """The longest runs as (start, length), longest first: as many as it takes to hold `length`.

        Fewer than that only when `count_max`, or all of at least `length_min`, don't hold it.
        """
        runs: list[tuple[int, int]] = []
        if not self._may_hold(length, count_max):
            return runs
        mask = self._mask
        while mask and length > 0 and len(runs) < count_max:
            number = mask.bit_length() - 1
            mask ^= 1 << number
            entries = self._bins[number]
            if len(entries) > _SCALAR_ENTRIES:
                return self._longest_of_all(count_max, length_min)
            found = {start: size for start in entries if (size := self._size_in(number, start))}
            self._keep(number, found)
            for start, size in sorted(found.items(), key=_second, reverse=True):
                if size < length_min or length <= 0 or len(runs) == count_max:
                    return runs
                runs.append((start, size))
                length -= size
        return runs

    def _keep(self, number: int, starts: Iterable[int]) -> None:
        """These are a bin's valid entries: drop the stale ones, while they are known."""
        entries = array("I", starts)
        self._entries += len(entries) - len(self._bins[number])
        self._bins[number] = entries
        if not entries:
            self._mask &= ~(1 << number)

    def _may_hold(self, length: int, count_max: int) -> bool:
        """Whether `count_max` runs can be that long together, told from the bins alone."""
        mask = self._mask
        while mask and length > 0 and count_max > 0:
            number = mask.bit_length() - 1
            mask ^= 1 << number
            count = min(len(self._bins[number]), count_max)
            length -= count * longest_in(number)
            count_max -= count
        return length <= 0

    def _longest_of_all(self, count_max: int, length_min: int) -> list[tuple[int, int]]:
        starts, ends = self.columns()
        sizes = ends - starts
        if len(sizes) > count_max:
            top = np.argpartition(sizes, -count_max)[-count_max:]
            starts, sizes = starts[top], sizes[top]
        order = np.argsort(-sizes)
        order = order[sizes[order] >= length_min]
        return list(zip(starts[order].tolist(), sizes[order].tolist(), strict=True))

    def _size_in(self, number: int, start: int) -> int:
        """Length of the run that starts there, if it is one of this bin, else 0."""
        chunk, index = self._at(start)
        if index < 0 or self._starts[chunk][index] != start:
            return 0
        size = self._ends[chunk][index] - start
        return size if bin_of(size) == number else 0

    def take_last(self, length: int) -> int:
        """Take `length` units from the end of the last run that is long enough; or -1."""
        starts, ends = self.columns()
        fits = np.flatnonzero(ends - starts >= length)
        if not len(fits):
            return -1
        end = int(ends[fits[-1]])
        self.take_at(end - length, end)
        return end - length

    # ---- all at once --------------------------------------------------------------------------

    def columns(self) -> tuple[Units, Units]:
        """Starts and ends of all runs, by address (copies)."""
        return _joined(self._starts), _joined(self._ends)

    def insert_many(self, starts: Units, ends: Units) -> None:
        """Free many runs at once, sorted and disjoint; cost is per run that there is in the end.

        Raises InternalError, changing nothing, if part of them is free.
        """
        old_starts, old_ends = self.columns()
        all_starts = np.concatenate((old_starts, starts))
        order = np.argsort(all_starts, kind="stable")
        all_starts = all_starts[order]
        all_ends = np.concatenate((old_ends, ends))[order]
        wrong = np.flatnonzero(all_starts[1:] < all_ends[:-1])
        if len(wrong):
            at = int(all_starts[wrong[0] + 1])
            raise overlap_error(at, int(all_ends[wrong[0]]) - at)
        border = all_starts[1:] != all_ends[:-1]
        all_starts = all_starts[np.concatenate(([True], border))]
        all_ends = all_ends[np.concatenate((border, [True]))]
        self.units += int((ends - starts).sum())
        self.count = len(all_starts)
        step = _CHUNK_RUNS_MAX * 3 // 4
        cuts = range(0, max(self.count, 1), step)
        self._starts = [_packed(all_starts[at : at + step]) for at in cuts]
        self._ends = [_packed(all_ends[at : at + step]) for at in cuts]
        self._firsts = [part[0] if part else 0 for part in self._starts]
        self._firsts[0] = 0
        self._make_bins(all_starts, all_ends)

    def _make_bins(self, starts: Units, ends: Units) -> None:
        # In a byte: NumPy sorts those by radix, 20 times faster than numbers.
        numbers = bins_of(ends - starts).astype(np.uint8)
        # Descending addresses: the top of each stack is the lowest.
        order = np.argsort(numbers[::-1], kind="stable")
        starts = starts[::-1][order]
        borders = [0, *np.cumsum(np.bincount(numbers, minlength=_BINS)).tolist()]
        self._mask = 0
        for number, (first, stop) in enumerate(pairwise(borders)):
            self._bins[number] = _packed(starts[first:stop])
            if stop > first:
                self._mask |= 1 << number
        self._entries = self.count

    def check(self) -> None:
        """Raise AssertionError unless both orders agree (for tests; O(runs))."""
        starts, ends = self.columns()
        assert len(starts) == len(ends) == self.count
        assert (starts < ends).all()
        assert (starts[1:] > ends[:-1]).all()
        assert int((ends - starts).sum()) == self.units
        assert len(self._starts) == len(self._ends) == len(self._firsts)
        assert self._firsts[0] == 0
        assert self._firsts == sorted(set(self._firsts))
        for chunk, part in enumerate(self._starts):
            assert len(part) <= _CHUNK_RUNS_MAX
            assert part or len(self._starts) == 1
            assert not part or part[0] >= self._firsts[chunk]
            if chunk + 1 < len(self._firsts):
                assert part[-1] < self._firsts[chunk + 1]
        assert self._entries == sum(map(len, self._bins))
        assert self._entries <= 4 * self.count + _STALE_ENTRIES_MIN
        for number, entries in enumerate(self._bins):
            assert bool(entries) == bool(self._mask >> number & 1)
        for start, size in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
            assert start in self._bins[bin_of(size)]


def _joined(parts: list[array[int]]) -> Units:
    columns = [np.frombuffer(part, np.uint32) for part in parts if part]
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, np.int64)


def _packed(values: Units) -> array[int]:
    return array("I", values.astype(np.uint32).tobytes())
