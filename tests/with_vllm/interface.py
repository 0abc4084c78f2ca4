"""Prints, as JSON, what the connector uses of vLLM's interface. Runs in vLLM's environment.

    interface.py > tests/unit/connectors/interfaces/vllm-VERSION.json

`tests/unit/connectors/test_vllm_interface.py` holds the connector against what was recorded, for
versions that can't be installed where it runs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

CLASSES = {
    "base": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
    "hybrid": "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA",
    "worker metadata": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata"
    ),
    "stats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "prometheus": "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics",
}
FIELDS = {
    "request": "vllm.v1.request:Request",
    "adapter": "vllm.lora.request:LoRARequest",
    "step": "vllm.v1.core.sched.output:SchedulerOutput",
    "new requests": "vllm.v1.core.sched.output:NewRequestData",
    "cached requests": "vllm.v1.core.sched.output:CachedRequestData",
    "worker output": "vllm.v1.outputs:KVConnectorOutput",
    "transfer results": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults"
    ),
    "cache": "vllm.v1.kv_cache_interface:KVCacheConfig",
    "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "transfer options": "vllm.config:KVTransferConfig",
    "event stored": "vllm.distributed.kv_events:BlockStored",
    "event removed": "vllm.distributed.kv_events:BlockRemoved",
}


def find(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def methods_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in inspect.getmembers_static(kind):
        if isinstance(value, property):
            found[name] = {"kind": "property"}
            continue
        called = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not inspect.isfunction(called) or (name.startswith("__") and name != "__init__"):
            continue
        found[name] = {
            "kind": "classmethod" if isinstance(value, classmethod) else "method",
            "abstract": bool(getattr(called, "__isabstractmethod__", False)),
            "parameters": [
                [p.name, str(p.kind), p.default is inspect.Parameter.empty]
                for p in list(inspect.signature(called).parameters.values())[1:]
            ],
        }
    return found


def fields_of(kind: type) -> list[str]:
    names = set(re.findall(r"self\.(\w+)\b(?: *:[^=]*)? *=[^=]", inspect.getsource(kind)))
    for base in kind.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    names |= {name for name, _ in inspect.getmembers_static(kind) if not name.startswith("_")}
    return sorted(name for name in names if not name.startswith("_"))


def main() -> None:
    import vllm

    version = vllm.__version__.split("+")[0]
    parts: list[tuple[str, dict[str, Any]]] = [
        *((f"class {name}", methods_of(find(place))) for name, place in CLASSES.items()),
        ("fields", {name: fields_of(find(place)) for name, place in FIELDS.items()}),
        ("modules", {name: there(name, names) for name, names in imports().items()}),
    ]
    lines = [f'"version": {json.dumps(version)}']
    for title, part in parts:
        rows = (f"  {json.dumps(name)}: {json.dumps(part[name])}" for name in sorted(part))
        lines.append(f"{json.dumps(title)}: {{\n" + ",\n".join(rows) + "\n}")
    print("{\n" + ",\n".join(lines) + "\n}")


def imports() -> dict[str, set[str]]:
    """What the connector's files import of vLLM, by module."""
    found: dict[str, set[str]] = {}
    for path in Path(__file__).parents[2].glob("client/cenote/connectors/vllm/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found.setdefault(str(node.module), set()).update(a.name for a in node.names)
    return found


def there(module: str, names: set[str]) -> list[str]:
    """Which of the names it has."""
    found = importlib.import_module(module)
    return sorted(name for name in names if hasattr(found, name))


if __name__ == "__main__":
    main()
