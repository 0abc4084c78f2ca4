"""A vLLM engine as a process that a test talks to. Runs in vLLM's environment: no pytest here.

The one argument is JSON: `model`, `llm` (more of `LLM(...)`), and `transfer` (of KVTransferConfig;
absent: no connector), `events` (where KV events are published). Commands are lines of JSON on
standard input, answers lines on standard output that begin with `ANSWER `:

    {"do": "generate", "prompts": [[token, ...], ...], "max_tokens": 16}
        (with "adapter": {"name": ..., "id": ..., "path": ...}: through it)
    {"do": "reset", "connector": false}       forget the engine's own prefix cache
    {"do": "metrics"}     counters by name
    {"do": "events"}      the KV events published since the last time (`events`: their ZMQ address)
    {"do": "quit"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    DO_NOT_TRACK="1",
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def answer(**values: Any) -> None:
    print("ANSWER " + json.dumps(values), flush=True)


def generate(llm: Any, command: dict[str, Any]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=command.get("max_tokens", 16), ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    began_s = time.monotonic()
    adapter = command.get("adapter")
    lora = None
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(adapter["name"], adapter["id"], adapter["path"])
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    answer(
        duration_s=time.monotonic() - began_s,
        cached=[output.num_cached_tokens for output in outputs],
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
    )


def reset(llm: Any, command: dict[str, Any]) -> None:
    answer(done=llm.reset_prefix_cache(reset_connector=command.get("connector", False)))


def metrics(llm: Any, command: dict[str, Any]) -> None:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None:
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            found[" ".join([metric.name, *labels.values()])] = value
    answer(metrics=found)


def events(llm: Any, command: dict[str, Any]) -> None:
    """As a router sees them: MessagePack, read without vLLM's types."""
    import msgspec

    found = []
    while SUBSCRIPTIONS[0].poll(command.get("wait_ms", 200)):
        *_, payload = SUBSCRIPTIONS[0].recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes = event.pop("block_hashes", [])
            event.pop("parent_block_hash", None)
            found.append({**event, "block_hashes": [str(each) for each in hashes]})
    answer(events=found)


def subscribe(address: str) -> None:
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(address)
    socket.subscribe(b"")
    SUBSCRIPTIONS.append(socket)


SUBSCRIPTIONS: list[Any] = []
COMMANDS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "generate": generate,
    "reset": reset,
    "metrics": metrics,
    "events": events,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    began_s = time.monotonic()
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    options = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "seed": 0,
        "disable_log_stats": False,
        **given.get("llm", {}),
    }
    if given.get("transfer"):
        options["kv_transfer_config"] = KVTransferConfig(**given["transfer"])
    if given.get("events"):
        options["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=given["events"]
        )
    llm = LLM(model=given["model"], **options)
    if given.get("events"):
        subscribe(given["events"])
    answer(ready_s=time.monotonic() - began_s)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        COMMANDS[command["do"]](llm, command)
    began_s = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    answer(ended_s=time.monotonic() - began_s)


if __name__ == "__main__":
    main()
