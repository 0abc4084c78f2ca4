"""Keys of the pool: which object holds a block of one KV group, from one rank.

A key is the engine's block hash, which stands for all tokens up to the block's end, then the group
and the shard. Ranks that hold the same bytes, as vLLM says of MLA, share a shard and divide the
work of saving it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

__all__ = ["RankShard", "key_suffixes", "object_keys", "shards_of"]

_SUFFIX: Final = Struct(">BH")


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds: shard `shard` of each block, as `replica` of `replicas` equal ranks."""

    shard: int
    replica: int
    replicas: int

    def saves(self, position: int) -> bool:
        """Whether this rank is the one to save the block at `position` of its prompt."""
        return position % self.replicas == self.replica


def shards_of(tp_size: int, pp_size: int, tp_replicas: int) -> list[RankShard]:
    """The shard of each rank, in order of ranks (pipeline stages outermost).

    `tp_replicas`: how many consecutive tensor-parallel ranks hold the same bytes.
    """
    if tp_replicas < 1 or tp_size % tp_replicas:
        raise ValueError(f"{tp_replicas} ranks with equal KV do not divide {tp_size} ranks")
    shards_per_stage = tp_size // tp_replicas
    return [
        RankShard(stage * shards_per_stage + rank // tp_replicas, rank % tp_replicas, tp_replicas)
        for stage in range(pp_size)
        for rank in range(tp_size)
    ]


def key_suffixes(group: int, shards: Sequence[int]) -> list[bytes]:
    """What the keys of a group's blocks end in, one for each of `shards`."""
    return [_SUFFIX.pack(group, shard) for shard in shards]


def object_keys(
    hashes: Sequence[bytes], groups: Sequence[int], shards: Sequence[int]
) -> list[bytes]:
    """Keys of blocks: block by block, and of each block all `shards`."""
    suffixes = {group: key_suffixes(group, shards) for group in set(groups)}
    return [
        block_hash + suffix
        for block_hash, group in zip(hashes, groups, strict=True)
        for suffix in suffixes[group]
    ]
