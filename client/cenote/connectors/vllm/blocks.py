"""Where the engine's blocks lie in its memory, and copies between them and the staging memory.

A block of a group is the bytes of all of the group's layers, in the order of the layers: one piece
for each layer, or a single one where the engine's layout has them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Device, device_of

__all__ = ["BlockMemory", "Piece", "Stack", "merge_pieces", "stack_pieces"]

_SHAPE: Final = "the KV cache of {name} has the shape {shape}, which does not begin with its blocks"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of every block: block `b` has `length` bytes of it at `offset + b * stride` of the
    memory that begins at `storage`."""

    storage: int
    offset: int
    stride: int
    length: int


def merge_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The same bytes in the same order, in as few pieces as there can be."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.storage, last.stride) == (piece.storage, piece.stride)
            and last.offset + last.length == piece.offset
        ):
            merged[-1] = Piece(last.storage, last.offset, last.stride, last.length + piece.length)
        else:
            merged.append(piece)
    return merged


@dataclass(frozen=True, slots=True)
class Stack:
    """Pieces that are alike and equally far from each other: one tensor takes them all."""

    piece: Piece
    """The first of them."""
    count: int
    gap: int

    @property
    def length(self) -> int:
        return self.count * self.piece.length


def stack_pieces(pieces: Sequence[Piece]) -> list[Stack]:
    """The same pieces in the same order. Each stack is copied in one call, which gives up the GIL
    once, however many layers it has."""
    stacks: list[Stack] = []
    for piece in pieces:
        last = stacks[-1] if stacks else None
        if last is not None:
            first = last.piece
            gap = piece.offset - first.offset - (last.count - 1) * last.gap
            alike = (first.storage, first.stride, first.length) == (
                piece.storage, piece.stride, piece.length,
            )  # fmt: skip
            if alike and gap > 0 and (last.count == 1 or gap == last.gap):
                stacks[-1] = Stack(first, last.count + 1, gap)
                continue
        stacks.append(Stack(piece, 1, piece.length))
    return stacks


@final
class BlockMemory:
    """The KV cache of one rank."""

    def __init__(
        self,
        caches: Mapping[str, Any],
        layers: Mapping[int, Sequence[str]],
        num_blocks: int,
        device: Device | None = None,
    ) -> None:
        """`caches`: by layer, one tensor or several; `layers`: of each group; `device`: where they
        are, if not found out by itself. Raises ValueError where blocks can't be addressed."""
        self._storages: dict[int, torch.Tensor] = {}
        self._views: dict[int, list[torch.Tensor]] = {}
        self.block_bytes: dict[int, int] = {}
        """By group."""
        self.pieces: dict[int, list[Piece]] = {}
        for number, names in layers.items():
            found: list[Piece] = []
            for name in names:
                cache = caches[name]
                for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                    found += self._pieces_of(name, tensor, num_blocks)
            self.pieces[number] = merge_pieces(found)
            self.block_bytes[number] = sum(piece.length for piece in found)
            self._views[number] = [
                self._storages[stack.piece.storage].as_strided(
                    (num_blocks, stack.count, stack.piece.length),
                    (stack.piece.stride, stack.gap, 1),
                    stack.piece.offset,
                )
                for stack in stack_pieces(self.pieces[number])
            ]
        self._place: torch.device = next(iter(self._storages.values())).device
        self.device = device_of(self._place) if device is None else device
        self._arrays: dict[int, list[NDArray[np.uint8]]] = {}
        """The views, where they are in this host's memory."""
        if self.device.is_host:
            self._arrays = {n: [view.numpy() for view in of] for n, of in self._views.items()}

    def _pieces_of(self, name: str, tensor: torch.Tensor, num_blocks: int) -> list[Piece]:
        shape = tuple(tensor.shape)
        if not shape or shape[0] % num_blocks:
            raise ValueError(_SHAPE.format(name=name, shape=shape))
        ratio = shape[0] // num_blocks  # kernels may divide a block into smaller ones
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._storages[storage.data_ptr()] = raw.set_(storage)
        width = tensor.element_size()
        stride = tensor.stride(0) * width
        base = tensor.storage_offset() * width
        starts, length = _dense_runs(shape[1:], tensor.stride()[1:], width)
        pieces = [
            Piece(storage.data_ptr(), base + part * stride + start, stride * ratio, length)
            for part in range(ratio)
            for start in starts
        ]
        return merge_pieces(pieces)

    # ---- copies ------------------------------------------------------------------------------

    def gather(self, group: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Blocks to `rows`: uint8[n, at least block_bytes], in host memory.

        On a GPU in order with what the engine computes on this thread's stream: see `copied`.
        """
        if self.device.is_host:
            for array, parts in self._host_parts(group, rows):
                for block_id, part in zip(block_ids, parts, strict=True):
                    part[...] = array[block_id]
            return
        ids = torch.tensor(block_ids, dtype=torch.long, device=self._place)
        views = self._views[group]
        blocks = torch.cat([view.index_select(0, ids).flatten(1) for view in views], dim=1)
        for row, block in zip(rows, blocks, strict=True):
            row[: blocks.shape[1]].copy_(block, non_blocking=True)

    def _host_parts(
        self, group: int, rows: torch.Tensor
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Each view of the group's blocks with the parts of `rows` that are theirs.

        NumPy copies them, since torch would have all threads of its team do so: they are as fast,
        but where one of their cores has other work, all of them wait for it, many times as long as
        the copy takes.
        """
        given, at = rows.numpy(), 0
        for array in self._arrays[group]:
            count, length = array.shape[1:]
            yield array, given[:, at : at + count * length].reshape(len(given), count, length)
            at += count * length

    def copied(self) -> Callable[[], None]:
        """What waits, in any thread, until all that was gathered so far has arrived."""
        return self.device.mark()

    def order_loads(self) -> None:
        """What is scattered from now on begins after all that the engine has begun so far. In the
        engine's thread."""
        self.device.order_beside()

    def scatter(self, group: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """`rows` to blocks; on a GPU beside what the engine computes: see `finish_loads`."""
        with self.device.beside():
            self._scatter(group, block_ids, rows)

    def _scatter(self, group: int, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        if self.device.is_host:
            for array, parts in self._host_parts(group, rows):
                for block_id, part in zip(block_ids, parts, strict=True):
                    array[block_id] = part
            return
        ids = torch.tensor(block_ids, dtype=torch.long, device=self._place)
        length = self.block_bytes[group]
        blocks = torch.empty(len(rows), length, dtype=torch.uint8, device=self._place)
        for block, row in zip(blocks, rows, strict=True):
            block.copy_(row[:length], non_blocking=True)
        at = 0
        for view in self._views[group]:
            part = _part_of(blocks, at, view)
            view.index_copy_(0, ids, part)
            at += part.shape[1] * part.shape[2]

    def finish_loads(self) -> None:
        """Until all that was scattered is where it belongs."""
        self.device.wait_beside()

    def pin(self, address: int, size_bytes: int) -> bool:
        """Memory of this host that a GPU is to reach by itself; False where it can't."""
        return self.device.pin(address, size_bytes)


def _part_of(rows: torch.Tensor, at: int, view: torch.Tensor) -> torch.Tensor:
    """The bytes of `rows` from `at` on in the shape of blocks of `view`: in one call, since each
    call of torch gives up the GIL, and has to wait for it."""
    count, length = view.shape[1:]
    return rows.as_strided(
        (len(rows), count, length), (rows.stride(0), length, 1), rows.storage_offset() + at
    )


def _dense_runs(
    shape: tuple[int, ...], strides: tuple[int, ...], width: int
) -> tuple[list[int], int]:
    """The bytes of one block as runs of equal length: where they start, and that length."""
    axes = sorted(
        ((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1),
        reverse=True,
    )
    length = 1
    while axes and axes[-1][0] == length:
        length *= axes.pop()[1]
    starts = [0]
    for stride, size in axes:
        starts = [start + i * stride * width for start in starts for i in range(size)]
    return starts, length * width
