"""Programs: the leading master is cut off from etcd again and again, while its users reach it.

They run in the users' namespace of a `network.Network`, and start the pool and its load from there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cenote.client import Client
from cluster import Cluster, Process
from network import Network
from takeovers import DEADLINE_S, check_all, report, settle
from waiting import wait_until
from workers import Load, pass_time, shared_pool

if TYPE_CHECKING:
    from programs import Control

__all__ = ["long_cuts", "short_cuts"]

CUT_S = (0.5, 1.0, 3.0)
"""How long the link stays cut after the other master has taken over: in turn."""
TENURE_S = 2.0
"""And some more."""
SHORT_CUT_S = (0.05, 1.6)
"""About as long as a tenure at most: sometimes the leader stays, sometimes it does not."""


@contextmanager
def loaded_pool(
    network: Network, metadata: str, seed: int, durability: str
) -> Iterator[tuple[Cluster, Load]]:
    here = f"{network.users.host}:0"  # masters ask daemons that clients complain of
    with ExitStack() as stack:
        cluster = stack.enter_context(
            shared_pool(
                metadata,
                masters=2,
                stores=2,
                places=network.masters,
                store_flags={"listen": here, "grpc": here, "insecure": True},
            )
        )
        load = Load(
            stack,
            cluster,
            seed,
            replicas=1,
            deadline_s=DEADLINE_S,
            durability=durability,
            misses_are_legal=True,
        )
        pass_time(1.0)
        yield cluster, load


def wait_for_role(cluster: Cluster, master: Process, role: str) -> None:
    wait_until(lambda: cluster.role_of(master) == role, what=f"{master.name} to be the {role}")


def check_newcomer(cluster: Cluster, old: Process, new: Process, removed: str) -> None:
    """A client that comes now is told what the new leader decided, though it asks the old first."""
    lanes = ",".join(each.ready["lane"].removeprefix("tcp://") for each in (old, new))
    stored = f"{removed}-since"
    with cluster.client(deadline_s=DEADLINE_S) as client:
        assert client.put(stored, b"new").stored
        client.remove(removed)
    with Client(lanes, deadline_s=DEADLINE_S) as newcomer:
        seen = newcomer.exists_batch([stored, removed]).tolist()
        assert seen == [1, 0], f"a newcomer sees {seen} of what was stored and what was removed"
        assert newcomer.get(stored) == b"new"
        assert newcomer.get(removed) is None


def long_cuts(
    control: Control, network: Network, metadata: str, seed: int, durability: str, rounds: int
) -> None:
    """Another takes over each time. Says "done" where everything held; the rest is on stderr."""
    with loaded_pool(network, metadata, seed, durability) as (cluster, load):
        faults: list[float] = []
        taken_over: list[float] = []
        for round_ in range(rounds):
            settle(cluster, 2)
            pass_time(1.0)
            with cluster.client(deadline_s=DEADLINE_S) as client:
                assert client.put(f"mark{round_}", b"old").stored
            leader = cluster.leader()
            (other,) = [master for master in cluster.masters if master is not leader]
            index = cluster.masters.index(leader)
            faults.append(time.monotonic())
            network.cut(index)
            assert cluster.role_of(leader), "the old leader can't be reached by its users"
            wait_for_role(cluster, other, "leader")
            taken_over.append(time.monotonic())
            check_newcomer(cluster, leader, other, f"mark{round_}")
            pass_time(CUT_S[round_ % len(CUT_S)])
            assert cluster.role_of(leader), "the old leader can't be reached by its users"
            network.heal(index)
            wait_for_role(cluster, leader, "standby")
        settle(cluster, 2)
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == [], f"{len(load.failures())} failures"
        check_all(cluster, load)  # first: slowness must not hide a loss
        report(load, faults, end_s, taken_over)
    control.say("done")


def short_cuts(
    control: Control, network: Network, metadata: str, seed: int, durability: str, rounds: int
) -> None:
    """Healed about when another may take over. Says "done" as `long_cuts` does."""
    rng = random.Random(seed)
    changes = 0
    with loaded_pool(network, metadata, seed, durability) as (cluster, load):
        for _ in range(rounds):
            leader = cluster.leader()
            index = cluster.masters.index(leader)
            network.cut(index)
            pass_time(rng.uniform(*SHORT_CUT_S))
            network.heal(index)
            settle(cluster, 2)
            pass_time(0.5)
            changes += cluster.leader() is not leader
        pass_time(TENURE_S)  # by then another has taken over, or none will
        settle(cluster, 2)
        load.stop()
        print(f"the lead changed {changes} times of {rounds}")
        assert load.failures() == [], f"{len(load.failures())} failures"
        check_all(cluster, load)
    control.say("done")
