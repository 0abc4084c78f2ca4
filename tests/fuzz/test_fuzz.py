"""Each fuzz target for some seconds; `make fuzz MINUTES=10` does it for longer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.targets import TARGETS, close

SECONDS = int(os.environ.get("CENOTE_FUZZ_S") or 4)
RUNNER = Path(__file__).with_name("run_target.py")


@pytest.fixture
def closed() -> Iterator[None]:
    yield
    close()


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_to_begin_with(name: str) -> None:
    """They are what a target takes in without atheris, too."""
    target = TARGETS[name]
    for data in [b"", *target.seeds()]:
        target.check(data)


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("no atheris: it has wheels for Linux on x86-64, CPython 3.11 to 3.13")
    ended = subprocess.run(
        [sys.executable, RUNNER, name, str(SECONDS), tmp_path / "corpus"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS + 80,
    )
    tail = "\n".join(ended.stdout.splitlines()[-40:])
    assert ended.returncode == 0, tail
    runs = [line for line in tail.splitlines() if "number_of_executed_units" in line]
    assert runs, f"it fuzzed nothing:\n{tail}"
    assert int(runs[0].split()[-1]) > 10, f"it fuzzed nothing:\n{tail}"
