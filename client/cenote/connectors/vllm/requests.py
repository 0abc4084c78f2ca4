"""The engine's requests, as far as they matter here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cenote.api.types import AcquiredLease

from .fetches import Fetch
from .saves import SaveProgress
from .variants import Variant

__all__ = ["Known", "RequestLike"]


class RequestLike(Protocol):
    """What is read of a vLLM request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]


@dataclass(slots=True)
class Known:
    """One request of the engine."""

    request: RequestLike
    variant: Variant
    fetch: Fetch[AcquiredLease] | None = None
    preemptions: int = 0
    saves: SaveProgress = field(default_factory=SaveProgress)
    sources: dict[str, int] = field(default_factory=dict)
    """Of the tokens that are being loaded, how many come from where: see `places.SOURCES`."""
    stale_preemptions: int | None = None
    """Some of its blocks are of weights that have been replaced: nothing is shared until it was
    preempted more often than that, and is computed anew. None: they are not."""
