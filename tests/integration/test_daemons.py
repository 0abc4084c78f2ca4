"""Daemon processes as the command and the tests start them, with daemons that misbehave."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, InvalidArgument, ResourceUnavailable, Unavailable
from cenote.cli.daemons import Daemon, DaemonSpec, clean_environment, stop_all
from cenote.cli.interrupts import Interrupts
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

READY = "print('ready lane=tcp://127.0.0.1:1 pid=1', flush=True)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WAIT = "import signal; signal.pause()"

MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeDaemon]:
    """Makes a daemon of lines of Python."""
    made: list[Daemon] = []

    def make_one(*lines: str, name: str = "fake") -> Daemon:
        (tmp_path / f"{name}_module.py").write_text(textwrap.dedent("\n".join(lines)))
        environment = clean_environment() | {"PYTHONPATH": str(tmp_path)}
        spec = DaemonSpec(name, f"{name}_module", {"flag": 1, "none": None})
        daemon = Daemon(spec, tmp_path, environment=environment)
        made.append(daemon)
        return daemon

    yield make_one
    for daemon in made:
        daemon.kill()


def test_it_is_ready_when_it_says_so(make: MakeDaemon) -> None:
    daemon = make("import sys; assert sys.argv[1:] == ['--flag', '1']", "print('hm')", READY, WAIT)
    daemon.start()
    assert daemon.wait_ready()["lane"] == "tcp://127.0.0.1:1"
    assert daemon.is_running
    assert daemon.stop() == -signal.SIGTERM
    assert daemon.exit_code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "kind"), [(1, CenoteError), (2, InvalidArgument), (3, ResourceUnavailable)]
)
def test_one_that_ends_early_says_why(make: MakeDaemon, code: int, kind: type[CenoteError]) -> None:
    daemon = make(f"import sys; print('no memory', file=sys.stderr); sys.exit({code})")
    daemon.start()
    with pytest.raises(kind, match="no memory"):
        daemon.wait_ready()


def test_one_that_is_never_ready_is_not_waited_for_long(make: MakeDaemon) -> None:
    daemon = make(WAIT)
    daemon.start()
    with pytest.raises(Unavailable, match="not ready"):
        daemon.wait_ready(timeout_s=0.2)


def test_a_restart_waits_for_the_new_ready_line(make: MakeDaemon, tmp_path: Path) -> None:
    daemon = make(READY, WAIT)
    daemon.start()
    daemon.wait_ready()
    daemon.kill()
    (tmp_path / "fake_module.py").write_text(WAIT)
    daemon.start()
    with pytest.raises(Unavailable):
        daemon.wait_ready(timeout_s=0.3)


def test_one_that_does_not_listen_is_killed_in_time(make: MakeDaemon) -> None:
    daemons = [make(DEAF, READY, WAIT, name=name) for name in ("one", "two")]
    for daemon in daemons:
        daemon.start()
        daemon.wait_ready()
    with ends_within(0.2, late_s=1.0):
        stop_all(daemons, time.monotonic() + 0.2)
    assert [daemon.exit_code for daemon in daemons] == [-signal.SIGKILL] * 2


def test_a_second_signal_does_not_wait(make: MakeDaemon) -> None:
    daemon = make(DEAF, READY, WAIT)
    daemon.start()
    daemon.wait_ready()
    interrupts = Interrupts()
    with interrupts.catching():
        interrupts.take()
        os.kill(os.getpid(), signal.SIGINT)
        with ends_within(5.0):
            stop_all([daemon], time.monotonic() + 30, interrupts)
    assert daemon.exit_code == -signal.SIGKILL


def test_ctrl_c_in_a_terminal_does_not_reach_it(make: MakeDaemon) -> None:
    daemon = make(READY, WAIT)
    daemon.start()
    daemon.wait_ready()
    assert os.getpgid(daemon.pid) == daemon.pid
    assert os.getpgid(daemon.pid) != os.getpgid(0)


def test_what_it_logs_is_kept_per_start(make: MakeDaemon) -> None:
    daemon = make("import os, sys; print('start', file=sys.stderr, flush=True)", READY, WAIT)
    for _ in range(2):
        daemon.start()
        daemon.wait_ready()
        wait_until(lambda: daemon.log_text() == "start\n", what="the log of this start")
        daemon.kill()
    assert daemon.log_path.read_text() == "start\n" * 2
