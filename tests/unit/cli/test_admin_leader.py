"""Commands and several masters: the leader is found, and waited for while there is none."""

from __future__ import annotations

from typing import Any

import pytest

from cenote.api.errors import NotLeader, Unavailable
from cenote.cli.connect import Admin
from cenote.v1 import admin_pb2
from promptness import ends_within


class Masters:
    """By gRPC address: what each one answers next; the last one stays."""

    def __init__(self, admin: Admin, **answers: list[Any]) -> None:
        self.answers = {name.replace("_", ":"): list(values) for name, values in answers.items()}
        self.asked: list[str] = []
        admin._ask = self.ask  # type: ignore[method-assign]

    def ask(self, address: str, method: str, request: Any, deadline_s: float) -> Any:
        self.asked.append(address)
        left = self.answers[address]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


REPLY = admin_pb2.ListNodesResponse()
STANDBY = NotLeader("this master is a standby", addresses=("a:1",))


def test_a_leader_that_is_yet_to_be_elected_is_waited_for() -> None:
    """A command in the second after a leader's death failed at once."""
    with Admin(["a:2", "b:2"]) as admin:
        masters = Masters(admin, a_2=[Unavailable("gone")], b_2=[STANDBY, STANDBY, REPLY])
        assert list(admin.nodes()) == []
        assert masters.asked == ["a:2", "b:2"] * 3
        assert admin.address == "b:2"


def test_no_longer_than_the_deadline() -> None:
    with Admin(["a:2", "b:2"], deadline_s=0.5) as admin:
        Masters(admin, a_2=[Unavailable("gone")], b_2=[STANDBY])
        with ends_within(0.5), pytest.raises(NotLeader):
            admin.nodes()


def test_a_pool_that_is_not_there_is_told_at_once() -> None:
    with Admin(["a:2", "b:2"]) as admin:
        masters = Masters(admin, a_2=[Unavailable("gone")], b_2=[Unavailable("gone, too")])
        with pytest.raises(Unavailable):
            admin.nodes()
        assert masters.asked == ["a:2", "b:2"]
