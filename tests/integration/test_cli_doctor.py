"""`cenote doctor` as a process: on this host, against real masters, daemons and etcd."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cenote.cli.daemons import clean_environment
from cluster import Cluster, run_cenote
from etcd import EtcdCluster
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
PROMPT_S = 25.0
"""For a command of some seconds, on a busy machine; without its deadlines it would never end."""
Findings = dict[str, dict[str, Any]]


def findings(done: subprocess.CompletedProcess[bytes]) -> Findings:
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return {finding["check"]: finding for finding in listed}


def test_a_host_without_a_pool() -> None:
    done = run_cenote("doctor", "--json")
    found = findings(done)
    assert {"kernel", "shared memory", "locked memory", "open files", "clock"} <= found.keys()
    assert found["memory barrier"]["verdict"] == "ok"
    verdicts = {finding["verdict"] for finding in found.values()}
    assert verdicts <= {"ok", "warn", "fail", "skipped"}
    assert (done.returncode == 1) == ("fail" in verdicts)
    for finding in found.values():
        assert finding["found"]
        assert finding["remedy"] or finding["verdict"] in ("ok", "skipped")


def test_limits_of_this_process_are_told(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 300; exec "$0" "$@"', sys.executable]
    options = ["--json", "--dram", "1000TiB", "--rdma-devices", "nosuch0"]
    done = subprocess.run(
        [*limited, "-m", "cenote.cli.main", "doctor", *options],
        capture_output=True,
        env=clean_environment(),
        timeout=60,
    )
    found = findings(done)
    assert done.returncode == 1
    assert found["open files"]["verdict"] == "fail"
    assert "300" in found["open files"]["found"]
    assert found["shared memory"]["verdict"] == "fail"
    assert found["rdma devices"]["verdict"] == "fail"
    elsewhere = run_cenote("doctor", "--json", "--dram-dir", str(tmp_path / "none"))
    assert findings(elsewhere)["shared memory"]["verdict"] == "fail"


def test_a_pool_that_is_well_and_one_that_is_not() -> None:
    with Cluster(stores=2, dram_bytes=48 * MIB) as cluster:
        cluster.wait_alive(2)
        done = cluster.cli("doctor", "--json")
        found = findings(done)
        for check in (f"master {cluster.lane}", "master grpc", "peer s0", "peer s1"):
            assert found[check]["verdict"] == "ok", found[check]
        assert "over shm" in found["peer s0"]["found"]
        assert found["etcd"]["verdict"] == "skipped"
        text = cluster.cli("doctor").stdout.decode()
        assert any(line.startswith("ok ") and "peer s1" in line for line in text.splitlines())

        cluster.stores[1].pause()
        cluster.master.pause()
        try:
            with ends_within(PROMPT_S, "the command"):
                stopped = cluster.cli("doctor", "--json", "--deadline", "1")
        finally:
            cluster.master.resume()
            cluster.stores[1].resume()
        assert stopped.returncode == 1
        found = findings(stopped)
        for check in (f"master {cluster.lane}", "master grpc", "peers"):
            assert found[check]["verdict"] == "fail", found[check]

        cluster.stores[1].kill()
        cluster.wait_alive(1, 20.0)
        done = cluster.cli("doctor", "--json", "--deadline", "2")
        assert done.returncode == 1
        found = findings(done)
        assert found["master grpc"]["verdict"] == "warn"
        assert found["peer s1"]["verdict"] == "fail"
        cluster.master.kill()
        found = findings(cluster.cli("doctor", "--json", "--deadline", "2"))
        assert found[f"master {cluster.lane}"]["verdict"] == "fail"
        assert "no connection" in found[f"master {cluster.lane}"]["found"]


def test_the_ssd_of_a_daemon_that_runs_and_one_that_is_to_be(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    flags = {"ssd": str(ssd), "ssd-size": 16 * MIB, "metrics-listen": "127.0.0.1:0"}
    with Cluster(stores=1, dram_bytes=16 * MIB, store_flags=flags) as cluster:
        cluster.wait_alive(1)
        found = findings(cluster.cli("doctor", "--json", "--dram-dir", str(cluster.dram_directory)))
        (store,) = cluster.stores
        in_use = found["ssd s0 use"]
        assert in_use["verdict"] == "ok"
        assert f"pid {store.pid}" in in_use["found"]
        assert str(ssd) in found["ssd s0"]["found"]
        assert found["ssd s0 speed"]["verdict"] == "skipped"
        assert found["transparent huge pages"]["verdict"] in ("ok", "warn")
        wait_until(lambda: "memory is prepared" in store.log_text(), what="the memory")
        with urllib.request.urlopen(store.ready["metrics"], timeout=10) as answer:
            told = re.search(r"cenote_store_segment_huge_bytes{.*} (\S+)", answer.read().decode())
        assert told is not None
        huge_bytes = float(told[1])
        assert huge_bytes % (2 * MIB) == 0
        can = found["transparent huge pages"]["verdict"] == "ok"
        assert huge_bytes <= 16 * MIB * can
        assert "ssd" not in found

    options = ["--ssd", str(ssd), "--ssd-size", "16MiB", "--deadline", "1"]
    kept = findings(run_cenote("doctor", "--json", *options))
    assert kept["ssd use"]["verdict"] == "ok"
    assert "what a store daemon left" in kept["ssd use"]["found"]
    assert kept["ssd room"]["verdict"] == "ok"
    too_many = ["--ssd-size", "9PiB", "--deadline", "1"]
    too_much = run_cenote("doctor", "--json", *options[:1], str(tmp_path / "new"), *too_many)
    assert too_much.returncode == 1
    assert findings(too_much)["ssd room"]["verdict"] == "fail"
    assert {path.name for path in tmp_path.iterdir()} <= {"ssd", "ssd.pool"}
    by_environment = run_cenote("doctor", "--json", environment={"CENOTE_STORE_SSD": "/none/ssd"})
    assert findings(by_environment)["ssd"]["verdict"] == "fail"


def test_masters_with_etcd(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path, members=1) as etcd,
        Cluster(stores=1, masters=2, metadata=etcd.url, dram_bytes=48 * MIB) as cluster,
    ):
        cluster.wait_alive(1)
        found = findings(cluster.cli("doctor", "--json"))
        (member,) = [finding for check, finding in found.items() if check.startswith("etcd ")]
        assert member["verdict"] == "ok", member
        assert "within seconds" in member["found"]
        assert "its database has" in member["found"]
        assert " of 2 GiB" in member["found"]  # its default quota
        told = [found[f"master {lane}"]["found"] for lane in cluster.lane.split(",")]
        assert sum(text.startswith("it leads") for text in told) == 1
        assert sum("stands by" in text for text in told) == 1
        by_etcd = {**cluster.environment, "CENOTE_MASTER": etcd.url}
        del by_etcd["CENOTE_GRPC"]
        looked_up = findings(run_cenote("doctor", "--json", environment=by_etcd))
        for lane in cluster.lane.split(","):
            assert looked_up[f"master {lane}"]["verdict"] == "ok", looked_up
        assert looked_up["peer s0"]["verdict"] == "ok"
        etcd.members[0].kill()
        lost = run_cenote("doctor", "--json", "--deadline", "2", environment=by_etcd)
        assert lost.returncode == 1
        assert findings(lost)["masters"]["verdict"] == "fail"
        alone = run_cenote("doctor", "--json", "--etcd", etcd.url)
        assert alone.returncode == 1
        check = etcd.url.removeprefix("etcd://")
        assert findings(alone)[f"etcd {check}"]["verdict"] == "fail"
