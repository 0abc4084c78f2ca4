"""Who may lead, and until when: the decisions, without I/O.

A tenure is proven by one thing only: changes of the row `tenure` that went through the service's
consensus. The leader writes it every quarter of a tenure. Where a write was answered, it may act
until `tenure_s` after it *sent* the write, less a margin. A standby that has seen a change waits
until `tenure_s` after it *learned* of it, which is later; then it replaces the row on condition
that nothing changed since. So:

- the successor's election follows the last change, whoever was slow, stopped or cut off;
- it comes at least `tenure_s` after the standby saw that change, hence after the leader sent it,
  hence after the leader's tenure ended on the leader's clock (if both clocks run at paces that
  differ by less than the margin);
- what the leader writes afterwards is refused: each of its writes is conditioned on the revision of
  the row `epoch`, which the election has changed.

A lease of the service's own would be shorter to write and weaker: etcd keeps them outside its
consensus. A member that was stopped and goes on, or is cut off, may extend a lease that its
successor has let expire; and expiry is polled, in whole seconds, and put off by every election
among etcd's members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from cenote.kv.service import Condition, Get, KvRow, Modified, Operation, Put, TxnReply

from .kv_keys import Keys, LeaderRow, TenureRow, epoch_text, parse_epoch
from .metadata import Leader, MasterRow

__all__ = ["Candidacy", "Observer", "Seen", "Tenure", "read_seen", "seen_from"]

MARGIN_SHARE: Final = 0.05
MARGIN_S: Final = 0.02
BEATS_PER_TENURE: Final = 4
"""How often the leader proves it: three answers in a row may be missed."""
LOOKS_PER_TENURE: Final = 6
"""How often a standby looks."""
GRACE_SHARE: Final = 0.4
"""Of a tenure that a standby waits once the service answers again, for the leader to be first."""


@final
class Tenure:
    """The leader's side."""

    def __init__(self, tenure_s: float) -> None:
        self.tenure_s = tenure_s
        self.end_s = float("-inf")
        """On the monotonic clock."""

    def proven(self, sent_s: float) -> None:
        """A write that was sent then has been answered."""
        end_s = sent_s + self.tenure_s * (1 - MARGIN_SHARE) - MARGIN_S
        self.end_s = max(self.end_s, end_s)

    @property
    def beat_s(self) -> float:
        """Between two proofs."""
        return self.tenure_s / BEATS_PER_TENURE


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of an election, as one read gave them; None where there is none."""

    epoch: KvRow | None
    leader: KvRow | None
    tenure: KvRow | None

    @property
    def epoch_number(self) -> int:
        """The newest. Raises JournalCorrupt."""
        return parse_epoch(self.epoch.value) if self.epoch is not None else 0


def read_seen(keys: Keys) -> list[Operation]:
    """What to read for `seen_from`."""
    return [Get(keys.epoch), Get(keys.leader), Get(keys.tenure)]


def seen_from(reply: TxnReply) -> Seen:
    """Of a transaction that did `read_seen` and no other Get."""
    return Seen(*reply.rows)


def _revision(row: KvRow | None) -> int:
    return 0 if row is None else row.mod_revision


@final
class Observer:
    """The standby's side: when the place of the leader is vacant."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.leader: Leader | None = None
        """Who leads, as the rows have it; a tenure that ended makes no difference here."""
        self.entry = 0
        """The newest entry that the leader said to be durable."""
        self._tenure_s = 0.0
        self._changed_at_s = 0.0
        self._healthy_from_s = float("inf")

    def saw(self, seen: Seen, now_s: float) -> None:
        """The service has answered; `now_s` is not earlier than its answer. Raises
        JournalCorrupt where a row is not ours."""
        before = self.seen
        seen.epoch_number  # noqa: B018 - for what it raises
        leader = None if seen.leader is None else LeaderRow.parse(seen.leader.value).leader
        if seen.tenure is not None:
            tenure = TenureRow.parse(seen.tenure.value)
            self._tenure_s, self.entry = tenure.tenure_ms / 1000, max(self.entry, tenure.entry)
        if before is None or _revision(before.tenure) != _revision(seen.tenure):
            self._changed_at_s = now_s
        self._healthy_from_s = min(self._healthy_from_s, now_s)
        self.seen, self.leader = seen, leader

    def failed(self) -> None:
        """The service has not answered."""
        self._healthy_from_s = float("inf")

    @property
    def vacant_at_s(self) -> float:
        """When the place is vacant, if nothing changes until then."""
        if self.seen is None:
            return float("inf")
        if self.seen.tenure is None:
            return self._healthy_from_s  # nobody led, or who did has resigned
        grace_s = self._tenure_s * GRACE_SHARE
        return max(self._changed_at_s + self._tenure_s, self._healthy_from_s + grace_s)


@final
class Candidacy:
    """One attempt to be elected, after what was `seen`."""

    def __init__(
        self,
        keys: Keys,
        seen: Seen,
        master: MasterRow,
        *,
        tenure_s: float,
        entry: int,
        nonce: str,
        first_epoch: int = 1,
    ) -> None:
        """`entry`: the newest that this master knows. `first_epoch`: where there was none before.
        Raises JournalCorrupt."""
        self.epoch = seen.epoch_number + 1 if seen.epoch is not None else first_epoch
        self.row = LeaderRow(self.epoch, nonce, master)
        tenure = TenureRow(self.epoch, round(tenure_s * 1000), entry)
        self.conditions: list[Condition] = [
            Modified(keys.epoch, _revision(seen.epoch)),
            Modified(keys.leader, _revision(seen.leader)),
            Modified(keys.tenure, _revision(seen.tenure)),
        ]
        self.then: list[Operation] = [
            Put(keys.epoch, epoch_text(self.epoch)),
            Put(keys.leader, self.row.to_bytes()),
            Put(keys.tenure, tenure.to_bytes()),
        ]

    def won(self, seen: Seen) -> int:
        """The fence, if what is seen now says that this attempt succeeded; else 0."""
        if seen.leader is None or seen.epoch is None:
            return 0
        row = LeaderRow.parse(seen.leader.value)
        mine = row.nonce == self.row.nonce and row.epoch == self.epoch
        return seen.epoch.mod_revision if mine else 0
