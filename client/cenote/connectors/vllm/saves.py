"""Which blocks of a request are still to be saved. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .groups import Block, Grouping
from .orders import SaveOrder

__all__ = ["SaveProgress"]

NULL_BLOCK: Final = 0
"""vLLM's block 0 stands for "none": outside of a window, or not allocated."""
_NEVER: Final = 1 << 62


@dataclass(slots=True)
class SaveProgress:
    """How far one request has been saved: per group, the index of the next block."""

    next_index: dict[int, int] = field(default_factory=dict)
    due_tokens: int = 0
    """With fewer computed than that, `advance` has nothing to save but states. 0: not known yet."""

    def skip(self, grouping: Grouping, tokens: int) -> None:
        """What lies before `tokens` is in the pool already."""
        for group in grouping.groups:
            index = tokens // group.block_tokens
            self.next_index[group.number] = max(self.next_index.get(group.number, 0), index)
        self._look_ahead(grouping)

    def _look_ahead(self, grouping: Grouping) -> None:
        self.due_tokens = min(
            (
                (self.next_index.get(group.number, 0) + 1) * group.block_tokens
                for group in grouping.groups
                if group.kind != "state"
            ),
            default=_NEVER,
        )

    def due(
        self,
        grouping: Grouping,
        hashes: Sequence[bytes],
        computed_tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> bool:
        """Whether `advance` may have something to save: in most steps not, and then nobody need
        make the tables, which are as long as the prompts."""
        if not self.due_tokens:
            self._look_ahead(grouping)
        tokens = min(computed_tokens, len(hashes) * grouping.hash_tokens)
        return bool(states) or tokens >= self.due_tokens

    def advance(
        self,
        grouping: Grouping,
        hashes: Sequence[bytes],
        computed_tokens: int,
        tables: Sequence[Sequence[int]],
        states: Sequence[tuple[int, int, int]] = (),
    ) -> SaveOrder | None:
        """What is to be saved once `computed_tokens` are computed, None for nothing.

        `tables`: the request's block ids by group. `states`: (group, block id, tokens) of recurrent
        states at exact boundaries, which vLLM hands out since their tables don't keep them.
        """
        blocks: list[Block] = []
        ids: list[int] = []
        tokens = min(computed_tokens, len(hashes) * grouping.hash_tokens)
        for group in grouping.groups:
            if group.kind == "state":
                for number, block_id, at_tokens in states:
                    whole = at_tokens and not at_tokens % group.block_tokens
                    if number == group.number and whole and at_tokens <= tokens:
                        blocks.append((number, at_tokens // group.block_tokens - 1))
                        ids.append(block_id)
                continue
            table = tables[group.number]
            first = self.next_index.get(group.number, 0)
            last = min(tokens // group.block_tokens, len(table))
            for index in range(first, last):
                if table[index] != NULL_BLOCK:
                    blocks.append((group.number, index))
                    ids.append(table[index])
            self.next_index[group.number] = max(first, last)
        self._look_ahead(grouping)
        if not blocks:
            return None
        found = tuple(grouping.hash_of(block, hashes) for block in blocks)
        return SaveOrder(tuple(blocks), found, tuple(ids))
