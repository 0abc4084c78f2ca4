"""How long a pool of many small objects goes without a leader, and where that time goes.

    PYTHONPATH=tests python benchmarks/takeover.py [--objects 1000000] [--rounds 5] [--busy 2]

Starts etcd and a pool of two masters and one store daemon on loopback (see tests/cluster.py), fills
it, then kills the leading master again and again; the one killed comes back as the standby, and
has followed everything before the next round. All times are seconds since the kill. At the end
both masters are killed, and one is started that has followed nothing. `--busy N` keeps N processes
busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cenote.client import Client
from cluster import Cluster, Process
from etcd import EtcdCluster
from payloads import payload_of
from waiting import wait_until
from workers import shared_pool

BATCH: Final = 4096
KEY_BYTES: Final = 112
PAYLOAD_BYTES: Final = 64
OBJECT_BYTES: Final = 460
"""Payload and key, which is longer than its slot has room for, 192; the slot 192; and a reserve."""
SPARE_BYTES: Final = 64 << 20
DEADLINE_S: Final = 30.0


def key_of(number: int) -> str:
    return f"{number:012}".rjust(KEY_BYTES, "k")


def fill(client: Client, objects: int) -> None:
    for first in range(0, objects, BATCH):
        keys = [key_of(i) for i in range(first, min(objects, first + BATCH))]
        values = [payload_of(key, PAYLOAD_BYTES) for key in keys]
        assert client.put_batch(keys, values).stored_count == len(keys)


def logged(process: Process, message: str, after_s: float) -> list[tuple[float, dict[str, str]]]:
    """(seconds after `after_s`, which is wall time, fields) of each such line since then."""
    found = []
    for line in process.log_text().splitlines():
        at = line.find(message)
        when = re.match(r"[-0-9]{10} [:.0-9]+", line)
        if at < 0 or when is None:
            continue
        passed_s = datetime.fromisoformat(when[0]).timestamp() - after_s
        if passed_s >= 0:
            fields = dict(re.findall(r"(\w+)=(\S+)", line[at:]))
            found.append((passed_s, fields))
    return found


def one_round(
    cluster: Cluster, etcd: EtcdCluster, client: Client, objects: int, number: int
) -> dict[str, float]:
    leader = cluster.leader()
    (standby,) = [master for master in cluster.masters if master is not leader]
    (store,) = cluster.stores
    wall_s, began_s = time.time(), time.monotonic()
    leader.kill()
    assert client.exists(key_of(number), deadline_s=DEADLINE_S)
    times = {"lookup": time.monotonic() - began_s}
    assert client.put(f"after{number}-{wall_s}", b"x", deadline_s=DEADLINE_S).stored
    times["put"] = time.monotonic() - began_s
    wait_until(lambda: logged(store, " attached ", wall_s), what="the daemon to say so")
    led_s, _ = logged(standby, " leads ", wall_s)[0]
    attached_s, fields = logged(store, " attached ", wall_s)[-1]
    times.update({"leads": led_s, "attached": attached_s})
    times.update({"attach_took": float(fields["seconds"]), "told_slots": float(fields["told"])})
    first = objects * (number % 7) // 8
    some = [key_of(i) for i in range(first, first + min(objects // 8, 20_000))]
    assert client.exists_batch(some, deadline_s=DEADLINE_S).all()
    leader.start()
    leader.wait_ready()
    wait_until(lambda: has_followed(etcd), 120.0, what="the standby to follow")
    return times


def cold_start(cluster: Cluster, client: Client, objects: int) -> dict[str, float]:
    """Seconds since a master was started beside which there is none."""
    one, other = cluster.masters
    for master in (one, other):
        master.kill()
    began_s = time.monotonic()
    one.start()
    one.wait_ready()
    wait_until(lambda: cluster.role_of(one) == "leader", 120.0, what="it to lead")
    times = {"leads": time.monotonic() - began_s}
    assert client.exists(key_of(objects // 2), deadline_s=DEADLINE_S)
    times["lookup"] = time.monotonic() - began_s
    assert client.put("after a cold start", b"x", deadline_s=DEADLINE_S).stored
    times["put"] = time.monotonic() - began_s
    return times


def has_followed(etcd: EtcdCluster) -> bool:
    """Whether two masters stand where the journal ends."""
    rows = etcd.ctl("get", "--prefix", "--print-value-only", "/cenote/masters/").splitlines()
    masters = [json.loads(row) for row in rows if row]
    (tenure,) = etcd.ctl("get", "--print-value-only", "/cenote/tenure").splitlines()[:1]
    entry = json.loads(tenure)["entry"]
    return len(masters) == 2 and min(master["entry"] for master in masters) >= entry > 0


@contextlib.contextmanager
def load_of(count: int) -> Iterator[None]:
    """So many processes that do nothing but work."""
    command = [sys.executable, "-c", "while True: sum(range(10_000))"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that load the machine")
    options = parser.parse_args()
    size_bytes = options.objects * OBJECT_BYTES + SPARE_BYTES
    rounds: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="cenote-etcd-") as directory,
        EtcdCluster(Path(directory)) as etcd,
        shared_pool(etcd.url, masters=2, stores=1, dram_bytes=size_bytes) as cluster,
        cluster.client(transports=("shm",), deadline_s=DEADLINE_S) as client,
    ):
        fill(client, options.objects)
        wait_until(lambda: has_followed(etcd), 120.0, what="the standby to follow")
        with load_of(options.busy):
            for number in range(options.rounds):
                rounds.append(one_round(cluster, etcd, client, options.objects, number))
                print(json.dumps({k: round(v, 3) for k, v in rounds[-1].items()}), flush=True)
            cold = cold_start(cluster, client, options.objects)
        (status,) = json.loads(etcd.ctl("endpoint", "status", "--write-out=json"))
    report: dict[str, Any] = {
        name: {
            "median": round(statistics.median(r[name] for r in rounds), 2),
            "worst": round(max(r[name] for r in rounds), 2),
        }
        for name in rounds[0]
    }
    report["cold"] = {name: round(seconds, 2) for name, seconds in cold.items()}
    report["database_mb"] = round(status["Status"]["dbSize"] / 1e6)
    print(json.dumps({"machine": platform.processor() or platform.machine(), **report}, indent=2))


if __name__ == "__main__":
    main()
