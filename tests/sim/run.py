"""Run seeds of the simulator: `python tests/sim/run.py --seed 7`, `--seeds 0:10000 --minutes 5`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sim.contents import DEDUP
from sim.faults import (
    ALL_FAULTS,
    WITH_HIDDEN_SOCKETS,
    WITH_METADATA_LOSS,
    WITH_POWER,
    WITH_QUOTAS,
)
from sim.takeover_faults import TAKEOVER
from sim.tiers import TIERS
from sim.world import Options, Report, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new seed after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=1 << 40, help="events until the faults end")
    parser.add_argument("--faults", default=",".join(sorted(ALL_FAULTS)))
    parser.add_argument("--without", default="", help="kinds of faults to leave out")
    parser.add_argument("--metadata-loss", action="store_true", help="of all of it, at times")
    parser.add_argument("--hidden-sockets", action="store_true", help="TCP instead, at times")
    parser.add_argument("--quotas", action="store_true", help="that change at times")
    parser.add_argument("--dedup", action="store_true", help="the same bytes under several keys")
    parser.add_argument("--power", action="store_true", help="the journal's end is lost at times")
    parser.add_argument("--lines", type=int, default=60, help="of the trace of a failure")
    parser.add_argument("--no-shrink", action="store_true", help="don't look for fewer faults")
    parser.add_argument("--tiers", action="store_true", help="SSDs, and objects that move")
    parser.add_argument("--takeover", action="store_true", help="several masters share metadata")
    given = parser.parse_args(arguments)
    faults = frozenset(given.faults.split(",")) - frozenset(given.without.split(",")) - {""}
    if given.power:
        faults |= WITH_POWER - ALL_FAULTS
    if given.metadata_loss:
        faults |= WITH_METADATA_LOSS - ALL_FAULTS
    if given.hidden_sockets:
        faults |= WITH_HIDDEN_SOCKETS - ALL_FAULTS
    if given.quotas:
        faults |= WITH_QUOTAS - ALL_FAULTS
    if given.tiers:
        faults |= {TIERS}
    if given.dedup:
        faults |= {DEDUP}
    if given.takeover:
        faults |= {TAKEOVER}
    if given.seed is not None:
        report = simulate(Options(given.seed, given.steps, faults))
        print(told(report, given.lines))
        return bool(report.failure)
    first, _, end = given.seeds.partition(":")
    options = (
        Options(seed, given.steps, faults) for seed in range(int(first), int(end or int(first) + 1))
    )
    return run_many(options, given)


def told(report: Report, lines: int) -> str:
    head = f"seed {report.seed}: {report.events} events, {report.virtual_s:.1f} s, {report.counts}"
    if not report.failure:
        return f"{head}: clean ({report.fingerprint & 0xFFFFFFFF:08x})"
    return "\n".join(
        [
            *(report.trace[-lines:] if lines else ()),
            "",
            head,
            report.failure,
            f"again: {report.reproduction}",
        ]
    )


def run_many(options: Iterator[Options], given: argparse.Namespace) -> int:
    jobs = given.jobs
    until = time.monotonic() + given.minutes * 60
    began = time.monotonic()
    done = failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        waiting = []
        for option in options:
            waiting.append(pool.submit(simulate, option))
            if len(waiting) < 2 * jobs:
                continue
            report = waiting.pop(0).result()
            done += 1
            failed += tell(report, given)
            if time.monotonic() > until or failed >= 20:
                break
        for future in waiting:
            report = future.result()
            done += 1
            failed += tell(report, given)
    print(f"{done} seeds, {failed} failed, {time.monotonic() - began:.1f} s")
    return bool(failed)


def tell(report: Report, given: argparse.Namespace) -> bool:
    if report.failure:
        print(told(report, given.lines), flush=True)
        if not given.no_shrink:
            print(shrunk(report), flush=True)
    return bool(report.failure)


def shrunk(report: Report) -> str:
    """The fewest kinds of faults with which the seed still fails: the command for it."""
    kinds = report.faults
    for kind in sorted(kinds & ALL_FAULTS):
        fewer = dataclasses.replace(Options(report.seed), faults=kinds - {kind})
        if simulate(fewer).failure:
            kinds = fewer.faults
    named = ",".join(sorted(kinds & ALL_FAULTS)) or "none"
    return f"with fewer faults: {report.reproduction} --faults {named}"


if __name__ == "__main__":
    sys.exit(main())
