"""How often a master that can't begin to lead tries again."""

from __future__ import annotations

from cenote.api.errors import NotLeader, ResourceUnavailable
from cenote.master.journal import JournalCorrupt
from cenote.master.server import RETRY_S, RETRY_S_MAX, _next_retry_s


def test_a_damaged_journal_is_read_less_and_less_often() -> None:
    waits = [RETRY_S]
    for _ in range(12):
        waits.append(_next_retry_s(waits[-1], JournalCorrupt("damaged")))
    assert waits == sorted(waits)
    assert waits[1] == 2 * RETRY_S
    assert waits[-1] == RETRY_S_MAX


def test_what_may_be_over_in_a_moment_is_tried_soon() -> None:
    for error in (NotLeader("another was elected"), ResourceUnavailable("no answer")):
        assert _next_retry_s(RETRY_S_MAX, error) == RETRY_S
