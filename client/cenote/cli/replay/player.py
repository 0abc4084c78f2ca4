"""One client of a replay: match, get what is there, check it, put the rest.

Blocks go through one buffer of `window` rows, so a long prompt needs no more memory than a short
one. A get that misses what match promised (another client's put evicted it meanwhile) is no error:
the hit ends there, as it would for an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.types import Sameness
from cenote.runtime.memory import address_of

from .pattern import BlockPattern
from .trace import BLOCK_TOKENS, Trace

if TYPE_CHECKING:
    from cenote.client.namespace import Namespace
    from cenote.client.results import GetResults, PutResults

__all__ = ["OPERATIONS", "Player", "Tally", "block_keys"]

OPERATIONS: Final = ("match", "get", "put")
PARTIAL_LESS_BYTES: Final = 8
"""A partial last block is put so much shorter. (Engines store still less of it; the capacity is
counted in blocks here.)"""
_EXAMPLES_MAX: Final = 5
_FAILURES_IN_A_ROW_MAX: Final = 10

Rows = NDArray[np.uint8]


@dataclass(slots=True)
class Tally:
    """What came of some requests. Adds up over clients; times in seconds."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    ssd_hit_blocks: int = 0
    """Of these, about as many were read from an SSD."""
    tokens: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    existed_blocks: int = 0
    vanished_blocks: int = 0
    """Matched, but evicted before they were read."""
    wrong_bytes: int = 0
    errors: int = 0
    gave_up: int = 0
    """Clients that ended early, since one request after the other failed."""
    examples: list[str] = field(default_factory=list)
    """The first few errors."""
    latencies_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in OPERATIONS}
    )

    def fail(self, what: str, count: int = 1) -> None:
        self.errors += count
        if len(self.examples) < _EXAMPLES_MAX:
            self.examples.append(what)

    def add(self, other: Tally) -> None:
        """Count what another client did, too."""
        for name in self.__slots__:
            value = getattr(other, name)
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.examples = (self.examples + other.examples)[:_EXAMPLES_MAX]
        for name, values in other.latencies_s.items():
            self.latencies_s[name].extend(values)


def block_keys(ids: NDArray[np.int64]) -> Rows:
    """uint8[n, 8]: the key of each block."""
    return ids.astype("<i8").view(np.uint8).reshape(-1, 8)


@final
class Player:
    """Plays requests of `trace` through `cache`; `tally` counts."""

    def __init__(
        self,
        cache: Namespace,
        trace: Trace,
        buffer: Rows,
        *,
        replicas: int = 1,
    ) -> None:
        """`buffer`: uint8[window, block_bytes], best from Client.alloc."""
        self.tally = Tally()
        self._cache = cache
        self._trace = trace
        self._buffer = buffer
        self._window = len(buffer)
        self._block_bytes = buffer.shape[1]
        row_starts = np.arange(len(buffer), dtype=np.uint64) * np.uint64(self._block_bytes)
        self._addresses = row_starts + np.uint64(address_of(buffer))
        self._replicas = replicas
        self._pattern = BlockPattern(self._block_bytes)
        self._failures_in_a_row = 0

    @property
    def hopeless(self) -> bool:
        """The last few requests all failed: the pool is gone."""
        return self._failures_in_a_row >= _FAILURES_IN_A_ROW_MAX

    def play(self, request: int) -> None:
        """One request. What fails is counted."""
        ids = self._trace.blocks_of(request)
        keys = block_keys(ids)
        tokens = int(self._trace.input_tokens[request])
        tally = self.tally
        lengths = self._lengths_of(len(ids), tokens)
        tally.requests += 1
        tally.blocks += len(ids)
        tally.tokens += tokens
        if not len(ids):
            return
        hits, errors_before = 0, tally.errors
        try:
            began_s = perf_counter()
            matched = self._cache.match(keys).prefix_keys
            tally.latencies_s["match"].append(perf_counter() - began_s)
            hits = self._get(ids[:matched], keys[:matched], lengths)
            self._put(ids, keys, hits, lengths)
        except CenoteError as error:
            tally.fail(f"request {request}: {error.reason}: {error}")
        self._failures_in_a_row = self._failures_in_a_row + 1 if tally.errors > errors_before else 0
        tally.hit_blocks += hits
        tally.hit_tokens += min(tokens, hits * BLOCK_TOKENS)

    def _lengths_of(self, blocks: int, tokens: int) -> NDArray[np.int64]:
        lengths = np.full(blocks, self._block_bytes, np.int64)
        if blocks and tokens % BLOCK_TOKENS and blocks == -(-tokens // BLOCK_TOKENS):
            lengths[-1] -= PARTIAL_LESS_BYTES
        return lengths

    def _get(self, ids: NDArray[np.int64], keys: Rows, lengths: NDArray[np.int64]) -> int:
        """Read and check a prefix; how many blocks of it came, without a gap."""
        tally = self.tally
        for first in range(0, len(ids), self._window):
            some = keys[first : first + self._window]
            rows, due = self._buffer[: len(some)], lengths[first : first + len(some)]
            began_s = perf_counter()
            results = self._cache.get_into_batch(
                some,
                addresses=self._addresses[: len(some)],
                lengths=due,
                chain=True,
            )
            tally.latencies_s["get"].append(perf_counter() - began_s)
            self._count_failures(results, first)
            came = _leading(results.hits)
            tally.read_bytes += int(due[:came].sum())
            wanted = ids[first : first + came]
            wrong_sizes = int(np.count_nonzero(results.sizes[:came] != due[:came]))
            tally.wrong_bytes += wrong_sizes * self._block_bytes
            if came and due[came - 1] < self._block_bytes:
                self._pattern.fill_last_word(rows[came - 1 : came], wanted[-1:])
            tally.wrong_bytes += self._pattern.wrong_bytes(rows[:came], wanted)
            if came < len(some):
                tally.vanished_blocks += len(ids) - first - came
                return first + came
        return len(ids)

    def _put(
        self, ids: NDArray[np.int64], keys: Rows, hits: int, lengths: NDArray[np.int64]
    ) -> None:
        """Put all blocks from `hits` on."""
        tally = self.tally
        for first in range(hits, len(ids), self._window):
            some = keys[first : first + self._window]
            rows = self._buffer[: len(some)]
            self._pattern.fill(rows, ids[first : first + len(some)])
            began_s = perf_counter()
            results = self._cache.put_from_batch(
                some,
                addresses=self._addresses[: len(some)],
                lengths=lengths[first : first + len(some)],
                chain=True,
                prefix=keys[:first],
                replicas=self._replicas,
            )
            tally.latencies_s["put"].append(perf_counter() - began_s)
            self._count_failures(results, first)
            tally.existed_blocks += results.existed_count
            tally.written_bytes += results.stored_count * self._block_bytes  # but for a tail's end
            different = int(np.count_nonzero(results.sameness == Sameness.DIFFERENT))
            if different:
                tally.fail(f"{different} blocks are there with other bytes", different)

    def _count_failures(self, results: GetResults | PutResults, first: int) -> None:
        if not results.failed_count:
            return
        try:
            results.raise_for_errors()
        except CenoteError as error:
            self.tally.fail(f"from block {first} on: {error.reason}: {error}", results.failed_count)


def _leading(flags: NDArray[np.bool_] | Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    array = np.asarray(flags)
    return len(array) if array.all() else int(np.argmin(array))
