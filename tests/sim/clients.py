"""Clients: the real SDK in a simulated process, and what its user does with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from cenote.api.errors import CenoteError, ClientClosed, InternalError, ProtocolError
from cenote.api.types import AcquiredLease, GetStatus
from cenote.client.client import Client
from cenote.client.config import ClientConfig, make_config
from cenote.client.master_stub import LaneMaster
from cenote.master.effects import GoneReason
from sim.contents import DEDUP, KEYS_EACH
from sim.lanes import SimMaster
from sim.loop import Party, Violation
from sim.one_sided import SimOneSided
from sim.oracle import PutRecord
from sim.transports import SimShm, SimTcp, SimTransport

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["ClientProcess", "flood", "key_bytes", "put_anew", "read_evicted", "read_leased"]

FINGERPRINT: Final = b"f"
SIZES: Final = (16, 40, 200, 900, 1024, 4096, 5000, 9000, 30_000)
CALLS_OF: Final = {
    "lease": 3, "read_leased": 3, "view": 3, "put_run": 50, "put_anew": 2, "flood": 2,
}  # fmt: skip
"""Of the SDK in one action, at most."""
LATE_S: Final = 0.1
"""So much later than its deadline a call may end."""


def key_bytes(key: int) -> bytes:
    """Every fifth key is too long for a slot."""
    name = b"key-%d" % key
    return name.ljust(90, b".") if key % 5 == 4 else name


@cache
def config_of(namespace: str, deadline_s: float, *, dedup: bool = False) -> ClientConfig:
    overrides: dict[str, object] = {
        "namespace": namespace,
        "deadline_s": deadline_s,
        "dedup": dedup,
    }
    return make_config("master:1", overrides)


@dataclass
class Hold:
    """A lease that the user keeps for a while."""

    lease: AcquiredLease
    keys: list[int]
    began_s: float


class ClientProcess:
    """One life of a client; its user does one thing after the other, in one or two tasks."""

    def __init__(self, world: World, party: Party, host: str, number: int) -> None:
        self.world = world
        self.party = party
        self.host = host
        self.number = number
        self.client: Client | None = None
        self.calls = 0
        self.errors: dict[str, int] = {}
        self.leases: list[Hold] = []
        self.pauses = 0
        self.boot_id = world.boot_id_of(host)
        several = len(world.namespaces) > 1
        self.space = world.loop.dice.randrange(len(world.namespaces)) if several else 0
        """Which namespace it uses; so are its keys."""

    # ---- life -----------------------------------------------------------------------------------

    def run(self, users: int) -> None:
        """The process's first task."""
        while self.client is None:
            try:
                self.client = self._connect()
            except CenoteError as error:
                self._note("connect", error)
                self.world.loop.sleep(0.05)
        for user in range(users):
            self.world.loop.spawn(self.party, f"user{user}", self._use)

    def _connect(self) -> Client:
        world, party = self.world, self.party
        dedup = DEDUP in world.options.faults
        deadline_s = world.loop.dice.choice((0.4, 1.0, 3.0))
        config = config_of(world.namespaces[self.space], deadline_s, dedup=dedup)
        far = SimOneSided if world.loop.dice.random() < 0.4 else SimTcp
        transports: list[SimTransport] = [far(world, party, self._boot)]
        if world.loop.dice.random() < 0.8:
            transports.insert(0, SimShm(world, party, self._boot))
        client = Client.__new__(Client)
        world.oracle.following.begins_anew(party)

        def master(hello: Any, greeted: Any) -> Any:
            if world.kv is None:
                return SimMaster(world, party, hello, greeted)
            names = world.loop.dice.sample(world.master_names, len(world.master_names))
            return LaneMaster([f"{name}:1" for name in names], hello, on_hello=greeted)

        client._start(config, FINGERPRINT, master, cast("Any", transports))
        if dedup:
            world.oracle.contents.set_out(client)
        party.on_death.append(lambda: self._abandon(client))
        world.loop.note(
            party.name, f"is open, session {client.session.identity.session_id.hex()[:6]}"
        )
        return client

    def _boot(self) -> str:
        return self.boot_id

    @staticmethod
    def _abandon(client: Client) -> None:
        client.session.refusal = ClientClosed("the process died")  # or its destructor complains

    def _use(self) -> None:
        dice, loop = self.world.loop.dice, self.world.loop
        while not self.world.calm:
            loop.sleep(dice.expovariate(1 / 0.08))
            self.do(dice.choice(ACTIONS if self.world.tiers is None else WITH_TIERS))

    def begin(self, action: Callable[[ClientProcess], None]) -> None:
        """In a task of its own."""

        def run() -> None:
            self.do(action)

        self.world.loop.spawn(self.party, "more", run)

    def do(self, action: Callable[[ClientProcess], None]) -> bool:
        """One call of the user; False where it ended with a typed error."""
        loop = self.world.loop
        began_s, pauses = loop.now_s, self.pauses
        self.calls += 1
        name = getattr(getattr(action, "func", action), "__name__", "?")
        try:
            action(self)
        except (InternalError, ProtocolError, AssertionError, ValueError, TypeError) as error:
            if isinstance(error, Violation):
                raise
            raise Violation(
                f"{name} of {self.party.name} failed with {error!r}\n{traceback.format_exc()}"
            ) from error
        except CenoteError as error:
            self._note(name, error)
            ended_well = False
        else:
            ended_well = True
        assert self.client is not None
        took_s = loop.now_s - began_s
        limit_s = self.client.config.deadline_s * CALLS_OF.get(name, 1)
        if took_s > limit_s + LATE_S + self.world.slack_s and pauses == self.pauses:
            raise Violation(
                f"{name} of {self.party.name} took {took_s:.3f} s, {limit_s} is its limit"
            )
        return ended_well

    def _note(self, what: str, error: CenoteError) -> None:
        self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
        self.world.loop.note(self.party.name, f"{what}: {error.reason}: {error.message[:90]}")

    # ---- help for actions -----------------------------------------------------------------------

    @property
    def sdk(self) -> Client:
        assert self.client is not None
        return self.client

    @property
    def first_key(self) -> int:
        return self.space * KEYS_EACH

    def some_keys(self, most: int) -> list[int]:
        dice, count, start = self.world.loop.dice, self.world.keys, self.first_key
        first = dice.randrange(count)
        if dice.random() < 0.5:  # a chain
            return [start + (first + i) % count for i in range(dice.randint(1, most))]
        return dice.sample(range(start, start + count), dice.randint(1, min(most, count)))

    def new_put(self, key: int, min_replicas: int) -> PutRecord:
        dice, oracle = self.world.loop.dice, self.world.oracle
        size = dice.choice(SIZES[: self.world.sizes]) + dice.choice((0, 0, 7))
        return oracle.new_put(key, self.number, size, min_replicas)

    def note(self, text: str) -> None:
        self.world.loop.note(self.party.name, text)


# ---- what users do ------------------------------------------------------------------------------


def _replicas(me: ClientProcess) -> tuple[int, int]:
    return me.world.loop.dice.choice(((1, 1), (1, 1), (2, 1), (2, 2)))


def put(me: ClientProcess) -> None:
    (key,) = me.some_keys(1)
    replicas, min_replicas = _replicas(me)
    record = me.new_put(key, min_replicas)
    me.note(f"put {record.serial} of key {key}, {len(record.value)} B x {replicas}")
    result = me.sdk.put(key_bytes(key), record.value, replicas=replicas, min_replicas=min_replicas)
    me.note(f"put {record.serial}: {result.status.name}")
    if result.stored:
        me.world.oracle.put_acked(record)


def put_batch(me: ClientProcess) -> None:
    keys = me.some_keys(6)
    replicas, min_replicas = _replicas(me)
    records = [me.new_put(key, min_replicas) for key in keys]
    me.note(f"puts {records[0].serial}.. of keys {keys} x {replicas}")
    results = me.sdk.put_batch(
        [key_bytes(key) for key in keys],
        [record.value for record in records],
        replicas=replicas,
        min_replicas=min_replicas,
        chain=me.world.loop.dice.random() < 0.5,
    )
    me.note(f"puts {records[0].serial}..: {[r.status.name for r in results]}")
    for record, result in zip(records, results, strict=True):
        if result.stored:
            me.world.oracle.put_acked(record)


def put_run(me: ClientProcess) -> None:
    """Keys removed, then put one after the other, side by side, again: the master grants ahead."""
    dice = me.world.loop.dice
    size = dice.choice(SIZES[: me.world.sizes])
    keys = sorted(set(me.some_keys(12)))
    me.note(f"a run of puts of keys {keys}")
    for _ in range(3):
        began_s = me.world.loop.now_s
        me.sdk.remove_batch([key_bytes(k) for k in keys])
        for key in keys:
            me.world.oracle.removed(key, began_s)
        records = [me.world.oracle.new_put(key, me.number, size, 1) for key in keys]
        several = dice.random() < 0.3
        if several:
            values = [record.value for record in records]
            results = list(me.sdk.put_batch([key_bytes(k) for k in keys], values))
        else:
            results = [me.sdk.put(key_bytes(r.key), r.value) for r in records]
        for record, result in zip(records, results, strict=True):
            if result.stored:
                me.world.oracle.put_acked(record)


def get(me: ClientProcess) -> None:
    (key,) = me.some_keys(1)
    began_s = me.world.loop.now_s
    value = me.sdk.get(key_bytes(key))
    me.note(f"got key {key}: {'-' if value is None else int.from_bytes(value[4:8], 'little')}")
    me.world.oracle.read(key, value, began_s)


def get_into(me: ClientProcess) -> None:
    (key,) = me.some_keys(1)
    buffer = bytearray(40_000)
    began_s = me.world.loop.now_s
    size = me.sdk.get_into(key_bytes(key), buffer)
    me.world.oracle.read(key, None if size is None else bytes(buffer[:size]), began_s)


def get_batch(me: ClientProcess) -> None:
    keys = me.some_keys(6)
    began_s = me.world.loop.now_s
    chain = me.world.loop.dice.random() < 0.3
    values = me.sdk.get_batch([key_bytes(key) for key in keys], chain=chain)
    me.note(f"got keys {keys}: {[v and int.from_bytes(v[4:8], 'little') for v in values]}")
    for key, value in zip(keys, values, strict=True):
        me.world.oracle.read(key, value, began_s)


def _read_under(me: ClientProcess, hold: Hold) -> None:
    buffers = [np.zeros(40_000, np.uint8) for _ in hold.keys]
    results = me.sdk.get_into_batch([key_bytes(k) for k in hold.keys], buffers, lease=hold.lease)
    for i, key in enumerate(hold.keys):
        if results.statuses[i] == GetStatus.HIT:
            value = buffers[i][: int(results.sizes[i])].tobytes()
            me.world.oracle.read(key, value, hold.began_s)


def lease(me: ClientProcess) -> None:
    keys = sorted(set(me.some_keys(4)))
    began_s = me.world.loop.now_s
    taken = me.sdk.acquire([key_bytes(k) for k in keys], ttl_s=me.world.loop.dice.choice((0.2, 2)))
    hold = Hold(taken, keys, began_s)
    try:
        if me.world.loop.dice.random() < 0.5:
            me.world.loop.sleep(0.1)
        _read_under(me, hold)
    finally:
        me.sdk.release(taken)


def view(me: ClientProcess) -> None:
    """Memory that is seen in place stays what it is for as long as the view is open."""
    keys = sorted(set(me.some_keys(3)))
    loop = me.world.loop
    began_s = loop.now_s
    with me.sdk.view([key_bytes(k) for k in keys]) as views:
        for key, seen in zip(keys, views, strict=True):
            me.world.oracle.read(key, None if seen is None else bytes(seen), began_s)
        if me.sdk.config.deadline_s >= 1:
            # Some for longer than any lease: what a restarted master knows of them is their claims.
            long = me.sdk.config.deadline_s >= 3 and loop.dice.random() < 0.5
            loop.sleep(loop.dice.uniform(2, 5.5) if long else loop.dice.uniform(0, 0.3))
        for key, seen in zip(keys, views, strict=True):
            me.world.oracle.read(key, None if seen is None else bytes(seen), began_s)
        del seen


def exists(me: ClientProcess) -> None:
    keys = me.some_keys(6)
    if len(keys) == 1:
        me.sdk.exists(key_bytes(keys[0]))
    elif me.world.loop.dice.random() < 0.5:
        me.sdk.exists_batch([key_bytes(k) for k in keys])
    else:
        me.sdk.match([key_bytes(k) for k in keys])


def remove(me: ClientProcess) -> None:
    keys = sorted(set(me.some_keys(3)))
    began_s = me.world.loop.now_s
    me.note(f"remove keys {keys}")
    me.sdk.remove_batch([key_bytes(k) for k in keys])
    me.note(f"removed keys {keys}")
    for key in keys:
        me.world.oracle.removed(key, began_s)


def pin(me: ClientProcess) -> None:
    keys = [key_bytes(k) for k in me.some_keys(2)]
    if me.world.loop.dice.random() < 0.5:
        me.sdk.pin(keys, ttl_s=me.world.loop.dice.choice((None, 0.5)))
    else:
        me.sdk.unpin(keys)


def put_anew(key: int, me: ClientProcess) -> None:
    began_s = me.world.loop.now_s
    me.sdk.remove(key_bytes(key))
    me.world.oracle.removed(key, began_s)
    record = me.new_put(key, 1)
    me.note(f"put {record.serial} of key {key}, which was removed")
    if me.sdk.put(key_bytes(key), record.value).stored:
        me.world.oracle.put_acked(record)


def prefetch(me: ClientProcess) -> None:
    me.sdk.prefetch([key_bytes(k) for k in _some_copied(me, 6, in_memory=False)])


def pin_copied(me: ClientProcess) -> None:
    keys = _some_copied(me, 4, in_memory=True)
    me.note(f"pins keys {keys}")
    me.sdk.pin([key_bytes(k) for k in keys], ttl_s=None)


def _some_copied(me: ClientProcess, most: int, *, in_memory: bool) -> list[int]:
    """Keys of which there are copies on SSDs, mostly; or some keys."""
    dice, tiers = me.world.loop.dice, me.world.tiers
    known = [] if tiers is None else tiers.copied(in_memory=in_memory)
    known = [key for key in known if key // KEYS_EACH == me.space]
    if not known or dice.random() < 0.3:
        return me.some_keys(most)
    return dice.sample(known, min(len(known), dice.randint(1, most)))


def read_leased(key: int, me: ClientProcess) -> None:
    began_s = me.world.loop.now_s
    taken = me.sdk.acquire([key_bytes(key)], ttl_s=1)
    try:
        _read_under(me, Hold(taken, [key], began_s))
    finally:
        me.sdk.release(taken)


def read_evicted(world: World) -> None:
    """Somebody wants what was evicted last."""
    gone = [v for v, why in world.oracle.gone.items() if why == GoneReason.EVICTED]
    for version in gone[-6:]:
        put = world.oracle.put_of[version]
        clients = world.living_clients(put.key)
        if clients:
            world.loop.dice.choice(clients).begin(partial(read_leased, put.key))


def flood(me: ClientProcess) -> None:
    """More than memory has room for, under keys of its own."""
    keys = range(me.first_key + me.world.keys, me.first_key + me.world.keys + 8)
    me.note(f"floods with keys {keys.start} to {keys.stop - 1}")
    began_s = me.world.loop.now_s
    me.sdk.remove_batch([key_bytes(k) for k in keys])
    for key in keys:
        me.world.oracle.removed(key, began_s)
    records = [me.new_put(key, 1) for key in keys]
    results = me.sdk.put_batch([key_bytes(k) for k in keys], [r.value for r in records])
    for record, result in zip(records, results, strict=True):
        if result.stored:
            me.world.oracle.put_acked(record)


ACTIONS: Final = (
    *(put,) * 4, put_run, *(put_batch,) * 4, *(get,) * 4, get_into, *(get_batch,) * 3,
    lease, lease, view, exists, exists, remove, pin,
)  # fmt: skip
WITH_TIERS: Final = (*ACTIONS, *(prefetch,) * 3, pin, pin_copied, *(get,) * 4)
