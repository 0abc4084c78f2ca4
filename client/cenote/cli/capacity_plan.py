"""How large a pool must be: arithmetic from a model's shape and its load. No I/O.

What must be kept follows from how long: a prefix is a hit if it is used again before it is evicted.
With times between uses that are exponential around `reuse_gap_s`, of which a share `hit_rate_max`
ever comes (the rest of the prompts is new), a cache that keeps what was used within T hits

    hit_rate = hit_rate_max * (1 - exp(-T / reuse_gap_s))

and, by Little's law, holds what comes in new times how long it stays: T after its last use, and
the times between its uses before. docs/operating/capacity.md walks through an example.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cenote.api.errors import InvalidArgument

__all__ = ["MODELS", "KvShape", "Load", "Node", "Plan", "make_plan", "shape_of_config"]

DRAM_USABLE: Final = 0.97
"""Of a node's memory, beside slot tables and the reserve that is kept free."""
DEMOTED_SHARE: Final = 0.5
"""Of memory has its copy on the SSD as well, where there is one."""
PEAK_FACTOR: Final = 2.0
"""Of the mean, for what must not queue: NICs and the master."""
NIC_SHARE_MAX: Final = 0.6
MASTER_BYTES_PER_OBJECT: Final = 110
JOURNAL_BYTES_PER_PUT: Final = 65 + 24
"""Of its commit, and of its eviction later."""
SNAPSHOT_BYTES_PER_OBJECT: Final = 65
ETCD_FACTOR: Final = 3
ETCD_BYTES_MIN: Final = 50 << 20
MASTER_LOOKUPS_PER_S: Final = 400_000
MASTER_PUTS_PER_S: Final = 100_000
"""Keys in batches, one client, one core: docs/PERFORMANCE.md."""
MASTER_SHARE_MAX: Final = 0.5
SSD_DWPD_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves in the cache, over all layers and ranks."""

    layers: int
    kv_heads: int
    head_dim: int
    latent_dim: int = 0
    """Of multi-head latent attention: values a layer and token, instead of heads."""

    def bytes_per_token(self, dtype_bytes: float) -> int:
        per_layer = self.latent_dim or 2 * self.kv_heads * self.head_dim
        return math.ceil(self.layers * per_layer * dtype_bytes)


MODELS: Final[Mapping[str, KvShape]] = {
    "llama-3.1-8b": KvShape(32, 8, 128),
    "llama-3.1-70b": KvShape(80, 8, 128),
    "llama-3.1-405b": KvShape(126, 8, 128),
    "mistral-7b": KvShape(32, 8, 128),
    "mixtral-8x7b": KvShape(32, 8, 128),
    "qwen2.5-72b": KvShape(80, 8, 128),
    "qwen3-8b": KvShape(36, 8, 128),
    "qwen3-32b": KvShape(64, 8, 128),
    "qwen3-235b-a22b": KvShape(94, 4, 128),
    "deepseek-v3": KvShape(61, 0, 0, 512 + 64),
}
"""By name; others from their config.json."""


def shape_of_config(config: Mapping[str, Any]) -> KvShape:
    """From a model's config.json. Raises InvalidArgument where it does not say enough."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "num_hidden_layers" not in config:
        config = text

    def number(name: str, default: object = None) -> int:
        value = config.get(name) or default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InvalidArgument(
                f"the model's configuration has no {name}", remedy="say --bytes-per-token"
            )
        return value

    layers = number("num_hidden_layers")
    if config.get("kv_lora_rank"):
        return KvShape(layers, 0, 0, number("kv_lora_rank") + number("qk_rope_head_dim"))
    heads = number("num_attention_heads")
    head_dim = config.get("head_dim") or number("hidden_size") // heads
    return KvShape(layers, number("num_key_value_heads", heads), int(head_dim))


@dataclass(frozen=True, slots=True)
class Load:
    """What the engines ask for together; rates are means."""

    bytes_per_token: int
    block_tokens: int
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    hit_rate: float
    """Of the prompts' tokens, that is wanted."""
    hit_rate_max: float
    """What a cache without end would hit."""
    reuse_gap_s: float
    """Mean time between two uses of a prefix that is used again."""
    kept_tokens: float | None = None
    """What must be kept, where that is known otherwise, as from a trace."""


@dataclass(frozen=True, slots=True)
class Node:
    """What each store daemon gives."""

    dram_bytes: int
    ssd_bytes: int
    nic_bytes_per_s: float
    replicas: int = 1
    beside_engines: bool = True
    """Engines run on the same nodes: of n nodes, one nth of the reads is local."""

    @property
    def usable_bytes(self) -> float:
        memory = self.dram_bytes * DRAM_USABLE
        return memory if not self.ssd_bytes else memory * (1 - DEMOTED_SHARE) + self.ssd_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes are of payload unless they are said to be otherwise; rates are means."""

    bytes_per_token: int
    block_bytes: int
    retention_s: float
    """How long after its last use a block must stay; nan where it comes from a trace."""
    kept_tokens: float
    kept_bytes: float
    objects: int
    nodes: int
    nodes_for_bytes: int
    nodes_for_nics: int
    read_bytes_per_s: float
    written_bytes_per_s: float
    nic_share_peak: float
    """Of one node's NIC, at PEAK_FACTOR times the mean."""
    ssd_written_bytes_per_day: float
    """At each node."""
    ssd_dwpd: float
    """Drive writes a day; 0 without SSDs."""
    master_memory_bytes: int
    master_keys_per_s: float
    master_share_peak: float
    """Of what one master process on one core serves, at PEAK_FACTOR times the mean."""
    journal_bytes_per_s: float
    etcd_bytes: int
    warnings: tuple[str, ...]


def _retention(load: Load) -> tuple[float, float]:
    """(how long after its last use, how long in all) a block must stay, in seconds."""
    share = load.hit_rate / load.hit_rate_max
    retention_s = -load.reuse_gap_s * math.log1p(-share)
    # Mean time between two uses, of those that come in time.
    gap_s = load.reuse_gap_s - retention_s * (1 - share) / share if share > 0 else 0.0
    return retention_s, retention_s + load.hit_rate / (1 - load.hit_rate) * gap_s


def make_plan(load: Load, node: Node) -> Plan:
    """Raises InvalidArgument where the numbers fit no pool."""
    _check(load, node)
    new_tokens_s = load.requests_per_s * (
        load.prompt_tokens * (1 - load.hit_rate) + load.output_tokens
    )
    retention_s, stays_s = _retention(load)
    kept_tokens = new_tokens_s * stays_s
    if load.kept_tokens is not None:
        kept_tokens, retention_s = load.kept_tokens, math.nan
    block_bytes = load.bytes_per_token * load.block_tokens
    objects = math.ceil(kept_tokens / load.block_tokens)
    kept_bytes = float(objects) * block_bytes
    read = load.requests_per_s * load.prompt_tokens * load.hit_rate * load.bytes_per_token
    written = new_tokens_s * load.bytes_per_token * node.replicas

    for_bytes = max(1, math.ceil(kept_bytes * node.replicas / node.usable_bytes))
    room = node.nic_bytes_per_s * NIC_SHARE_MAX
    # A NIC carries both ways at once: what is read leaves, what is written comes.
    for_nics = max(1, math.ceil(PEAK_FACTOR * max(read, written) / room))
    nodes = max(for_bytes, for_nics, node.replicas)
    remote = 1 - 1 / nodes if node.beside_engines else 1.0
    nic_share = PEAK_FACTOR * max(read, written) * remote / nodes / node.nic_bytes_per_s
    ssd_per_day = written / nodes * 86_400 if node.ssd_bytes else 0.0
    looked_up = load.requests_per_s * load.prompt_tokens / load.block_tokens
    put = new_tokens_s / load.block_tokens
    busy = PEAK_FACTOR * (looked_up / MASTER_LOOKUPS_PER_S + put / MASTER_PUTS_PER_S)
    plan = Plan(
        bytes_per_token=load.bytes_per_token,
        block_bytes=block_bytes,
        retention_s=retention_s,
        kept_tokens=kept_tokens,
        kept_bytes=kept_bytes,
        objects=objects,
        nodes=nodes,
        nodes_for_bytes=for_bytes,
        nodes_for_nics=for_nics,
        read_bytes_per_s=read,
        written_bytes_per_s=written,
        nic_share_peak=nic_share,
        ssd_written_bytes_per_day=ssd_per_day,
        ssd_dwpd=ssd_per_day / node.ssd_bytes if node.ssd_bytes else 0.0,
        master_memory_bytes=objects * MASTER_BYTES_PER_OBJECT,
        master_keys_per_s=looked_up + put,
        master_share_peak=busy,
        journal_bytes_per_s=put * JOURNAL_BYTES_PER_PUT,
        etcd_bytes=ETCD_BYTES_MIN + ETCD_FACTOR * SNAPSHOT_BYTES_PER_OBJECT * objects,
        warnings=(),
    )
    return _with_warnings(plan, node)


def _check(load: Load, node: Node) -> None:
    if load.bytes_per_token <= 0 or load.block_tokens <= 0 or node.dram_bytes <= 0:
        raise InvalidArgument("bytes per token, tokens per block and memory are above 0")
    if load.requests_per_s <= 0 or load.prompt_tokens <= 0 or load.output_tokens < 0:
        raise InvalidArgument("a load has requests, and these have prompts")
    if not 0 <= load.hit_rate < load.hit_rate_max <= 1:
        raise InvalidArgument(
            f"a hit rate of {load.hit_rate:g} is not below the {load.hit_rate_max:g} that a cache "
            "without end would have",
            remedy="measure with `cenote simulate` or `cenote mrc`, or say --hit-rate-max",
        )
    if load.reuse_gap_s <= 0 or node.nic_bytes_per_s <= 0 or node.replicas < 1:
        raise InvalidArgument("times, rates and replicas are above 0")


def _with_warnings(plan: Plan, node: Node) -> Plan:
    found = []
    if plan.nodes_for_nics > plan.nodes_for_bytes:
        found.append(
            f"NICs decide, not capacity: {plan.nodes_for_nics} nodes for the bytes that move,"
            f" {plan.nodes_for_bytes} for those that are kept"
        )
    if plan.ssd_dwpd > SSD_DWPD_MAX:
        found.append(
            f"SSDs are written {plan.ssd_dwpd:.1f} times a day: larger ones, or"
            " cenote-store's endurance settings (docs/internals/ssd.md)"
        )
    if plan.master_share_peak > MASTER_SHARE_MAX:
        found.append(
            f"one master would be {100 * plan.master_share_peak:.0f} % busy at the peak: larger"
            " blocks (--block-tokens), or several pools"
        )
    if plan.etcd_bytes > 2 << 30:
        found.append("etcd needs --quota-backend-bytes above its default of 2 GiB")
    if node.replicas > plan.nodes_for_bytes:
        found.append(f"{node.replicas} replicas need as many nodes")
    return dataclasses.replace(plan, warnings=tuple(found))
