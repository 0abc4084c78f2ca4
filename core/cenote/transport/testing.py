"""The public contract of a `Transport`: whoever adds one lets it pass this suite.

Derive a test class from `TransportContract`, say in `far_end` how a daemon is reached over the
transport, and let pytest collect it. Nothing here needs pytest itself.

    class TestMyTransport(TransportContract):
        @contextmanager
        def far_end(self) -> Iterator[FarEnd]: ...
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    InvalidArgument,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.api.rows import EXTENT
from cenote.v1 import common_pb2

from .base import Channel, SealBatch, U64Array
from .testing_support import (
    DEADLINE_S,
    GRACE_S,
    GUARD,
    SHORT_S,
    UNKNOWN_SEGMENT,
    FarEnd,
    LocalMemory,
    batch,
    payload,
    raises,
    seal_rows,
)

__all__ = ["FarEnd", "TransportContract"]


class TransportContract:
    """The suite. Each test has a daemon of its own."""

    def far_end(self) -> AbstractContextManager[FarEnd]:
        raise NotImplementedError

    @contextmanager
    def channel(self) -> Iterator[tuple[FarEnd, Channel]]:
        with self.far_end() as far:
            channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
            try:
                yield far, channel
            finally:
                channel.close()

    # ---- bytes ------------------------------------------------------------------------------

    def test_it_is_reachable_and_says_what_it_is(self) -> None:
        with self.channel() as (far, channel):
            assert far.transport.obstacle(far.node, far.identity) is None
            assert far.transport.obstacle(common_pb2.NodeView(node_id=1), far.identity)
            assert channel.route
            assert channel.node_id == far.node.node_id
            assert channel.verifies_by_lease == far.proven_by_lease
            memory = LocalMemory(64)
            region = far.transport.register(memory.address, 64, memory)
            assert (region.address, region.length) == (memory.address, 64)
            far.transport.deregister(region)

    def test_single_items_of_all_sizes(self) -> None:
        sizes = [1, 2, 63, 64, 65, 4095, 4096, 65_535, 65_536, 65_537, 262_145]
        sizes += [1 << 20, (1 << 20) + 1, 5 << 19, (4 << 20) + 3, 16 << 20]
        with self.channel() as (far, channel):
            memory = LocalMemory((16 << 20) + 128)
            for seed, size in enumerate(sizes):
                for checksum in (True, False):
                    data = payload(size, seed + 1000 * checksum)
                    source = np.frombuffer(data, np.uint8)
                    status, digest = channel.write_one(
                        far.segment_id, 192, size, source.ctypes.data, 7, DEADLINE_S, checksum
                    )
                    assert status == 0
                    assert digest == (xxh3_64_intdigest(data) if checksum else 0)
                    assert far.peek(192, size) == data
                    status, digest = channel.read_one(
                        far.segment_id, 192, size, memory.address + 64, DEADLINE_S, checksum
                    )
                    assert status == 0
                    assert digest == (xxh3_64_intdigest(data) if checksum else 0)
                    assert memory.bytes[64 : 64 + size].tobytes() == data
                    assert memory.untouched(0, 64)
                    assert memory.untouched(64 + size, 64 + size + 64)
                    memory.bytes[64 : 64 + size] = GUARD

    def test_batches_of_any_shape(self) -> None:
        shapes: list[tuple[int, Callable[[random.Random], int]]] = [
            (1, lambda rng: 4096),
            (2, lambda rng: rng.randint(1, 100)),
            (300, lambda rng: 4096),
            (500, lambda rng: rng.choice([1, 64, 4096, 70_000])),
            (3000, lambda rng: rng.randint(1, 300)),
            (6, lambda rng: rng.choice([1 << 20, (1 << 20) + 7, 3 << 20])),
        ]
        with self.channel() as (far, channel):
            for number, (count, length_of) in enumerate(shapes):
                for scattered in (False, True):
                    rng = random.Random(number)
                    self._round_trip(
                        far, channel, rng, [length_of(rng) for _ in range(count)], scattered
                    )

    def _round_trip(
        self,
        far: FarEnd,
        channel: Channel,
        rng: random.Random,
        lengths: list[int],
        scattered: bool,
    ) -> None:
        """Write a batch, look at the segment, read it back to other addresses."""
        remote = self._places(rng, lengths, scattered)
        local = self._places(rng, lengths, scattered)
        extents = batch([(far.segment_id, o, n) for o, n in zip(remote, lengths, strict=True)])
        total = sum(lengths)
        source = np.frombuffer(payload(2 * total + 64, rng.randint(0, 1 << 30)), np.uint8)
        far.poke(0, bytes([GUARD]) * (2 * total + 64))
        addresses = np.array(local, np.uint64) + np.uint64(source.ctypes.data)
        sums: U64Array = np.zeros(len(lengths), np.uint64)
        statuses = channel.write(extents, addresses, 7, DEADLINE_S, sums)
        assert not statuses.any()
        expected = np.full(2 * total + 64, GUARD, np.uint8)
        for o, a, n in zip(remote, local, lengths, strict=True):
            expected[o : o + n] = source[a : a + n]
        assert far.peek(0, len(expected)) == expected.tobytes()
        wanted = [
            xxh3_64_intdigest(source[a : a + n].data) for a, n in zip(local, lengths, strict=True)
        ]
        assert sums.tolist() == wanted
        for checksums in (None, np.zeros(len(lengths), np.uint64)):
            memory = LocalMemory(2 * total + 64)
            addresses = np.array(local, np.uint64) + np.uint64(memory.address)
            statuses = channel.read(extents, addresses, DEADLINE_S, checksums)
            assert not statuses.any()
            expected = np.full(2 * total + 64, GUARD, np.uint8)
            for a, n in zip(local, lengths, strict=True):
                expected[a : a + n] = source[a : a + n]
            assert memory.bytes.tobytes() == expected.tobytes()
            assert checksums is None or checksums.tolist() == wanted

    def _places(self, rng: random.Random, lengths: list[int], scattered: bool) -> list[int]:
        """Where to put items in twice their room: back to back, or shuffled with gaps."""
        order = list(range(len(lengths)))
        gaps = [0] * len(lengths)
        if scattered:
            rng.shuffle(order)
            gaps = [rng.choice([0, 0, 1, 64]) for _ in lengths]
            gaps = [min(gap, length) for gap, length in zip(gaps, lengths, strict=True)]
        places = [0] * len(lengths)
        at = 0
        for i in order:
            places[i] = at + gaps[i]
            at += gaps[i] + lengths[i]
        return places

    def test_very_many_items(self) -> None:
        count = 20_000
        with self.channel() as (far, channel):
            data = payload(count * 40, 3)
            source = np.frombuffer(data, np.uint8)
            steps = np.arange(count, dtype=np.uint64)
            extents = np.zeros(count, EXTENT)
            extents["segment"], extents["length"] = far.segment_id, 40
            extents["offset"] = steps * np.uint64(64)
            addresses = steps * np.uint64(40) + np.uint64(source.ctypes.data)
            assert not channel.write(extents, addresses, 7, DEADLINE_S).any()
            memory = LocalMemory(count * 40)
            addresses = steps * np.uint64(40) + np.uint64(memory.address)
            assert not channel.read(extents, addresses, DEADLINE_S).any()
            assert memory.bytes.tobytes() == data

    def test_nothing_to_do(self) -> None:
        with self.channel() as (_, channel):
            nothing: Any = np.zeros(0, EXTENT)
            assert channel.read(nothing, np.zeros(0, np.uint64), DEADLINE_S).tolist() == []
            assert channel.write(nothing, np.zeros(0, np.uint64), 7, DEADLINE_S).tolist() == []

    def test_several_threads(self) -> None:
        area = 1 << 20
        failures: list[str] = []

        def work(far: FarEnd, channel: Channel, number: int) -> None:
            rng = random.Random(number)
            memory = LocalMemory(area)
            for turn in range(25):
                size = rng.choice([100, 4096, 70_000, area])
                data = payload(size, 100 * number + turn)
                source = np.frombuffer(data, np.uint8)
                one = batch([(far.segment_id, number * area, size)] * 2)
                one[1] = (far.segment_id, 0, number * area, min(size, 100))
                to = np.array([source.ctypes.data] * 2, np.uint64)
                if channel.write(one, to, 7, DEADLINE_S).any():
                    failures.append("write")
                status, digest = channel.read_one(
                    far.segment_id, number * area, size, memory.address, DEADLINE_S, True
                )
                if status or digest != xxh3_64_intdigest(data):
                    failures.append("read")

        with self.channel() as (far, channel):
            threads = [threading.Thread(target=work, args=(far, channel, i)) for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert failures == []

    # ---- bad items --------------------------------------------------------------------------

    def _bad_places(self, far: FarEnd) -> list[tuple[tuple[int, int, int], int]]:
        size, segment = far.size_bytes, far.segment_id
        stale, invalid = StaleLocation.code, InvalidArgument.code
        return [
            ((UNKNOWN_SEGMENT, 0, 64), stale),
            ((segment, size, 64), invalid),
            ((segment, size - 63, 64), invalid),
            ((segment, size + (1 << 40), 64), invalid),
            ((segment, 0, size + 1), invalid),
            ((segment, (1 << 64) - 32, 64), invalid),
            ((segment, 64, 0), invalid),
        ]

    def test_single_bad_items(self) -> None:
        with self.channel() as (far, channel):
            far.poke(0, b"x" * 256)
            memory = LocalMemory(far.size_bytes + 64)
            for (segment, offset, length), code in self._bad_places(far):
                args = (segment, offset, length, memory.address)
                assert channel.read_one(*args, DEADLINE_S, True)[0] == code
                assert channel.write_one(*args, 7, DEADLINE_S, True)[0] == code
            assert memory.untouched(0, len(memory.bytes))
            assert far.peek(0, 256) == b"x" * 256
            # The channel goes on as if nothing had been.
            assert (
                channel.read_one(far.segment_id, 0, 256, memory.address, DEADLINE_S, False)[0] == 0
            )
            assert memory.bytes[:256].tobytes() == b"x" * 256

    def test_bad_items_beside_good_ones(self) -> None:
        with self.channel() as (far, channel):
            bad = [place for place in self._bad_places(far) if place[0][2] <= 64]
            good = [((far.segment_id, 64 * (2 * i + 1), 64), 0) for i in range(30)]
            mixed = good + bad
            random.Random(5).shuffle(mixed)
            extents = batch([place for place, _ in mixed])
            codes = [code for _, code in mixed]
            memory = LocalMemory(64 * len(mixed))
            addresses = np.arange(len(mixed), dtype=np.uint64) * np.uint64(64)
            addresses += np.uint64(memory.address)
            far.poke(0, bytes([1]) * 64 * 64)
            sums = np.zeros(len(mixed), np.uint64)
            assert channel.read(extents, addresses, DEADLINE_S, sums).tolist() == codes
            for i, code in enumerate(codes):
                item = memory.bytes[64 * i : 64 * i + 64]
                assert set(item.tolist()) == ({GUARD} if code else {1})
                assert int(sums[i]) == (0 if code else xxh3_64_intdigest(bytes([1]) * 64))
            memory.bytes[:] = 2
            assert channel.write(extents, addresses, 7, DEADLINE_S).tolist() == codes
            for i in range(60):
                assert set(far.peek(64 * i, 64)) == ({2} if i % 2 else {1})

    # ---- seals ------------------------------------------------------------------------------

    def test_seals(self) -> None:
        with self.channel() as (far, channel):
            ids = [far.segment_id, UNKNOWN_SEGMENT, far.segment_id]
            stale = StaleLocation.code
            assert channel.seal(seal_rows(ids, 5), DEADLINE_S).tolist() == [0, stale, 0]
            assert channel.seal(seal_rows(ids, 5), DEADLINE_S).tolist() == [0, stale, 0]
            assert channel.seal(seal_rows(ids, 4), DEADLINE_S).tolist() == [stale] * 3
            assert channel.seal(seal_rows([far.segment_id], 6), DEADLINE_S).tolist() == [0]
            many = [far.segment_id] * 5000
            assert not channel.seal(seal_rows(many, 7), DEADLINE_S).any()
            assert channel.seal(SealBatch(1, 1, 1, b"", b""), DEADLINE_S).tolist() == []

    def test_changes_of_an_older_epoch_are_refused(self) -> None:
        with self.channel() as (far, channel):
            far.set_epoch(2)
            with raises(StaleEpoch):
                channel.seal(seal_rows([far.segment_id], 1), DEADLINE_S)
            newer = replace(seal_rows([far.segment_id], 1), epoch=2)
            assert channel.seal(newer, DEADLINE_S).tolist() == [0]
            if not far.outlives_peer:
                memory = LocalMemory(1 << 20)
                far.poke(0, b"x" * 128)
                with raises(StaleEpoch):
                    channel.write_one(far.segment_id, 0, 64, memory.address, 7, DEADLINE_S, True)
                extents = batch([(far.segment_id, 0, 64), (far.segment_id, 64, 64)])
                addresses = np.array([memory.address] * 2, np.uint64)
                with raises(StaleEpoch):
                    channel.write(extents, addresses, 7, DEADLINE_S)
                assert far.peek(0, 128) == b"x" * 128
                later = far.transport.connect(far.node, far.identity, 2, DEADLINE_S)
                assert not later.write(extents, addresses, 7, DEADLINE_S).any()
                later.close()

    # ---- endings ----------------------------------------------------------------------------

    def test_a_peer_that_stands_still(self) -> None:
        with self.channel() as (far, channel):
            assert not channel.seal(seal_rows([far.segment_id], 1), DEADLINE_S).any()
            memory = LocalMemory(8 << 20)
            extents = batch([(far.segment_id, i << 20, 1 << 20) for i in range(8)])
            addresses = np.arange(8, dtype=np.uint64) * np.uint64(1 << 20)
            addresses += np.uint64(memory.address)
            calls: list[Callable[[], object]] = [
                lambda: channel.seal(seal_rows([far.segment_id], 2), SHORT_S),
                lambda: far.transport.connect(far.node, far.identity, 1, SHORT_S),
            ]
            if far.needs_peer:
                one = (far.segment_id, 0, 4096, memory.address)
                calls += [
                    lambda: channel.read_one(*one, SHORT_S, True),
                    lambda: channel.write_one(*one, 7, SHORT_S, True),
                    lambda: channel.read(extents, addresses, SHORT_S),
                    lambda: channel.write(extents, addresses, 7, SHORT_S),
                ]
            far.pause()
            try:
                for call in calls:
                    begun = monotonic()
                    with raises(DeadlineExceeded):
                        call()
                    assert SHORT_S - 0.1 < monotonic() - begun < SHORT_S + GRACE_S
                assert memory.untouched(0, len(memory.bytes))
            finally:
                far.resume()
            far.poke(0, bytes([3]) * 100)
            assert not channel.seal(seal_rows([far.segment_id], 3), DEADLINE_S).any()
            assert (
                channel.read_one(far.segment_id, 0, 100, memory.address, DEADLINE_S, True)[0] == 0
            )
            # What the paused peer had still to send must not have landed.
            assert memory.untouched(100, len(memory.bytes))

    def test_a_peer_that_is_gone(self) -> None:
        with self.channel() as (far, channel):
            memory = LocalMemory(4096)
            one = (far.segment_id, 0, 4096, memory.address)
            assert channel.write_one(*one, 7, DEADLINE_S, True)[0] == 0
            far.stop()
            for _ in range(2):
                with raises(Unavailable):
                    channel.seal(seal_rows([far.segment_id], 2), DEADLINE_S)
                with raises(Unavailable):
                    channel.write_one(*one, 7, DEADLINE_S, True)
                with raises(Unavailable):
                    far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
                if not far.outlives_peer:
                    with raises(Unavailable):
                        channel.read_one(*one, DEADLINE_S, True)

    def test_a_session_that_is_cut_off(self) -> None:
        with self.channel() as (far, channel):
            memory = LocalMemory(4096)
            one = (far.segment_id, 0, 4096, memory.address)
            assert channel.write_one(*one, 7, DEADLINE_S, True)[0] == 0
            far.cut(far.identity.session_id)
            end = monotonic() + DEADLINE_S
            with raises(GrantRevoked):
                # Where the daemon has no part in it, the news may come a moment later.
                while not far.needs_peer and monotonic() < end:
                    channel.write_one(*one, 7, DEADLINE_S, True)
                channel.write_one(*one, 7, DEADLINE_S, True)
            for _ in range(2):
                with raises(GrantRevoked):
                    channel.write_one(*one, 7, DEADLINE_S, True)
                with raises(GrantRevoked):
                    channel.seal(seal_rows([far.segment_id], 2), DEADLINE_S)
            with raises(GrantRevoked):
                far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
            other = replace(far.identity, session_id=b"another session!")
            later = far.transport.connect(far.node, other, 1, DEADLINE_S)
            assert later.write_one(*one, 7, DEADLINE_S, True)[0] == 0
            later.close()

    def test_close_during_a_call(self) -> None:
        with self.channel() as (far, channel):
            assert not channel.seal(seal_rows([far.segment_id], 1), DEADLINE_S).any()
            ended: list[type[BaseException]] = []

            def wait_for_peer() -> None:
                try:
                    channel.seal(seal_rows([far.segment_id], 2), DEADLINE_S)
                except CenoteError as error:
                    ended.append(type(error))

            far.pause()
            try:
                threads = [threading.Thread(target=wait_for_peer) for _ in range(2)]
                for thread in threads:
                    thread.start()
                threads[0].join(0.05)  # long enough that one is most likely in the middle of it
                begun = monotonic()
                channel.close()
                for thread in threads:
                    thread.join(10)
                assert monotonic() - begun < GRACE_S
            finally:
                far.resume()
            assert ended == [ClientClosed] * 2

    def test_use_after_close(self) -> None:
        with self.channel() as (far, channel):
            memory = LocalMemory(4096)
            one = (far.segment_id, 0, 4096, memory.address)
            assert channel.write_one(*one, 7, DEADLINE_S, True)[0] == 0
            channel.close()
            channel.close()
            extents = batch([(far.segment_id, 0, 64)])
            addresses = np.array([memory.address], np.uint64)
            calls: list[Callable[[], object]] = [
                lambda: channel.read_one(*one, DEADLINE_S, True),
                lambda: channel.write_one(*one, 7, DEADLINE_S, True),
                lambda: channel.read(extents, addresses, DEADLINE_S),
                lambda: channel.write(extents, addresses, 7, DEADLINE_S),
                lambda: channel.seal(seal_rows([far.segment_id], 1), DEADLINE_S),
            ]
            for call in calls:
                with raises(ClientClosed):
                    call()
            assert channel.view(extents, 1 << 40, DEADLINE_S).views == [None]
            far.transport.close()
            with raises(ClientClosed):
                far.transport.connect(far.node, far.identity, 1, DEADLINE_S)

    def test_views(self) -> None:
        with self.channel() as (far, channel):
            far.poke(100, b"abcdef")
            extents = batch(
                [
                    (far.segment_id, 100, 6),
                    (UNKNOWN_SEGMENT, 0, 6),
                    (far.segment_id, far.size_bytes - 5, 6),
                    (far.segment_id, 102, 4),
                ]
            )
            seen = channel.view(extents, 1 << 40, DEADLINE_S)
            view, unknown, outside, part = seen.views
            assert unknown is outside is None
            if view is None:
                assert part is None
                seen.end()
                return
            assert part is not None
            assert view.readonly
            assert bytes(view) == b"abcdef"
            far.poke(100, b"ABC")
            assert bytes(view) == b"ABCdef"
            assert bytes(part) == b"Cdef"
            channel.close()
            assert bytes(view) == b"ABCdef"
            seen.end()
            seen.end()
