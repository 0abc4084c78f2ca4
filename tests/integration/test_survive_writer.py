"""Writers are killed or stopped at each step of a put: their keys can be put again at once,
nobody's bytes change, and their space comes back by the rule."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from admin import Admin, admin_of
from cenote.api.errors import CenoteError, DeadlineExceeded, GrantRevoked
from cenote.client import Client
from cenote.v1 import common_pb2
from cluster import Cluster
from halted import Halted, halted_writers
from halting_writer import STEPS, WriterSpec
from payloads import payload_of
from promptness import stopwatch
from waiting import wait_until
from workers import pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
DRAM_BYTES = 64 * MIB
SESSION_TTL_S = 2.0
SOON_S = 20.0
"""After its session's time is over: what a very busy machine takes to cut off all writers."""
AT_ONCE_S = 1.5
WARM_MAX = 64
"""Pinned of what a writer put until it was granted space ahead: many, on a busy machine."""
SHORT_S, LONG_S = 2.0, 60.0
TRANSPORTS = ("shm", "tcp")

KINDS: dict[str, dict[str, Any]] = {
    "single": {"size": 300_000},
    "pair": {"size": 300_000, "replicas": 2},
    "batch": {"size": 70_000, "count": 8, "replicas": 2},
    "spare": {"size": 4_000, "spares": True},
    "spares": {"size": 4_000, "count": 8, "spares": True},
}
UNDECIDED = STEPS[: STEPS.index("commit sent")]
GRANTED = UNDECIDED[UNDECIDED.index("start sent") :]


def applies(step: str, kind: str, transport: str) -> bool:
    """Whether such a put comes by the step."""
    replicas = KINDS[kind].get("replicas", 1)
    if step in ("before start", "start sent"):
        return not KINDS[kind].get("spares")
    if step in ("in last replica", "half sealed"):
        return bool(replicas == 2)
    return step != "payload sent" or transport == "tcp"


def specs_of(transport: str, what: str, steps: tuple[str, ...] = STEPS) -> list[WriterSpec]:
    """One writer for each kind and step; half of them have a deadline that passes meanwhile."""
    specs = []
    for row, (kind, traits) in enumerate(KINDS.items()):
        for column, step in enumerate(steps):
            if applies(step, kind, transport):
                name = f"{what}/{transport}/{kind}/{step}"
                specs.append(
                    WriterSpec(
                        name,
                        tuple(f"{name}/{i}" for i in range(traits.get("count", 1))),
                        traits["size"],
                        step,
                        SHORT_S if (row + column) % 2 else LONG_S,
                        traits.get("replicas", 1),
                        traits.get("spares", False),
                    )
                )
    return specs


class Background:
    """Objects that fill the pool, and overwrite it again and again."""

    def __init__(self, client: Client, capacity_bytes: int) -> None:
        self._client = client
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[str, int] = {}
        self._rounds = 0

    def overwrite(self, share: float = 1.15) -> None:
        """Put new objects of that share of the capacity. If it is more than all of it, whatever is
        free is used, and all of the old is evicted."""
        self._rounds += 1
        self._sizes = {}
        total = number = 0
        while total < share * self._capacity_bytes:
            sizes = {
                f"fill{self._rounds}-{number + i}": 1_000 + (number + i) * 7_919 % 150_000
                for i in range(64)
            }
            number += len(sizes)
            total += sum(sizes.values())
            values = [payload_of(key, size) for key, size in sizes.items()]
            self._client.put_batch(list(sizes), values).raise_for_errors()
            self._sizes |= sizes

    def begin_anew(self) -> None:
        """Remove it all, and fill half of the pool: there is room for spare extents then."""
        if self._sizes:
            self._client.remove_batch(list(self._sizes))
        self.overwrite(0.5)

    def check(self) -> int:
        """All bytes that are there are right; how many."""
        present = 0
        keys = list(self._sizes)
        for first in range(0, len(keys), 64):
            some = keys[first : first + 64]
            for key, value in zip(some, self._client.get_batch(some), strict=True):
                if value is not None:
                    assert value == payload_of(key, self._sizes[key]), f"{key} has wrong bytes"
                    present += len(value)
        return present


class Pool:
    """A cluster, and what the tests know of its contents."""

    def __init__(self, cluster: Cluster, admin: Admin, stack: ExitStack) -> None:
        self.cluster = cluster
        self.admin = admin
        self.near = stack.enter_context(cluster.client(transports=("shm",), deadline_s=20.0))
        self.far = stack.enter_context(cluster.client(transports=("tcp",), deadline_s=20.0))
        self.capacity_bytes = admin.status().capacity_bytes
        self.background = Background(self.near, self.capacity_bytes)
        self.slowest_s = 0.0
        """Of putting a writer's keys again and reading them."""
        self.values: dict[str, bytes] = {}
        """What is pinned, and must never change."""

    def is_trusted(self) -> bool:
        """Whether nobody suspects a node: else no space is granted ahead."""
        return all(n.view.state == common_pb2.NODE_STATE_ALIVE for n in self.admin.nodes().values())

    def looked_dead(self) -> bool:
        """Whether somebody suspected a node at any time, since a busy machine let it answer too
        late: then what lay there alone gives way to what he puts."""
        return "probed node" in self.cluster.master.log_text()

    def put_again(self, writer: Halted, other: Client, reader: Client) -> None:
        """Another client puts the writer's keys: that succeeds, and is readable at once."""
        spec = writer.spec
        keys = list(spec.keys)
        ours, theirs = spec.payloads("v2"), spec.payloads()
        with stopwatch() as watch:
            if len(keys) == 1:
                results = [other.put(keys[0], ours[0], replicas=spec.replicas)]
            else:
                results = list(other.put_batch(keys, ours, replicas=spec.replicas))
            read = reader.get_batch(keys)
        self.slowest_s = max(self.slowest_s, watch.took_s)
        for result, mine, their, value in zip(results, ours, theirs, read, strict=True):
            assert result.error is None, (spec.name, result.error)
            assert result.stored or spec.step not in UNDECIDED, spec.name
            # Sent and not answered: it is decided a moment before this put, or a moment after.
            decided = spec.step not in (*UNDECIDED, "commit sent")
            assert result.existed or not decided or self.looked_dead(), spec.name
            assert value == (mine if result.stored else their), spec.name
        watch.check(AT_ONCE_S, f"{spec.name}: to put it again and to read it", late_s=0)
        assert other.pin(keys).all()
        self.values |= {key: value for key, value in zip(keys, read, strict=True) if value}
        warm = writer.warm[-WARM_MAX:]
        if warm:
            pinned = other.pin(warm)
            assert pinned.all() or self.looked_dead(), spec.name
            for key, is_there in zip(warm, pinned, strict=True):
                if is_there:
                    self.values[key] = payload_of(key, spec.size)

    def check(self, share: float = 0.75) -> None:
        """Every byte of every object is right, what was pinned is there, and that share of what is
        not withheld is in use."""
        keys = list(self.values)
        for reader in (self.near, self.far):
            for first in range(0, len(keys), 64):
                some = keys[first : first + 64]
                for key, value in zip(some, reader.get_batch(some), strict=True):
                    assert value == self.values[key], f"{key} has wrong bytes, or is missing"
        held = self.background.check() + sum(map(len, self.values.values()))
        print(f"{held / MIB:.0f} MiB of objects are right")
        status = self.admin.status()
        assert held > share * (self.capacity_bytes - status.quarantined_bytes)

    def forget(self) -> None:
        """Of the keys of one test."""
        if self.values:
            self.near.unpin(list(self.values))
            self.near.remove_batch(list(self.values))
        self.values = {}
        self.slowest_s = 0.0

    def wait_for_space(self, since_s: float, within_s: float) -> None:
        """Until nothing is granted or withheld, and what is used is what objects use."""

        def at_rest() -> bool:
            status = self.admin.status()
            return not (status.grants or status.granted_bytes or status.quarantined_bytes)

        left_s = since_s + within_s - time.monotonic()
        # What was done meanwhile may have taken all of it, and left grants of its own.
        wait_until(at_rest, max(left_s, SOON_S), what="all space to come back")
        print(f"all space is back after {time.monotonic() - since_s:.1f} s")
        used = sum(node.used_bytes for node in self.admin.nodes().values())
        assert used == self.admin.status().used_bytes


@pytest.fixture(scope="module")
def made_pool() -> Iterator[Pool]:
    flags = {"session_ttl_s": SESSION_TTL_S, "lease_ttl_s": 0.5, "lease_ttl_max_s": 1}
    with (
        pool(2, dram_bytes=DRAM_BYTES, **flags) as cluster,
        admin_of(cluster) as admin,
        ExitStack() as stack,
    ):
        yield Pool(cluster, admin, stack)


@pytest.fixture
def held(made_pool: Pool) -> Iterator[Pool]:
    made_pool.background.begin_anew()
    wait_until(made_pool.is_trusted, what="suspicions of an earlier test to end")
    yield made_pool
    made_pool.forget()


def put_all_again(held: Pool, writers: list[Halted]) -> None:
    for number, writer in enumerate(writers):
        pair = (held.near, held.far) if number % 2 else (held.far, held.near)
        held.put_again(writer, *pair)
    print(f"put again and read, the slowest of {len(writers)}: {held.slowest_s * 1e3:.0f} ms")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_writers_leave_nothing(held: Pool, transport: str) -> None:
    specs = specs_of(transport, "killed")
    with halted_writers(held.cluster, transport, specs) as writers:
        assert held.admin.status().granted_bytes
        for writer in writers:
            writer.kill()
        killed_s = time.monotonic()
        put_all_again(held, writers)
        held.background.overwrite()
        held.check()
        held.wait_for_space(killed_s, SESSION_TTL_S + SOON_S)
    held.background.overwrite()
    held.check()


def check_outcome(held: Pool, writer: Halted) -> None:
    """It finished rightly, or with a typed error; and goes on as if nothing had been."""
    spec = writer.spec
    outcome = writer.outcome()
    for key, value, (how, what) in zip(spec.keys, spec.payloads(), outcome, strict=True):
        if how == "error":
            assert isinstance(what, CenoteError)
            assert isinstance(what, DeadlineExceeded | GrantRevoked), (spec.name, what)
            assert spec.deadline_s == SHORT_S, (spec.name, what)
        else:
            is_its = held.values[key] == value
            assert how == ("stored" if is_its else "existed"), (spec.name, how)
    own = [f"{spec.name}/after/{i}" for i in range(3)]
    for key in own:
        assert writer.call("put", key, payload_of(key, spec.size)).stored, spec.name
    right = [payload_of(key, spec.size) for key in own] + [held.values[key] for key in spec.keys]
    assert writer.call("get_batch", own + list(spec.keys)) == right, spec.name
    writer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_resumed_writers_have_changed_nothing(held: Pool, transport: str) -> None:
    specs = specs_of(transport, "stopped")
    doomed = specs_of(transport, "doomed", GRANTED) if transport == "shm" else []
    with halted_writers(held.cluster, transport, specs + doomed) as writers:
        for writer in writers:
            writer.stop()
        stopped_s = time.monotonic()
        put_all_again(held, writers)
        if transport == "tcp":
            held.wait_for_space(stopped_s, SESSION_TTL_S + SOON_S)
        else:
            wait_for_quarantine(held, specs + doomed)
        withheld = held.admin.status().quarantined_bytes
        held.background.overwrite()
        held.check()
        assert held.admin.status().quarantined_bytes == withheld
        if doomed:
            check_doomed(held, writers[len(specs) :], withheld)
        for writer in writers[
            : len(specs)
        ]:  # one after the other: a crowd would be too much for two cores
            writer.resume()
            check_outcome(held, writer)
        resumed_s = time.monotonic()
        held.check(0.5)  # what was withheld is free now
        held.wait_for_space(resumed_s, SESSION_TTL_S + SOON_S)
    held.background.overwrite()
    held.check()


def least_withheld(specs: list[WriterSpec]) -> int:
    """Bytes that these were granted and have not committed."""
    return sum(s.size * s.replicas * len(s.keys) for s in specs if s.step in GRANTED)


def wait_for_quarantine(held: Pool, specs: list[WriterSpec]) -> None:
    """Stopped writers over shared memory can't be cut off: what they may write into is withheld."""

    def quarantined() -> bool:
        status = held.admin.status()
        return not status.granted_bytes and status.quarantined_bytes >= least_withheld(specs)

    wait_until(quarantined, SESSION_TTL_S + SOON_S, what="what they were granted to be withheld")
    assert "in quarantine" in held.cluster.cli("status").stdout.decode()


def check_doomed(held: Pool, writers: list[Halted], withheld: int) -> None:
    """Stopped writers that die: their space comes back, nobody else's."""
    least = least_withheld([writer.spec for writer in writers])
    for writer in writers:
        writer.kill()
    wait_until(
        lambda: held.admin.status().quarantined_bytes <= withheld - least,
        SOON_S,
        what="the space of those that died to come back",
    )
    assert held.admin.status().quarantined_bytes
