"""A replay that is told to end, in each state: it reports, or says that nothing was played."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cenote.api.errors import NamespaceNotFound
from cenote.cli.cmd_demo import SAMPLE
from cenote.cli.cmd_replay import play_trace
from cenote.cli.connect import Admin, open_admin
from cenote.cli.interrupts import Interrupts
from cenote.cli.replay import fleet as fleet_module
from cenote.cli.replay.fleet import Fleet
from cenote.cli.replay.trace import Trace, load_trace
from cenote.cli.replay.worker import Job
from cluster import Cluster, CommandProcess, start_cenote
from promptness import ends_within
from waiting import children_of, wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
END_S = 2.0
SIGNALS = [signal.SIGINT, signal.SIGTERM]
WORKER = "cenote.cli.replay"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=64 * MIB) as started:
        started.wait_alive(2)
        yield started


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with open_admin(cluster.lane, cluster.grpc, 10.0) as opened:
        yield opened


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The sample under a name that no other test uses: nothing of it is in the pool."""
    return Path(shutil.copy(SAMPLE, tmp_path / f"{tmp_path.name}.jsonl"))


def start_replay(cluster: Cluster, trace: Path, *options: str, **settings: Any) -> CommandProcess:
    """One that takes longer than any test: at 50 times the speed that it was recorded at."""
    environment = cluster.environment | settings.pop("environment", {})
    words = ["replay", str(trace), "--speed-up", "50", "--json", *options]
    return start_cenote(*words, environment=environment, **settings)


def end(process: CommandProcess, *numbers: signal.Signals) -> tuple[bytes, str]:
    """Tell it to end; what it said. It must have taken the first signal for the reason."""
    with ends_within(END_S, "the end"):
        for number in numbers:
            process.send_signal(number)
        out, err = process.communicate(timeout=END_S + 8)
    assert process.returncode == 128 + numbers[0], err.decode()
    assert b"Traceback" not in err, err.decode()
    return out, err.decode()


def wait_for_objects(admin: Admin, trace: Path, block: str = "64KiB") -> None:
    """Until the replay of this trace has put something."""
    name = f"replay-{load_trace(trace).name}-{block}"

    def is_there() -> bool:
        with contextlib.suppress(NamespaceNotFound):
            return admin.namespace(name).objects > 0
        return False

    wait_until(is_there, what="the replay's first puts")


# ---- the command, in each state ----------------------------------------------------------------


def wait_for_reader(fifo: Path) -> Callable[[], None]:
    """Until somebody waits in open() for a writer; returns what makes the wait go on."""

    def opened() -> int:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        return 0

    fd = wait_until(opened, what=f"a reader of {fifo}")
    return lambda: os.close(fd)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_imports(
    cluster: Cluster, trace: Path, tmp_path: Path, number: signal.Signals
) -> None:
    fifo, package = tmp_path / "fifo", tmp_path / "path"
    os.mkfifo(fifo)
    package.mkdir()
    (package / "typer.py").write_text(f"open({str(fifo)!r}).read()")
    with start_replay(cluster, trace, environment={"PYTHONPATH": str(package)}) as process:
        close = wait_for_reader(fifo)
        out, err = end(process, number)
        close()
    assert (out, err) == (b"", f"cenote: ended by {number.name}\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_reads_the_trace(cluster: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "trace.jsonl"
    os.mkfifo(fifo)
    with start_replay(cluster, fifo) as process:
        close = wait_for_reader(fifo)
        out, err = end(process, number)
        close()
    assert (out, err) == (b"", f"cenote: ended by {number.name}: nothing was played\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_while_its_clients_connect(cluster: Cluster, trace: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = f"127.0.0.1:{silent.getsockname()[1]}"
        options = ["--clients", "2", "--master", master, "--grpc", cluster.grpc]
        with start_replay(cluster, trace, *options) as process:
            silent.settimeout(20)
            connection, _ = silent.accept()  # by a client that waits for a hello from now on
            clients = children_of(process.pid, WORKER)
            with connection:
                out, err = end(process, number)
    assert (out, err) == (b"", f"cenote: ended by {number.name}: nothing was played\n")
    assert len(clients) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in clients), what="their end")


@pytest.mark.parametrize("times", [1, 2])  # `timeout` tells its child twice
@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_plays(
    cluster: Cluster, admin: Admin, trace: Path, number: signal.Signals, times: int
) -> None:
    with start_replay(cluster, trace, "--clients", "2") as process:
        wait_for_objects(admin, trace)
        out, err = end(process, *[number] * times)
    report = json.loads(out)
    assert report["interrupted"]
    assert 0 < report["requests"] < len(load_trace(trace)) or report["unheard_clients"]
    assert (report["errors"], report["wrong_bytes"]) == (0, 0)
    assert ("did not tell in time" in err) == (report["unheard_clients"] > 0)


def test_clients_that_do_not_answer_any_more_are_named(
    cluster: Cluster, admin: Admin, trace: Path
) -> None:
    with start_replay(cluster, trace, "--clients", "2") as process:
        wait_for_objects(admin, trace)
        stopped, _ = children_of(process.pid, WORKER)
        os.kill(stopped, signal.SIGSTOP)
        out, err = end(process, signal.SIGTERM)
    assert json.loads(out)["unheard_clients"] >= 1
    assert "did not tell in time" in err


def test_a_master_that_does_not_answer_any_more_is_not_waited_for(trace: Path) -> None:
    with Cluster(stores=1, dram_bytes=64 * MIB) as own, open_admin(own.lane, own.grpc, 10) as admin:
        with start_replay(own, trace) as process:
            wait_for_objects(admin, trace)
            own.master.pause()
            out, _ = end(process, signal.SIGTERM)
        own.master.resume()
    report = json.loads(out)
    assert report["interrupted"]
    assert report["evicted_objects"] is None


# ---- moments that only this process can hit ------------------------------------------------------


class Telling:
    """An administration during whose n-th `status` a signal comes."""

    def __init__(self, admin: Admin, nth: int) -> None:
        self._admin = admin
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def status(self, **options: Any) -> Any:
        self._left -= 1
        if not self._left:
            signal.raise_signal(signal.SIGTERM)
        return self._admin.status(**options)


SETTINGS: Final[dict[str, Any]] = {
    "block_bytes": 4096, "clients": 2, "speed_up": None, "replicas": 1, "warm": False,
    "transports": ("shm", "tcp"), "deadline_s": 10.0,
}  # fmt: skip


def test_while_it_asks_what_was_evicted(cluster: Cluster, admin: Admin, trace: Path) -> None:
    shown: list[dict[str, Any]] = []
    interrupts = Interrupts()
    with interrupts.catching():
        telling: Any = Telling(admin, 2)
        played = load_trace(trace, 20)
        play_trace(played, cluster.lane, telling, interrupts, shown.append, **SETTINGS)
    (report,) = shown
    assert (report["requests"], report["errors"]) == (20, 0)
    assert report["interrupted"]
    assert report["evicted_objects"] is None


def test_while_it_shows_the_report(cluster: Cluster, admin: Admin, trace: Path) -> None:
    shown: list[dict[str, Any]] = []
    interrupts = Interrupts()

    def show(report: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        shown.append(report)

    with interrupts.catching():
        play_trace(load_trace(trace, 20), cluster.lane, admin, interrupts, show, **SETTINGS)
    (report,) = shown
    assert report["requests"] == 20
    assert not report["interrupted"]


# ---- the clients ---------------------------------------------------------------------------------


def job_for(cluster: Cluster, trace: Trace) -> Job:
    return Job(
        master=cluster.lane,
        namespace=f"fleet-{trace.name}",
        fingerprint="",
        trace=trace,
        block_bytes=4096,
        replicas=1,
        deadline_s=10.0,
        transports=("shm", "tcp"),
    )


def test_clients_that_were_told_to_end_at_the_same_time(cluster: Cluster, trace: Path) -> None:
    """As a service manager does it: to all processes of a service."""
    loaded = load_trace(trace)
    with Fleet(job_for(cluster, loaded), 2) as fleet:
        fleet.start()
        told: list[int] = []

        def tell(_: int) -> None:
            if not told:
                told.extend(children_of(os.getpid(), WORKER))
                for pid in told:
                    os.kill(pid, signal.SIGTERM)
                wait_until(lambda: all(map(has_ended, told)), what="the clients' end")

        outcome = fleet.play(50.0, tell, lambda: bool(told))
    assert outcome.interrupted
    assert outcome.unheard_clients == 2


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_client_that_looks_for_work_while_it_is_taken_back_finds_the_end(
    cluster: Cluster, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet(job_for(cluster, load_trace(trace)), 1) as fleet:
        fleet.start()
        tickets_fd, stdout = fleet._tickets_out, fleet._workers[0].stdout
        taken_back: list[int] = []

        def read(fd: int, size_bytes: int) -> bytes:
            """Until the client has done what it found, and has told so: it looks for more then."""
            if fd == tickets_fd:
                taken_back.append(fd)
                wait_until(lambda: select.select([stdout], [], [], 0)[0], what="the client")
            return os.read(fd, size_bytes)

        patched = type("os", (), {**vars(os), "read": staticmethod(read)})
        monkeypatch.setattr(fleet_module, "os", patched)
        outcome = fleet.play(1e-3, lambda _: None, lambda: True)
    assert taken_back
    assert outcome.interrupted
    assert (outcome.unheard_clients, outcome.tally.errors) == (0, 0)
