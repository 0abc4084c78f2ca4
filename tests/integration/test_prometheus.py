"""A real Prometheus scrapes real daemons and a client, and has what the dashboard asks for."""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.client.metrics import serve
from cenote.client.tally import TALLY
from cluster import Cluster
from expressions import RULES, dashboard_expressions
from prometheus import Prometheus, prometheus_program, promtool
from waiting import wait_until

READY_S = 60.0
pytestmark = pytest.mark.integration

MAY_BE_EMPTY = frozenset(
    (
        "NICs",  # no NIC is served here
        "NIC errors",
        "RDMA: over TCP instead",
        "Tenure left",  # the metadata are in a file
        "Errors in the engines",  # there are none
        "Copies",
        "SSDs: bytes",  # there is none
        "SSDs: waiting and failing",
    )
)
"""Panels that have nothing to show of a pool that is well, and has neither RDMA nor etcd."""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[dict[str, list[str]]]:
    """A pool at work, and who shows what of it."""
    prometheus_program("prometheus")
    TALLY.begin()  # it is the process's: not what other tests, and a first try of this one, counted
    listen = {"metrics-listen": "127.0.0.1:0"}
    with (
        Cluster(stores=2, dram_bytes=16 << 20, master_flags=listen, store_flags=listen) as cluster,
        cluster.client(namespace="llama", transports=("tcp",)) as client,
    ):
        server = serve(0)
        try:
            for n in range(80):  # more than the pool has room for: some are evicted
                client.put(f"key-{n}", bytes(512 << 10))
                assert client.get(f"key-{n}") is not None
            assert client.get("never put") is None
            assert client.get_batch(["key-79", "nor this"])[1] is None
            assert client.exists("key-79")
            yield {
                "cenote-master": [cluster.master.ready["metrics"]],
                "cenote-store": [store.ready["metrics"] for store in cluster.stores],
                "engine": [f"http://127.0.0.1:{server.port}/metrics"],
            }
        finally:
            server.close()


def test_the_dashboard_has_something_to_show(jobs: dict[str, list[str]], tmp_path: Path) -> None:
    for url in (url for urls in jobs.values() for url in urls):
        with urllib.request.urlopen(url, timeout=10) as reply:
            assert promtool("check", "metrics", stdin=reply.read()) == ""
    with Prometheus(tmp_path, jobs, rules=RULES) as prometheus:
        wait_until(lambda: len(prometheus.query("up == 1")) == 4, READY_S, what="all to be scraped")
        (found,) = prometheus.query("cenote_pool_committed_objects_total")
        assert found[1] == 80
        assert found[0]["pool"] == "test"
        stages = {
            metric["stage"]: value
            for metric, value in prometheus.query(
                'cenote_client_funnel_keys_total{namespace="llama"}'
            )
        }
        assert stages == {"asked": 83, "present": 81, "fetched": 81, "verified": 81}

        asked = [(t, e) for t, e in dashboard_expressions() if t not in MAY_BE_EMPTY]
        asked.remove(next(one for one in asked if one[1].startswith("max by (pool) (changes")))

        def found_all() -> bool:
            empty[:] = [title for title, expression in asked if not prometheus.query(expression)]
            return not empty

        empty: list[str] = []
        try:
            wait_until(found_all, READY_S, what="all panels to have data")  # rates want two samples
        except AssertionError:
            raise AssertionError(f"panels without data: {empty}") from None
        for _, expression in dashboard_expressions():
            prometheus.query(expression)  # also those that may be empty are understood
        groups = prometheus.get("rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        assert [
            rule["name"]
            for group in groups
            for rule in group["rules"]
            if rule["type"] == "alerting" and rule["state"] == "firing"
        ] == []
        ratio = prometheus.query("pool:cenote_used_ratio")
        assert ratio
        assert all(0 < value <= 1 or math.isnan(value) for _, value in ratio)
