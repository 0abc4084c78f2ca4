"""A vLLM engine that is measured from inside. Runs in vLLM's environment.

`tests/with_vllm/engine.py` with three commands more:

    {"do": "measure", "prompts": [[token, ...], ...], "max_tokens": 8, "together": false}
    {"do": "settle", "limit_s": 5}        until the process computes nothing any more
    {"do": "timeline"}                    what happened since it was asked last: see `timeline.py`

`measure` serves the prompts one after the other, or all `together`, and tells when each had its
first and its last token, what scheduling took, what the worker's side of a connector made the
engine wait, and the processor time of the process. The engine steps as vLLM's own core process
does: where a step computed nothing, it sleeps for a millisecond, so that threads get on.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "with_vllm"))

import engine

IDLE_S = 0.1
IDLE_SHARE = 0.04
STEP_PAUSE_S = 0.001
OF_SCHEDULER = ("schedule", "update_from_output", "add_request", "finish_requests")
OF_WORKER = (
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "handle_preemptions",
)


OF_CONNECTOR = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished_all_groups",
)
"""What the scheduler asks of a connector: within what scheduling takes."""


class Watch:
    """Adds up what calls take, by the owner's name."""

    def __init__(self) -> None:
        self.spent_s = {"scheduler": 0.0, "worker": 0.0}
        self.calls: dict[str, tuple[int, float]] = {}
        """How often each was called, and what that took, in seconds."""
        self.steps = 0
        self.empty_steps = 0
        self.loads: Counter[str] = Counter()
        """Of each request, how often it was given blocks to be loaded: once more each time that it
        is scheduled anew."""
        self._depth = 0

    def wrap(self, owner: Any, name: str, whose: str) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began_s = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - began_s
                self._depth -= 1
                if not self._depth:  # a call that is made in another one counts once
                    self.spent_s[whose] += took_s
                count, spent_s = self.calls.get(f"{whose}.{name}", (0, 0.0))
                self.calls[f"{whose}.{name}"] = count + 1, spent_s + took_s

        setattr(owner, name, timed)

    def count_loads(self, connector: Any) -> None:
        inner = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            self.loads[request.request_id] += num_external_tokens > 0
            return inner(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = counted

    def step_like_core_process(self, core: Any) -> None:
        inner = core.step_fn

        def step() -> Any:
            outputs, executed = inner()
            self.steps += executed
            self.empty_steps += not executed
            if not executed and core.scheduler.has_requests():
                time.sleep(STEP_PAUSE_S)
            return outputs, executed

        core.step_fn = step

    def take(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"{name}_s": spent for name, spent in self.spent_s.items()}
        found |= {"steps": self.steps, "empty_steps": self.empty_steps, "calls": self.calls}
        self.calls = {}
        self.spent_s = dict.fromkeys(self.spent_s, 0.0)
        self.steps = self.empty_steps = 0
        return found


WATCHES: dict[int, Watch] = {}


def watch_of(llm: Any) -> Watch:
    watch = WATCHES.get(id(llm))
    if watch is not None:
        return watch
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    watch = WATCHES[id(llm)] = Watch()
    core = llm.llm_engine.engine_core.engine_core
    for name in OF_SCHEDULER:
        watch.wrap(core.scheduler, name, "scheduler")
    if core.scheduler.connector is not None:
        watch.count_loads(core.scheduler.connector)
        for name in OF_CONNECTOR:
            watch.wrap(core.scheduler.connector, name, "scheduler")
    if has_kv_transfer_group():
        for name in OF_WORKER:
            watch.wrap(get_kv_transfer_group(), name, "worker")
    watch.step_like_core_process(core)
    return watch


class Served:
    """Requests of one measurement."""

    def __init__(self, llm: Any, max_tokens: int) -> None:
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        self._sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._numbers: dict[str, int] = {}
        self._began_s: list[float] = []
        self.first_s: list[float] = []
        self.last_s: list[float] = []
        self.cached: list[int] = []
        self.tokens: list[list[int]] = []

    def add(self, prompt: list[int]) -> None:
        number = len(self._began_s)
        self._began_s.append(time.perf_counter())
        for each in (self.first_s, self.last_s):
            each.append(0.0)
        self.cached.append(0)
        self.tokens.append([])
        given = f"measured-{time.monotonic_ns()}-{number}"
        self._numbers[given] = number
        self._engine.add_request(given, {"prompt_token_ids": prompt}, self._sampling)

    def counts(self, of: Counter[str]) -> list[int]:
        """By request. (The engine lengthens the names that it is given.)"""
        found = [0] * len(self._began_s)
        for name, number in self._numbers.items():
            found[number] += sum(count for full, count in of.items() if full.startswith(f"{name}-"))
        return found

    def run(self) -> None:
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                number = self._numbers[output.request_id]
                took_s = time.perf_counter() - self._began_s[number]
                if not self.first_s[number] and output.outputs[0].token_ids:
                    self.first_s[number] = took_s
                if output.finished:
                    self.last_s[number] = took_s
                    self.cached[number] = output.num_cached_tokens
                    self.tokens[number] = list(output.outputs[0].token_ids)


def measure(llm: Any, command: dict[str, Any]) -> None:
    watch = watch_of(llm)
    watch.take()
    watch.loads.clear()
    served = Served(llm, command.get("max_tokens", 8))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for prompt in command["prompts"]:
        served.add(prompt)
        if not command.get("together"):
            served.run()
    served.run()
    engine.answer(
        duration_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        first_s=served.first_s,
        last_s=served.last_s,
        cached=served.cached,
        tokens=served.tokens,
        loads=served.counts(watch.loads),
        **watch.take(),
    )


def settle(llm: Any, command: dict[str, Any]) -> None:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    until_s = began_s + command.get("limit_s", 5)
    core = llm.llm_engine.engine_core.engine_core
    while time.perf_counter() < until_s:
        while core.scheduler.has_requests() and time.perf_counter() < until_s:
            llm.llm_engine.step()  # a connector may hold blocks until a later step
        cpu_s = time.process_time()
        time.sleep(IDLE_S)
        if time.process_time() - cpu_s < IDLE_SHARE * IDLE_S:
            break
    engine.answer(waited_s=time.perf_counter() - began_s, cpu_s=time.process_time() - began_cpu_s)


def timeline(llm: Any, command: dict[str, Any]) -> None:
    import timeline as events

    if not TIMED:
        TIMED.append(True)
        events.watch(llm.llm_engine.engine_core.engine_core)
    engine.answer(events=events.take())


TIMED: list[bool] = []
engine.COMMANDS.update(measure=measure, settle=settle, timeline=timeline)

if __name__ == "__main__":
    engine.main()
