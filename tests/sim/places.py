"""What lies where the master says that its objects are: each one's own bytes, whoever else's they
are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.facts import is_intact, known_versions
from sim.loop import Violation
from unit.master.state_checks import check as check_state

if TYPE_CHECKING:
    from sim.masters import MasterProcess
    from sim.oracle import Oracle

__all__ = ["check"]


def check(oracle: Oracle, master: MasterProcess) -> None:
    """The master's state agrees with itself, and with what lies in memory and on SSDs. What was
    found by daemons after the end of a journal was lost may have been written over; readers find
    that by its checksum."""
    check_state(master.service.state)
    if oracle.power_failed or oracle.has_lost_metadata or oracle.journal_lags:
        return
    for version in known_versions(master.pool):
        put = oracle.put_of.get(version)
        if put is None:
            continue
        placed = oracle._placed[version]
        good = [at for at in placed if not at[0].is_lost and version not in at[0].damaged]
        if not is_intact(put.value, good, version):
            raise Violation(
                f"put {put.serial} of key {put.key}, version {version}, has its slots, and other"
                f" bytes lie in {', '.join(file.name for file, _, _ in good)}"
            )
