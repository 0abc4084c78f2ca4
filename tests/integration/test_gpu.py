"""Tensors on a real GPU through a pool of real processes; skips where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

COUNT = 64
BLOCK_BYTES = 1 << 20
STAGING_BYTES = 16 << 20
"""Areas of 4 MiB: sixteen turns."""


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensors_there_and_back(torch: Any, transport: str) -> None:
    """Put while they are still being computed; read, also into registered memory."""
    keys = [f"k{i}" for i in range(COUNT)]
    with (
        Cluster(stores=1, dram_bytes=256 << 20) as cluster,
        cluster.client(transports=(transport,), device_staging_bytes=STAGING_BYTES) as client,
    ):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            source = torch.randint(256, (COUNT, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
            for _ in range(100):
                source = source.flip(0)
            client.put_from_batch(keys, list(source), chain=True).raise_for_errors()
        stream.synchronize()
        expected = source.cpu()
        assert client.get(keys[5]) == expected[5].numpy().tobytes()
        target = torch.zeros_like(source)
        assert client.get_into_batch(keys, list(target), chain=True).hit_count == COUNT
        assert torch.equal(target.cpu(), expected)
        with client.register(target):
            target.zero_()
            torch.cuda.synchronize()
            assert (
                client.get_into_batch(
                    keys,
                    addresses=[target.data_ptr() + i * BLOCK_BYTES for i in range(COUNT)],
                    lengths=BLOCK_BYTES,
                ).hit_count
                == COUNT
            )
        assert torch.equal(target.cpu(), expected)
        assert client.put_from("one", target[3]).stored
        assert client.get_into("one", target[4]) == BLOCK_BYTES
        assert torch.equal(target[4].cpu(), expected[3])
        assert client.session.staging.pinned
