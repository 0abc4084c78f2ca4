"""A whole pool on this machine: a master and some store daemons, started and stopped together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from cenote.api.errors import DeadlineExceeded, ResourceUnavailable, Unavailable

from .daemons import Daemon, stop_all
from .interrupts import Interrupts
from .scratch import MEMORY_DIRECTORY, scratch_directory
from .specs import master_spec, store_spec

if TYPE_CHECKING:
    from .connect import Admin

__all__ = ["LocalPool", "PoolPlan", "memory_available_bytes", "running_pool"]

_READY_TIMEOUT_S: Final = 20.0
# Together below the two seconds in which Ctrl-C has to end everything.
_STORES_STOP_S: Final = 1.0
_MASTER_STOP_S: Final = 0.5
_MEMORY_TIMEOUT_S: Final = 600.0
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What to start."""

    nodes: int
    dram_bytes: int
    """Of each node."""
    lane_port: int = 0
    grpc_port: int = 0
    """0: any free port."""
    directory: Path | None = None
    """Metadata and logs, kept at the end; None: nothing is kept."""
    dram_directory: Path | None = None
    """Segments; None: a directory in /dev/shm that is removed at the end."""
    distinct_domains: bool = False
    """Each node is a failure domain of its own, so that one host can hold two replicas."""
    master_flags: tuple[tuple[str, object], ...] = ()
    store_flags: tuple[tuple[str, object], ...] = ()
    ssd_directory: Path | None = None
    """Where each node's SSD is, a file; None: there are none. Removed at the end, unless the pool
    keeps its `directory`."""
    ssd_bytes: int = 0
    """Of each node."""
    ssd_object_bytes: int = 128 << 10


@final
class LocalPool:
    """The daemons of a plan. `start`, then `stop` in any state."""

    def __init__(
        self, plan: PoolPlan, directory: Path, dram_directory: Path, socket_directory: Path
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.dram_directory = dram_directory
        self._socket_directory = socket_directory
        metadata = f"file:{directory / 'metadata'}"
        spec = master_spec(
            metadata=metadata,
            lane_port=plan.lane_port,
            grpc_port=plan.grpc_port,
            extra=dict(plan.master_flags),
        )
        self.master = Daemon(spec, directory)
        self.stores: list[Daemon] = []
        self.ssd_directory: Path | None = None

    @property
    def lane(self) -> str:
        """Address of the master's lane, host:port."""
        return self.master.ready["lane"].removeprefix("tcp://")

    @property
    def grpc(self) -> str:
        """Address of the master's gRPC server, host:port."""
        return self.master.ready["grpc"]

    @property
    def daemons(self) -> list[Daemon]:
        return [self.master, *self.stores]

    def start(self) -> None:
        """Start everything; returns when all serve. Raises what kept one from it."""
        self.master.start()
        self.master.wait_ready(_READY_TIMEOUT_S)
        for index in range(self.plan.nodes):
            name = f"node{index}"
            flags: dict[str, object] = dict(self.plan.store_flags)
            if self.plan.distinct_domains:
                flags["failure-domain"] = name
            if self.ssd_directory is not None:
                flags["ssd"] = self.ssd_directory / f"{name}.ssd"
                flags["ssd-size"] = self.plan.ssd_bytes
                flags["ssd-object-size"] = self.plan.ssd_object_bytes
            spec = store_spec(
                name,
                master=self.lane,
                dram_bytes=self.plan.dram_bytes,
                dram_directory=self.dram_directory,
                socket_directory=self._socket_directory,
                extra=flags,
            )
            store = Daemon(spec, self.directory)
            self.stores.append(store)
            store.start()
        for store in self.stores:
            store.wait_ready(_READY_TIMEOUT_S)

    def wait_for_memory(self, admin: Admin) -> None:
        """Until all memory can be used. Raises Unavailable where a daemon dies meanwhile."""
        from cenote.v1 import common_pb2

        from .output import Bar

        total = self.plan.nodes * self.plan.dram_bytes
        end_s = time.monotonic() + _MEMORY_TIMEOUT_S
        with Bar("Preparing memory", total=total, unit="bytes") as bar:
            while True:
                views = [s.view for s in admin.segments() if s.view.tier == common_pb2.TIER_DRAM]
                bar.update(sum(view.ready_bytes for view in views))
                nodes = {view.node_id for view in views}
                if len(nodes) == self.plan.nodes and all(
                    view.ready_bytes >= view.size_bytes for view in views
                ):
                    return
                dead = self.first_dead()
                if dead is not None:
                    raise Unavailable(
                        f"{dead.name} {dead.how_it_ended()}", remedy=dead.last_trouble()
                    )
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(f"the memory was not ready in {_MEMORY_TIMEOUT_S:g} s")
                time.sleep(_POLL_S)

    def first_dead(self) -> Daemon | None:
        """A daemon that ended by itself."""
        return next((daemon for daemon in self.daemons if not daemon.is_running), None)

    def stop(self, interrupts: Interrupts | None = None) -> None:
        """End everything: the stores while their master is there to be told, then the master."""
        if interrupts is not None:
            interrupts.take()
        now_s = time.monotonic()
        stop_all(self.stores, now_s + _STORES_STOP_S, interrupts)
        stop_all([self.master], time.monotonic() + _MASTER_STOP_S, interrupts)


@contextmanager
def running_pool(plan: PoolPlan, interrupts: Interrupts) -> Iterator[LocalPool]:
    """A pool that serves inside the block, and of which nothing is left after it.

    What the plan says to keep is kept. The caller catches signals with `interrupts`.
    """
    with ExitStack() as stack:
        # Sockets always lie in a short path: a long one can't name a socket.
        scratch = stack.enter_context(scratch_directory())
        directory = scratch if plan.directory is None else _made(plan.directory)
        if plan.dram_directory is None:
            dram_directory = stack.enter_context(scratch_directory(MEMORY_DIRECTORY))
        else:
            dram_directory = _made(plan.dram_directory)
        pool = LocalPool(plan, directory, dram_directory, scratch)
        if plan.ssd_directory is not None:
            pool.ssd_directory = (
                stack.enter_context(scratch_directory(plan.ssd_directory))
                if plan.directory is None
                else _made(plan.ssd_directory)
            )
        try:
            pool.start()
            yield pool
        finally:
            pool.stop(interrupts)


def _made(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceUnavailable(
            f"can't make the directory {path}: {error.strerror}", remedy="choose another --dir"
        ) from error
    return path.resolve()


def memory_available_bytes() -> int:
    """How much the segments of a new pool could get."""
    from cenote.runtime.memory import available_bytes

    with contextlib.suppress(OSError):
        fd = os.open(MEMORY_DIRECTORY, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return available_bytes(fd)
        finally:
            os.close(fd)
    return 0
