"""The PyPI package `ibverbs` (extra `cenote[rdma]`): releases the GIL, cheap work requests."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

from .base import (
    CompletionQueue,
    DeviceLimits,
    PathSettings,
    PortInfo,
    QueuePairAddress,
    QueuePairState,
    VerbsError,
)

__all__ = ["load_ibverbs"]

_LINK_LAYER_ETHERNET: Final = 2
_SIGNALED: Final = 2
_ATTR_STATE: Final = 1


def load_ibverbs() -> IbVerbs:
    """Raises ImportError where the package, or the system's libibverbs, is missing."""
    return IbVerbs(importlib.import_module("ibverbs"))


@contextmanager
def _translated(library: Any, doing: str) -> Iterator[None]:
    try:
        yield
    except library.VerbsError as error:
        raise VerbsError(error.errno or errno.EIO, f"{doing}: {error.strerror or error}") from error
    except ValueError as error:
        raise VerbsError(errno.EINVAL, f"{doing}: {error}") from error


@final
class IbVerbs:
    """See `base.Verbs`."""

    name = "ibverbs"

    def __init__(self, library: Any) -> None:
        self._library = library

    def device_names(self) -> list[str]:
        return [device.name for device in self._devices()]

    def _devices(self) -> list[Any]:
        try:
            return list(self._library.get_device_list())
        except self._library.VerbsError as error:
            if error.errno == errno.ENOSYS:  # the kernel has no InfiniBand
                return []
            raise VerbsError(error.errno, f"listing devices: {error.strerror}") from error

    def open(self, device_name: str) -> IbDevice:
        for device in self._devices():
            if device.name == device_name:
                with _translated(self._library, f"opening {device_name}"):
                    return IbDevice(self._library, device_name, device.open())
        raise VerbsError(errno.ENODEV, f"there is no RDMA device {device_name}")


@final
class IbDevice:
    """See `base.Device`."""

    def __init__(self, library: Any, name: str, context: Any) -> None:
        self.name = name
        self._library = library
        self._context = context
        with _translated(library, f"asking {name} for its limits"):
            found = context.query_device()
            self._domain = context.alloc_pd()
        self.limits = DeviceLimits(
            queue_pairs=found.max_qp,
            work_requests=found.max_qp_wr,
            completions=found.max_cqe,
            regions=found.max_mr,
            region_bytes=found.max_mr_size,
            reads_in_flight=found.max_qp_rd_atom,
            ports=found.phys_port_cnt,
        )

    @property
    def event_fd(self) -> int:
        return int(self._context.async_fd)

    def consume_event(self) -> int:
        with _translated(self._library, f"taking an event of {self.name}"):
            event = self._context.get_async_event()
            number = int(event.event_type)
            self._context.ack_async_event(event)
        return number

    def port(self, number: int) -> PortInfo:
        with _translated(self._library, f"asking for port {number} of {self.name}"):
            found = self._context.query_port(number)
        return PortInfo(
            state=int(found.state),
            mtu_code=int(found.active_mtu),
            message_bytes_max=found.max_msg_sz,
            lid=found.lid,
            gids=found.gid_tbl_len,
            is_ethernet=int(found.link_layer) == _LINK_LAYER_ETHERNET,
        )

    def gid(self, port: int, index: int) -> bytes:
        with _translated(self._library, f"asking for GID {index} of {self.name}"):
            return bytes(self._context.query_gid(port, index).raw)

    def register(self, address: int, length: int, access: int) -> IbRegion:
        with _translated(self._library, f"registering {length} bytes with {self.name}"):
            return IbRegion(self._library, self._domain.reg_mr(address, length, access))

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: int
    ) -> IbRegion:
        with _translated(self._library, f"registering a dma-buf with {self.name}"):
            found = self._domain.reg_dmabuf_mr(offset, length, address, fd, access)
            return IbRegion(self._library, found)

    def completion_queue(self, depth: int) -> IbCompletionQueue:
        with _translated(self._library, f"making a completion queue of {self.name}"):
            return IbCompletionQueue(self._library, self._context, depth)

    def queue_pair(self, completions: CompletionQueue, depth: int, access: int) -> IbQueuePair:
        assert isinstance(completions, IbCompletionQueue)
        library = self._library
        with _translated(library, f"making a queue pair of {self.name}"):
            queue = completions.queue
            wanted = library.QPInitAttr(
                send_cq=queue,
                recv_cq=queue,
                qp_type=library.QPType.RC,
                max_send_wr=depth,
                max_recv_wr=1,
                sq_sig_all=False,
            )
            return IbQueuePair(library, self, self._domain.create_qp(wanted), access)

    def close(self) -> None:
        with _translated(self._library, f"closing {self.name}"):
            self._domain.close()
            self._context.close()


@final
class IbRegion:
    """See `base.MemoryRegion`."""

    def __init__(self, library: Any, region: Any) -> None:
        self._library = library
        self._region = region
        self.local_key = int(region.lkey)
        self.remote_key = int(region.rkey)

    def close(self) -> None:
        with _translated(self._library, "letting registered memory go"):
            self._region.close()


@final
class IbCompletionQueue:
    """See `base.CompletionQueue`."""

    def __init__(self, library: Any, context: Any, depth: int) -> None:
        self._library = library
        self._channel = context.create_comp_channel()
        self.queue = context.create_cq(depth, self._channel)
        self._poll = self.queue.poll
        self.fd = int(self._channel.fd)

    def poll(self, most: int) -> list[tuple[int, int]]:
        return [(ended.wr_id, int(ended.status)) for ended in self._poll(most)]

    def arm(self) -> None:
        with _translated(self._library, "asking for completion events"):
            self.queue.req_notify()

    def consume_event(self) -> None:
        with _translated(self._library, "taking a completion event"):
            self._channel.get_cq_event()
            self.queue.ack_events(1)

    def close(self) -> None:
        with _translated(self._library, "closing a completion queue"):
            self.queue.close()
            self._channel.close()


@final
class IbQueuePair:
    """See `base.QueuePair`."""

    def __init__(self, library: Any, device: IbDevice, pair: Any, access: int) -> None:
        self._library = library
        self._device = device
        self._pair = pair
        self._access = access
        self._element = library.SGE
        self._request = library.SendWR
        self._post = pair.post_send
        self.number = int(pair.qp_num)
        self._closed = False

    def connect(self, first_psn: int, peer: QueuePairAddress, path: PathSettings) -> None:
        library = self._library
        mine = self._device.port(path.port)
        with _translated(library, f"connecting a queue pair of {self._device.name}"):
            remote = library.QPInfo(
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
        chain[-1].send_flags = _SIGNALED
        try:
            self._post(chain)
        except self._library.VerbsError as error:
            raise VerbsError(error.errno or errno.EIO, f"posting: {error.strerror}") from error

    def fail(self) -> None:
        if self._closed:
            return
        with _translated(self._library, "moving a queue pair to error"):
            self._pair.modify(_ATTR_STATE, qp_state=QueuePairState.ERROR)

    def state(self) -> int:
        with _translated(self._library, "asking for a queue pair's state"):
            found, _ = self._pair.query()
        return int(found["qp_state"])

    def close(self) -> None:
        if self._closed:
            return
        with _translated(self._library, "closing a queue pair"):
            self._pair.close()
        self._closed = True
