"""Limits of the state that may change while it works; what was changed is journaled.

A change holds for every leader after this one, over restarts, and before what these were started
with, until it is unset. Only what the state reads anew each time it needs it is here: what clients
and daemons were told when they said hello is not.
"""

from __future__ import annotations

from cenote.api.errors import InvalidArgument

from .admin_commands import Configure
from .effects import Configured
from .pool import Pool
from .state_config import DYNAMIC, with_overrides

__all__ = ["apply_configured", "configure"]


def configure(pool: Pool, command: Configure, now_s: float) -> None:
    """Raises InvalidArgument, having changed nothing."""
    for name in (*command.values, *command.unset):
        if name not in DYNAMIC:
            raise InvalidArgument(
                f"{name!r} can't be changed while a master runs",
                remedy="start the masters with another value; these can: " + ", ".join(DYNAMIC),
            )
    for name, value in command.values.items():
        _, least, most = DYNAMIC[name]
        if not least <= value <= most:
            raise InvalidArgument(f"{name} is {value:g}, outside of {least:g} to {most:g}")
    values = {n: v for n, v in pool.overrides.items() if n not in command.unset}
    effect = Configured(dict(sorted((values | command.values).items())))
    apply_configured(pool, effect)
    pool.effects.append(effect)
    pool.placement_dirty = True


def apply_configured(pool: Pool, effect: Configured) -> None:
    """All that is set, instead of what was before. Names of another release do nothing."""
    pool.overrides = dict(effect.values)
    pool.config = with_overrides(pool.started_with, pool.overrides)
