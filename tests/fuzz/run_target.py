"""Fuzz one target: `run_target.py TARGET SECONDS [CORPUS]`; exit code 0 where nothing was found.

In a process of its own: libFuzzer ends the process it runs in, and atheris instruments what is
imported under it. What is found is printed with the input, and the input is kept in CORPUS.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

RSS_MB_MAX = 4096
"""Of which atheris itself takes 1 GB for a million inputs."""
INPUT_S_MAX = 60
INPUT_BYTES_MAX = 16 << 10

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["cenote"]):
    from fuzz.targets import TARGETS


def main() -> None:
    name, seconds, corpus = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    target = TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        target.check(data)
        (corpus / f"seed-{number}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-rss_limit_mb={RSS_MB_MAX}",
        f"-timeout={INPUT_S_MAX}",
        f"-artifact_prefix={corpus}/found-",
        "-print_final_stats=1",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], target.check)
    atheris.Fuzz()


main()
