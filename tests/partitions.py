"""A program: the leading master is cut off from etcd again and again, while clients reach it.

It runs in the users' namespace of a `network.Network`, and starts the pool and its load from there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from network import Network
from takeovers import DEADLINE_S, ROUNDS, check_all, report, settle
from waiting import wait_until
from workers import Load, pass_time, shared_pool

if TYPE_CHECKING:
    from programs import Control

__all__ = ["partitions"]

CUT_S = (0.5, 1.0, 3.0)
"""How long the link stays cut after the other master has taken over: in turn."""


def partitions(
    control: Control, network: Network, metadata: str, seed: int, durability: str
) -> None:
    """Says "done" where everything held; what did not is on standard error."""
    with ExitStack() as stack:
        cluster = stack.enter_context(
            shared_pool(metadata, masters=2, stores=2, places=network.masters)
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
        faults: list[float] = []
        taken_over: list[float] = []
        for round_ in range(ROUNDS):
            settle(cluster, 2)
            pass_time(1.0)
            leader = cluster.leader()
            (other,) = [master for master in cluster.masters if master is not leader]
            index = cluster.masters.index(leader)
            faults.append(time.monotonic())
            network.cut(index)
            assert cluster.role_of(leader), "the old leader can't be reached by its users"
            wait_until(
                lambda new=other: cluster.role_of(new) == "leader",  # type: ignore[misc]
                what="the other master to take over",
            )
            taken_over.append(time.monotonic())
            pass_time(CUT_S[round_ % len(CUT_S)])
            assert cluster.role_of(leader), "the old leader can't be reached by its users"
            network.heal(index)
            wait_until(
                lambda old=leader: cluster.role_of(old) == "standby",  # type: ignore[misc]
                what="the old leader to stand by",
            )
        settle(cluster, 2)
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == [], f"{len(load.failures())} failures"
        report(load, faults, end_s, taken_over)
        check_all(cluster, load)
    control.say("done")
