"""What a request waits for when the pool dies under a real vLLM engine, against the limits for it.

    PYTHONPATH=tests CENOTE_TEST_VLLM_PYTHON=.venv-vllm/bin/python \\
        .venv/bin/python benchmarks/vllm/faults.py [--rounds 5] [--model medium] [--policies fail]

An engine over two store daemons, by TCP, so that a daemon's bytes die with it. Requests are served
one after the other, and each is timed; `plain` is the same engine where the pool has nothing of
what is asked. Cases:

    before      both daemons are killed (SIGKILL), then the prompts are asked for
    during      they are killed after a part of the time that a prompt takes from the pool, which
                differs from round to round: while it is looked up, brought over, loaded
    stopped     the master is stopped (SIGSTOP): lookups get no answer

Limits: a request takes less than twice its time without pool when owners are killed, and at most a
second more when the master is stopped; its tokens are the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from bench_parts import HERE, fresh_prompts, make_model

from cluster import Cluster
from waiting import wait_until
from with_vllm.engines import Engine

PROMPT_TOKENS: Final = 15 * 128 + 4
CACHED_TOKENS: Final = 15 * 128
KILLED_RATIO_MAX: Final = 2.0
STOPPED_EXTRA_MAX_S: Final = 1.0
Result = dict[str, Any]


class Faults:
    """One engine, its pool, and what was measured of them."""

    def __init__(self, engine: Engine, cluster: Cluster, prompts: list[list[int]]) -> None:
        self.engine = engine
        self.cluster = cluster
        self.prompts = prompts
        self.tokens: list[list[int]] = []
        self.plain_s: list[float] = []
        self.times_s: dict[str, list[list[float]]] = {}
        """By case: of each round, of each request."""
        self.wrong = 0
        self.fetches: dict[str, float] = {}
        self.from_pool_s = 0.0

    def ask(self) -> Result:
        self.engine.forget()
        return self.engine.ask(do="measure", prompts=self.prompts, max_tokens=8)

    def measure_plain(self, rounds: int) -> None:
        """Other prompts, which the pool has never seen: as long, and as dear."""
        seen = []
        for number in range(rounds):
            other = fresh_prompts(f"plain {number}", len(self.prompts), PROMPT_TOKENS)
            self.engine.forget()
            seen += self.engine.ask(do="measure", prompts=other, max_tokens=8)["last_s"]
            self.engine.ask(do="settle", limit_s=3)
        self.plain_s = seen

    def fill(self) -> None:
        """Until all of it comes from the pool."""

        def filled() -> bool:
            found = self.ask()
            self.engine.ask(do="settle", limit_s=3)
            self.from_pool_s = found["duration_s"] / len(self.prompts)
            if not self.tokens:
                self.tokens = found["tokens"]
            return bool(found["cached"] == [CACHED_TOKENS] * len(self.prompts))

        wait_until(filled, 120, what="the prompts to come from the pool")
        self.fetches = {k: v for k, v in self.engine.metrics().items() if "cenote_fetches" in k}

    def served(self, case: str) -> None:
        found = self.ask()
        self.times_s.setdefault(case, []).append(found["last_s"])
        self.tell_slow(case, found["last_s"])
        self.wrong += found["tokens"] != self.tokens

    def tell_slow(self, case: str, times_s: list[float]) -> None:
        """What the connector counted where a request took long."""
        now = {k: v for k, v in self.engine.metrics().items() if "cenote_fetches" in k}
        if max(times_s) > 1.5 * statistics.median(self.plain_s):
            told = {
                name.rpartition(" ")[2]: count - self.fetches.get(name, 0)
                for name, count in now.items()
                if count > self.fetches.get(name, 0)
            }
            print(case, [round(1e3 * each) for each in times_s], told, flush=True)
        self.fetches = now

    def killed_before(self) -> None:
        self.fill()
        for store in self.cluster.stores:
            store.kill()
        self.served("before")
        self.revive()

    def killed_during(self, share: float) -> None:
        self.fill()
        after_s = share * self.from_pool_s * len(self.prompts)
        killer = threading.Timer(after_s, lambda: [store.kill() for store in self.cluster.stores])
        killer.start()
        self.served("during")
        killer.join()
        self.revive()

    def revive(self) -> None:
        for store in self.cluster.stores:
            store.restart()
        self.cluster.wait_alive(len(self.cluster.stores))

    def master_stopped(self) -> None:
        self.fill()
        self.cluster.master.pause()
        self.served("stopped")
        self.served("stopped")
        self.cluster.master.resume()

    # ---- what came of it ---------------------------------------------------------------------

    def report(self, policy: str) -> bool:
        plain_s = statistics.median(self.plain_s)
        print(f"\npolicy {policy}: without pool {1e3 * plain_s:.0f} ms (worst", end=" ")
        print(f"{1e3 * max(self.plain_s):.0f}), from the pool {1e3 * self.from_pool_s:.0f} ms")
        print("| case | requests | median ms | worst ms | worst by plain | limit | |")
        print("|---|---|---|---|---|---|---|")
        kept = not self.wrong
        for case, rounds in self.times_s.items():
            times_s = [each for one in rounds for each in one]
            worst_s = max(times_s)
            if case == "stopped":
                limit, holds = "+ 1 s", worst_s <= plain_s + STOPPED_EXTRA_MAX_S
                told = f"+ {1e3 * (worst_s - plain_s):.0f} ms"
            else:
                limit, holds = "2 x", worst_s < KILLED_RATIO_MAX * plain_s
                told = f"{worst_s / plain_s:.2f} x"
            kept = kept and holds
            print(
                f"| {case} | {len(times_s)} | {1e3 * statistics.median(times_s):.0f}"
                f" | {1e3 * worst_s:.0f} | {told} | {limit} | {'holds' if holds else 'missed'} |"
            )
        print(f"answers with other tokens: {self.wrong}")
        return kept


def run(policy: str, options: argparse.Namespace, model: Path) -> bool:
    with Cluster(stores=2, dram_bytes=512 << 20) as cluster:
        transfer = {
            "kv_connector": "CenoteStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "master": cluster.lane,
                "transports": ["tcp"],
                "staging_bytes": "256MiB",
            },
        }
        llm = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
        with Engine(model, transfer=transfer, llm=llm, program=HERE / "bench_engine.py") as engine:
            faults = Faults(engine, cluster, fresh_prompts("asked", 3, PROMPT_TOKENS))
            faults.fill()
            faults.measure_plain(options.rounds)
            rng = random.Random(options.seed)
            for _ in range(options.rounds):
                faults.killed_before()
                faults.killed_during(rng.random())
                faults.master_stopped()
            return faults.report(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="medium", help="of tests/with_vllm/models.py")
    parser.add_argument("--policies", default="fail,recompute")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(options.model, Path(directory))
        kept = [run(policy, options, model) for policy in options.policies.split(",")]
    raise SystemExit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
