"""Where the engine's blocks lie: checked in vLLM's environment, where torch is."""

from __future__ import annotations

import subprocess

import pytest

from with_vllm.conftest import HERE
from with_vllm.engines import vllm_python


@pytest.mark.parametrize("check", ["blocks_check.py", "device_check.py"])
def test_blocks_are_copied_right_in_every_layout_and_in_order_on_gpus(check: str) -> None:
    ended = subprocess.run(
        [str(vllm_python()), str(HERE / check)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("checked")
