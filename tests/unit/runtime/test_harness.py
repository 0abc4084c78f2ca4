"""A real program per test: what a signal does can't be seen from inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cenote.api.errors import (
    ConfigError,
    InternalError,
    NotLeader,
    ResourceUnavailable,
)
from cenote.runtime.harness import exit_code_of, parse_ready_line, ready_line, run_daemon
from promptness import ends_within

PROGRAM = """
import asyncio, ctypes, sys, threading, time
from cenote.api.errors import ConfigError, ResourceUnavailable, Unavailable
from cenote.runtime.harness import run_daemon
from cenote.runtime.log import setup_logging

setup_logging()
mode = sys.argv[1]

def say(word):
    print(word, flush=True)

async def for_ever():
    await asyncio.get_running_loop().create_future()

async def start():
    if mode == "start-hangs":
        say("starting")
        await for_ever()
    if mode == "start-blocks":
        say("starting")
        threading.Event().wait(60)
    if mode == "start-ignores-cancel":
        say("starting")
        try:
            await for_ever()
        except asyncio.CancelledError:
            pass
    if mode == "start-fails":
        raise ResourceUnavailable("no memory", remedy="buy some")
    if mode == "start-misconfigured":
        raise ConfigError("bad flag")
    if mode == "start-has-a-bug":
        raise KeyError("bug")
    if mode == "unheard":
        sys.stdin.readline()
    return {"lane": "tcp://127.0.0.1:5111"}

async def stop():
    if mode != "unheard":
        say("stopping")
    if mode == "stop-hangs":
        await for_ever()
    if mode == "stop-fails":
        raise Unavailable("the master is gone")
    if mode == "gil-is-held":  # only a thread that needs no GIL can end this
        ctypes.PyDLL(None).sleep(60)

async def wait():
    if mode == "wait-returns":
        return
    if mode == "wait-fails":
        raise Unavailable("the master is gone")
    await for_ever()

sys.exit(run_daemon(start, stop, wait=None if mode == "no-wait" else wait))
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_program(mode: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_program
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("mode", ["plain", "no-wait"])
def test_a_signal_stops_a_ready_daemon(start: Start, mode: str, number: signal.Signals) -> None:
    process = start(mode)
    fields = parse_ready_line(first_line(process))
    assert fields == {"lane": "tcp://127.0.0.1:5111", "pid": str(process.pid)}
    process.send_signal(number)
    code, out, err = end(process)
    assert (code, out) == (0, "stopping\n")
    assert f"stopping signal={number.name}" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_came_while_it_was_paused_counts(
    start: Start, number: signal.Signals
) -> None:
    """Ctrl-Z, a signal, fg: the kernel may hand it to a thread that is not the main one."""
    for _ in range(5):
        process = start("plain")
        first_line(process)
        os.kill(process.pid, signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        assert end(process)[:2] == (0, "stopping\n")


@pytest.mark.parametrize("mode", ["start-hangs", "start-ignores-cancel"])
def test_a_signal_stops_a_starting_daemon(start: Start, mode: str) -> None:
    process = start(mode)
    assert first_line(process) == "starting"
    process.terminate()
    code, out, _ = end(process)
    assert (code, out) == (0, "stopping\n")


@pytest.mark.parametrize(
    ("mode", "code", "cause"),
    [
        ("start-blocks", 4, "in start"),
        ("stop-hangs", 4, "ended by force"),
        ("gil-is-held", 1, "in stop"),
    ],
)
def test_what_hangs_is_ended_within_two_seconds_and_named(
    start: Start, mode: str, code: int, cause: str
) -> None:
    process = start(mode)
    first_line(process)
    with ends_within(2.0, at_least_s=1.4, late_s=0.5):
        process.terminate()
        assert process.wait(timeout=20) == code
    assert cause in end(process)[2]


def test_a_second_signal_ends_the_program_at_once(start: Start) -> None:
    process = start("stop-hangs")
    first_line(process)
    process.send_signal(signal.SIGINT)
    assert first_line(process) == "stopping"
    with ends_within(1.9):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("start-fails", 3, "failed: no memory (buy some) reason=ResourceUnavailable"),
        ("start-misconfigured", 2, "failed: bad flag"),
        ("start-has-a-bug", 1, "KeyError: 'bug'"),
        ("wait-fails", 3, "failed: the master is gone"),
        ("wait-returns", 0, ""),
    ],
)
def test_a_daemon_that_ends_by_itself_stops_first(
    start: Start, mode: str, code: int, message: str
) -> None:
    process = start(mode)
    got, out, err = end(process)
    assert got == code
    assert out.endswith("stopping\n")
    assert message in err
    assert ("Traceback" in err) == (mode == "start-has-a-bug")


def test_a_stop_that_fails_shows_in_the_exit_code(start: Start) -> None:
    process = start("stop-fails")
    first_line(process)
    process.terminate()
    code, _, err = end(process)
    assert code == 3
    assert "stop failed: the master is gone" in err


def test_a_daemon_serves_though_nobody_reads_its_output(start: Start) -> None:
    process = start("unheard")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.flush()
    assert "can't print the readiness line" in process.stderr.readline()
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert "stopping" in process.stderr.read()


def test_the_readiness_line() -> None:
    line = ready_line({"lane": "unix:/run/a", "segments": 2})
    assert line == f"ready lane=unix:/run/a segments=2 pid={os.getpid()}"
    assert parse_ready_line(line + "\n") == {
        "lane": "unix:/run/a",
        "segments": "2",
        "pid": str(os.getpid()),
    }
    for other in ("", "hello", "ready or not", "already a=b"):
        assert parse_ready_line(other) is None
    with pytest.raises(ValueError, match="readiness line"):
        ready_line({"lane": "two words"})
    with pytest.raises(ValueError, match="readiness line"):
        ready_line({"a=b": "c"})


def test_exit_codes() -> None:
    assert exit_code_of(ConfigError("x")) == 2
    assert exit_code_of(ResourceUnavailable("x")) == 3
    assert exit_code_of(NotLeader("x")) == 3
    assert exit_code_of(InternalError("x")) == 1
    assert exit_code_of(KeyError("x")) == 1


def test_only_the_main_thread_can_run_a_daemon() -> None:
    import threading

    caught: list[BaseException] = []

    async def nothing() -> dict[str, object]:
        return {}

    async def stop() -> None:
        pass

    def run() -> None:
        try:
            run_daemon(nothing, stop)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
