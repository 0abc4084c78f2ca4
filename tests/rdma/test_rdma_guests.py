"""Two machines, wired by two NICs each: cables are pulled, one stands still, one loses its power.

Runs here and steers emulated machines, which `make test-rdma` asks for with CENOTE_TEST_RDMA=1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rdma.vm.guests import Cluster, Command
from waiting import wait_until

HERE = Path(__file__).resolve().parent
SLOW_S = 180.0

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("CENOTE_TEST_RDMA") != "1", reason="boots machines: make test-rdma"
    ),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def guests() -> Iterator[Cluster]:
    with Cluster(guests=2, nics=2) as guests:
        yield guests


class Client:
    """The program that moves bytes, and what it told."""

    def __init__(self, guests: Cluster, library: str) -> None:
        program = [sys.executable, str(HERE / "guest_server.py"), "10.77.1.2", library]
        self.server = guests[1].spawn(program)
        node = self._line(self.server)
        self.command = guests[0].spawn(
            [sys.executable, str(HERE / "guest_client.py"), node, library]
        )

    def _line(self, command: Command) -> str:
        def find() -> str:
            assert command.poll() is None, command.output()
            return command.output()[0].partition("\n")[0]

        return wait_until(find, SLOW_S, what="the server to be ready")

    def turns(self) -> list[dict[str, Any]]:
        lines = self.command.output()[0].split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        assert not any(turn.get("wrong") for turn in found), found[-1]
        assert not any(turn["late"] for turn in found), [t for t in found if t["late"]]
        return found

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Until a turn that began after this call was like that."""
        first = len(self.turns()) + 1

        def find() -> dict[str, Any] | None:
            assert self.command.poll() is None, self.command.output()
            return next((turn for turn in self.turns()[first:] if condition(turn)), None)

        found = wait_until(find, SLOW_S, what=f"{what}; so far: {self.turns()[-3:]}")
        assert found is not None
        return found


def is_well(turn: dict[str, Any]) -> bool:
    return "error" not in turn


@pytest.mark.parametrize("library", ["ibverbs", "pyverbs"])
def test_cables_and_power(guests: Cluster, library: str) -> None:
    client = Client(guests, library)
    client.wait(lambda t: is_well(t) and t["paths"] == 2, "both NICs in use")
    assert not any(turn["tcp_calls"] for turn in client.turns())

    guests[0].link(0, up=False)  # the share of one is finished on the other, without an error
    client.wait(lambda t: is_well(t) and t["paths"] == 1, "one NIC in use")
    assert all(map(is_well, client.turns()))
    guests[0].link(0, up=True)
    client.wait(lambda t: is_well(t) and t["paths"] == 2, "the other NIC to be back")
    assert all(map(is_well, client.turns()))

    for nic in range(2):  # then there is no way at all: a typed error, by its deadline
        guests[0].link(nic, up=False)
    errors = {"DeadlineExceeded", "Unavailable"}
    client.wait(lambda t: t.get("error") in errors, "an error without any cable")
    for nic in range(2):
        guests[0].link(nic, up=True)
    client.wait(lambda t: is_well(t) and t["paths"] == 2, "all to be well again")

    guests[1].pause()
    client.wait(lambda t: t.get("error") in errors, "an error where the peer stands still")
    guests[1].resume()
    client.wait(lambda t: is_well(t) and t["paths"] == 2, "all to be well again")

    guests[1].kill()
    client.wait(lambda t: t.get("error") in errors, "an error where the peer lost its power")
    assert {turn.get("error", "") for turn in client.turns()} <= errors | {""}
