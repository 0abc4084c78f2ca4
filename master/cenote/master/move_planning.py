"""Copies between nodes, planned with every tick: for what reason comes first."""

from __future__ import annotations

from .evacuation import plan_evacuations, tasks_of_nodes
from .heat import has_heat, plan_hot
from .move_tables import Cause
from .moves import Targets, drop_superseded, give_up_dead
from .pool import Pool
from .rebalancing import plan_rebalance
from .replenishing import plan_replenishing

__all__ = ["plan_moves"]

_POOLWIDE = ((Cause.REBALANCE, 0), (Cause.REPAIR, 0))
MOVES_PER_TICK = 96
"""A tick holds requests up for so long: about 60 us for each."""


def plan_moves(pool: Pool, now_s: float) -> None:
    """One tick's worth. Bounded."""
    moves = pool.moves
    tasks = tasks_of_nodes(pool, now_s)
    is_hot = has_heat(pool)
    is_idle = not tasks and not moves.superseded and not moves.short
    is_idle = is_idle and all(moves.tasks[key].done for key in _POOLWIDE if key in moves.tasks)
    if is_idle and (not is_hot or now_s < pool.heat.look_at_s):
        return
    give_up_dead(pool)
    drop_superseded(pool)
    targets = Targets(pool, now_s)
    left = MOVES_PER_TICK - plan_evacuations(pool, tasks, targets, MOVES_PER_TICK, now_s)
    left -= plan_replenishing(pool, targets, left, now_s)
    plan_rebalance(pool, targets, left, now_s)
    if is_hot:
        plan_hot(pool, targets, now_s)
    targets.send()
