"""Run seeds of the journal's simulator: `python tests/sim/run_journal.py --seed 7`, or
`--seeds 0:10000 --minutes 5`. `--bug NAME`: with a bug on purpose (see journal_mutations.py)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sim.journal_mutations import mutated
from sim.journal_world import JournalReport, simulate_journal

FAILURES_MAX = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new seed after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--lines", type=int, default=60, help="of the trace of a failure")
    parser.add_argument("--bug", default="")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return tell(run_one(given.seed, given.bug), given.lines)
    first, _, end = given.seeds.partition(":")
    until_s = time.monotonic() + given.minutes * 60
    began_s = time.monotonic()
    done = failed = 0
    with ProcessPoolExecutor(given.jobs) as pool:
        waiting = []
        for seed in range(int(first), int(end or int(first) + 1)):
            waiting.append(pool.submit(run_one, seed, given.bug))
            if len(waiting) >= 2 * given.jobs:
                done += 1
                failed += tell(waiting.pop(0).result(), given.lines, quiet=True)
            if time.monotonic() > until_s or failed >= FAILURES_MAX:
                break
        for future in waiting:
            done += 1
            failed += tell(future.result(), given.lines, quiet=True)
    print(f"{done} seeds, {failed} failed, {time.monotonic() - began_s:.1f} s")
    return bool(failed)


def run_one(seed: int, bug: str) -> JournalReport:
    logging.disable(logging.CRITICAL)
    with mutated(bug) if bug else contextlib.nullcontext():
        return simulate_journal(seed)


def tell(report: JournalReport, lines: int, *, quiet: bool = False) -> bool:
    if report.failure or not quiet:
        print("\n".join(report.trace[-lines:]))
        print(f"seed {report.seed}: {report.counts}: {report.failure or 'clean'}", flush=True)
    return bool(report.failure)


if __name__ == "__main__":
    sys.exit(main())
