"""Which slots of a daemon's inventory may become objects that the journal does not know.

The journal runs a few milliseconds behind the decisions. What a crash cut off of it is still in
the slot tables: a slot of epoch e is *newer than the journal* when its seq is above the last one
that the journal has of e. A slot at or below that and not in the table was evicted, removed or
replaced.

Removed keys never return: a remove names its keys in the journal even when they are unknown, and
such a tombstone outweighs every slot of an earlier epoch. Tombstones are needed only as long as
daemons may still bring such slots, and their number is bounded: when either ends, the floor rises,
and nothing of an epoch below the floor is adopted any more.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["AdoptionLog"]

_EPOCHS_MAX = 64
_EVERYTHING = 1 << 63


class AdoptionLog:
    __slots__ = ("_tombstones_max", "below", "floor", "known", "tombstones")

    def __init__(self, tombstones_max: int) -> None:
        self.known: dict[int, int] = {}
        """Epoch -> last seq of it that the journal has."""
        self.tombstones: dict[bytes, int] = {}
        """Digest -> epoch in which it was removed."""
        self.floor = 0
        self.below = 0
        """What the journal had of earlier epochs than this one was lost: it may all be adopted."""
        self._tombstones_max = tombstones_max

    def start(self, epoch: int, last_seq: int) -> None:
        """An epoch begins, or is met in a snapshot with the last seq known of it."""
        self.known[epoch] = max(self.known.get(epoch, 0), last_seq)
        while len(self.known) > _EPOCHS_MAX:
            oldest = min(self.known)
            del self.known[oldest]
            self.raise_floor(oldest + 1)

    def stored(self, epoch: int, last_seq: int) -> None:
        if last_seq > self.known.get(epoch, -1):
            self.known[epoch] = last_seq

    def removed(self, digests: Iterable[bytes], epoch: int) -> None:
        """Keys were removed in this epoch."""
        if self.floor >= epoch:
            return
        for digest in digests:
            self.tombstones[digest] = epoch
        if len(self.tombstones) > self._tombstones_max:
            self.raise_floor(epoch)

    def raise_floor(self, epoch: int) -> None:
        """Nothing of an earlier epoch than this is adopted from now on."""
        if epoch > self.floor:
            self.floor = epoch
            self.tombstones = {d: e for d, e in self.tombstones.items() if e > epoch}
            self.known = {e: seq for e, seq in self.known.items() if e >= epoch}

    def may_adopt(self, epoch: int, seq: int, digest: bytes) -> bool:
        newer = epoch >= self.floor and seq > self.newest_of(epoch)
        return newer and self.tombstones.get(digest, 0) <= epoch

    def newest_of(self, epoch: int) -> int:
        """The last seq of this epoch of which the journal can be asked: later ones it missed."""
        return -1 if epoch < self.below else self.known.get(epoch, _EVERYTHING)
