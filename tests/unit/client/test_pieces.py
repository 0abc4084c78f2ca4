"""Cutting extents and pieces to match: against a model that moves byte by byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import ProtocolError
from cenote.api.rows import EXTENT
from cenote.client.plan.pieces import Pieces, cut_items, place_replicas, ranges


def split(draw: st.DrawFn, total: int) -> list[int]:
    """Positive lengths that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=4)))
    edges = [0, *[cut for cut in cuts if cut < total], total]
    return [b - a for a, b in pairwise(edges)]


@st.composite
def objects(draw: st.DrawFn) -> list[tuple[int, int, list[list[int]], list[int]]]:
    """(size, tail, extent lengths per replica, piece lengths) of some objects."""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        size, tail = draw(st.integers(1, 30)), draw(st.sampled_from([0, 0, 3]))
        replicas = [split(draw, size + tail) for _ in range(draw(st.integers(1, 3)))]
        pieces = split(draw, size + draw(st.integers(0, 5)))
        made.append((size, tail, replicas, pieces))
    return made


@given(objects(), st.randoms(use_true_random=False))
def test_every_byte_goes_where_it_belongs(
    made: list[tuple[int, int, list[list[int]], list[int]]], random: object
) -> None:
    extents, counts, at = [], [], 1000
    addresses, lengths, starts, here = [], [], [0], 50_000
    for _, _, replicas, pieces in made:
        counts.append(sum(map(len, replicas)))
        for replica in replicas:
            for length in replica:
                extents.append((at % 3, 0, at, length))
                at += length + 7
        for length in pieces:
            addresses.append(here)
            lengths.append(length)
            here += length + 11
        starts.append(len(addresses))
    sizes = np.array([size for size, *_ in made])
    placement = place_replicas(
        np.array(extents, EXTENT),
        np.array(counts),
        np.array([len(replicas) for _, _, replicas, _ in made]),
        sizes + np.array([tail for _, tail, *_ in made]),
    )
    flat = all(len(pieces) == 1 for *_, pieces in made)
    local_side = Pieces(
        np.array(addresses, np.uint64),
        np.array(lengths, np.uint64),
        None if flat else np.array(starts),
    )
    chosen = np.array([len(replicas) - 1 for _, _, replicas, _ in made])
    select = placement.replica == chosen[placement.owner]
    items = cut_items(
        placement.extents[select],
        placement.owner[select],
        placement.start[select],
        sizes,
        local_side,
    )
    got: dict[tuple[int, int], int] = {}
    for extent, address, owner in zip(items.extents, items.addresses, items.owner, strict=True):
        assert extent["length"] > 0
        for i in range(int(extent["length"])):
            got[int(owner), int(address) + i] = int(extent["offset"]) + i
    wanted: dict[tuple[int, int], int] = {}
    row = 0
    for i, (size, _, replicas, _) in enumerate(made):
        remote: list[int] = []
        local: list[int] = []
        for number, replica in enumerate(replicas):
            for _ in replica:
                if number == chosen[i]:
                    remote += range(extents[row][2], extents[row][2] + extents[row][3])
                row += 1
        for j in range(starts[i], starts[i + 1]):
            local += range(addresses[j], addresses[j] + lengths[j])
        wanted |= {(i, local[k]): remote[k] for k in range(size)}
    assert got == wanted
    assert items.whole == (len(items.owner) == len(made))


def test_extents_that_do_not_add_up_are_refused() -> None:
    def place(lengths: list[int], counts: list[int], replicas: list[int], sizes: list[int]) -> None:
        extents = np.array([(1, 0, 0, length) for length in lengths], EXTENT)
        place_replicas(extents, np.array(counts), np.array(replicas), np.array(sizes))

    place([10, 10], [2], [2], [10])
    place([4, 6, 10], [3], [2], [10])
    for lengths, counts, replicas, sizes in (
        ([9], [1], [1], [10]),
        ([10, 9], [2], [2], [10]),
        ([10, 10], [1], [1], [10]),
        ([10], [0], [1], [10]),
        ([5, 10, 5], [3], [2], [10]),  # an extent that crosses from one replica into the next
        ([10, 0, 10], [3], [2], [10]),
        ([10, 10, 10], [3], [2], [10]),
    ):
        with pytest.raises(ProtocolError):
            place(lengths, counts, replicas, sizes)


def test_taking_some_objects_keeps_their_pieces() -> None:
    pieces = Pieces(
        np.arange(6, dtype=np.uint64), np.arange(1, 7, dtype=np.uint64), np.array([0, 1, 3, 3, 6])
    )
    taken = pieces.take(np.array([3, 1]))
    assert taken.starts is not None
    assert taken.starts.tolist() == [0, 3, 5]
    assert taken.addresses.tolist() == [3, 4, 5, 1, 2]
    assert pieces.totals().tolist() == [1, 5, 0, 15]
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 1])).tolist() == [5, 6, 9]
