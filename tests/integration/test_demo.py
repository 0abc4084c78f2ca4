"""`cenote demo`, as `make demo` runs it: a result, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from cenote.cli.daemons import clean_environment
from cenote.cli.scratch import MEMORY_DIRECTORY
from cluster import run_cenote, start_cenote
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MEMORY_NAME = re.compile(rb"--dram-dir\0([^\0]+)")


def daemons_of(directory: Path) -> dict[int, bytes]:
    """Command lines that name the directory, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            line = path.read_bytes()
            if os.fsencode(directory) in line:
                found[int(path.parent.name)] = line
    return found


def test_it_plays_the_sample_and_leaves_nothing(tmp_path: Path) -> None:
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    result = run_cenote("demo", environment=environment, timeout_s=100)
    out = result.stdout.decode()
    assert result.returncode == 0, result.stderr.decode()
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "400 requests" in rows["trace"]
    assert re.search(r"[1-9]\d*\.\d % of blocks", rows["hit rate"])
    assert rows["errors"].split() == ["errors", "0"]
    assert rows["wrong bytes"].split() == ["wrong", "bytes", "0"]
    assert "2 of 2 alive" in rows["nodes"]
    assert "\x1b" not in out
    assert not list(tmp_path.iterdir())
    assert not daemons_of(tmp_path)


@pytest.mark.parametrize("daemons", [1, 3])
def test_ctrl_c_ends_all_of_it(tmp_path: Path, daemons: int) -> None:
    """`daemons`: how many are running when it comes."""
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    with start_cenote("demo", environment=environment) as process:
        wait_until(lambda: len(daemons_of(tmp_path)) >= daemons, what="the demo's daemons")
        memory = {
            Path(os.fsdecode(match[1]))
            for line in daemons_of(tmp_path).values()
            if (match := MEMORY_NAME.search(line))
        }
        with ends_within(2.5):
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=10)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert all(path.parent == MEMORY_DIRECTORY for path in memory)
    assert not any(path.exists() for path in memory)
    wait_until(lambda: not daemons_of(tmp_path), what="the daemons to end")
    assert not list(tmp_path.iterdir())
