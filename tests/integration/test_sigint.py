"""SIGINT and SIGTERM in any state end every program within two seconds."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from admin import admin_of
from cluster import Cluster, Process, start_cenote, start_module
from promptness import ends_within
from remote import Remote
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
END_S = 2.0
SIGNALS = [signal.SIGINT, signal.SIGTERM]
BY_SIGNAL = {0, 130, 143, -signal.SIGINT, -signal.SIGTERM}
INTERPRETER_STARTS = ("Could not import runpy module", "Fatal Python error: init_")
"""What Python says, and ends with exit code 1, where SIGINT comes before it runs a line of ours."""


def check_end(process: Process, number: signal.Signals) -> None:
    """A daemon that is up takes its leave: exit code 0, in time."""
    with ends_within(END_S, f"{process.name}'s end"):
        code = process.kill(number)
    assert code == 0, process.log_text()


def end(popen: subprocess.Popen[bytes], number: signal.Signals, what: str = "its end") -> None:
    """Send the signal and wait. Fails where it has not ended in time."""
    try:
        with ends_within(END_S, what):
            popen.send_signal(number)
            popen.wait(END_S + 8)
    finally:
        popen.kill()


@pytest.fixture
def loaded(seed: int) -> Iterator[Cluster]:
    """A pool that two programs read from and write to as fast as they can."""
    size, keys = 1 * MIB, [f"k{i}" for i in range(16)]
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(stores=2, dram_bytes=64 * MIB))
        with cluster.client() as client:
            client.put_batch(keys, [bytes(size)] * len(keys)).raise_for_errors()
        programs = [
            stack.enter_context(Remote("busy_reader", cluster.lane, keys, size, kind))
            for kind in ("get", "put")
        ]
        for program in programs:
            program.expect("ready")
        with admin_of(cluster) as admin:
            wait_until(lambda: admin.status().evicted_objects > 100, what="load")
        yield cluster
        for program in programs:
            program.process.kill()


@pytest.mark.parametrize("number", SIGNALS)
def test_daemons_under_load(loaded: Cluster, number: signal.Signals) -> None:
    for process in (loaded.stores[0], loaded.master, loaded.stores[1]):
        check_end(process, number)


@pytest.mark.parametrize("number", SIGNALS)
def test_idle_daemons_and_one_whose_master_is_away(number: signal.Signals) -> None:
    with Cluster(stores=3) as cluster:
        check_end(cluster.stores[0], number)
        cluster.master.pause()
        check_end(cluster.stores[1], number)
        cluster.master.resume()
        check_end(cluster.master, number)
        check_end(cluster.stores[2], number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_paused_daemon_ends_when_it_goes_on(number: signal.Signals) -> None:
    with Cluster(stores=1) as cluster:
        for process in cluster.processes:
            process.pause()
            process.send_signal(number)
            with ends_within(END_S):
                process.resume()
                assert process.wait_exit(END_S) == 0


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("program", ["master", "store"])
def test_daemons_at_any_moment_of_their_start(
    program: str, number: signal.Signals, rng: random.Random, tmp_path: Path
) -> None:
    """From the first instant, while modules load, through memory being set up, until it serves."""
    arguments = {
        "master": ["--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--metadata", "memory:"],
        "store": [
            *("--name", f"sigint{rng.randrange(1 << 30)}", "--dram", "1GiB", "--wipe-on-exit"),
            *("--master", "127.0.0.1:9", "--socket-dir", str(tmp_path)),
        ],
    }[program]
    for after_s in (0.0, 0.15, 0.4, 0.7, rng.random()):
        with start_module(f"cenote.{program}", *arguments) as popen:
            until_s = time.monotonic() + after_s
            wait_until(lambda u=until_s: time.monotonic() >= u, what="that moment")  # type: ignore[misc]
            end(popen, number, f"its end when told after {after_s:.2f} s")
            assert popen.stderr is not None
            said = popen.stderr.read().decode()
        if popen.returncode == 1 and said.startswith(INTERPRETER_STARTS):
            assert number == signal.SIGINT, said
            assert "KeyboardInterrupt" in said, said
            continue
        assert popen.returncode in BY_SIGNAL, said
    left = list(Path("/dev/shm").glob(f"*{arguments[1]}*")) if program == "store" else []
    assert not left, "a node that was to wipe its memory left some"


@pytest.mark.parametrize("program", ["master", "store"])
def test_modules_that_swallow_interrupts_while_they_load(program: str, tmp_path: Path) -> None:
    """Python drops a KeyboardInterrupt in a destructor or a callback; imports have many."""
    (tmp_path / "sitecustomize.py").write_text(SWALLOWS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = ["--metadata", "memory:"] if program == "master" else ["--master", "127.0.0.1:9"]
    with start_module(f"cenote.{program}", *arguments, env=environment) as popen:
        _, said = popen.communicate(timeout=30)
    assert popen.returncode == -signal.SIGINT, said.decode()


SWALLOWS = """
import signal, sys

class Swallowing:
    def find_spec(self, name, path, target=None):
        if name in ("cenote.master.server", "cenote.store.daemon"):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                sys.exit("it was swallowed")

sys.meta_path.insert(0, Swallowing())
"""


# ---- programs that use the SDK ------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("kind", ["get", "put"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_program_in_the_middle_of_a_batch(
    kind: str, transports: str, number: signal.Signals, rng: random.Random
) -> None:
    size, keys = 2 * MIB, [f"k{i}" for i in range(24)]
    with Cluster(stores=2, dram_bytes=96 * MIB) as cluster, cluster.client() as client:
        client.put_batch(keys, [bytes(size)] * len(keys)).raise_for_errors()
        options = {"transports": (transports,)}
        with Remote("busy_reader", cluster.lane, keys, size, kind, options) as program:
            program.expect("ready")
            until_s = time.monotonic() + 0.2 + rng.random() / 5
            wait_until(lambda: time.monotonic() >= until_s, what="a batch to be under way")
            with ends_within(END_S, "the program's end"):
                code = program.signalled(number, END_S + 8)
        assert code in BY_SIGNAL | {1}
        # And the pool is none the worse for it.
        assert kind == "put" or client.get("k1") == bytes(size)
        assert client.put("after", b"x" * size).stored
        assert client.get("after") == b"x" * size


@pytest.mark.parametrize("kind", ["get", "put"])
@pytest.mark.parametrize("away", ["master", "stores"])
def test_a_program_whose_pool_does_not_answer(away: str, kind: str) -> None:
    size, keys = 1 * MIB, [f"k{i}" for i in range(8)]
    with Cluster(stores=1, dram_bytes=64 * MIB) as cluster:
        with cluster.client() as client:
            client.put_batch(keys, [bytes(size)] * len(keys)).raise_for_errors()
        options = {"transports": ("tcp",), "deadline_s": 60.0, "location_cache_entries": 0}
        with Remote("busy_reader", cluster.lane, keys, size, kind, options) as program:
            program.expect("ready")
            for process in [cluster.master] if away == "master" else cluster.stores:
                process.pause()
            wait_until(lambda: is_asleep(program.process.pid), what="it to wait for an answer")
            with ends_within(END_S, "the program's end"):
                code = program.signalled(signal.SIGINT, END_S + 8)
            assert code in BY_SIGNAL | {1}


def is_asleep(pid: int) -> bool:
    """Whether the process has used no time of a processor for a while."""

    def used() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, until_s = used(), time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() >= until_s, what="a moment to pass")
    return used() - before <= 1


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_pool_on_this_machine(number: signal.Signals) -> None:
    with start_cenote("up", "--nodes", "2", "--dram", "32MiB", "--port", "0") as popen:
        assert popen.stdout is not None
        line = b""
        while b"master" not in line:
            line = popen.stdout.readline()
            assert line, popen.stderr.read() if popen.stderr else ""
        end(popen, number)
        assert popen.returncode in BY_SIGNAL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_replay(number: signal.Signals, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {i}, "input_length": 8192, "output_length": 10,'
        f' "hash_ids": {list(range(i, i + 16))}}}'
        for i in range(20_000)
    ]
    trace.write_text("\n".join(lines))
    with Cluster(stores=1, dram_bytes=64 * MIB) as cluster, admin_of(cluster) as admin:
        with start_cenote(
            "replay", str(trace), "--block-size", "64KiB", environment=cluster.environment
        ) as popen:
            wait_until(lambda: admin.status().objects > 50, what="the replay")
            end(popen, number)
            assert popen.stderr is not None
            said = popen.stderr.read().decode()
        assert popen.returncode in BY_SIGNAL, said
        assert not re.search("Traceback", said), said
