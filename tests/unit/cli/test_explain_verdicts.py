"""What `cenote explain` concludes, and what it advises."""

from __future__ import annotations

from typing import Any

import pytest

from cenote.cli.cmd_explain import verdict_of
from cenote.v1 import admin_pb2 as pb
from cenote.v1.common_pb2 import NODE_STATE_ALIVE as ALIVE
from cenote.v1.common_pb2 import NODE_STATE_DEAD as DEAD


def absent(*decisions: pb.KeyDecision, **fields: Any) -> pb.ExplainResponse:
    return pb.ExplainResponse(state="absent", decisions=decisions, **fields)


def test_each_end_is_told_with_what_helps() -> None:
    evicted = pb.KeyDecision(fate="evicted", cause="on_demand", ago_s=60.0, idle_s=7200.0)
    verdict, remedy = verdict_of(absent(evicted))
    assert "evicted 60 s ago" in verdict
    assert "not been used for 2 h" in verdict
    assert "a put needed room" in verdict
    assert "cenote mrc" in remedy

    named = pb.NamespaceStatus(name="tenant")
    verdict, remedy = verdict_of(absent(evicted, over_quota=True, namespace=named))
    assert "over its quota" in verdict
    assert "set-quota tenant" in remedy

    verdict, remedy = verdict_of(absent(pb.KeyDecision(fate="lost", ago_s=1.0)))
    assert "copies were lost" in verdict
    assert "replicas=2" in remedy


@pytest.mark.parametrize("fate", ["evicted", "removed", "lost", "reset", "expired", "refused"])
def test_every_fate_is_known(fate: str) -> None:
    verdict, _ = verdict_of(absent(pb.KeyDecision(fate=fate, cause="ahead", ago_s=5.0)))
    assert "ago" in verdict
    assert verdict != f"{fate}, 5 s ago"


def test_a_key_of_another_namespace_and_an_unknown_one() -> None:
    _, remedy = verdict_of(absent(found_in=["other"]))
    assert remedy.startswith("cenote explain -n other")
    verdict, _ = verdict_of(absent(log_keys=100, log_s=60.0, tenure_s=3600.0))
    assert "100 decisions on keys reach 60 s back" in verdict
    verdict, _ = verdict_of(absent(tenure_s=10.0))
    assert "nothing was evicted" in verdict


def test_nodes_that_are_not_there_are_named() -> None:
    places = [
        pb.ObjectPlace(node_name="n1", node_state=DEAD, attached=True),
        pb.ObjectPlace(node_name="n2", node_state=ALIVE, attached=False),
    ]
    verdict, remedy = verdict_of(pb.ExplainResponse(state="unreachable", places=places))
    assert "n1, n2" in verdict
    assert "store daemon of n1" in remedy
