"""What the adapters to the two libraries have in common.

Both wrap rdma-core's own structures under the names that these have in C, and close what they made
by a method `close`; they differ in how queue pairs are made, connected and posted to, and in what
they raise.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from .base import DeviceLimits, PortInfo

__all__ = [
    "SIGNALED",
    "AdaptedDevice",
    "AdaptedQueue",
    "AdaptedQueuePair",
    "AdaptedRegion",
    "Library",
]

SIGNALED: Final = 2
"""IBV_SEND_SIGNALED."""
_LINK_LAYER_ETHERNET: Final = 2


class Library(Protocol):
    """A verbs library, loaded."""

    def translated(self, doing: str) -> AbstractContextManager[None]:
        """Whatever it raises inside becomes VerbsError, with its errno and what was being done."""
        ...


class AdaptedDevice:
    """The part of `base.Device` that asks and closes."""

    def __init__(self, library: Library, name: str, context: Any, new_domain: Any) -> None:
        """`new_domain()` makes a protection domain of `context`."""
        self.name = name
        self._errors = library
        self._context = context
        with library.translated(f"asking {name} for its limits"):
            found = context.query_device()
            self._domain: Any = new_domain()
        self.limits = DeviceLimits(
            queue_pairs=found.max_qp,
            work_requests=found.max_qp_wr,
            completions=found.max_cqe,
            regions=found.max_mr,
            region_bytes=found.max_mr_size,
            reads_in_flight=found.max_qp_rd_atom,
            ports=found.phys_port_cnt,
        )

    def port(self, number: int) -> PortInfo:
        with self._errors.translated(f"asking for port {number} of {self.name}"):
            found = self._context.query_port(number)
        return PortInfo(
            state=int(found.state),
            mtu_code=int(found.active_mtu),
            message_bytes_max=found.max_msg_sz,
            lid=found.lid,
            gids=found.gid_tbl_len,
            is_ethernet=int(found.link_layer) == _LINK_LAYER_ETHERNET,
        )

    def close(self) -> None:
        with self._errors.translated(f"closing {self.name}"):
            self._domain.close()
            self._context.close()


class AdaptedRegion:
    """See `base.MemoryRegion`."""

    def __init__(self, library: Library, region: Any) -> None:
        self._errors = library
        self._region = region
        self.local_key = int(region.lkey)
        self.remote_key = int(region.rkey)

    def close(self) -> None:
        with self._errors.translated("letting registered memory go"):
            self._region.close()


class AdaptedQueue:
    """The part of `base.CompletionQueue` that does not poll."""

    def __init__(self, library: Library, channel: Any, queue: Any, fd: int) -> None:
        self.queue = queue
        self.fd = fd
        self._errors = library
        self._channel = channel

    def arm(self) -> None:
        with self._errors.translated("asking for completion events"):
            self.queue.req_notify()

    def consume_event(self) -> None:
        with self._errors.translated("taking a completion event"):
            self._take_event()
            self.queue.ack_events(1)

    def _take_event(self) -> None:
        self._channel.get_cq_event()

    def close(self) -> None:
        with self._errors.translated("closing a completion queue"):
            self.queue.close()
            self._channel.close()


class AdaptedQueuePair:
    """The part of `base.QueuePair` that ends it."""

    def __init__(self, library: Library, pair: Any, access: int) -> None:
        self.number = int(pair.qp_num)
        self._errors = library
        self._pair = pair
        self._access = access
        self._closed = False

    def fail(self) -> None:
        if self._closed:
            return
        with self._errors.translated("moving a queue pair to error"):
            self._move_to_error()

    def _move_to_error(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._closed:
            return
        with self._errors.translated("closing a queue pair"):
            self._pair.close()
        self._closed = True
