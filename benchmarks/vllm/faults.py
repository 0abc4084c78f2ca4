"""What a request waits for when the pool dies under a real vLLM engine, against the limits for it.

    PYTHONPATH=tests CENOTE_TEST_VLLM_PYTHON=.venv-vllm/bin/python \\
        .venv/bin/python benchmarks/vllm/faults.py [--rounds 5] [--model medium] [--policies fail]

An engine over two owners of blocks, by TCP, so that an owner's bytes die with it. Requests are
served one after the other, and each is timed; `plain` is the same engine where the pool has nothing
of what is asked. Cases:

    before      the owners are killed (SIGKILL), then the prompts are asked for
    during      they are killed after a part of the time that the prompts take from the pool, which
                differs from round to round: while one is looked up, brought over, loaded; in every
                other round one after the other, so that two requests meet it
    hung        they are stopped (SIGSTOP) after such a time: nothing tells that they are gone
    stopped     the master is stopped (SIGSTOP): lookups get no answer

Limits: a request takes less than twice its time without pool when owners are killed, and at most a
second more when the master is stopped; its tokens are the same; it is scheduled anew once at most.

`--pools cenote,mooncake` puts the peer beside ours, where its wheel is in vLLM's environment.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench_parts import HERE, fresh_prompts, make_model
from fault_pools import POOLS, FaultyPool, open_pool

from waiting import wait_until
from with_vllm.engines import Engine, vllm_python

PROMPT_TOKENS: Final = 15 * 128 + 4
CACHED_TOKENS: Final = 15 * 128
OUTPUT_TOKENS: Final = 8
KILLED_RATIO_MAX: Final = 2.0
STOPPED_EXTRA_MAX_S: Final = 1.0
LOADS_MAX: Final = 2
"""Of one request: the first one, and one more where it was scheduled anew."""
FILL_S: Final = 180
Result = dict[str, Any]


@dataclass
class Case:
    """What came of a case, of each of its requests."""

    times_s: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    empty: int = 0
    wrong: int = 0


class Faults:
    """One engine, its pool, and what was measured of them."""

    def __init__(self, engine: Engine, pool: FaultyPool, options: argparse.Namespace) -> None:
        self.engine = engine
        self.pool = pool
        self.prompts = fresh_prompts("asked", 3, PROMPT_TOKENS)
        self.timeline: bool = options.timeline
        """Whether to print what happened when, where a request took long."""
        self.tokens: list[list[int]] = []
        self.plain_s: list[float] = []
        self.cases: dict[str, Case] = {}
        self.fetches: dict[str, float] = {}
        self.from_pool_s = 0.0

    def forget(self) -> None:
        """A connector that holds blocks until they are saved gives them back in a later step: a
        small request makes one."""

        def done() -> bool:
            self.engine.ask(do="settle", limit_s=1)
            self.engine.generate([[1, 2, 3]], max_tokens=1)
            return bool(self.engine.ask(do="reset")["done"])

        wait_until(done, 60, what="the engine to have no block in use")

    def ask(self, meanwhile: threading.Timer | None = None) -> Result:
        self.forget()
        if self.timeline:
            self.engine.ask(do="timeline")
        if meanwhile is not None:
            meanwhile.start()
        return self.engine.ask(do="measure", prompts=self.prompts, max_tokens=OUTPUT_TOKENS)

    def measure_plain(self, rounds: int) -> None:
        """Other prompts, which the pool has never seen: as long, and as dear."""
        for number in range(rounds):
            other = fresh_prompts(f"plain {number}", len(self.prompts), PROMPT_TOKENS)
            self.forget()
            found = self.engine.ask(do="measure", prompts=other, max_tokens=OUTPUT_TOKENS)
            self.plain_s += found["last_s"]

    def fill(self) -> None:
        """Until all of it comes from the pool."""

        def filled() -> bool:
            found = self.ask()
            self.from_pool_s = found["duration_s"] / len(self.prompts)
            if not self.tokens and all(found["tokens"]):
                self.tokens = found["tokens"]
            return bool(found["cached"] == [CACHED_TOKENS] * len(self.prompts))

        wait_until(filled, FILL_S, what="the prompts to come from the pool")
        self.fetches = {k: v for k, v in self.engine.metrics().items() if "cenote_fetches" in k}

    def served(self, case: str, meanwhile: threading.Timer | None = None) -> None:
        found = self.ask(meanwhile)
        self.tell_slow(case, found["last_s"])
        kept = self.cases.setdefault(case, Case())
        kept.times_s += found["last_s"]
        kept.loads += found["loads"]
        for tokens, right in zip(found["tokens"], self.tokens, strict=True):
            kept.empty += not tokens
            kept.wrong += bool(tokens) and tokens != right

    def tell_slow(self, case: str, times_s: list[float]) -> None:
        """What the connector counted where a request took long."""
        now = {k: v for k, v in self.engine.metrics().items() if "cenote_fetches" in k}
        if max(times_s) > 1.5 * min(self.plain_s):
            told = {
                name.rpartition(" ")[2]: count - self.fetches.get(name, 0)
                for name, count in now.items()
                if count > self.fetches.get(name, 0)
            }
            print(case, [round(1e3 * each) for each in times_s], told, flush=True)
            if self.timeline:
                self.print_timeline()
        self.fetches = now

    def print_timeline(self) -> None:
        seen: list[list[Any]] = self.engine.ask(do="timeline")["events"]
        events = sorted([(at_s, what) for at_s, what in [*seen, *self.pool.kills]])
        began_s = events[0][0] if events else 0.0
        for at_s, what in events:
            print(f"    {1e3 * (at_s - began_s):8.1f} ms  {what}")

    def killed_before(self) -> None:
        self.fill()
        self.pool.kill_owners()
        self.served("before")
        self.pool.revive()

    def hung(self, share: float) -> None:
        self.fill()
        stopper = threading.Timer(self.after_s(share), self.pool.hang_owners)
        self.served("hung", stopper)
        stopper.join()
        self.pool.revive()

    def after_s(self, share: float) -> float:
        return share * self.from_pool_s * len(self.prompts)

    def killed_during(self, share: float, together: bool) -> None:
        self.fill()
        killer = threading.Timer(self.after_s(share), self.pool.kill_owners, [together])
        self.served("during", killer)
        killer.join()
        self.pool.revive()

    def master_stopped(self) -> None:
        self.fill()
        self.pool.stop_master()
        self.served("stopped")
        self.served("stopped")
        self.pool.continue_master()

    # ---- what came of it ---------------------------------------------------------------------

    def report(self, pool: str, policy: str) -> bool:
        plain_s = statistics.median(self.plain_s)
        print(f"\n{pool}, policy {policy}: without pool {1e3 * plain_s:.0f} ms (worst", end=" ")
        print(f"{1e3 * max(self.plain_s):.0f}), from the pool {1e3 * self.from_pool_s:.0f} ms")
        print(
            "| case | requests | median ms | worst ms | worst by plain | loads, most | empty",
            end="",
        )
        print(" | other tokens | limit | |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        kept = True
        for name, case in self.cases.items():
            worst_s = max(case.times_s)
            if name == "stopped":
                limit, holds = "+ 1 s", worst_s <= plain_s + STOPPED_EXTRA_MAX_S
                told = f"+ {1e3 * (worst_s - plain_s):.0f} ms"
            else:
                limit, holds = "2 x", worst_s < KILLED_RATIO_MAX * plain_s
                told = f"{worst_s / plain_s:.2f} x"
            holds = holds and max(case.loads) <= LOADS_MAX and not case.empty and not case.wrong
            kept = kept and holds
            print(
                f"| {name} | {len(case.times_s)} | {1e3 * statistics.median(case.times_s):.0f}"
                f" | {1e3 * worst_s:.0f} | {told} | {max(case.loads)} | {case.empty}"
                f" | {case.wrong} | {limit} | {'holds' if holds else 'missed'} |",
                flush=True,
            )
        return kept


def run(kind: str, policy: str, options: argparse.Namespace, model: Path, scratch: Path) -> bool:
    peer_bin = Path(str(vllm_python())).parent
    with open_pool(kind, scratch / f"{kind}-{policy}", peer_bin, options.load_share) as pool:
        transfer = {**pool.transfer, "kv_load_failure_policy": policy}
        llm = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
        with Engine(
            model,
            transfer=transfer,
            llm=llm,
            program=HERE / "bench_engine.py",
            environment=pool.environment,
        ) as engine:
            faults = Faults(engine, pool, options)
            faults.fill()
            faults.measure_plain(options.rounds)
            rng = random.Random(options.seed)
            for number in range(options.rounds):
                for case in options.cases.split(","):
                    if case == "before":
                        faults.killed_before()
                    elif case == "during":
                        faults.killed_during(rng.random(), together=number % 2 == 0)
                    elif case == "hung":
                        faults.hung(rng.random())
                    else:
                        faults.master_stopped()
            return faults.report(kind, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="medium", help="of tests/with_vllm/models.py")
    parser.add_argument("--pools", default="cenote", help=f"of {', '.join(POOLS)}")
    parser.add_argument("--policies", default="fail,recompute")
    parser.add_argument("--cases", default="before,during,hung,stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load-share", type=float, help="our option load_share")
    parser.add_argument("--timeline", action="store_true", help="of rounds with slow requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = make_model(options.model, scratch)
        kept = [
            run(pool, policy, options, model, scratch)
            for pool in options.pools.split(",")
            for policy in options.policies.split(",")
        ]
    raise SystemExit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
