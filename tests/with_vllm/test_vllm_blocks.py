"""What is checked in vLLM's environment, where torch is, without an engine."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from with_vllm.conftest import HERE
from with_vllm.engines import vllm_python


@pytest.mark.parametrize("check", ["blocks_check.py", "device_check.py", "connector_check.py"])
def test_parts_of_the_connector_that_need_vllm_or_torch(check: str) -> None:
    ended = subprocess.run(
        [str(vllm_python()), str(HERE / check)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("checked")


def test_this_version_of_vllm_is_as_it_was_recorded() -> None:
    """See `interface.py`: the connector is held against the record, here and elsewhere."""
    ended = subprocess.run(
        [str(vllm_python()), str(HERE / "interface.py")],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(ended.stdout)
    records = HERE.parent / "unit" / "connectors" / "interfaces"
    recorded = json.loads((records / f"vllm-{found['version']}.json").read_text())
    assert found == recorded
