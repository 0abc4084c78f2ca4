"""Asks the pool which blocks lie on this host, in the lookups' thread: for the books of
`residency.py`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

import numpy as np

from cenote.api.errors import CenoteError
from cenote.client import Namespace
from cenote.runtime.log import get_logger

from .places import DISK, MEMORY, HostView
from .residency import Change, Medium, Noted, Residency, Survey

__all__ = ["ResidencyWatch", "survey"]

_log: Final = get_logger("cenote.vllm")
_LEASE_S: Final = 1.0
_DEADLINE_S: Final = 0.5
_MEDIUMS: Final[dict[int, Medium]] = {MEMORY: "memory", DISK: "disk"}


def survey(
    space: Namespace, asked: Survey, suffixes: Sequence[bytes], until_s: float, view: HostView
) -> None:
    """Ask the pool. `suffixes`: what keys end in, one for each shard. Raises what the calls do.

    Whether a block is still there is asked without keeping it: that is no use of it.
    """
    count = len(suffixes)
    if asked.again:
        keys = [key_hash + suffix for key_hash in asked.again for suffix in suffixes]
        present = space.exists_batch(keys, deadline_s=max(0.001, until_s - time.monotonic()))
        asked.present = np.all(present.reshape(-1, count), axis=1).tolist()
    if asked.fresh:
        keys = [block.key_hash + suffix for block in asked.fresh for suffix in suffixes]
        deadline_s = max(0.001, until_s - time.monotonic())
        lease = space.acquire(keys, _LEASE_S, deadline_s=deadline_s)
        try:
            places = view.places(space, lease, count)
            asked.found = [_MEDIUMS.get(place) for place in places.tolist()]
        finally:
            if lease.lease_id:
                space.release(lease)


@final
class ResidencyWatch:
    """The books, and the surveys that fill them, each a job of the lookups' thread."""

    def __init__(
        self,
        number: int,
        suffixes: Sequence[bytes],
        space: Callable[[float], Namespace | None],
        submit: Callable[[Callable[[], None]], bool],
        view: HostView,
    ) -> None:
        """`number`: of the KV group whose blocks are told. `space`: the namespace, within so many
        seconds; None where there is none yet."""
        self.number = number
        self._suffixes = suffixes
        self._space = space
        self._submit = submit
        self._view = view
        self._books = Residency()
        self._answers: deque[Survey] = deque()

    def note(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Blocks, each as a hash as in keys, and as vLLM's, may be here soon."""
        self._books.note(Noted(*block) for block in blocks)

    def clear(self) -> None:
        self._books.clear()

    def poll(self, now_s: float) -> list[Change]:
        """Go on; what has changed since the last call."""
        while self._answers:
            self._books.answered(self._answers.popleft())
        asked = self._books.due(now_s)
        if asked is not None and not self._submit(lambda: self._ask(asked)):
            self._books.answered(asked)
        return self._books.take()

    def _ask(self, asked: Survey) -> None:
        """In the lookups' thread."""
        try:
            space = self._space(_DEADLINE_S)
            if space is not None:
                until_s = time.monotonic() + _DEADLINE_S
                survey(space, asked, self._suffixes, until_s, self._view)
        except CenoteError as error:
            _log.debug("where blocks are was not answered", why=error)
        finally:
            self._answers.append(asked)
