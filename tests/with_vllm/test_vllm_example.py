"""The example does what it says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from with_vllm.conftest import HERE
from with_vllm.engines import ENVIRONMENT, free_port, vllm_python


@pytest.mark.slow_engine
def test_the_second_engine_has_what_the_first_one_computed(models: Path) -> None:
    python = vllm_python()
    assert python is not None
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    patient = {"CENOTE_VLLM_LOOKUP_DEADLINE_S": "5s", "CENOTE_VLLM_LOAD_DEADLINE_S": "10s"}
    ended = subprocess.run(
        [str(HERE.parents[1] / "examples" / "vllm" / "run.sh"), str(models / "tiny")],
        env={
            **os.environ, **ENVIRONMENT, **quiet, **patient,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "CENOTE_PORT": str(free_port()),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=1000,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = ended.stdout.split("== the second engine")
    begun, from_pool = (
        int(re.findall(r"(\d+) of them not computed", said)[0]) for said in (first, second)
    )
    assert begun == 0
    assert from_pool > 500
