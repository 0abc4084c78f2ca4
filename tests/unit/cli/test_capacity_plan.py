"""The arithmetic of `cenote capacity`, against known models and against a simulated load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument
from cenote.cli.capacity_plan import MODELS, Load, Node, Plan, make_plan, shape_of_config
from cenote.cli.main import main

GIB = 1 << 30
LOAD = {
    "bytes_per_token": 327_680,
    "block_tokens": 16,
    "requests_per_s": 10.0,
    "prompt_tokens": 4000.0,
    "output_tokens": 300.0,
    "hit_rate": 0.5,
    "hit_rate_max": 0.8,
    "reuse_gap_s": 600.0,
}


def plan(*, node: Node | None = None, **changes: float) -> Plan:
    node = node or Node(512 * GIB, 0, 12.5e9)
    return make_plan(Load(**(LOAD | changes)), node)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "expected"),
    [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("deepseek-v3", 70_272)],
)
def test_a_token_is_as_large_as_the_model_makes_it(model: str, expected: int) -> None:
    assert MODELS[model].bytes_per_token(2.0) == expected
    assert MODELS[model].bytes_per_token(1.0) == expected / 2


def test_shapes_come_from_a_models_own_configuration() -> None:
    heads = {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
    assert shape_of_config(heads | {"num_key_value_heads": 8}) == MODELS["llama-3.1-70b"]
    assert shape_of_config(heads).kv_heads == 64
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert shape_of_config(latent) == MODELS["deepseek-v3"]
    assert shape_of_config({"text_config": latent}) == MODELS["deepseek-v3"]
    with pytest.raises(InvalidArgument, match="num_hidden_layers"):
        shape_of_config({})


def test_what_is_kept_agrees_with_a_simulated_load() -> None:
    """Prefixes of one block that are used again with exponential gaps, kept for the planned time:
    hit rate and residents come out as planned."""
    rng = np.random.default_rng(7)
    found = plan(hit_rate=0.5, output_tokens=0.0, block_tokens=1, prompt_tokens=1.0)
    touches_s, horizon_s, warm_s = 5.0, 40_000.0, 15_000.0
    # New prefixes come so that uses add up to `touches_s`: each use has a next one with `p`.
    p, gap_s = LOAD["hit_rate_max"], LOAD["reuse_gap_s"]
    firsts = rng.uniform(0, horizon_s, rng.poisson(touches_s * (1 - p) * horizon_s))
    hits = uses = 0
    resident_s = 0.0
    for first in firsts:
        at = first
        until = at + found.retention_s
        uses += warm_s < at
        resident_from = at
        while rng.random() < p:
            at += rng.exponential(gap_s)
            if at > horizon_s:
                break
            if at <= until:
                hits += warm_s < at
            else:
                resident_s += max(0.0, min(until, horizon_s) - max(resident_from, warm_s))
                resident_from = at
            until = at + found.retention_s
            uses += warm_s < at
        resident_s += max(0.0, min(until, horizon_s) - max(resident_from, warm_s))
    assert hits / uses == pytest.approx(0.5, abs=0.03)
    rate = uses / (horizon_s - warm_s) / LOAD["requests_per_s"]
    residents = resident_s / (horizon_s - warm_s) / rate
    assert residents == pytest.approx(found.kept_tokens, rel=0.05)


def test_more_of_everything_needs_more_nodes_and_ssds_need_fewer() -> None:
    base = plan()
    assert plan(requests_per_s=20.0).nodes > base.nodes
    assert plan(hit_rate=0.7).kept_bytes > base.kept_bytes
    with_ssd = plan(node=Node(512 * GIB, 8 << 40, 12.5e9))
    assert with_ssd.nodes < base.nodes
    assert with_ssd.ssd_dwpd > 0
    assert plan(node=Node(512 * GIB, 0, 12.5e9, replicas=2)).nodes >= 2 * base.nodes - 1
    assert math.isclose(base.read_bytes_per_s, 10 * 4000 * 0.5 * 327_680), (
        "what is hit is read, once"
    )


def test_narrow_networks_and_busy_masters_are_warned_of() -> None:
    slow = plan(node=Node(64 << 40, 0, 1.25e9))
    assert slow.nodes_for_nics > slow.nodes_for_bytes
    assert any("NICs" in warning for warning in slow.warnings)
    busy = plan(block_tokens=1, requests_per_s=1000.0)
    assert any("one master" in warning for warning in busy.warnings)


@pytest.mark.parametrize(
    "wrong",
    [{"hit_rate": 0.9}, {"hit_rate": 0.8}, {"requests_per_s": 0.0}, {"reuse_gap_s": 0.0}],
)
def test_what_no_pool_can_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        plan(**wrong)


# ---- the command -----------------------------------------------------------------------------


def test_the_command_plans_from_a_model_or_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", "--model", "llama-3.1-70b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 327_680

    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": i * 1000, "input_length": 1024, "hash_ids": [i % 10, 1000 + i % 10]}
        for i in range(200)
    )
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    arguments = ["capacity", "--bytes-per-token", "1024", "--trace", str(trace), "--hit-rate"]
    assert main([*arguments, "0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept_tokens"] == pytest.approx(20 * 512, rel=0.06)
    assert found["load"]["requests_per_s"] == pytest.approx(1.0, rel=0.01)
    assert main([*arguments, "0.99"]) == 2
    assert "--hit-rate 0.95" in capsys.readouterr().err


def test_an_unknown_model_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--model", "nonsense"]) == 2
    assert "llama-3.1-70b" in capsys.readouterr().err
    assert main(["capacity"]) == 2
