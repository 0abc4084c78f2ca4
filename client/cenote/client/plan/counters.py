"""What a client counts: plain ints where it happens, read by a collector at scrape.

Of each namespace, what became of every key that was read, in parts that add up:

    asked ── absent                    the master knows no such object
      │  └── failed, stage lookup      nobody said where it is
      present ── unreachable           a miss: no node that holds it answered
      │      └── failed, stage fetch
      fetched ── failed, stage verify  the bytes were not what was put
          └── verified                 hits, from memory or SSD
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cenote.api.errors import CenoteError, NamespaceReset

__all__ = [
    "CALL_KINDS",
    "FETCH",
    "LOOKUP",
    "PUT",
    "READ",
    "STORE",
    "VERIFY",
    "Counters",
    "SpaceCounters",
]

READ: Final = "read"
PUT: Final = "put"
LOOKUP: Final = "lookup"
FETCH: Final = "fetch"
VERIFY: Final = "verify"
STORE: Final = "store"

CALL_KINDS: Final = (
    "get", "get_batch", "put", "put_batch", "exists", "exists_batch", "match", "acquire", "pin",
    "unpin", "remove", "view",
)  # fmt: skip
"""By number: that of a `Call`. 0 is what needs no setting."""


@dataclass(slots=True)
class Counters:
    """Of a client as a whole; see `cenote.api.types.ClientStats`."""

    node_failures: int = 0
    retries: int = 0


@dataclass(slots=True)
class SpaceCounters:
    """Of one namespace of a client."""

    hits: int = 0
    ssd_hits: int = 0
    misses: int = 0
    """Unreachable ones included."""
    unreachable_misses: int = 0
    cached_reads: int = 0
    stale_locations: int = 0
    misreads: int = 0
    stored: int = 0
    existed: int = 0
    failed: int = 0
    """Keys of batches, read or put."""
    read_bytes: int = 0
    written_bytes: int = 0
    failures: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By (READ or PUT, stage, reason): keys, those of calls of a single key included. As many as
    there are stages and classes of errors, at most."""

    def fail(self, what: str, stage: str, error: CenoteError, keys: int = 1) -> None:
        """So many keys got no outcome but this error. A namespace that was reset is no failure:
        the call begins anew."""
        if keys and not isinstance(error, NamespaceReset):
            name = (what, stage, error.reason)
            self.failures[name] = self.failures.get(name, 0) + keys

    def failed_keys(self, what: str, *stages: str) -> int:
        """How many failed in these stages, for whatever reason."""
        return sum(
            keys
            for (kind, stage, _), keys in list(self.failures.items())
            if kind == what and stage in stages
        )

    def funnel(self) -> dict[str, int]:
        """Keys that were read, by how far they got; see the module."""
        fetched = self.hits + self.failed_keys(READ, VERIFY)
        present = fetched + self.unreachable_misses + self.failed_keys(READ, FETCH)
        absent = self.misses - self.unreachable_misses
        asked = present + absent + self.failed_keys(READ, LOOKUP)
        return {"asked": asked, "present": present, "fetched": fetched, "verified": self.hits}
