"""`cenote replay`: hit rates, bytes, clients, and pools that fail meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import DeadlineExceeded, Unavailable
from cenote.cli.cmd_demo import SAMPLE
from cenote.cli.daemons import clean_environment
from cenote.cli.replay.fleet import Fleet
from cenote.cli.replay.player import block_keys
from cenote.cli.replay.trace import Trace, load_trace
from cenote.cli.replay.worker import Job
from cluster import Cluster, CommandProcess, run_cenote, start_cenote
from waiting import children_of, wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
HIT_RATE_TOLERANCE = 0.005
FULL_TRACES = os.environ.get("CENOTE_TRACES", "")
"""Directory of the whole traces; they are not in the repository."""


def lru_hit_rate(trace: Trace, capacity: int) -> float:
    """Share of blocks in the longest cached prefix, under LRU in which a chain's root is newest."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in range(len(trace)):
        ids = trace.blocks_of(request).tolist()
        hits += next((n for n, block in enumerate(ids) if block not in cached), len(ids))
        for block in reversed(ids):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / len(trace.block_ids)


def replay(*arguments: object, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """A replay's report; it must have gone well."""
    words = [str(argument) for argument in arguments]
    result = run_cenote("replay", "--json", *words, environment=environment, timeout_s=300)
    assert result.returncode == 0, result.stderr.decode()
    report: dict[str, Any] = json.loads(result.stdout)
    assert (report["errors"], report["wrong_bytes"]) == (0, 0)
    return report


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=64 * MIB) as started:
        started.wait_alive(2)
        yield started


# ---- hit rates -------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "block_size"), [(2_000, "64KiB"), (6_000, "8KiB")])
def test_the_sample_hits_as_often_as_lru_would(capacity: int, block_size: str) -> None:
    trace = load_trace(SAMPLE)
    report = replay(SAMPLE, "--pool", "--capacity-objects", capacity, "--block-size", block_size)
    assert report["requests"] == len(trace)
    assert report["blocks"] == len(trace.block_ids)
    assert report["evicted_objects"] > 0
    assert abs(report["hit_rate_blocks"] - lru_hit_rate(trace, capacity)) < HIT_RATE_TOLERANCE
    stored = report["written_bytes"] // report["block_bytes"]
    assert stored + report["hit_blocks"] + report["existed_blocks"] == report["blocks"]
    assert report["read_bytes"] == report["hit_blocks"] * report["block_bytes"]


@pytest.mark.skipif(not FULL_TRACES, reason="CENOTE_TRACES names no directory of whole traces")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("capacity", [2_000, 10_000, 40_000])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_whole_traces_hit_as_often_as_lru_would(name: str, capacity: int) -> None:
    path = Path(FULL_TRACES) / f"{name}_trace.jsonl"
    report = replay(path, "--pool", "--capacity-objects", capacity)
    expected = lru_hit_rate(load_trace(path), capacity)
    assert abs(report["hit_rate_blocks"] - expected) < HIT_RATE_TOLERANCE


# ---- clients, transports, replicas -----------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_several_clients_read_what_each_other_wrote(cluster: Cluster, transport: str) -> None:
    options = ["--clients", 3, "--limit", 120, "--block-size", "16KiB", "--transport", transport]
    cold = replay(SAMPLE, *options, environment=cluster.environment)
    assert cold["requests"] == 120
    warm = replay(SAMPLE, "--warm", *options, environment=cluster.environment)
    assert warm["hit_rate_blocks"] > 0.95
    assert warm["operations"]["get"]["calls"] >= 120
    again_cold = replay(SAMPLE, *options, environment=cluster.environment)
    assert again_cold["hit_rate_blocks"] < 0.5


def test_replicas_are_placed_on_both_nodes() -> None:
    report = replay(
        SAMPLE, "--pool", "--capacity-objects", 3_000, "--replicas", 2, "--limit", 50,
        "--block-size", "8KiB",
    )  # fmt: skip
    assert report["written_bytes"] > 0


def test_the_recorded_times_are_kept_when_asked_for(tmp_path: Path, cluster: Cluster) -> None:
    path = tmp_path / "paced.jsonl"
    path.write_text("".join(f'{{"timestamp": {i * 1000}, "hash_ids": [{i}]}}\n' for i in range(5)))
    report = replay(path, "--speed-up", 4, environment=cluster.environment)
    assert report["wall_s"] > 0.95


# ---- what must be found ----------------------------------------------------------------------


def test_wrong_bytes_are_found_and_end_in_exit_code_1(tmp_path: Path, cluster: Cluster) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"hash_ids": [1, 2, 3]}\n')
    trace = load_trace(path)
    with cluster.client(
        namespace=f"replay-{trace.name}-4KiB",
        fingerprint="cenote replay 1, blocks of 4096 bytes",
    ) as client:
        keys = block_keys(np.array([1, 2], np.int64))
        client.put_batch([key.tobytes() for key in keys], [bytes(4096)] * 2)
    result = run_cenote(
        "replay", str(path), "--block-size", "4KiB", "--warm", "--json",
        environment=cluster.environment,
    )  # fmt: skip
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["wrong_bytes"] > 8_000
    assert report["errors"] == 0
    assert b"were not those that were put" in result.stderr


def test_a_pool_that_dies_ends_the_replay_with_errors() -> None:
    with Cluster(stores=1, dram_bytes=64 * MIB) as own:
        own.wait_alive(1)
        with start_replay(own.environment, "--deadline", "0.3") as process:
            wait_for_traffic(own)
            own.stores[0].kill()
            own.master.kill()
            _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert b"given up" in err or process.returncode == 4
    assert b"Traceback" not in err


def start_replay(environment: dict[str, str], *options: str) -> CommandProcess:
    """One that takes longer than any test: at the speed that it was recorded at."""
    return start_cenote(
        "replay", str(SAMPLE), "--speed-up", "50", "--json", *options, environment=environment
    )


def wait_for_traffic(cluster: Cluster) -> None:
    def written() -> bool:
        nodes = json.loads(cluster.cli("nodes", "--json").stdout)
        return any(node["used_bytes"] for node in nodes)

    wait_until(written, what="the replay's first puts")


def test_clients_that_hang_are_not_waited_for_long(cluster: Cluster) -> None:
    with Fleet(job_for(cluster.lane), 1, silence_max_s=0.5) as fleet:
        fleet.start()
        (client,) = children_of(os.getpid(), "cenote.cli.replay")
        os.kill(client, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="said nothing"):
            fleet.play(None, lambda _: None)
    assert not children_of(os.getpid(), "cenote.cli.replay")


def test_clients_that_cannot_connect_say_why() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with Fleet(job_for(address), 2) as fleet, pytest.raises(Unavailable):
            fleet.start()


def job_for(address: str) -> Job:
    return Job(
        master=address,
        namespace="fleet",
        fingerprint="",
        trace=load_trace(SAMPLE, limit=5),
        block_bytes=4096,
        replicas=1,
        deadline_s=1.0,
        transports=("shm", "tcp"),
    )


def test_a_killed_replay_leaves_no_clients(cluster: Cluster) -> None:
    with start_replay(cluster.environment, "--clients", "2") as process:
        clients = wait_until(lambda: children_of(process.pid), what="the replay's clients")
        process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in clients), what="their end")


def test_no_daemon_or_file_is_left_of_a_pool_of_its_own(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    replay(
        SAMPLE, "--pool", "--capacity-objects", 500, "--block-size", "4KiB", "--limit", 10,
        environment=environment,
    )  # fmt: skip
    assert not list(tmp_path.glob("cenote-*"))
