"""An administrator who changes the namespace's quota, and looks whether it outlives what fails."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from cenote.api.errors import CenoteError
from cenote.master.commands import SetQuota
from sim.loop import Violation

if TYPE_CHECKING:
    from cenote.master.state import MasterState
    from sim.world import World

__all__ = ["QuotaAdmin", "quota_command"]

_BODY: Final = Struct("<QQQ")
_BYTES: Final = (0, 0, 2048, 16 << 10, 1 << 40)
_OBJECTS: Final = (0, 0, 0, 4)

Quota = tuple[int, int, int]
"""Bytes in memory, objects, priority."""


def quota_command(body: bytes) -> SetQuota:
    dram_bytes, objects, priority = _BODY.unpack_from(body)
    name = body[_BODY.size :].decode()
    return SetQuota(name, dram_bytes=dram_bytes, objects=objects, priority=priority)


class QuotaAdmin:
    """Keeps what the quota may be now, since not every change was answered."""

    def __init__(self, world: World, namespace: str) -> None:
        self._world = world
        self._namespace = namespace
        self._possible: list[Quota | None] = [(0, 0, 2)]
        """By the change that set it; None where a later one was answered."""
        self.answered = 0

    def change(self) -> None:
        """To anything."""
        from sim.masters import SET_QUOTA, LaneConnection

        world = self._world
        loop, master = world.loop, world.master
        if master is None:
            return
        dice = loop.dice
        quota = dice.choice(_BYTES), dice.choice(_OBJECTS), dice.choice((1, 2, 2, 3))
        number = len(self._possible)
        self._possible.append(quota)

        def reply(answer: bytes | CenoteError) -> None:
            if not isinstance(answer, CenoteError):
                self.answered += 1
                self._possible[:number] = [None] * number

        loop.note("admin", f"sets the quota to {quota}")
        connection, body = LaneConnection(), _BODY.pack(*quota) + self._namespace.encode()
        loop.after(
            0.0, lambda: master.receive(connection, SET_QUOTA, body, reply, "admin"), master.party
        )

    def check(self, state: MasterState) -> None:
        """Where no metadata were lost."""
        for found in state.namespaces():
            quota = found.dram_quota_bytes, found.objects_quota, found.priority
            if found.name == self._namespace and quota not in self._possible:
                possible = [one for one in self._possible if one is not None]
                raise Violation(f"the quota is {quota}, which is none of {possible}")
