"""What is said of a daemon that ended by itself."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TextIO

import pytest

from cenote.cli.daemons import Daemon, DaemonSpec
from cenote.runtime.log import get_logger, setup_logging


def test_the_last_warning_or_error_is_found_among_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    daemon = Daemon(DaemonSpec("node0", "nothing", {}), tmp_path)
    with (tmp_path / "node0.log").open("w") as log:
        setup_logging(level="info", stream=log)
        logger = get_logger("cenote.test")
        logger.info("ready", name="node0")
        assert daemon_says(daemon, log) == ""
        logger.warning("the disk is slow")
        assert daemon_says(daemon, log) == "the disk is slow"
        logger.error("failed: no memory", reason="RESOURCE_UNAVAILABLE")
        logger.info("stopping")
        log.write("Traceback (most recent call last):\n")
        assert daemon_says(daemon, log) == "no memory"


def daemon_says(daemon: Daemon, log: TextIO) -> str:
    log.flush()
    return daemon.last_trouble()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "ended with exit code 3"),
        (-int(signal.SIGSEGV), "was killed by SIGSEGV"),
        (-int(signal.SIGKILL), "was killed by SIGKILL (by somebody, or by the kernel"),
        (-50, "was killed by signal 50"),
    ],
)
def test_how_it_ended_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    monkeypatch.setattr(Daemon, "exit_code", code)
    assert Daemon(DaemonSpec("node0", "nothing", {}), tmp_path).how_it_ended().startswith(said)
