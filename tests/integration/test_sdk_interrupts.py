"""Ctrl-C at any moment of a call leaves a client that works and closes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import Cluster

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).parent.parent / "interrupted_client.py"
SECONDS = 3.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_interrupts_do_no_harm(transport: str, rng: random.Random) -> None:
    with Cluster(stores=1, dram_bytes=64 << 20) as cluster:
        command = [sys.executable, str(PROGRAM), cluster.lane, transport, str(SECONDS)]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=cluster.environment,
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            until_s = time.monotonic() + SECONDS - 0.5
            while time.monotonic() < until_s:
                try:
                    program.wait(rng.uniform(0.01, 0.1))
                    break
                except subprocess.TimeoutExpired:
                    program.send_signal(signal.SIGINT)
            out, err = program.communicate(timeout=20)
        assert program.returncode == 0, err
        report = json.loads(out)
        assert report["interrupts"] > 10, report
        assert report["hits"] > 0, report
        assert report["close_s"] < 2.5, report
        assert report["threads"] == [], report
        with cluster.client() as client:
            assert client.put("after", b"x").stored
