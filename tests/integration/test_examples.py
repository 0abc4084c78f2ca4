"""The examples do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from cenote.cli.app import app
from cluster import Cluster

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
