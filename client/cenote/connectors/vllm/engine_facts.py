"""Facts about a vLLM engine, in our own words."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from cenote.api.errors import ConfigError
from cenote.runtime.log import get_logger

from .groups import Group, Grouping
from .identity import space_of
from .keys import RankShard, shards_of
from .options import ConnectorOptions
from .orders import SpaceName
from .weights import weights_digest

__all__ = ["block_bytes_of", "grouping_of", "layers_of", "shards_of_engine", "space_maker"]

_log: Final = get_logger("cenote.vllm")
_CPU_FLAGS: Final = ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2", "asimd", "sve")
_NOT_OF_MODEL: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def grouping_of(vllm_config: Any, kv_cache_config: Any) -> Grouping:
    """The KV groups whose blocks are kept by their hashes. Raises ConfigError for what can't be."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is not supported yet", remedy="leave it at 1")
    unit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    for number in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        groups.append(_group(number, spec))
    if not groups:
        raise ConfigError(
            "no KV group of this model can be cached by prefix",
            remedy="run it without this connector",
        )
    return Grouping(tuple(groups), unit_tokens, hash_tokens)


def _group(number: int, spec: Any) -> Group:
    specs = list(iter_layer_specs(spec))
    if all(isinstance(each, FullAttentionSpec) for each in specs):
        return Group(number, "full", spec.block_size)
    if all(isinstance(each, MambaSpec) for each in specs):
        modes = {each.mamba_cache_mode for each in specs}
        if modes != {"align"}:
            raise ConfigError(
                f"recurrent states are cached in mode {sorted(modes)}",
                remedy="pass --mamba-cache-mode align",
            )
        return Group(number, "state", spec.block_size)
    if all(isinstance(each, SlidingWindowSpec) for each in specs):
        window_tokens = max(each.sliding_window for each in specs)
        return Group(number, "window", spec.block_size, window_tokens)
    if all(isinstance(each, AttentionSpec) for each in specs):
        # Whatever it needs is among all blocks; those that its table does not keep are not loaded.
        return Group(number, "full", spec.block_size)
    raise ConfigError(
        f"KV groups of {type(specs[0]).__name__} are not supported yet",
        remedy="run this model without this connector",
    )


def shards_of_engine(vllm_config: Any, kv_cache_config: Any) -> list[RankShard]:
    """What each rank of the engine holds."""
    parallel = vllm_config.parallel_config
    return shards_of(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        getattr(kv_cache_config, "kv_tp_replicas", 1),
    )


def layers_of(grouping: Grouping, kv_cache_config: Any) -> dict[int, list[str]]:
    """Names of the layers of each group."""
    return {
        group.number: list(kv_cache_config.kv_cache_groups[group.number].layer_names)
        for group in grouping.groups
    }


def block_bytes_of(grouping: Grouping, kv_cache_config: Any) -> dict[int, int]:
    """About how large a block of each group is at one rank."""
    found = {}
    for group in grouping.groups:
        described = kv_cache_config.kv_cache_groups[group.number]
        spec = described.kv_cache_spec
        specs = list(iter_layer_specs(spec))
        each = sum(s.page_size_bytes for s in specs) / len(specs)
        found[group.number] = int(each * len(described.layer_names))
    return found


# ---- the namespace ---------------------------------------------------------------------------


def space_maker(
    options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any, grouping: Grouping
) -> Callable[[], SpaceName | None]:
    """What names the model's namespace; it reads the weights, so it is called in a thread."""

    def make() -> SpaceName | None:
        facts = _engine_facts(vllm_config, kv_cache_config, grouping)
        weights = _all_weights(options, vllm_config)
        if weights is None:
            _log.error(
                "nothing is shared: the weights' files can't be found to tell models apart by",
                model=vllm_config.model_config.model,
                remedy="name the weights with the option weights_id",
            )
            return None
        return space_of(options.namespace, {**facts, "weights": weights})

    return make


def _engine_facts(vllm_config: Any, kv_cache_config: Any, grouping: Grouping) -> dict[str, object]:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "model": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "groups": [
            [group.number, group.kind, group.block_tokens, group.window_tokens, layer_facts]
            for group in grouping.groups
            for layer_facts in [_spec_facts(kv_cache_config.kv_cache_groups[group.number])]
        ],
        "unit_tokens": grouping.unit_tokens,
        "hash": [str(cache.prefix_caching_hash_algo), grouping.hash_tokens, _hash_seed(cache)],
        "speculative": None if speculative is None else [
            str(speculative.method), speculative.num_speculative_tokens,
        ],
        "ranks": [
            parallel.tensor_parallel_size // getattr(kv_cache_config, "kv_tp_replicas", 1),
            parallel.pipeline_parallel_size,
        ],
        "platform": _platform(),
    }  # fmt: skip


def _spec_facts(described: Any) -> list[object]:
    return [
        len(described.layer_names),
        sorted(
            {
                f"{type(s).__name__} {s.page_size_bytes} {getattr(s, 'head_size', '')}"
                f" {getattr(s, 'num_kv_heads', '')} {getattr(s, 'dtype', '')}"
                for s in iter_layer_specs(described.kv_cache_spec)
            }
        ),
    ]


def _hash_seed(cache: Any) -> str:
    """What the hash of nothing is: it differs between processes where the algorithm seeds it."""
    from vllm.v1.core import kv_cache_utils

    return bytes(getattr(kv_cache_utils, "NONE_HASH", b"")).hex()


def _platform() -> str:
    """On CPUs the order of bytes in a block depends on the instructions that are used."""
    if current_platform.device_type != "cpu":
        return str(current_platform.device_type)
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    return f"cpu {platform.machine()} {' '.join(f for f in _CPU_FLAGS if f in flags)}"


def _plain(value: Any) -> Any:
    """A model's configuration without where it came from, as JSON would take it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_OF_MODEL}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def _all_weights(options: ConnectorOptions, vllm_config: Any) -> list[str] | None:
    """Of the model, and of the draft model where there is one, since its layers have KV, too."""
    if options.weights_id:
        return [options.weights_id]
    model = vllm_config.model_config
    found = [_weights(model.model, model.revision, vllm_config.load_config, model.seed)]
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        found.append(_weights(draft.model, draft.revision, vllm_config.load_config, model.seed))
    return None if None in found else [each for each in found if each is not None]


def _weights(model: str, revision: str | None, load_config: Any, seed: int) -> str | None:
    if str(load_config.load_format) == "dummy":
        return f"dummy {seed}"
    path = Path(model)
    if not path.exists():
        from huggingface_hub import snapshot_download

        try:
            path = Path(
                snapshot_download(
                    model,
                    revision=revision,
                    cache_dir=load_config.download_dir,
                    local_files_only=True,
                )
            )
        except (OSError, ValueError) as error:
            _log.warning("the model's files were not found", model=model, why=error)
            return None
    return weights_digest(path)
