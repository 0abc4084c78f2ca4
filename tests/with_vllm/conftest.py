"""Models for the tests with real vLLM, which skip where there is none."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from with_vllm.engines import vllm_python

HERE = Path(__file__).parent
BUDGET_S = float(os.environ.get("CENOTE_TEST_VLLM_BUDGET_S", "inf"))
"""No test is begun later than that: a slow machine runs fewer of them, and says so."""
BEGAN_S = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_python() is not None:
        return
    skip = pytest.mark.skip(reason="no vLLM: `make test-vllm` installs it, and runs these tests")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if HERE in item.path.parents and time.monotonic() - BEGAN_S > BUDGET_S:
        pytest.skip(f"the {BUDGET_S:.0f} s of this part are used up: make test-vllm runs all")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models of `models.py`."""
    directory = tmp_path_factory.mktemp("models")
    python = vllm_python()
    assert python is not None
    names = ["tiny", "other", "window", "state", "latent", "adapter-a", "adapter-b"]
    subprocess.run(
        [python, str(HERE / "models.py"), str(directory), *names],
        check=True,
        timeout=600,
        capture_output=True,
    )
    return directory
