"""The vLLM connector's way to a pool: absent, refused, met."""

from __future__ import annotations

import pytest

from cenote.api.errors import FingerprintMismatch, Unavailable
from cenote.client import Client
from cenote.connectors.vllm.link import PoolLink
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import SpaceName
from cluster import Cluster
from waiting import wait_until

SPACE = SpaceName("vllm/x", b"x")


@pytest.mark.integration
def test_a_pool_that_is_absent_is_met_when_it_comes() -> None:
    prepared: list[Client] = []
    with Cluster(stores=1) as cluster:
        cluster.master.kill()
        link = PoolLink(make_options({"master": cluster.lane}), "test", prepared.append)
        link.start()
        try:
            wait_until(lambda: not link.hopeful, what="the first attempt to fail")
            with pytest.raises(Unavailable, match="no pool was reached"):
                link.space(SPACE, 5.0)
            cluster.master.restart()
            wait_until(lambda: link.client, what="the pool to be met")
            assert prepared == [link.client]
            assert link.space(SPACE, 5.0).name == SPACE.name
            with pytest.raises(FingerprintMismatch):
                link.space(SpaceName(SPACE.name, b"y"), 5.0)
        finally:
            link.close()
        assert prepared[0].closed
