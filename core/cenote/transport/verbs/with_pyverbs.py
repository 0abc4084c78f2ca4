"""rdma-core's own `pyverbs`, as distributions ship it: holds the GIL, dear work requests.

A virtual environment does not see the distribution's packages, so it is also looked for where these
lie. What it makes holds memory until it is closed, work requests included.
"""

from __future__ import annotations

import errno
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, final

from .adapted import SIGNALED, AdaptedDevice, AdaptedQueue, AdaptedQueuePair, AdaptedRegion
from .base import (
    CompletionQueue,
    PathSettings,
    QueuePairAddress,
    QueuePairState,
    VerbsError,
)

__all__ = ["load_pyverbs"]

_DISTRIBUTION_PATHS: Final = ["/usr/lib/python3/dist-packages", "/usr/lib64/python3/site-packages"]
_MAKING: Final = threading.Lock()
_PARTS: Final = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")


@final
class _Library:
    """Its modules, loaded."""

    def __init__(self) -> None:
        _find_package()
        parts = {part: importlib.import_module(f"pyverbs.{part}") for part in _PARTS}
        self.error: Any = parts["pyverbs_error"].PyverbsRDMAError
        self.user_error: Any = parts["pyverbs_error"].PyverbsUserError
        self.addr: Any = parts["addr"]
        self.cq: Any = parts["cq"]
        self.device: Any = parts["device"]
        self.mr: Any = parts["mr"]
        self.pd: Any = parts["pd"]
        self.qp: Any = parts["qp"]
        self.wr: Any = parts["wr"]

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self.error as error:
            code = getattr(error, "error_code", 0) or 0
            number = code if isinstance(code, int) and code > 0 else _errno_in(str(error))
            raise VerbsError(number, f"{doing}: {error}") from error
        except self.user_error as error:
            raise VerbsError(errno.EINVAL, f"{doing}: {error}") from error


def _errno_in(text: str) -> int:
    """It often tells the number only as `Errno: 12, Cannot allocate memory`."""
    _, found, rest = text.partition("Errno: ")
    digits = rest.split(",")[0].strip()
    return int(digits) if found and digits.isdigit() else errno.EIO


def _find_package() -> None:
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", _DISTRIBUTION_PATHS)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'pyverbs'", name="pyverbs")
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise


def _event_descriptors() -> set[int]:
    """This process's descriptors on which the kernel tells RDMA events."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


def _with_descriptor(make: Callable[[], Any]) -> tuple[Any, int]:
    """What `make` makes, and its event descriptor, which the library keeps to itself.

    -1 where it can't be told: another library of this process made one meanwhile.
    """
    with _MAKING:
        before = _event_descriptors()
        made = make()
        new = _event_descriptors() - before
    return made, new.pop() if len(new) == 1 else -1


def load_pyverbs() -> PyVerbs:
    """Raises ImportError where it is missing, or was made for another Python."""
    return PyVerbs(_Library())


@final
class PyVerbs:
    """See `base.Verbs`."""

    name = "pyverbs"

    def __init__(self, library: _Library) -> None:
        self._library = library

    def device_names(self) -> list[str]:
        try:
            found = self._library.device.get_device_list()
        except self._library.error:
            return []  # it does not tell why; without InfiniBand in the kernel it is always so
        return [device.name.decode() for device in found]

    def open(self, device_name: str) -> PyDevice:
        if device_name not in self.device_names():
            raise VerbsError(errno.ENODEV, f"there is no RDMA device {device_name}")
        with self._library.translated(f"opening {device_name}"):
            context, event_fd = _with_descriptor(
                lambda: self._library.device.Context(name=device_name)
            )
            return PyDevice(self._library, device_name, context, event_fd)


@final
class PyDevice(AdaptedDevice):
    """See `base.Device`."""

    def __init__(self, library: _Library, name: str, context: Any, event_fd: int) -> None:
        super().__init__(library, name, context, lambda: library.pd.PD(context))
        self.event_fd = event_fd
        self._library = library

    def consume_event(self) -> int:
        with self._library.translated(f"taking an event of {self.name}"):
            event = self._context.get_async_event()
            number = int(event.event_type)
            event.ack()
        return number

    def gid(self, port: int, index: int) -> bytes:
        with self._library.translated(f"asking for GID {index} of {self.name}"):
            text = self._context.query_gid(port, index).gid
        return bytes.fromhex(text.replace(":", ""))

    def register(self, address: int, length: int, access: int) -> AdaptedRegion:
        library = self._library
        with library.translated(f"registering {length} bytes with {self.name}"):
            found = library.mr.MR(self._domain, length, access, address=address)
            return AdaptedRegion(library, found)

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: int
    ) -> AdaptedRegion:
        library = self._library
        if address != offset:  # it has no argument for the address
            raise VerbsError(errno.EOPNOTSUPP, "pyverbs names dma-bufs by their offsets only")
        with library.translated(f"registering a dma-buf with {self.name}"):
            found = library.mr.DmaBufMR(self._domain, length, access, dmabuf=fd, offset=offset)
            return AdaptedRegion(library, found)

    def completion_queue(self, depth: int) -> PyCompletionQueue:
        with self._library.translated(f"making a completion queue of {self.name}"):
            return PyCompletionQueue(self._library, self._context, depth)

    def queue_pair(self, completions: CompletionQueue, depth: int, access: int) -> PyQueuePair:
        assert isinstance(completions, PyCompletionQueue)
        qp = self._library.qp
        with self._library.translated(f"making a queue pair of {self.name}"):
            # Signalling all is its default: then completions come early, and bytes seem to be there
            # that are not.
            wanted = qp.QPInitAttr(
                qp_type=2,  # RC
                scq=completions.queue,
                rcq=completions.queue,
                cap=qp.QPCap(max_send_wr=depth, max_recv_wr=1),
                sq_sig_all=0,
            )
            pair = qp.QP(self._domain, wanted, qp.QPAttr())
            return PyQueuePair(self._library, self, pair, access)


@final
class PyCompletionQueue(AdaptedQueue):
    """See `base.CompletionQueue`."""

    def __init__(self, library: _Library, context: Any, depth: int) -> None:
        channel, fd = _with_descriptor(lambda: library.cq.CompChannel(context))
        super().__init__(library, channel, library.cq.CQ(context, depth, None, channel), fd)

    def poll(self, most: int) -> list[tuple[int, int]]:
        _, found = self.queue.poll(most)
        return [(ended.wr_id, ended.status) for ended in found or ()]

    def _take_event(self) -> None:
        self._channel.get_cq_event(self.queue)


@final
class PyQueuePair(AdaptedQueuePair):
    """See `base.QueuePair`."""

    def __init__(self, library: _Library, device: PyDevice, pair: Any, access: int) -> None:
        super().__init__(library, pair, access)
        self._library = library
        self._device = device

    def connect(self, first_psn: int, peer: QueuePairAddress, path: PathSettings) -> None:
        addr, qp = self._library.addr, self._library.qp
        mine = self._device.port(path.port)
        with self._library.translated(f"connecting a queue pair of {self._device.name}"):
            wanted = qp.QPAttr(port_num=path.port)
            wanted.qp_access_flags = self._access
            self._pair.to_init(wanted)
            route = addr.GlobalRoute(
                dgid=addr.GID(_grouped(peer.gid)),
                sgid_index=path.gid_index,
                hop_limit=path.hop_limit,
                traffic_class=path.traffic_class,
            )
            wanted.path_mtu = min(mine.mtu_code, peer.mtu_code)
            wanted.dest_qp_num = peer.number
            wanted.rq_psn = peer.first_psn
            wanted.max_dest_rd_atomic = path.reads_in_flight
            wanted.min_rnr_timer = 12
            wanted.ah_attr = addr.AHAttr(
                gr=route, is_global=1, port_num=path.port, dlid=peer.lid, sl=path.service_level
            )
            self._pair.to_rtr(wanted)
            wanted.sq_psn = first_psn
            wanted.timeout = path.timeout_exponent
            wanted.retry_cnt = wanted.rnr_retry = path.retries
            wanted.max_rd_atomic = path.reads_in_flight
            self._pair.to_rts(wanted)

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
        wr = self._library.wr
        columns = zip(
            local_addresses, lengths, local_keys, remote_addresses, remote_keys, strict=True
        )
        chain: list[Any] = []
        elements: list[Any] = []
        try:
            for local, length, key, remote, remote_key in columns:
                element = wr.SGE(local, length, key)
                elements.append(element)
                request = wr.SendWR(first_id + len(chain), opcode, 1, 0, [element], 0)
                request.set_wr_rdma(remote_key, remote)
                if chain:
                    chain[-1].next_wr = request
                chain.append(request)
            chain[-1].send_flags = SIGNALED
            with self._library.translated("posting"):
                self._pair.post_send(chain[0])
        finally:
            for made in (*chain, *elements):  # they keep their memory for ever otherwise
                made.close()

    def _move_to_error(self) -> None:
        self._pair.modify(self._library.qp.QPAttr(qp_state=QueuePairState.ERROR), 1)

    def state(self) -> int:
        with self._library.translated("asking for a queue pair's state"):
            found, _ = self._pair.query(1)
        return int(found.qp_state)


def _grouped(gid: bytes) -> str:
    """As the library reads it: eight groups of four digits."""
    digits = gid.hex()
    return ":".join(digits[first : first + 4] for first in range(0, 32, 4))
