"""What a simulated cluster must have come to when all faults have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cenote.api.errors import CenoteError
from sim.clients import ClientProcess, key_bytes
from sim.contents import KEYS_EACH
from sim.loop import Violation

if TYPE_CHECKING:
    from sim.oracle import Oracle
    from sim.values import PutRecord
    from sim.world import World

__all__ = ["check_contents", "check_liveness", "check_rest", "check_unused", "expected"]


def expected(oracle: Oracle) -> dict[int, PutRecord]:
    """By key: what was acknowledged and must be readable now."""
    found: dict[int, PutRecord] = {}
    best: dict[int, int] = {}
    for put in oracle.puts.values():
        for version in put.versions:
            number = oracle.numbers[version]
            if number > best.get(put.key, 0) and oracle.is_expected(put, version):
                best[put.key], found[put.key] = number, put
    return found


def _in_task(world: World, client: ClientProcess, act: Any, seconds: float) -> None:
    ended = world.loop.spawn(client.party, "check", act)
    until_s = world.loop.now_s + seconds
    while not ended.is_set and world.loop.now_s < until_s:
        world.loop.run(min(until_s, world.loop.now_s + 0.05))
    if not ended.is_set:
        raise Violation(f"{client.party.name} hangs after all faults have ended")


def check_contents(world: World) -> None:
    """What was acknowledged is there, seen from each client."""
    for client in world.living_clients():

        def look(client: ClientProcess = client) -> None:
            for key in list(expected(world.oracle)):
                if key // KEYS_EACH == client.space:
                    _look(world, client, key)

        _in_task(world, client, look, 60.0)


def _look(world: World, client: ClientProcess, key: int) -> None:
    value: bytes | None = None
    began_s = world.loop.now_s
    for _ in range(3):
        awaited = expected(world.oracle).get(key)
        if awaited is None:
            return
        try:
            value = client.sdk.get(key_bytes(key))
        except CenoteError as error:
            client.note(f"key {key}: {error!r}")
            world.loop.sleep(0.3)
            continue
        world.oracle.read(key, value, began_s)
        if value is not None:
            return
        world.loop.sleep(0.3)
    if expected(world.oracle).get(key) is awaited and awaited is not None:
        raise Violation(
            f"put {awaited.serial} of key {key} (versions {awaited.versions}) was"
            f" acknowledged, and {client.party.name} can't read it after all faults have ended"
        )


def check_liveness(world: World) -> None:
    """Every client can put and get again."""
    for client in world.living_clients():

        def prove(client: ClientProcess = client) -> None:
            key = client.first_key + world.keys + client.number % 40
            last: object = None
            for _ in range(4):
                record = world.oracle.new_put(key, client.number, 3000, 1)
                began_s = world.loop.now_s
                try:
                    result = client.sdk.put(key_bytes(key), record.value)
                    if result.stored:
                        world.oracle.put_acked(record)
                    value = client.sdk.get(key_bytes(key))
                except CenoteError as error:
                    last = error
                    client.note(f"liveness: {error!r}")
                    world.loop.sleep(0.5)
                    continue
                world.oracle.read(key, value, began_s)
                if value is not None:
                    return
                last = f"{result.status.name}, and then a miss"
                world.loop.sleep(0.5)
            raise Violation(
                f"{client.party.name} can't put and get after all faults have ended: {last!r}"
            )

        _in_task(world, client, prove, 60.0)


def check_unused(world: World) -> None:
    """Where no call is under way, no session has anything that a call left behind."""
    if world.tiers is not None:
        world.tiers.note_under_way(world.leader())
    for client in world.living_clients():
        session_id = client.sdk.session.identity.session_id
        session = world.leader().service.state._pool.sessions.by_id.get(session_id)
        if session is None:
            continue
        holds = [lease for lease in session.leases if lease.is_hold]
        if session.grants or holds:
            raise Violation(
                f"{client.party.name} does nothing, and its session has grants"
                f" {[g & 0xFFFFFFFFFF for g in session.grants]} and {len(holds)} holds"
            )


def check_rest(world: World) -> None:
    """Nobody is left who holds anything."""
    master = world.leader()
    pool = master.service.state._pool
    world.oracle._check(master)
    if world.tiers is not None:
        world.tiers.check_ended(master)
    left = {
        "quarantined units": pool.orphans.units,
        "orphans": len(pool.orphans),
        "leases": len(pool.leases),
        "grants": len(pool.grants),
        "sessions": len([s for s in pool.sessions.by_id.values() if not s.observer]),
        "condemned objects": pool.condemned_rows,
    }
    found = {what: count for what, count in left.items() if count}
    if found:
        raise Violation(f"all faults have ended and all clients are closed, but: {found}")
    for host in world.hosts.values():
        assert host.process is not None
        if not host.process.agent._core.is_attached:
            raise Violation(f"{host.name} is not attached after all faults have ended")
