"""What the daemons' command lines have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cenote.runtime import program as module
from cenote.runtime.config import option
from cenote.runtime.program import Daemon, Program

SECRET = "hunter2-on-a-command-line"


class Made(Exception):
    """It came as far as making the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    log_level: str = "info"
    log_json: bool = False
    password: str = field(default="", repr=False, metadata=option(help="a secret"))


def make(config: Config, version: str) -> Daemon:
    raise Made(config.password)


@pytest.mark.parametrize("on_command_line", [True, False])
def test_a_secret_on_the_command_line_is_warned_of_and_taken(
    on_command_line: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "setup_logging", lambda **_: None)  # of the whole process
    monkeypatch.setenv("CENOTE_TESTED_PASSWORD", SECRET)
    program = Program("cenote-tested", "", Config, "CENOTE_TESTED_", "", make)
    with pytest.raises(Made, match=SECRET), caplog.at_level("WARNING", logger="cenote.program"):
        program.main(["--password", SECRET] if on_command_line else ["--log-level", "info"])
    text = "\n".join(str(vars(record)) for record in caplog.records)
    assert ("--password" in text) == on_command_line
    assert ("CENOTE_TESTED_PASSWORD" in text) == on_command_line
    assert SECRET not in text
