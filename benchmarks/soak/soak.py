"""Hours of random work on a pool whose processes are killed, stopped and begun anew all the time.

    python benchmarks/soak/soak.py --minutes 60 --seed 1

A master (`file:`; with `--etcd-members 3` two, and their etcd), three store daemons, four clients
over shared memory and TCP, which put, get, view, pin, remove and replace objects of 64 B to 4 MiB
with two replicas and check every byte.
Faults come about every five seconds, most of them in the middle of a client's call; now and then
there is a quiet time, after which all that was acknowledged and pinned must be there, and nothing
that was removed. Ends with a table, DIR/report.json, and exit code 1 where a rule was broken; see
docs/RELIABILITY.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from board import Board, write_line
from faults import Chaos
from processes import Pool
from report import Outcome, print_report
from watch import Watch

from cenote.cli.scratch import MEMORY_DIRECTORY, scratch_directory

MIB = 1 << 20
STORES = 3
DEADLINE_S = 5.0
LOCATION_TTL_S = 10.0  # the master's default
CLIENTS: list[dict[str, Any]] = [
    {"transports": ["shm", "tcp"], "min_replicas": 2},
    {"transports": ["tcp"], "min_replicas": 1},
    {"transports": ["shm"], "min_replicas": 1},
    {"transports": ["shm", "tcp"], "min_replicas": 1, "verify": "checksum"},
]
SPACE_BACK_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--rate", type=float, default=8.0, help="calls a second and client")
    parser.add_argument(
        "--etcd-members",
        type=int,
        default=0,
        help="keep the metadata in an etcd of so many members (3), which are disturbed, too",
    )
    parser.add_argument("--masters", type=int, default=None, help="default: 2 with etcd, else 1")
    parser.add_argument("--dram-mib", type=int, default=256, help="of each of the three stores")
    parser.add_argument(
        "--dir", type=Path, default=None, help="logs and report; default: a new one"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if arguments.seed is None else arguments.seed
    # Unix socket paths are limited to 107 bytes, so what runs lies in a short directory.
    work = Path(tempfile.mkdtemp(prefix="cenote-soak-"))
    with scratch_directory(MEMORY_DIRECTORY) as memory:
        outcome = run(arguments, seed, work, memory)
    passed = print_report(outcome)
    (work / "report.json").write_text(json.dumps(outcome.as_dict(), indent=1))
    if arguments.dir is not None:
        shutil.copytree(work, arguments.dir, dirs_exist_ok=True, ignore=_no_sockets)
        shutil.rmtree(work)
        work = arguments.dir
    print(f"report.json, logs, violations, errors: {work}")
    return 0 if passed else 1


def _no_sockets(directory: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not os.path.isfile(os.path.join(directory, name))
        and not os.path.isdir(os.path.join(directory, name))
    ]


def run(arguments: argparse.Namespace, seed: int, work: Path, memory: Path) -> Outcome:
    board = Board(work / "board", len(CLIENTS))
    clients = [{"deadline_s": DEADLINE_S, "replicas": 2, **client} for client in CLIENTS]
    options = {
        "clients": clients,
        "stores": STORES,
        "etcd_members": arguments.etcd_members,
        "masters": arguments.masters or (2 if arguments.etcd_members else 1),
        "dram_bytes": arguments.dram_mib * MIB,
        "keys": 400,
        "pinned_keys": 100,
        "calls_per_s": arguments.rate,
        "location_ttl_s": LOCATION_TTL_S,
    }
    pool = Pool(work, memory, seed, options)
    run_s = arguments.minutes * 60
    print(f"soak: seed {seed}, {arguments.minutes:g} minutes, in {work}", flush=True)

    def say(text: str) -> None:
        write_line(work / "events", text)

    # Ctrl-C and SIGTERM end it with a report of what was seen until then.
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: asked.append(got))
    before_s = cpu_s()
    began_s = time.monotonic()
    pool.start()
    watch = Watch(pool, began_s, max(2.0, run_s / 400))
    chaos = Chaos(pool, board, random.Random(seed), began_s, run_s, say)
    quiet_every_s = min(240.0, max(40.0, run_s / 5))
    quiet_s = began_s + quiet_every_s
    try:
        while not asked and time.monotonic() < began_s + run_s:
            watch.step()
            if time.monotonic() >= quiet_s:
                chaos.quiet(watch.step)
                quiet_s = time.monotonic() + quiet_every_s
            chaos.step()
            time.sleep(0.02)
        chaos.quiet(watch.step)
        ended_s = time.monotonic()
        board.give("stop", 1)
        pool.wait_for(lambda: not any(p.running for p in pool.of("client")), 15.0)
        held = held_bytes(pool)
        last = pool.status()
    finally:
        codes = pool.end(board)
    return Outcome(
        seed=seed,
        ran_s=ended_s - began_s,
        cpu_share=(cpu_s() - before_s) / (ended_s - began_s),
        totals=board.totals(),
        late_ms_max=max(board.get(number, "late_ms_max") for number in range(board.clients)),
        chaos=chaos,
        watch=watch,
        pool=pool,
        held=held,
        lost_objects=int(last.lost_objects) if last is not None else -1,
        damaged_replicas=int(last.damaged_replicas) if last is not None else -1,
        exit_codes=codes,
        directory=work,
    )


def cpu_s() -> float:
    """Of this process and all that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def held_bytes(pool: Pool) -> dict[str, int]:
    """What is granted, leased, condemned or in quarantine once all clients are gone."""
    held: dict[str, int] = {}

    def all_free() -> bool:
        status = pool.status()
        names = ("granted_bytes", "leased_bytes", "condemned_bytes", "quarantined_bytes")
        held.update({n: int(getattr(status, n)) if status is not None else -1 for n in names})
        return not any(held.values())

    pool.wait_for(all_free, SPACE_BACK_TIMEOUT_S)
    return held


if __name__ == "__main__":
    sys.exit(main())
