"""Models for the tests with real vLLM, which skip where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from with_vllm.engines import vllm_python

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_python() is not None:
        return
    skip = pytest.mark.skip(reason="no vLLM: `make test-vllm` installs it, and runs these tests")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models of `models.py`."""
    directory = tmp_path_factory.mktemp("models")
    python = vllm_python()
    assert python is not None
    subprocess.run(
        [python, str(HERE / "models.py"), str(directory), "tiny", "other", "window", "state"],
        check=True,
        timeout=600,
        capture_output=True,
    )
    return directory
