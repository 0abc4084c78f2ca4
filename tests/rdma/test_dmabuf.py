"""A real dma-buf up to the NIC's driver: what stands for a GPU is the kernel's `vgem`, whose
buffers are host memory. A driver that takes dma-bufs moves bytes there; one that doesn't
(soft-RoCE) gives an error that says so, and what would help.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.cuda import DmaBuf
from cenote.transport.testing_support import DEADLINE_S, payload
from rdma_daemon import rdma_far_end

pytestmark = pytest.mark.rdma

SIZE_BYTES = 1 << 20
_CREATE_DUMB = 0xC02064B2
_HANDLE_TO_FD = 0xC00C642D
_DUMB = struct.Struct("=IIIIIIQ")
_PRIME = struct.Struct("=IIi")


@contextmanager
def dma_buffer() -> Iterator[int]:
    """A dma-buf of SIZE_BYTES; skips where the kernel has no `vgem`."""
    card = next(
        (
            card
            for card in Path("/dev/dri").glob("card*")
            if Path(f"/sys/class/drm/{card.name}/device/driver").resolve().name == "vgem"
            or "vgem" in os.path.realpath(f"/sys/class/drm/{card.name}")
        ),
        None,
    )
    if card is None:
        pytest.skip("no vgem device: modprobe vgem (make test-rdma has one)")
    fd = os.open(card, os.O_RDWR | os.O_CLOEXEC)
    try:
        made = fcntl.ioctl(fd, _CREATE_DUMB, _DUMB.pack(SIZE_BYTES // 4096, 1024, 32, 0, 0, 0, 0))
        *_, handle, _pitch, size = _DUMB.unpack(made)
        assert size >= SIZE_BYTES
        flags = os.O_RDWR | os.O_CLOEXEC
        exported = _PRIME.unpack(fcntl.ioctl(fd, _HANDLE_TO_FD, _PRIME.pack(handle, flags, -1)))[2]
        try:
            yield exported
        finally:
            os.close(exported)
    finally:
        os.close(fd)


@pytest.mark.parametrize("library", ["ibverbs", "pyverbs"])
def test_a_real_dma_buffer(library: str) -> None:
    with rdma_far_end(library) as far, dma_buffer() as fd:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf")
        view = mmap.mmap(fd, SIZE_BYTES)
        address = 0  # of its first byte; it is named by its offsets

        def export(_address: int, _length: int) -> DmaBuf:
            return DmaBuf(os.dup(fd), 0)

        refusal: ResourceUnavailable | None = None
        try:
            region = far.transport.register_device(address, SIZE_BYTES, view, export)
        except ResourceUnavailable as error:
            refusal = error
        if refusal is not None:
            print(refusal)
            assert "GPU memory can't be registered" in refusal.message
            assert "errno" in refusal.message
            assert "tensor.cpu()" in refusal.remedy
            assert not far.transport.memory.has_device_memory
            return
        data = payload(SIZE_BYTES, 1)
        view[:] = data
        channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
        place = (far.segment_id, 0, SIZE_BYTES, address)
        assert channel.write_one(*place, 7, DEADLINE_S, False)[0] == 0
        assert far.peek(0, SIZE_BYTES) == data
        view[:] = bytes(SIZE_BYTES)
        assert channel.read_one(*place, DEADLINE_S, False)[0] == 0
        assert view[:] == data
        assert far.transport.counters.tcp_calls == 0
        channel.close()
        far.transport.deregister(region)
