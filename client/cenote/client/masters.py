"""The masters of a pool as one client knows them, and which of them to ask for the leader. No I/O.

A leader is followed upwards only: one of an older epoch than was followed before is an old leader
that does not know it yet. A leader past its tenure still answers lookups, so it is better than
none, and worse than any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cenote.v1 import master_pb2 as pb

__all__ = ["HELLO_S", "KNOWN_MAX", "Masters", "seek_pause_s"]

HELLO_S: Final = 0.3
"""How long a master may take to answer a hello before the next one is asked. A stopped one takes
the connection all the same."""
SILENT_HELLO_S: Final = 0.1
"""The same for one that did not answer the last time."""
KNOWN_MAX: Final = 16
"""Addresses that are remembered: those that were configured and those of leaders."""
_PAUSE_FIRST_S: Final = 0.02
_PAUSE_MAX_S: Final = 0.2


class Masters:
    """See the module's docstring. `addresses` is not empty; the first one is asked first."""

    def __init__(self, addresses: Sequence[str], *, more_to_find: bool = False) -> None:
        """`more_to_find`: there is somebody who can be asked for others."""
        self._more_to_find = more_to_find
        self.known = list(dict.fromkeys(addresses))
        """The present leader, or who was taken for it last, first."""
        self.epoch = 0
        """Of the latest leader that was met, or heard of from a standby."""
        self._second_best = 0
        """Epoch of the leader past its tenure beside which nobody better was found."""
        self._silent: set[str] = set()

    @property
    def is_lone(self) -> bool:
        """There is nobody else to turn to."""
        return len(self.known) == 1 and not self._more_to_find

    def accepts(self, reply: pb.HelloResponse) -> bool:
        """Whether this is the hello of a leader that may be followed."""
        return reply.is_leader and (self.is_lone or reply.epoch >= self.epoch)

    def told(self, epoch: int) -> None:
        """Some master knows of a leader of that epoch (0: of none): older ones are over, whether
        they know it or not."""
        if not self.is_lone:
            self.epoch = max(self.epoch, epoch)

    def settles_for(self, reply: pb.HelloResponse) -> bool:
        """Whether the leader of this hello may be asked before the others were. One past its tenure
        knows nothing of what its successor decides: what was removed there exists here."""
        return not reply.past_tenure or self.is_lone or reply.epoch == self._second_best

    def settle_for(self, reply: pb.HelloResponse) -> None:
        """All were asked: this leader past its tenure is better than none."""
        self._second_best = reply.epoch

    def followed(self, reply: pb.HelloResponse) -> None:
        """A leader was met."""
        self.epoch = max(self.epoch, reply.epoch)

    def choose(self, address: str) -> None:
        """From now on this one is taken for the leader."""
        rest = [other for other in self.known if other != address]
        self.known = [address, *rest][:KNOWN_MAX]

    def learn(self, addresses: Iterable[str]) -> None:
        """These are all masters there are; only the one in use is kept, whether or not it is among
        them."""
        present = self.known[0]
        self.known = list(dict.fromkeys((present, *addresses)))[:KNOWN_MAX]
        self._silent.intersection_update(self.known)

    # ---- a round of questions -----------------------------------------------------------------

    def in_order(self, hints: Iterable[str]) -> list[str]:
        """Whom to ask, in this order: those named as leader, then the others, who was taken for the
        leader last of all, but for those that did not answer the last time."""
        once = dict.fromkeys((*hints, *self.known[1:], self.known[0]))
        return sorted(once, key=lambda address: address in self._silent)

    def patience_s(self, address: str) -> float:
        """How long it may take to answer."""
        return SILENT_HELLO_S if address in self._silent else HELLO_S

    def heard(self, address: str) -> None:
        self._silent.discard(address)

    def silent(self, address: str) -> None:
        """It did not answer in time, or nobody is there."""
        self._silent.add(address)


def seek_pause_s(attempt: int, jitter: float) -> float:
    """Before the next round, when the `attempt`-th found no leader; `jitter` is in [0, 1)."""
    longest_s = min(_PAUSE_FIRST_S * 2.0 ** min(attempt - 1, 10), _PAUSE_MAX_S)
    return longest_s * (0.5 + 0.5 * jitter)
