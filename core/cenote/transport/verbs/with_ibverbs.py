"""The PyPI package `ibverbs` (extra `cenote[rdma]`): releases the GIL, cheap work requests."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

from .adapted import SIGNALED, AdaptedDevice, AdaptedQueue, AdaptedQueuePair, AdaptedRegion
from .base import (
    CompletionQueue,
    PathSettings,
    QueuePairAddress,
    QueuePairState,
    VerbsError,
)

__all__ = ["load_ibverbs"]

_ATTR_STATE: Final = 1


@final
class _Library:
    """The package, loaded."""

    def __init__(self) -> None:
        self.ibverbs: Any = importlib.import_module("ibverbs")

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self.ibverbs.VerbsError as error:
            why = error.strerror or error
            raise VerbsError(error.errno or errno.EIO, f"{doing}: {why}") from error
        except ValueError as error:
            raise VerbsError(errno.EINVAL, f"{doing}: {error}") from error


def load_ibverbs() -> IbVerbs:
    """Raises ImportError where the package, or the system's libibverbs, is missing."""
    return IbVerbs(_Library())


@final
class IbVerbs:
    """See `base.Verbs`."""

    name = "ibverbs"

    def __init__(self, library: _Library) -> None:
        self._library = library

    def device_names(self) -> list[str]:
        return [device.name for device in self._devices()]

    def _devices(self) -> list[Any]:
        ibverbs = self._library.ibverbs
        try:
            return list(ibverbs.get_device_list())
        except ibverbs.VerbsError as error:
            if error.errno == errno.ENOSYS:  # the kernel has no InfiniBand
                return []
            raise VerbsError(error.errno, f"listing devices: {error.strerror}") from error

    def open(self, device_name: str) -> IbDevice:
        for device in self._devices():
            if device.name == device_name:
                with self._library.translated(f"opening {device_name}"):
                    return IbDevice(self._library, device_name, device.open())
        raise VerbsError(errno.ENODEV, f"there is no RDMA device {device_name}")


@final
class IbDevice(AdaptedDevice):
    """See `base.Device`."""

    def __init__(self, library: _Library, name: str, context: Any) -> None:
        super().__init__(library, name, context, context.alloc_pd)
        self._library = library

    @property
    def event_fd(self) -> int:
        return int(self._context.async_fd)

    def consume_event(self) -> int:
        with self._library.translated(f"taking an event of {self.name}"):
            event = self._context.get_async_event()
            number = int(event.event_type)
            self._context.ack_async_event(event)
        return number

    def gid(self, port: int, index: int) -> bytes:
        with self._library.translated(f"asking for GID {index} of {self.name}"):
            return bytes(self._context.query_gid(port, index).raw)

    def register(self, address: int, length: int, access: int) -> AdaptedRegion:
        with self._library.translated(f"registering {length} bytes with {self.name}"):
            return AdaptedRegion(self._library, self._domain.reg_mr(address, length, access))

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: int
    ) -> AdaptedRegion:
        with self._library.translated(f"registering a dma-buf with {self.name}"):
            found = self._domain.reg_dmabuf_mr(offset, length, address, fd, access)
            return AdaptedRegion(self._library, found)

    def completion_queue(self, depth: int) -> IbCompletionQueue:
        with self._library.translated(f"making a completion queue of {self.name}"):
            return IbCompletionQueue(self._library, self._context, depth)

    def queue_pair(self, completions: CompletionQueue, depth: int, access: int) -> IbQueuePair:
        assert isinstance(completions, IbCompletionQueue)
        ibverbs = self._library.ibverbs
        with self._library.translated(f"making a queue pair of {self.name}"):
            queue = completions.queue
            wanted = ibverbs.QPInitAttr(
                send_cq=queue,
                recv_cq=queue,
                qp_type=ibverbs.QPType.RC,
                max_send_wr=depth,
                max_recv_wr=1,
                sq_sig_all=False,
            )
            return IbQueuePair(self._library, self, self._domain.create_qp(wanted), access)


@final
class IbCompletionQueue(AdaptedQueue):
    """See `base.CompletionQueue`."""

    def __init__(self, library: _Library, context: Any, depth: int) -> None:
        channel = context.create_comp_channel()
        super().__init__(library, channel, context.create_cq(depth, channel), int(channel.fd))
        self._poll = self.queue.poll

    def poll(self, most: int) -> list[tuple[int, int]]:
        return [(ended.wr_id, int(ended.status)) for ended in self._poll(most)]


@final
class IbQueuePair(AdaptedQueuePair):
    """See `base.QueuePair`."""

    def __init__(self, library: _Library, device: IbDevice, pair: Any, access: int) -> None:
        super().__init__(library, pair, access)
        self._library = library
        self._device = device
        self._error = library.ibverbs.VerbsError
        self._element = library.ibverbs.SGE
        self._request = library.ibverbs.SendWR
        self._post = pair.post_send

    def connect(self, first_psn: int, peer: QueuePairAddress, path: PathSettings) -> None:
        mine = self._device.port(path.port)
        with self._library.translated(f"connecting a queue pair of {self._device.name}"):
            remote = self._library.ibverbs.QPInfo(
                qp_num=peer.number,
                psn=peer.first_psn,
                lid=peer.lid,
                gid=peer.gid,
                port=path.port,
                mtu=peer.mtu_code,
            )
            self._pair.to_init(path.port, access=self._access)
            self._pair.to_rtr(
                remote,
                sgid_index=path.gid_index,
                mtu=min(mine.mtu_code, peer.mtu_code),
                hop_limit=path.hop_limit,
                max_dest_rd_atomic=path.reads_in_flight,
                sl=path.service_level,
                traffic_class=path.traffic_class,
            )
            self._pair.to_rts(
                first_psn,
                timeout=path.timeout_exponent,
                retry_cnt=path.retries,
                rnr_retry=path.retries,
                max_rd_atomic=path.reads_in_flight,
            )

    def post(
        self,
        opcode: int,
        first_id: int,
        local_addresses: Sequence[int],
        lengths: Sequence[int],
        local_keys: Sequence[int],
        remote_addresses: Sequence[int],
        remote_keys: Sequence[int],
    ) -> None:
        request, element = self._request, self._element
        columns = zip(
            local_addresses, lengths, local_keys, remote_addresses, remote_keys, strict=True
        )
        # Positional, plain ints: keywords and enums would double the cost of each.
        chain = [
            request(number, [element(local, length, key)], opcode, 0, remote, remote_key)
            for number, (local, length, key, remote, remote_key) in enumerate(columns, first_id)
        ]
        chain[-1].send_flags = SIGNALED
        try:
            self._post(chain)
        except self._error as error:
            raise VerbsError(error.errno or errno.EIO, f"posting: {error.strerror}") from error

    def _move_to_error(self) -> None:
        self._pair.modify(_ATTR_STATE, qp_state=QueuePairState.ERROR)

    def state(self) -> int:
        with self._library.translated("asking for a queue pair's state"):
            found, _ = self._pair.query()
        return int(found["qp_state"])
