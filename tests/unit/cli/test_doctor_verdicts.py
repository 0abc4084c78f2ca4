"""What `cenote doctor` makes of facts: no machine is looked at here."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.api.types import PathObstacle, PeerPath
from cenote.cli.doctor.clock import SKEW_S, STEP_S, ClockFacts, judge_clock, judge_skew
from cenote.cli.doctor.findings import Check, Finding, Verdict, run_checks
from cenote.cli.doctor.gpu import GpuFacts, judge_gpus
from cenote.cli.doctor.host import (
    DramFacts,
    HugePageFacts,
    judge_dram,
    judge_files,
    judge_huge_pages,
    judge_kernel,
    judge_memlock,
)
from cenote.cli.doctor.pool import (
    judge_etcd,
    judge_lane,
    judge_path,
    judge_status,
    quota_in,
)
from cenote.cli.doctor.rdma import judge_counters, judge_library, judge_ports, rdma_checks
from cenote.runtime.memlock import MemlockFacts
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.nics.sysfs import read_netdevs, read_ports
from cenote.v1 import admin_pb2, master_pb2
from fake_sys import FakeSys
from promptness import ends_within

GIB, MIB = 1 << 30, 1 << 20
OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
PROMPT_S = 3.0


def assert_says(finding: Finding, verdict: Verdict, *parts: str) -> None:
    assert finding.verdict is verdict, finding
    for part in parts:
        assert part in f"{finding.found} {finding.remedy}", finding
    if verdict in (WARN, FAIL):
        assert finding.remedy, finding


# ---- GPUs --------------------------------------------------------------------------------------


def test_gpus() -> None:
    assert_says(judge_gpus(GpuFacts(False, "there is no CUDA driver here")), SKIPPED, "no NVIDIA")
    hidden = judge_gpus(GpuFacts(True, "there is no CUDA driver here"))
    assert_says(hidden, WARN, "no CUDA driver", "libcuda.so.1")
    assert_says(judge_gpus(GpuFacts(True)), WARN, "no GPU is visible")
    both = (("0000:3b:00.0", True), ("0000:af:00.0", True))
    assert_says(judge_gpus(GpuFacts(True, "", both)), OK, "2 that NICs", "0000:af:00.0")
    one = (("0000:3b:00.0", True), ("0000:af:00.0", False))
    mixed = judge_gpus(GpuFacts(True, "", one))
    assert_says(mixed, WARN, "NICs can't reach the memory of 0000:af:00.0", "open kernel modules")


# ---- running -----------------------------------------------------------------------------------


def test_a_check_that_hangs_is_a_failure_and_keeps_nobody_waiting() -> None:
    never = threading.Event()

    def hang(_: float) -> list[Finding]:
        never.wait()
        return []

    checks = [Check(f"hangs {n}", hang) for n in range(20)]
    checks.append(Check("works", lambda _: [Finding("works", OK, "fine")]))
    checks.reverse()
    try:
        with ends_within(PROMPT_S, "all of them"):
            found = run_checks(checks, 0.2)
    finally:
        never.set()
    assert (found[0].check, found[0].verdict) == ("works", OK)
    assert {finding.verdict for finding in found[1:]} == {FAIL}
    assert_says(found[1], FAIL, "no answer within 0.2 s")


def test_checks_that_raise_are_failures() -> None:
    def typed(_: float) -> list[Finding]:
        raise ResourceUnavailable("it is full", remedy="empty it")

    def bug(_: float) -> list[Finding]:
        raise KeyError("x")

    first, second, third = run_checks(
        [Check("a", typed), Check("b", bug), Check("c", lambda _: [])], 5.0
    )
    assert_says(first, FAIL, "it is full", "empty it")
    assert_says(second, FAIL, "KeyError")
    assert_says(third, SKIPPED)


# ---- the host ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "verdict"), [("6.1.0-57-amd64", OK), ("5.14.0", OK), ("5.4.0-1", WARN), ("?", OK)]
)
def test_kernel(release: str, verdict: Verdict) -> None:
    (finding,) = judge_kernel((3, 11, 7), release)
    assert_says(finding, verdict, release, "Python 3.11.7")


def dram(**changes: object) -> DramFacts:
    known = {
        "directory": "/dev/shm",
        "exists": True,
        "in_memory": True,
        "writable": True,
        "total_bytes": 32 * GIB,
        "free_bytes": 20 * GIB,
        "available_bytes": 20 * GIB,
    }
    return DramFacts(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "wanted", "verdict", "parts"),
    [
        (dram(), None, OK, ["32 GiB", "20 GiB can be had"]),
        (dram(), 20 * GIB, OK, []),
        (dram(), 20 * GIB + 1, FAIL, ["less than", "remount,size=20481M", "--shm-size"]),
        (dram(total_bytes=64 * MIB, free_bytes=64 * MIB, available_bytes=64 * MIB), None, WARN,
         ["64 MiB", "default of --dram", "--shm-size"]),
        (dram(available_bytes=2 * GIB), 4 * GIB, FAIL, ["control group", "--dram"]),
        (dram(available_bytes=2 * GIB, held_bytes=3 * GIB), 4 * GIB, OK, ["3 GiB are in files"]),
        (dram(available_bytes=2 * GIB, held_bytes=GIB), 4 * GIB, FAIL, ["1 GiB are in files"]),
        (dram(in_memory=False), None, FAIL, ["on a disk"]),
        (dram(writable=False), None, FAIL, ["can't be written"]),
        (DramFacts("/none", exists=False), None, FAIL, ["no directory /none"]),
        (dram(total_bytes=0), None, OK, ["no limit of its own"]),
    ],
)  # fmt: skip
def test_shared_memory(
    facts: DramFacts, wanted: int | None, verdict: Verdict, parts: list[str]
) -> None:
    assert_says(judge_dram(facts, wanted), verdict, *parts)


@pytest.mark.parametrize(
    ("facts", "directory", "wanted", "verdict", "parts"),
    [
        (HugePageFacts(2 * MIB), "/dev/shm", None, OK, ["needs none"]),
        (HugePageFacts(2 * MIB, 100, 100, ("/dev/hugepages",)), "/dev/shm", None, WARN,
         ["lie idle", "--dram-dir /dev/hugepages"]),
        (HugePageFacts(2 * MIB, 100, 0, ("/dev/hugepages",)), "/dev/shm", None, OK, []),
        (HugePageFacts(2 * MIB, 100, 100), "/dev/shm", None, WARN, ["hugetlbfs"]),
        (HugePageFacts(2 * MIB, 0, 0, ("/huge",)), "/huge", None, FAIL, ["no page is reserved"]),
        (HugePageFacts(2 * MIB, 512, 512, ("/huge",)), "/huge/a", GIB, OK, ["512 of 512"]),
        (HugePageFacts(2 * MIB, 600, 500, ("/huge",)), "/huge", GIB, FAIL,
         ["512 are needed", "vm.nr_hugepages=612"]),
        (HugePageFacts(2 * MIB, 600, 88, ("/huge",), GIB), "/huge", GIB, OK, ["88 of 600"]),
        (HugePageFacts(2 * MIB, 600, 88, ("/huge",), GIB), "/huge", 2 * GIB, FAIL,
         ["512 are needed", "vm.nr_hugepages=1024"]),
        (HugePageFacts(2 * MIB, 100, 100, ("/huge",)), "/hugeness", None, WARN, []),
    ],
)  # fmt: skip
def test_huge_pages(
    facts: HugePageFacts, directory: str, wanted: int | None, verdict: Verdict, parts: list[str]
) -> None:
    assert_says(judge_huge_pages(facts, directory, wanted), verdict, *parts)


@pytest.mark.parametrize(
    ("facts", "has_rdma", "wanted", "verdict", "parts"),
    [
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=False), False, None, OK, ["8 MiB", "no device"]),
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=False), True, None, WARN, ["TCP", "ulimit -l"]),
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=True), True, GIB, OK, ["CAP_IPC_LOCK"]),
        (MemlockFacts(None, None, exempt=False), True, GIB, OK, ["no limit"]),
        (MemlockFacts(GIB, GIB, exempt=False), True, GIB, OK, []),
        (MemlockFacts(GIB, GIB, exempt=False, user_namespace=True), True, 2 * GIB, WARN,
         ["user namespace"]),
    ],
)  # fmt: skip
def test_locked_memory(
    facts: MemlockFacts, has_rdma: bool, wanted: int | None, verdict: Verdict, parts: list[str]
) -> None:
    assert_says(judge_memlock(facts, has_rdma, wanted), verdict, *parts)


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "parts"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, OK, []),
        (4096, 4096, OK, []),
        (1024, 524_288, OK, ["1024"]),
        (600, 600, WARN, ["limits.conf"]),
        (256, 4096, FAIL, ["ulimit -n 4096"]),
    ],
)
def test_open_files(soft: int, hard: int, verdict: Verdict, parts: list[str]) -> None:
    assert_says(judge_files(soft, hard), verdict, *parts)


# ---- clocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "verdict", "parts"),
    [
        (ClockFacts("tsc", False, 0.0, 50, True), OK, ["tsc", "50 ns"]),
        (ClockFacts("", False, 0.0, 50, None), OK, ["not told"]),
        (ClockFacts("tsc", False, STEP_S, 50, True), OK, []),
        (ClockFacts("tsc", True, 0.0, 50, True), FAIL, ["went back"]),
        (ClockFacts("tsc", False, -2 * STEP_S, 50, True), WARN, ["-10.0 ms", "slew"]),
        (ClockFacts("hpet", False, 0.0, 50, True), WARN, ["hpet"]),
        (ClockFacts("tsc", False, 0.0, 900, True), WARN, ["900 ns"]),
        (ClockFacts("tsc", False, 0.0, 50, False), WARN, ["NTP"]),
    ],
)
def test_clock(facts: ClockFacts, verdict: Verdict, parts: list[str]) -> None:
    (finding,) = judge_clock(facts)
    assert_says(finding, verdict, *parts)


def test_skew() -> None:
    assert judge_skew("x", SKEW_S, 0.0) is None
    assert judge_skew("x", -SKEW_S - 1, 2.0) is None
    finding = judge_skew("x", -3600.0, 0.1)
    assert finding is not None
    assert_says(finding, WARN, "-3600 s")


# ---- RDMA --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "verdict", "parts"),
    [
        ((False, True, ["ibverbs"], True), SKIPPED, ["no RDMA device"]),
        ((True, False, ["ibverbs"], True), WARN, ["libibverbs.so.1", "apt-get"]),
        ((True, True, [], True), WARN, ["cenote[rdma]"]),
        ((True, True, ["ibverbs"], False), WARN, ["can't be opened", "--device=/dev/infiniband"]),
        ((True, True, ["ibverbs"], None), WARN, ["are not there"]),
        ((True, True, ["ibverbs", "pyverbs"], True), OK, ["ibverbs and pyverbs"]),
    ],
)
def test_verbs_library(
    arguments: tuple[bool, bool, list[str], bool | None], verdict: Verdict, parts: list[str]
) -> None:
    (finding,) = judge_library(*arguments)
    assert_says(finding, verdict, *parts)


@pytest.fixture
def sys(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


def judged(sys: FakeSys, devices: str = "") -> list[Finding]:
    allowed = DeviceFilter.parse(devices)
    return judge_ports(read_ports(sys.root), allowed, read_netdevs(sys.root))


def test_each_port_is_told(sys: FakeSys) -> None:
    assert [f.verdict for f in judged(sys)] == [SKIPPED]
    device = sys.pci("pci0000:3a", "0000:3a:00.0", numa_node=1)
    sys.nic("mlx5_0", device=device, netdev="eth0", gids=[("10.0.0.1", "RoCE v2")])
    sys.nic("mlx5_1", netdev="eth1", state="1: DOWN", physical_state="3: Disabled")
    first, second = judged(sys)
    assert_says(first, OK, "400 Gb/s", "NUMA node 1", "0: 10.0.0.1")
    assert_says(second, WARN, "DOWN", "cable")
    first, second = judged(sys, "mlx5_0")
    assert (first.verdict, second.verdict) == (OK, SKIPPED)
    *_, last = judged(sys, "mlx5_1")
    assert_says(last, WARN, "no port can be used")
    *_, last = judged(sys, "mlx5_0,mlx6_0")
    assert_says(last, FAIL, "mlx6_0")


def test_losses(sys: FakeSys) -> None:
    gids = [("10.0.0.1", "RoCE v2")]
    sys.nic("mlx5_0", netdev="e0", gids=gids, counters={"out_of_sequence": 0, "np_cnp_sent": 7})
    sys.nic("mlx5_1", netdev="e1", gids=gids, counters={"packet_seq_err": 12})
    (check,) = rdma_checks(DeviceFilter(), sys.root)
    (finding,) = [found for found in check.look(1.0) if found.check == "rdma losses"]
    assert_says(finding, WARN, "mlx5_1:1", "packet_seq_err 12", "PFC")
    assert_says(judge_counters({"a": {"out_of_sequence": 0}})[0], OK, "none since")
    assert_says(judge_counters({"a": {"packets": 1}})[0], OK, "don't count")
    assert_says(judge_counters({})[0], SKIPPED)


# ---- the pool ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "round_trip_s", "verdict", "parts"),
    [
        (master_pb2.HelloResponse(is_leader=True, epoch=3), 50e-6, OK, ["epoch 3", "50 µs"]),
        (master_pb2.HelloResponse(is_leader=True), 0.02, WARN, ["20 ms"]),
        (master_pb2.HelloResponse(is_leader=True, past_tenure=True), 1e-4, FAIL, ["etcd"]),
        (master_pb2.HelloResponse(leader_addresses=["a:1"]), 1.0, OK, ["a:1 leads"]),
        (master_pb2.HelloResponse(), 1.0, WARN, ["knows no leader"]),
    ],
)
def test_masters(
    reply: master_pb2.HelloResponse, round_trip_s: float, verdict: Verdict, parts: list[str]
) -> None:
    assert_says(judge_lane("m:1", reply, round_trip_s), verdict, *parts)


@pytest.mark.parametrize(
    ("changes", "verdict", "parts"),
    [
        ({}, OK, ["2 of 2 nodes"]),
        ({"nodes_alive": 1}, WARN, ["1 of 2 nodes", "cenote nodes"]),
        ({"role": "standby"}, FAIL, ["none of them leads"]),
        ({"writes_refused": "no quorum"}, FAIL, ["no quorum"]),
        ({"backlog_age_s": 4.2}, WARN, ["4.2 s behind"]),
    ],
)
def test_status(changes: dict[str, object], verdict: Verdict, parts: list[str]) -> None:
    known = {"role": "leader", "cluster_name": "c", "nodes_alive": 2, "nodes_total": 2}
    reply = admin_pb2.GetStatusResponse(**{**known, **changes})  # type: ignore[arg-type]
    (finding,) = judge_status(reply)
    assert_says(finding, verdict, *parts)


@pytest.mark.parametrize(
    ("answer", "skew_s", "verdict", "parts"),
    [
        ({"health": "true"}, 0.4, OK, ["healthy", "within seconds"]),
        ({"health": True}, None, OK, ["healthy"]),
        ({"health": "true"}, 90.0, WARN, ["+90 s"]),
        ({"health": "false", "reason": "RAFT NO LEADER"}, 0.0, FAIL, ["RAFT NO LEADER"]),
        (["what"], 0.0, FAIL, ["not healthy"]),
    ],
)
def test_etcd(answer: object, skew_s: float | None, verdict: Verdict, parts: list[str]) -> None:
    (finding,) = judge_etcd("etcd e:1", answer, skew_s, 0.01)
    assert_says(finding, verdict, *parts)


def test_the_room_that_etcd_has_left() -> None:
    text = """
# HELP etcd_mvcc_db_total_size_in_bytes Total size of the underlying database.
# TYPE etcd_mvcc_db_total_size_in_bytes gauge
etcd_mvcc_db_total_size_in_bytes 1.9e+09
etcd_mvcc_db_total_size_in_use_in_bytes 1000
etcd_server_quota_backend_bytes 2.147483648e+09
"""
    quota = quota_in(text)
    assert quota == (1_900_000_000, 2 << 30)
    (finding,) = judge_etcd("etcd e:1", {"health": "true"}, 0.1, 0.01, quota)
    assert_says(finding, WARN, "1.77 GiB of 2 GiB", "--quota-backend-bytes")
    (finding,) = judge_etcd("etcd e:1", {"health": "true"}, 0.1, 0.01, (1 << 20, 2 << 30))
    assert_says(finding, OK, "1 MiB of 2 GiB")
    for silent in ("", "etcd_server_quota_backend_bytes x", text.replace("2.147483648e+09", "0")):
        assert quota_in(silent) is None


def test_peers() -> None:
    far = PathObstacle("shm", "the node is on another host")
    hidden = PathObstacle("shm", "its socket /x can't be seen from here: No such file")
    assert_says(judge_path(PeerPath(1, "n", "shm", "/x", ())), OK, "over shm (/x)")
    assert_says(judge_path(PeerPath(1, "n", "tcp", "a:1", (far,))), OK, "over tcp")
    assert_says(judge_path(PeerPath(1, "n", "tcp", "a:1", (hidden,))), WARN, "--socket-dir")
    dead = PathObstacle("tcp", "connection refused")
    assert_says(judge_path(PeerPath(1, "n", None, "", (dead,))), FAIL, "connection refused")
