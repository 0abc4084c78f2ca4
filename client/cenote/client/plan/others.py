"""Sealing what others decided: a put that finds such an object may say that it exists only then.

The other writer may have died before it sealed, or be about to. A daemon takes a version as often
as it is told, so both may seal it. One whole replica will do: it is what a restart brings back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    GrantRevoked,
    error_from_code,
)
from cenote.transport.base import ItemStatus, SealBatch

from .asking import hidden_after_report
from .budgets import node_failed, seal_budget_s
from .peers import groups_by_node
from .state import Call
from .steps import Plan, RefreshView, Reopen, SealPart, Seals

__all__ = ["seal_for_others"]

I64 = NDArray[np.int64]


def seal_for_others(
    call: Call, keys: Sequence[bytes], seals: NDArray[np.void], counts: I64, epoch: int
) -> Plan[tuple[NDArray[np.bool_], CenoteError | None]]:
    """Have each daemon seal its part of `seals`, the SEAL rows of the keys' objects (`counts` of
    them each, without the lengths of keys), once. Returns (which keys are sealed, the last error).

    Raises ClientClosed.
    """
    owner = np.repeat(np.arange(len(keys), dtype=np.int64), counts)
    rows = seals.copy()
    rows["key_length"] = np.fromiter(map(len, keys), np.uint16, len(keys))[owner]
    nodes = call.state.peers.nodes_of(rows["segment"])
    if (nodes < 0).any():
        yield RefreshView(max(0.001, call.remaining_s()))
        nodes = call.state.peers.nodes_of(rows["segment"])
    known = np.flatnonzero(nodes >= 0)
    session_id = call.state.session_id
    remaining_s = call.remaining_s()
    parts: list[SealPart] = []
    members: list[I64] = []
    for node, where in groups_by_node(nodes[known]):
        some = known if where is None else known[where]
        named = b"".join([keys[i] for i in owner[some].tolist()])
        batch = SealBatch(epoch, call.namespace_id, call.generation, rows[some].tobytes(), named)
        parts.append(SealPart(node, batch, seal_budget_s(remaining_s, len(some), 0)))
        members.append(some)
    yield Seals(parts)
    until_s = call.end_s - remaining_s + sum(part.budget_s for part in parts)
    done = np.zeros(len(rows), np.bool_)
    last: CenoteError | None = None
    for part, some in zip(parts, members, strict=True):
        error = part.error
        if error is None and part.statuses is not None:
            done[some] = part.statuses == ItemStatus.OK
            refused = part.statuses[part.statuses != ItemStatus.OK]
            if len(refused):
                what = f"node {part.node_id} did not seal what another client had decided"
                last = error_from_code(int(refused[0]), what)
            continue
        assert error is not None
        if isinstance(error, ClientClosed):
            raise error
        last = error
        if node_failed(error):
            call.node_failed(part.node_id, error, until_s=until_s)
    if isinstance(last, GrantRevoked):
        yield Reopen(call.remaining_s(), session_too=True, cut_session_id=session_id)
    silent = call.stalled & {part.node_id for part in parts}
    if silent and call.remaining_s() > 0:
        yield from hidden_after_report(call, silent)
    return _wholly(owner, rows["replica"], done, len(keys)), last


def _wholly(
    owner: I64, replica: NDArray[np.uint8], done: NDArray[np.bool_], count: int
) -> NDArray[np.bool_]:
    """Which objects have a replica all of whose extents are done."""
    pairs, at = np.unique(owner * 256 + replica, return_inverse=True)
    whole = np.ones(len(pairs), np.bool_)
    whole[at[~done]] = False
    found = np.zeros(count, np.bool_)
    found[pairs[whole] // 256] = True
    return found
