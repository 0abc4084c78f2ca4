"""The examples do what they say."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from cenote.cli.app import app
from cenote.cli.daemons import clean_environment
from cluster import Cluster, run_cenote
from etcd import etcd_program
from waiting import wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(stores=1) as cluster:
        cluster.wait_alive(1)
        monkeypatch.setenv("CENOTE_MASTER", cluster.lane)
        for _ in range(2):  # the second time everything is there already
            runpy.run_path(str(EXAMPLES / "quickstart.py"))
            assert capsys.readouterr().out == "3 of 4 blocks came from the pool, equal: True\n"


def test_the_python_in_the_readme() -> None:
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with Cluster(stores=1) as cluster:
        cluster.wait_alive(1)
        found: dict[str, object] = {}
        for code in codes:  # each goes on with what those before it made
            exec(code.replace("127.0.0.1:5110", cluster.lane), found)
        assert found["hit"] == 3
        assert np.array_equal(np.asarray(found["buffers"]), np.asarray(found["blocks"]))
        assert found["sizes"] == [64 << 10] * 3
        assert found["first"] == np.asarray(found["blocks"])[0].tobytes()


def test_the_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^ *cenote ([a-z]+)", text, re.MULTILINE))
    for row in re.findall(r"^\| `cenote (.*?) \|", text, re.MULTILINE):
        named |= set(re.findall(r"[a-z-]+", row.replace("TRACE.jsonl", "")))
    callbacks = [command.callback for command in app.registered_commands]
    known = {callback.__name__ for callback in callbacks if callback is not None}
    for group in app.registered_groups:
        known.add(str(group.name))
        commands = group.typer_instance.registered_commands  # type: ignore[union-attr]
        known |= {str(one.name or getattr(one.callback, "__name__", "")) for one in commands}
    assert named == known


def wait_for_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        if text.strip() == line:
            return
    raise AssertionError(f"it ended with {process.wait()}")


def asked_of_prometheus(port: int, query: str) -> list[float]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={query}"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
        return [float(row["value"][1]) for row in json.load(reply)["data"]["result"]]
    return []


@pytest.mark.timeout(240)
def test_a_pool_with_etcd_without_containers(tmp_path: Path) -> None:
    """As the README has it: two nodes, two masters, tokens, and a Prometheus that shows them."""
    # Below those that the kernel gives to whoever asks for any.
    port = next(base for base in random.sample(range(15_000, 32_000, 50), 100) if all_free(base))
    directory = tmp_path / "pool"
    programs = [Path(sys.executable).parent, Path(etcd_program()).parent]
    environment = clean_environment() | {"PORT": str(port), "DRAM": "32MiB"}
    environment["PATH"] = os.pathsep.join([*map(str, programs[::-1]), environment["PATH"]])
    script = [str(EXAMPLES / "pool_with_etcd.sh"), str(directory)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, env=environment) as process:
        try:
            wait_for_line(process, b"ready")
            environment["CENOTE_MASTER"] = f"etcd://127.0.0.1:{port + 30}/cenote"
            stranger = run_cenote("status", environment=environment)
            assert stranger.returncode == 1
            assert b"token" in stranger.stderr
            environment["CENOTE_CLIENT_TOKEN_FILE"] = f"{directory}/auth/admin.token"
            put = run_cenote(
                "put", "greeting", "-", "--replicas", "2", stdin=b"hello", environment=environment
            )
            assert put.returncode == 0, put.stderr
            assert run_cenote("get", "greeting", environment=environment).stdout == b"hello"
            for each in (port + 2, port + 12, port + 7, port + 17):
                with urllib.request.urlopen(f"http://127.0.0.1:{each}/metrics", timeout=10) as r:
                    assert b"cenote_build_info" in r.read()
            if shutil.which("prometheus"):
                wait_until(
                    lambda: asked_of_prometheus(port + 40, "max(cenote_pool_objects)") == [1.0],
                    60.0,
                    what="Prometheus to show the object",
                )
                up = asked_of_prometheus(port + 40, "sum(up)")
                assert up == [5.0]  # etcd's own series, too
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    for each in (port, port + 5, port + 30):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", each), 5).close()


def all_free(base: int) -> bool:
    """The ports that the script takes."""
    with contextlib.ExitStack() as held:
        try:
            for offset in (0, 1, 2, 5, 6, 7, 10, 11, 12, 15, 16, 17, 30, 31, 40):
                sock = held.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", base + offset))
        except OSError:
            return False
    return True
