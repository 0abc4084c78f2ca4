"""Whom the clients of several masters follow, and what that excuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.loop import Party, Violation

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["Following"]


class Following:
    """A leader past its tenure answers lookups, and can't know what is removed elsewhere by now.
    Whoever knows that there is a later one must not ask it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heard: dict[Party, int] = {}
        """Epochs of leaders that a process's client knows of."""
        self._unproven_s: dict[Party, float] = {}
        """When a client was last answered by a leader that was past its tenure."""

    def begins_anew(self, party: Party) -> None:
        """It opens a client, after one that could not be opened maybe: what that was told went
        with it."""
        self._heard.pop(party, None)

    def heard(self, party: Party, epoch: int) -> None:
        """A master has told that this epoch has begun."""
        self._heard[party] = max(epoch, self._heard.get(party, 0))

    def followed(self, party: Party, epoch: int) -> None:
        """It takes the master that it has just connected to for the leader."""
        world, heard = self._world, self._heard.get(party, 0)
        if world.kv is not None and party.name in world.clients and epoch < heard:
            raise Violation(f"{party.name} follows epoch {epoch}, and has heard of {heard}")

    def unproven(self, name: str) -> None:
        """A leader past its tenure answers."""
        client = self._world.clients.get(name)
        if client is not None:
            self._unproven_s[client.party] = self._world.loop.now_s

    def may_be_behind(self, since_s: float) -> bool:
        """Whether the running task's client was answered by such a one since then."""
        task = self._world.loop.task
        return task is not None and self._unproven_s.get(task.party, 0.0) > since_s
