"""Real vLLM on CPUs: without connector, with ours and with the peer's, by turns in one run.

    PYTHONPATH=tests CENOTE_TEST_VLLM_PYTHON=.venv-vllm/bin/python \\
        .venv/bin/python benchmarks/vllm/beside_peer.py [--rounds 5] [--model medium]

All engines stand beside each other, and one works at a time; a round is the same work at each of
them, and who begins alternates. Cases:

    cold    prompts that nobody has seen, one after the other: looked up, computed, saved
    pool    the engine forgets them, and is asked again: they come from the pool
    own     once more: they come from the engine's own cache
    batch   prompts that nobody has seen, all at once, with more output: tokens a second

Told are medians over the rounds; for `batch` the ratio to the engine without connector, round by
round. The peer is measured where its wheel is installed in vLLM's environment
(`mooncake-transfer-engine-non-cuda`); without it only ours.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench_parts import fresh_prompts, make_model
from contenders import KINDS, Contender, contender

from waiting import wait_until
from with_vllm.engines import vllm_python

BLOCK_TOKENS: Final = 128
Result = dict[str, Any]


def measured(of: Contender, prompts: list[list[int]], max_tokens: int, together: bool) -> Result:
    """Until nothing is computed any more, so that saves count for what caused them."""
    before_s = of.pool_cpu_s()
    found = of.engine.ask(do="measure", prompts=prompts, max_tokens=max_tokens, together=together)
    settled = of.engine.ask(do="settle", limit_s=3)
    found["cpu_s"] += settled["cpu_s"]
    found["pool_cpu_s"] = of.pool_cpu_s() - before_s
    return found


def forget(of: Contender) -> None:
    """The engine's own cache. A connector that holds blocks until they are saved gives them back in
    a later step: a small request makes one."""

    def done() -> bool:
        of.engine.ask(do="settle", limit_s=1)
        of.engine.generate([[1, 2, 3]], max_tokens=1)
        return bool(of.engine.ask(do="reset")["done"])

    wait_until(done, 30, what=f"{of.name} to have no block in use")


def meet_pool(of: Contender) -> None:
    """Until what it computed comes from the pool; warm-up for the one without."""
    prompts = fresh_prompts(of.name, 1, 6 * BLOCK_TOKENS + 5)

    def answered() -> bool:
        forget(of)
        found = of.engine.ask(do="measure", prompts=prompts, max_tokens=4)
        return of.name == "none" or found["cached"] == [6 * BLOCK_TOKENS]

    wait_until(answered, 60, what=f"{of.name} to meet its pool")
    for _ in range(2):
        answered()


def one_round(of: Contender, number: int, options: argparse.Namespace) -> dict[str, Result]:
    prompts = fresh_prompts(f"cold {number}", options.prompts, options.tokens)
    found = {"cold": measured(of, prompts, 8, False)}
    if of.name != "none":
        forget(of)
        found["pool"] = measured(of, prompts, 8, False)
    found["own"] = measured(of, prompts, 8, False)
    if options.batch:
        fresh = fresh_prompts(f"batch {number}", options.batch, options.batch_tokens)
        found["batch"] = measured(of, fresh, options.batch_output, True)
    forget(of)
    return found


# ---- tables -------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def rows(rounds: list[dict[str, Result]], case: str) -> list[Result]:
    return [each[case] for each in rounds if case in each]


def tokens_per_s(found: Result) -> float:
    total = found["prompt_tokens"] + sum(len(tokens) for tokens in found["tokens"])
    return float(total / found["duration_s"])


def per_step_us(key: str) -> Callable[[Result], float]:
    return lambda found: 1e6 * found[key] / max(1, found["steps"])


COLUMNS: Final[dict[str, tuple[str, Callable[[Result], float]]]] = {
    "first token ms": ("{:.1f}", lambda found: 1e3 * median(found["first_s"])),
    "worst ms": ("{:.1f}", lambda found: 1e3 * max(found["first_s"])),
    "scheduler us/step": ("{:.0f}", per_step_us("scheduler_s")),
    "scheduler ms/prompt": ("{:.2f}", lambda f: 1e3 * f["scheduler_s"] / len(f["first_s"])),
    "worker us/step": ("{:.0f}", per_step_us("worker_s")),
    "CPU engine ms/prompt": ("{:.0f}", lambda f: 1e3 * f["cpu_s"] / len(f["first_s"])),
    "CPU pool ms/prompt": ("{:.0f}", lambda f: 1e3 * f["pool_cpu_s"] / len(f["first_s"])),
}


def table(results: dict[str, list[dict[str, Result]]], case: str) -> None:
    print(f"\n| {case} | " + " | ".join(COLUMNS) + " | hits |")
    print("|---|" + "---|" * (len(COLUMNS) + 1))
    for name, rounds in results.items():
        found = rows(rounds, case)
        if not found:
            continue
        cells = [
            form.format(median(value(each) for each in found)) for form, value in COLUMNS.values()
        ]
        cached = sum(sum(each["cached"]) for each in found)
        asked = sum(each["prompt_tokens"] for each in found)
        print(f"| {name} | " + " | ".join(cells) + f" | {100 * cached / asked:.0f} % |")


def batch_table(results: dict[str, list[dict[str, Result]]]) -> None:
    plain = [tokens_per_s(each) for each in rows(results.get("none", []), "batch")]
    print("\n| batch | tokens/s | of without | rounds | CPU engine s | CPU pool s | us/step |")
    print("|---|---|---|---|---|---|---|")
    for name, rounds in results.items():
        found = rows(rounds, "batch")
        speeds = [tokens_per_s(each) for each in found]
        ratios = [speed / other for speed, other in zip(speeds, plain, strict=False)]
        told = " ".join(f"{ratio:.3f}" for ratio in ratios)
        cpu_s = median(each["cpu_s"] for each in found)
        pool_s = median(each["pool_cpu_s"] for each in found)
        step_us = median(1e6 * (f["scheduler_s"] + f["worker_s"]) / f["steps"] for f in found)
        ratio = f"{median(ratios):.3f}" if ratios else ""
        print(
            f"| {name} | {median(speeds):.0f} | {ratio} | {told} | {cpu_s:.2f} | {pool_s:.2f}"
            f" | {step_us:.0f} |"
        )


def calls_table(results: dict[str, list[dict[str, Result]]]) -> None:
    """What the calls of a batch cost, of all that the connector is asked, and in how many steps."""
    for name, rounds in results.items():
        found = rows(rounds, "batch")
        steps, empty = (median(each[key] for each in found) for key in ("steps", "empty_steps"))
        print(f"\n{name}, batch: {steps:.0f} steps, {empty:.0f} that computed nothing")
        called = sorted({call for each in found for call in each["calls"]})
        for call in called:
            seen = [each["calls"].get(call, (0, 0.0)) for each in found]
            count, spent_s = median(c for c, _ in seen), median(s for _, s in seen)
            print(f"  {call}: {count:.0f} calls, {1e6 * spent_s / max(1, steps):.1f} us/step")


def check_tokens(results: dict[str, list[dict[str, Result]]]) -> None:
    """One prompt alone says the same everywhere. (In a batch the last bits differ.)"""
    plain = next(iter(results.values()))
    for name, rounds in results.items():
        for number, each in enumerate(rounds):
            differ = each["cold"]["tokens"] != plain[number]["cold"]["tokens"]
            if differ:
                print(f"{name}, round {number}: other tokens than without pool")


def installed(module: str) -> bool:
    python = vllm_python()
    assert python is not None, "see bench_parts.make_model"
    return not subprocess.run(
        [python, "-c", f"import {module}"], capture_output=True, check=False, timeout=60
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="medium", help="of tests/with_vllm/models.py")
    parser.add_argument("--engines", default=",".join(KINDS))
    parser.add_argument("--prompts", type=int, default=4, help="of cold, pool and own")
    parser.add_argument("--tokens", type=int, default=15 * BLOCK_TOKENS + 4, help="of each")
    parser.add_argument("--batch", type=int, default=12, help="prompts of batch; 0: left out")
    parser.add_argument("--batch-tokens", type=int, default=500)
    parser.add_argument("--batch-output", type=int, default=32)
    parser.add_argument(
        "--apart", action="store_true", help="the engine has one core, everything else another one"
    )
    parser.add_argument("--calls", action="store_true", help="what each call costs in a batch")
    parser.add_argument("--json", type=Path, help="all that was measured")
    options = parser.parse_args()
    kinds = options.engines.split(",")
    if any("mooncake" in kind for kind in kinds) and not installed("mooncake.store"):
        print("no peer in vLLM's environment: measuring ours alone")
        kinds = [kind for kind in kinds if "mooncake" not in kind]
    llm = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
    results: dict[str, list[dict[str, Result]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        scratch = Path(directory)
        model = make_model(options.model, scratch)
        peer_bin = Path(str(vllm_python())).parent
        contenders = []
        for kind in kinds:
            began_s = time.monotonic()
            made = contender(kind, model, scratch, llm, peer_bin, options.apart)
            contenders.append(stack.enter_context(made))
            meet_pool(contenders[-1])
            print(f"{kind}: ready after {time.monotonic() - began_s:.1f} s", flush=True)
        for number in range(options.rounds):
            order = contenders if number % 2 == 0 else contenders[::-1]
            for each in order:
                found = one_round(each, number, options)
                for case, result in found.items():
                    single = case != "batch"
                    count = options.prompts if single else options.batch
                    result["prompt_tokens"] = count * (
                        options.tokens if single else options.batch_tokens
                    )
                results[each.name].append(found)
            print(f"round {number + 1} of {options.rounds}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results))
    print(f"\n{platform.machine()}, model {options.model}, {options.rounds} rounds")
    for case in ("cold", "pool", "own"):
        table(results, case)
    if options.batch:
        batch_table(results)
        if options.calls:
            calls_table(results)
    check_tokens(results)


if __name__ == "__main__":
    main()
