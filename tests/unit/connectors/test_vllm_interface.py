"""The connector against the interfaces of vLLM's versions, as recorded: without vLLM.

`tests/with_vllm/interface.py` records one; a new version's file is all that it takes to hold the
connector against it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "client/cenote/connectors/vllm").glob("*.py"))
RECORDS = sorted((Path(__file__).parent / "interfaces").glob("vllm-*.json"))
IMPLEMENTED = {
    "CenoteStoreConnector": ("class base", "class hybrid"),
    "StepReports": ("class worker metadata",),
    "CenoteConnectorStats": ("class stats",),
    "CenotePromMetrics": ("class prometheus",),
}
READ = {
    "request": [
        "request_id", "num_tokens", "num_prompt_tokens", "num_preemptions", "num_computed_tokens",
        "block_hashes", "lora_request", "skip_reading_prefix_cache",
    ],
    "adapter": ["lora_path"],
    "step": [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "total_num_scheduled_tokens", "kv_connector_block_state",
    ],
    "new requests": ["req_id", "num_computed_tokens"],
    "cached requests": ["req_ids", "num_computed_tokens"],
    "worker output": ["finished_recving", "kv_connector_worker_meta"],
    "transfer results": ["finished_recving", "failed_recving"],
    "cache": [
        "kv_cache_groups", "num_blocks", "kv_tp_replicas", "prefix_cacheable_group_ids",
    ],
    "group": ["kv_cache_spec", "layer_names"],
    "transfer options": ["kv_connector_extra_config", "is_kv_consumer", "is_kv_producer"],
    "event stored": [
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "group_idx", "kv_cache_spec_kind",
    ],
    "event removed": ["block_hashes", "medium", "group_idx"],
}  # fmt: skip
"""Attributes of vLLM's objects that the connector reads, and fields that it sets."""


@pytest.fixture(params=RECORDS, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def ours() -> dict[str, dict[str, ast.FunctionDef]]:
    """Methods of our classes that implement vLLM's, by class."""
    return {
        node.name: {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name in IMPLEMENTED
    }


def test_both_versions_that_are_supported_are_recorded() -> None:
    assert [path.stem for path in RECORDS] == ["vllm-0.32.0", "vllm-0.33.0"]
    assert ours().keys() == IMPLEMENTED.keys()


def test_calls_of_vllm_fit_our_methods(recorded: dict[str, Any]) -> None:
    checked = 0
    for name, methods in ours().items():
        theirs = {k: v for base in IMPLEMENTED[name] for k, v in recorded[base].items()}
        for method, node in methods.items():
            if method not in theirs or theirs[method]["kind"] == "property":
                continue
            checked += 1
            given = [arg.arg for arg in node.args.posonlyargs + node.args.args][1:]
            wanted = [p[0] for p in theirs[method]["parameters"] if "VAR" not in p[1]]
            assert given == wanted, f"{name}.{method}"
            keywords = any("VAR_KEYWORD" in p[1] for p in theirs[method]["parameters"])
            assert not keywords or node.args.kwarg is not None, f"{name}.{method} takes keywords"
    assert checked >= 30


def test_nothing_that_must_be_implemented_is_missing(recorded: dict[str, Any]) -> None:
    for name, methods in ours().items():
        for base in IMPLEMENTED[name]:
            for method, theirs in recorded[base].items():
                if theirs.get("abstract"):
                    assert method in methods, f"{name} lacks {method}"


def test_what_is_imported_and_read_is_there(recorded: dict[str, Any]) -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                wanted = {alias.name for alias in node.names}
                found = set(recorded["modules"].get(str(node.module), ()))
                assert wanted <= found, f"{path.name}: {wanted - found}; record it anew?"
    for name, fields in READ.items():
        missing = set(fields) - set(recorded["fields"][name])
        assert not missing, f"{name}: {missing}"


def test_newer_methods_are_ours_too(recorded: dict[str, Any]) -> None:
    """Sleep mode: vLLM 0.33 asks for it, 0.32 does not know it."""
    newer = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert newer <= ours()["CenoteStoreConnector"].keys()
    there = newer & recorded["class base"].keys()
    assert there == (newer if recorded["version"] >= "0.33" else set())
