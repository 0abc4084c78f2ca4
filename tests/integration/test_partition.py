"""The leading master is cut off from etcd, in real networks, and its users still reach it.

Another one takes over under load: nothing acknowledged is lost, nothing removed returns, no byte is
wrong, and writes go on soon. With CENOTE_TEST_FULL=1 20 times each; run with `-s` to see the times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from etcd import EtcdCluster
from network import network_of
from remote import Remote
from takeovers import ROUNDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PROGRAM_TIMEOUT_S = 840.0


@pytest.mark.parametrize("durability", ["relaxed", "journaled"])
@pytest.mark.parametrize("program", ["long_cuts", "short_cuts"])
def test_the_leader_is_cut_off_from_etcd_under_load(
    tmp_path: Path, seed: int, program: str, durability: str
) -> None:
    with (
        network_of(masters=2) as network,
        EtcdCluster(tmp_path / "etcd", place=network.etcd) as etcd,
        Remote(
            "partition",
            program,
            network,
            etcd.url,
            seed,
            durability,
            ROUNDS,
            place=network.users,
        ) as running,
    ):
        running.expect("done", PROGRAM_TIMEOUT_S)
