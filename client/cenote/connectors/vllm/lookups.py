"""Asks the pool for prompts, in a thread of its own, so that the engine's scheduler never waits."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.types import AcquiredLease
from cenote.client import Namespace
from cenote.runtime.log import get_logger

from .fetches import Found
from .groups import Block, Grouping
from .keys import object_keys
from .places import HostView, by_index
from .variants import Variant

__all__ = ["Answer", "Lookup", "LookupThread", "find"]

_log: Final = get_logger("cenote.vllm")
_WAITING_MAX: Final = 1024
_LEASE_MARGIN_S: Final = 0.5
"""A lease that ends sooner is not worth beginning a transfer under."""
_UNLEASED_S: Final = 1.0
"""For so long a prefix is taken for present that could not be leased (the leased share of the pool
was used up)."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One question: how much of a prompt with these hashes is there?"""

    ticket: int
    hashes: list[bytes]
    limit_tokens: int
    until_s: float
    variant: Variant


@dataclass(frozen=True, slots=True)
class Answer:
    """`found`: None where there was no answer; `late`: it was not even asked in time."""

    ticket: int
    found: Found[AcquiredLease] | None
    error: CenoteError | None


def find(
    space: Namespace,
    grouping: Grouping,
    shards: list[int],
    lookup: Lookup,
    lease_ttl_s: float,
    view: HostView,
) -> Found[AcquiredLease]:
    """Ask, and lease what can be resumed from. Raises what the calls raise."""
    tokens = min(lookup.limit_tokens, len(lookup.hashes) * grouping.hash_tokens)
    blocks = grouping.all_blocks(grouping.aligned(tokens))
    if not blocks:
        return Found(0, None, 0.0)
    began_s = time.monotonic()
    if not grouping.single:
        keys = _keys_of(grouping, blocks, shards, lookup.hashes)
        present = space.match(keys, deadline_s=lookup.until_s - began_s).present
        there = _whole(blocks, present, len(shards))
        blocks = grouping.needed(grouping.usable_tokens(tokens, there.__contains__))
        if not blocks:
            return Found(0, None, 0.0)
    keys = _keys_of(grouping, blocks, shards, lookup.hashes)
    lease = space.acquire(
        keys, lease_ttl_s, chain=grouping.single, deadline_s=lookup.until_s - time.monotonic()
    )
    if grouping.single:
        size = grouping.groups[0].block_tokens
        found = grouping.aligned(lease.prefix_keys // len(shards) * size)
    else:
        there = _whole(blocks, lease.present, len(shards))
        found = grouping.usable_tokens(tokens, there.__contains__)
    if not lease.lease_id:
        return Found(found, None, began_s + _UNLEASED_S)
    margin_s = min(_LEASE_MARGIN_S, lease.ttl_s / 2)
    places = by_index(blocks, view.places(space, lease, len(shards)), grouping.main)
    return Found(found, lease, began_s + lease.ttl_s - margin_s, places)


def _whole(blocks: list[Block], present: NDArray[np.bool_], shards: int) -> set[Block]:
    """The blocks of which all shards are there."""
    rows = present.reshape(len(blocks), shards)
    return {blocks[i] for i in np.flatnonzero(np.all(rows, axis=1)).tolist()}


def _keys_of(
    grouping: Grouping, blocks: list[Block], shards: list[int], hashes: list[bytes]
) -> list[bytes]:
    return object_keys(
        [grouping.hash_of(block, hashes) for block in blocks],
        [block[0] for block in blocks],
        shards,
    )


@final
class LookupThread:
    """Takes questions one after the other; answers are collected by the scheduler's thread."""

    def __init__(self, ask: Callable[[Lookup], Found[AcquiredLease]]) -> None:
        self._ask = ask
        self._waiting: queue.Queue[Lookup | Callable[[], None] | None] = queue.Queue(_WAITING_MAX)
        self.answers: deque[Answer] = deque()
        self._thread = threading.Thread(target=self._run, name="cenote-lookups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, item: Lookup | Callable[[], None]) -> bool:
        """Ask, or do something else in that thread; False where too much is waiting."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """End it after what it is at."""
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._waiting.get_nowait()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            if isinstance(item, Lookup):
                self.answers.append(self._answer(item))
                continue
            try:
                item()
            except CenoteError as error:  # of a release: leases end by themselves
                _log.debug("not done", why=error)
            except Exception:  # whatever a model's files hold: lookups of others go on
                _log.exception("not done")

    def _answer(self, lookup: Lookup) -> Answer:
        if time.monotonic() >= lookup.until_s:
            return Answer(lookup.ticket, None, None)
        try:
            return Answer(lookup.ticket, self._ask(lookup), None)
        except CenoteError as error:
            return Answer(lookup.ticket, None, error)
        except Exception as error:  # a bug of ours must not stop the engine's lookups for good
            _log.exception("a lookup failed")
            return Answer(lookup.ticket, None, CenoteError(f"{type(error).__name__}: {error}"))
