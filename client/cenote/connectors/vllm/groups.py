"""KV groups, and how much of a prompt can be resumed from the blocks that are present.

vLLM divides a model's layers into groups with one block table each. To resume after `n` tokens, a
group of full attention needs all blocks before `n`, one of a sliding window those that the window
of the next token reaches, and one of recurrent states (Mamba) the state at exactly `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Block", "Group", "Grouping"]

Block = tuple[int, int]
"""(group number, index of the block in the prompt)."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group, by vLLM's number of it."""

    number: int
    kind: Literal["full", "window", "state"]
    block_tokens: int
    window_tokens: int = 0

    def first_needed(self, tokens: int) -> int:
        """Index of the first block that is needed to resume after `tokens`."""
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return tokens // self.block_tokens - 1
        return max(0, tokens - self.window_tokens + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class Grouping:
    """All groups of a model. Prompts are resumed at multiples of `unit_tokens`; block hashes stand
    for multiples of `hash_tokens`."""

    groups: tuple[Group, ...]
    unit_tokens: int
    hash_tokens: int

    def __post_init__(self) -> None:
        for group in self.groups:
            if self.unit_tokens % group.block_tokens or group.block_tokens % self.hash_tokens:
                raise ValueError(
                    f"blocks of {group.block_tokens} tokens fit neither units of "
                    f"{self.unit_tokens} nor hashes of {self.hash_tokens}"
                )

    @property
    def single(self) -> bool:
        """One group of full attention: the present blocks of a prompt are a prefix."""
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def main(self) -> int:
        """Number of the first group of full attention: its blocks are as many as the prompt's. -1:
        there is none."""
        return next((group.number for group in self.groups if group.kind == "full"), -1)

    def aligned(self, tokens: int) -> int:
        """The longest length up to `tokens` that can be resumed at."""
        return tokens // self.unit_tokens * self.unit_tokens

    def hash_of(self, block: Block, hashes: Sequence[bytes]) -> bytes:
        """The hash of all tokens up to the block's end."""
        tokens = (block[1] + 1) * self.group(block[0]).block_tokens
        return bytes(hashes[tokens // self.hash_tokens - 1])

    def group(self, number: int) -> Group:
        for group in self.groups:
            if group.number == number:
                return group
        raise KeyError(number)

    def all_blocks(self, tokens: int) -> list[Block]:
        """Every block that a prompt of `tokens` could be resumed from, group by group."""
        return [
            (group.number, index)
            for group in self.groups
            for index in range(tokens // group.block_tokens)
        ]

    def needed(self, tokens: int, have_tokens: int = 0) -> list[Block]:
        """The blocks to resume after `tokens`, where those of `have_tokens` are there already.

        In order of the prompt, so that a part of them from the front on is of use.
        """
        if tokens <= have_tokens:
            return []
        if self.single:  # prompts are long, and this is asked for while the engine waits
            number, size = self.groups[0].number, self.groups[0].block_tokens
            return [(number, index) for index in range(have_tokens // size, tokens // size)]
        found = [
            (group.number, index)
            for group in self.groups
            for index in range(
                max(group.first_needed(tokens), have_tokens // group.block_tokens),
                tokens // group.block_tokens,
            )
        ]
        ends = {group.number: group.block_tokens for group in self.groups}
        return sorted(found, key=lambda block: ((block[1] + 1) * ends[block[0]], block[0]))

    def usable_tokens(
        self, limit_tokens: int, present: Callable[[Block], bool], have_tokens: int = 0
    ) -> int:
        """The longest length up to `limit_tokens` that can be resumed at with what is `present`.

        What lies before `have_tokens` is there already. 0 where nothing is gained by it.
        """
        tokens = self.aligned(limit_tokens)
        for group in self.groups:
            if group.kind == "full":
                tokens = min(tokens, self._prefix_of(group, tokens, present, have_tokens))
        others = [group for group in self.groups if group.kind != "full"]
        while tokens > have_tokens:
            if all(self._resumes(group, tokens, present, have_tokens) for group in others):
                return tokens
            tokens -= self.unit_tokens
        return 0

    def _prefix_of(
        self, group: Group, tokens: int, present: Callable[[Block], bool], have_tokens: int
    ) -> int:
        index = have_tokens // group.block_tokens
        while index < tokens // group.block_tokens and present((group.number, index)):
            index += 1
        return self.aligned(index * group.block_tokens)

    def _resumes(
        self, group: Group, tokens: int, present: Callable[[Block], bool], have_tokens: int
    ) -> bool:
        first = max(group.first_needed(tokens), have_tokens // group.block_tokens)
        return all(
            present((group.number, index)) for index in range(first, tokens // group.block_tokens)
        )
