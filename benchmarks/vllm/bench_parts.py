"""What the benchmarks with real vLLM share."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Final

from with_vllm.engines import vllm_python

__all__ = ["HERE", "fresh_prompts", "make_model"]

HERE: Final = Path(__file__).resolve().parent
VOCABULARY: Final = 500


def fresh_prompts(seed: str, count: int, tokens: int) -> list[list[int]]:
    """Prompts that begin with different blocks; the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def make_model(name: str, directory: Path) -> Path:
    """A model of tests/with_vllm/models.py. Raises SystemExit where there is no vLLM."""
    python = vllm_python()
    if python is None:
        raise SystemExit("set CENOTE_TEST_VLLM_PYTHON: make test-vllm makes .venv-vllm/bin/python")
    program = HERE.parents[1] / "tests" / "with_vllm" / "models.py"
    subprocess.run(
        [python, str(program), str(directory), name],
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    return directory / name
