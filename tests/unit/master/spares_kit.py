"""What the tests of spare extents share."""

from __future__ import annotations

from typing import Any

import numpy as np

from cenote.master import commands as c
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import MIB, Kit, new_node, session_id
from unit.master.state_replies import Put

__all__ = [
    "abort",
    "cancel",
    "facts",
    "free_units",
    "granted_bytes",
    "grants",
    "make_kit",
    "pending",
    "twenty_spares",
]


def make_kit(size_bytes: int = 4 * MIB, nodes: int = 1, **config: Any) -> Kit:
    made = [new_node(i, size_bytes, slots=4096) for i in range(1, nodes + 1)]
    kit = Kit(StateConfig(**config)).with_nodes(*made)
    return kit.with_session(1).with_session(2, "host-2")


def twenty_spares(kit: Kit) -> Put:
    """Of 1 KiB; the key that was put with them is 9999."""
    put, spares = kit.start_spares(20)
    kit.commit(put)
    assert len(spares.keys) == 20
    return spares


def free_units(kit: Kit) -> int:
    return sum(segment.free_units for segment in pool_of(kit.state).segments.by_id.values())


def granted_bytes(kit: Kit) -> int:
    return kit.state.status(kit.now_s).granted_bytes


def grants(kit: Kit) -> int:
    return kit.state.status(kit.now_s).grants


def pending(kit: Kit, spares: Put) -> list[int]:
    grant = pool_of(kit.state).grants.by_id.get(spares.reply.grant_id)
    return [] if grant is None else grant.all_entries().tolist()


def abort(kit: Kit, spares: Put, *positions: int, session: int = 1, unfenced: bool = False) -> None:
    indexes = np.array(positions, np.uint32) if positions else None
    kit.apply(c.PutAbort(session_id(session), spares.reply.grant_id, indexes, unfenced))
    check(kit.state)


def facts(kit: Kit, *keys: int) -> list[tuple[int, int] | None]:
    return [None if hit is None else (hit.size, hit.checksum) for hit in kit.get(*keys)]


def cancel(kit: Kit, *request_ids: int) -> None:
    ids = np.array(request_ids, np.uint64)
    kit.apply(c.RenewSession(session_id(1), cancelled_request_ids=ids))
    check(kit.state)
