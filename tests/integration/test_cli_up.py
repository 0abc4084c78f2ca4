"""`cenote up` and `down`: a pool on this machine, its end in all ways, what is kept of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from cenote.cli.cmd_pool import _kept_memory
from cenote.cli.daemons import clean_environment
from cenote.cli.scratch import MEMORY_DIRECTORY
from cluster import run_cenote, start_cenote
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

STOP_S = 2.0


def test_up_starts_a_pool_and_ctrl_c_stops_all_of_it(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--nodes", "2", "--dram", "16MiB", "--port", "0", "--ready-line"]
    with start_cenote("up", *arguments, environment=environment) as process:
        assert process.stdout is not None
        ready = dict(word.split("=", 1) for word in process.stdout.readline().decode().split()[1:])
        found = environment | {"CENOTE_MASTER": ready["lane"], "CENOTE_GRPC": ready["grpc"]}
        status = run_cenote("status", "--json", environment=found)
        assert json.loads(status.stdout)["nodes_total"] == 2
        memory = Path(ready["memory"])
        assert memory.parent == MEMORY_DIRECTORY
        assert list(memory.glob("*.data"))
        end_by(process, signal.SIGINT)
        assert process.returncode == 0
    assert not memory.exists()
    assert not list(tmp_path.glob("cenote-tmp-*"))


def end_by(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End it by a signal; within the time that is promised for that."""
    with ends_within(STOP_S + 0.5):
        process.send_signal(number)
        process.wait(timeout=10)


@pytest.mark.parametrize("after_bytes", [b"", b"ready"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_ends_in_any_state(tmp_path: Path, after_bytes: bytes, number: signal.Signals) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--dram", "16MiB", "--port", "0", "--ready-line"]
    with start_cenote("up", *arguments, environment=environment) as process:
        if after_bytes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(after_bytes)
        else:
            wait_until(
                lambda: list(tmp_path.glob("cenote-tmp-*/master.log")), what="the master's log"
            )
        end_by(process, number)
    wait_until(lambda: not daemons_in(tmp_path), what="the daemons to end")
    assert not list(tmp_path.glob("cenote-tmp-*"))


def daemons_in(directory: Path) -> list[int]:
    """Processes whose command line names the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.fsencode(directory) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_daemons_end_with_a_killed_up(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--nodes", "1", "--dram", "16MiB", "--port", "0", "--ready-line"]
    with start_cenote("up", *arguments, environment=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        assert len(daemons_in(tmp_path)) >= 2
        process.kill()
    wait_until(lambda: not daemons_in(tmp_path), what="the daemons to end")


def test_a_daemon_that_is_killed_is_named_and_ends_the_rest(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--nodes", "2", "--dram", "16MiB", "--port", "0", "--ready-line"]
    with start_cenote("up", *arguments, environment=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"ready")
        (victim,) = (pid for pid in daemons_in(tmp_path) if b"node1" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=10) == 1
        said = process.stderr.read().decode()
    assert said.startswith("cenote: node1 was killed by SIGKILL (by somebody, or by the kernel")
    assert "so the rest is stopped, too\n" in said  # it had nothing to complain of
    wait_until(lambda: not daemons_in(tmp_path), what="the daemons to end")


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_up_in_the_background_keeps_its_contents_and_down_ends_it(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    directory = tmp_path / "pool"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["up", "--nodes", "1", "--dram", "16MiB", "--ssd", "64MiB", "--policy", "auto"]
    arguments += ["--dir", str(directory), "--port", str(port), "--detach"]
    found = environment | {"CENOTE_MASTER": f"127.0.0.1:{port}"}
    try:
        for round_number in range(2):
            started = run_cenote(*arguments, environment=environment)
            assert started.returncode == 0, started.stderr
            if not round_number:
                put = run_cenote("put", "k", __file__, environment=found)
                assert put.returncode == 0, put.stderr
                again = run_cenote(*arguments, environment=environment)
                assert again.returncode == 1
                assert b"already" in again.stderr
            status = json.loads(run_cenote("status", "--json", environment=found).stdout)
            assert status["ssd_capacity_bytes"] > 0.9 * (64 << 20)
            assert status["eviction_policy_wanted"] == "auto"
            assert "ssd used" in run_cenote("nodes", environment=found).stdout.decode()
            (node,) = json.loads(run_cenote("nodes", "--json", environment=found).stdout)
            for name in ("capacity_bytes", "ssd_capacity_bytes"):
                assert node[name] == status[name]
            got = run_cenote("get", "k", environment=found)
            assert got.stdout == Path(__file__).read_bytes()
            down = run_cenote("down", "--port", str(port), environment=environment)
            assert down.returncode == 0, down.stderr
            kept = down.stderr.decode()
            assert f"of memory in {_kept_memory(directory)}, " in kept
            command = "cenote up --nodes 1 --dram 16MiB --ssd 64MiB --policy auto"
            assert f"{command} --dir {directory} --port {port}\n" in kept
            assert (directory / "ssd" / "node0.ssd").stat().st_size == 64 << 20
            assert f"rm -r {directory} {_kept_memory(directory)}" in kept
        none_there = run_cenote("down", "--port", str(port), environment=environment)
        assert none_there.returncode == 3
        assert b"by itself" not in none_there.stderr  # it was stopped in order
        started = run_cenote(*arguments, environment=environment)
        assert started.returncode == 0, started.stderr
        (victim,) = (pid for pid in daemons_in(tmp_path) if b"node0" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not daemons_in(tmp_path), what="the rest to be stopped")

        def told() -> bytes:
            return run_cenote("down", "--port", str(port), environment=environment).stderr

        # Nobody looked at a pool in the background when it ended: `down` says why.
        wait_until(lambda: b"the last one ended by itself: node0 was killed" in told(), what="why")
        log = next(line for line in started.stdout.decode().splitlines() if "log" in line)
        assert b"node0 was killed by SIGKILL" in Path(log.split()[-1]).read_bytes()
    finally:
        run_cenote("down", "--port", str(port), environment=environment)
        shutil.rmtree(_kept_memory(directory))
    assert not daemons_in(tmp_path)


def test_up_with_ssds_leaves_nothing_where_nothing_is_to_be_kept(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--nodes", "1", "--dram", "16MiB", "--ssd", "64MiB", "--port", "0", "--ready-line"]
    with start_cenote("up", *arguments, environment=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        files = [name for pid in daemons_in(tmp_path) for name in open_files(pid)]
        (path,) = (Path(name) for name in set(files) if name.endswith("/node0.ssd"))
        assert path.exists()
        end_by(process, signal.SIGTERM)
    assert not path.parent.exists()


def open_files(pid: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


def test_up_without_room_for_its_ssds_says_so(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    arguments = ["--nodes", "1", "--dram", "16MiB", "--ssd", "500TiB", "--port", "0"]
    result = run_cenote("up", *arguments, environment=environment)
    assert result.returncode == 1
    assert b"are free there" in result.stderr
    assert b"Traceback" not in result.stderr
    assert not daemons_in(tmp_path)


def test_up_that_gets_no_memory_says_what_it_could_have(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    result = run_cenote("up", "--dram", "500TiB", "--port", "0", environment=environment)
    assert result.returncode == 1
    assert b"could be had" in result.stderr
    assert b"Traceback" not in result.stderr
    assert not list(tmp_path.glob("cenote-tmp-*"))
