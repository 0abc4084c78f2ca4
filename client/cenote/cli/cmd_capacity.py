"""`cenote capacity`: how much memory, SSD, network, master and etcd a load needs."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .exits import EXIT_OK
from .options import AsJson

if TYPE_CHECKING:
    from .capacity_plan import Load, Node, Plan

__all__ = ["capacity"]

_DTYPES: Final = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}
_CONFIG_BYTES_MAX: Final = 16 << 20
_STEPS_MAX: Final = 24


def capacity(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Such as llama-3.1-70b; a wrong name lists them.")
    ] = "",
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's config.json instead.")
    ] = None,
    bytes_per_token: Annotated[
        int, typer.Option(min=0, help="Of all layers and ranks, instead of a model.")
    ] = 0,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help=", ".join(_DTYPES) + ".")] = "bf16",
    block_tokens: Annotated[int, typer.Option(min=1, help="Of an engine's KV block.")] = 16,
    requests_per_s: Annotated[
        float, typer.Option(min=0, help="All engines together; 0: the trace's.")
    ] = 0.0,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean; a trace has its own.")] = 4000,
    output_tokens: Annotated[float, typer.Option(min=0, help="Mean; they are kept, too.")] = 300,
    hit_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Wanted, of prompts' tokens.")
    ] = 0.5,
    hit_rate_max: Annotated[
        float, typer.Option(min=0, max=1, help="What a cache without end would hit.")
    ] = 0.7,
    reuse_gap: Annotated[
        str, typer.Option(metavar="DURATION", help="Mean time between two uses of a prefix.")
    ] = "10m",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.jsonl",
            help="Find what must be kept by playing it through LRU, instead of the last two.",
        ),
    ] = None,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="That each node gives.")] = "512GiB",
    ssd: Annotated[str, typer.Option(metavar="SIZE", help="Likewise; 0: none.")] = "0",
    nic_gbit: Annotated[float, typer.Option(min=0.1, help="Each node's network.")] = 100.0,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Of each block.")] = 1,
    json: AsJson = False,
) -> int:
    """Estimate the nodes, NICs, SSD wear, master and etcd that a load needs. Needs no pool.

    Measure rather than guess where you can: `cenote mrc` in a running pool, or --trace.
    """
    from cenote.runtime.units import parse_duration_s, parse_size_bytes

    from .capacity_plan import Load, Node, make_plan
    from .output import print_json

    node = Node(
        dram_bytes=parse_size_bytes(dram),
        ssd_bytes=parse_size_bytes(ssd),
        nic_bytes_per_s=nic_gbit * 1e9 / 8,
        replicas=replicas,
    )
    load = Load(
        bytes_per_token=_bytes_per_token(model, config, bytes_per_token, kv_dtype),
        block_tokens=block_tokens,
        requests_per_s=requests_per_s or (0.0 if trace is not None else 1.0),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=hit_rate,
        hit_rate_max=hit_rate_max,
        reuse_gap_s=parse_duration_s(reuse_gap),
    )
    if trace is not None:
        load = _from_trace(load, trace)
    plan = make_plan(load, node)
    if json:
        facts = dataclasses.asdict(plan)
        facts["retention_s"] = None if math.isnan(plan.retention_s) else plan.retention_s
        print_json({"load": dataclasses.asdict(load), "node": dataclasses.asdict(node)} | facts)
    else:
        _print(load, node, plan)
    return EXIT_OK


def _bytes_per_token(model: str, config: Path | None, given: int, kv_dtype: str) -> int:
    """Raises InvalidArgument."""
    from cenote.api.errors import InvalidArgument

    from .capacity_plan import MODELS, shape_of_config

    if sum((bool(model), config is not None, bool(given))) != 1:
        raise InvalidArgument(
            "name a --model, its --config, or --bytes-per-token",
            remedy="models: " + ", ".join(MODELS),
        )
    if given:
        return given
    if kv_dtype not in _DTYPES:
        raise InvalidArgument(f"no type {kv_dtype!r}", remedy="one of " + ", ".join(_DTYPES))
    if config is None:
        shape = MODELS.get(model.lower())
        if shape is None:
            raise InvalidArgument(
                f"the model {model!r} is not known here",
                remedy="give its --config, or one of: " + ", ".join(MODELS),
            )
        return shape.bytes_per_token(_DTYPES[kv_dtype])
    try:
        with config.open("rb") as file:
            described = json_module.loads(file.read(_CONFIG_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"can't read {config}: {error}") from error
    if not isinstance(described, dict):
        raise InvalidArgument(f"{config} is no model's configuration")
    return shape_of_config(described).bytes_per_token(_DTYPES[kv_dtype])


def _from_trace(load: Load, path: Path) -> Load:
    """With what the trace says: rate, prompts, and what must be kept for the wanted hit rate.

    Raises InvalidArgument where no capacity gives that.
    """
    import numpy as np

    from cenote.api.errors import InvalidArgument
    from cenote.policy.model import spread
    from cenote.policy.simulation import simulate

    from .output import Bar
    from .replay.trace import BLOCK_TOKENS, load_trace

    loaded = load_trace(path)
    ids, blocks = np.unique(loaded.block_ids, return_inverse=True)
    keys = spread(ids)
    requests = [
        blocks[a:b] for a, b in zip(loaded.starts, loaded.starts[1:], strict=False) if b > a
    ]
    low, high = 1, len(ids)
    steps = max(1, math.ceil(math.log2(max(2, high))))
    with Bar("Playing the trace", total=min(steps, _STEPS_MAX) + 1, unit="runs") as bar:
        best = simulate(requests, keys, "lru", high).hit_rate
        bar.update(1)
        if best < load.hit_rate:
            raise InvalidArgument(
                f"{path.name} hits {100 * best:.1f} % even with room for all of it",
                remedy=f"ask for less: --hit-rate {math.floor(100 * best) / 100:g}",
            )
        for step in range(_STEPS_MAX):
            if high - low <= max(1, high // 100):
                break
            middle = (low + high) // 2
            if simulate(requests, keys, "lru", middle).hit_rate >= load.hit_rate:
                high = middle
            else:
                low = middle
            bar.update(step + 2)
    rate = len(loaded) / loaded.duration_s if loaded.duration_s else 1.0
    requests_per_s = load.requests_per_s or rate
    return dataclasses.replace(
        load,
        requests_per_s=requests_per_s,
        prompt_tokens=float(loaded.input_tokens.mean()),
        hit_rate_max=min(1.0, max(best, load.hit_rate + 1e-9)),
        kept_tokens=high * BLOCK_TOKENS * requests_per_s / rate,
    )


def _print(load: Load, node: Node, plan: Plan) -> None:
    from cenote.runtime.units import format_duration, format_size

    from .output import counted, note, print_pairs

    def rate(bytes_per_s: float) -> str:
        return f"{format_size(int(bytes_per_s))}/s ({bytes_per_s * 8 / 1e9:.1f} Gbit/s)"

    why = "from the trace" if math.isnan(plan.retention_s) else (
        f"what was used in the last {format_duration(plan.retention_s)}"
    )  # fmt: skip
    each = f"{format_size(node.dram_bytes)} of memory"
    if node.ssd_bytes:
        each += f" and {format_size(node.ssd_bytes)} of SSD"
    print_pairs(
        [
            ("a token", format_size(plan.bytes_per_token)),
            ("a block", f"{format_size(plan.block_bytes)}, {load.block_tokens} tokens"),
            ("load", f"{load.requests_per_s:.3g} requests/s of {load.prompt_tokens:,.0f} +"
                f" {load.output_tokens:,.0f} tokens"),
            ("to hit", f"{100 * load.hit_rate:.0f} % of prompts' tokens, of"
                f" {100 * load.hit_rate_max:.0f} % that could ever be"),
            ("kept", f"{format_size(int(plan.kept_bytes))}, {plan.objects:,} blocks: {why}"),
            ("nodes", f"{plan.nodes}, each with {each}; {counted(node.replicas, 'replica')}"),
            ("read", rate(plan.read_bytes_per_s) + " together, in the mean"),
            ("written", rate(plan.written_bytes_per_s)),
            ("NICs", f"{100 * plan.nic_share_peak:.0f} % used at twice the mean"),
            *([("SSDs", f"{format_size(int(plan.ssd_written_bytes_per_day))} a day each,"
                f" {plan.ssd_dwpd:.2f} drive writes a day")] if node.ssd_bytes else []),
            ("master", f"{format_size(plan.master_memory_bytes)},"
                f" {plan.master_keys_per_s:,.0f} keys/s,"
                f" {100 * plan.master_share_peak:.0f} % of a core at twice the mean"),
            ("journal", f"{format_size(int(plan.journal_bytes_per_s))}/s;"
                f" etcd's database {format_size(plan.etcd_bytes)}"),
        ]
    )  # fmt: skip
    for warning in plan.warnings:
        note(f"note: {warning}")
