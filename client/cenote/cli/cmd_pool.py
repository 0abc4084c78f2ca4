"""`cenote up`, `down`, `master`, `store`: daemons on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .exits import EXIT_ERROR, EXIT_NOT_FOUND, EXIT_OK

if TYPE_CHECKING:
    from .local_pool import LocalPool, PoolPlan

__all__ = ["down", "master", "store", "up"]

_POLL_S: Final = 0.05
_DOWN_TIMEOUT_S: Final = 5.0
_DETACH_TIMEOUT_S: Final = 60.0
_PORT_DEFAULT: Final = 5110
_LOCK_BYTES_MAX: Final = 16_384
_LOG_CHARS_MAX: Final = 65_536
_STOPPED_TOO: Final = ", so the rest is stopped, too"

_Kept = tuple[Path, Path, str]
"""Directories of metadata and of memory; the command that goes on with them."""

Port = Annotated[
    int,
    typer.Option(
        min=0, max=65534, help="Of the master's lane; gRPC takes the next one. 0: any free ones."
    ),
]
SsdSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="SSD of each, for what has no room in memory: a file in DIR/ssd, or without --dir one"
        " in /var/tmp that is removed at the end.",
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(metavar="NAME", help="What goes when the pool is full; see `cenote simulate`."),
]


# ---- up --------------------------------------------------------------------------------------


def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Store daemons.")] = 2,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each.")] = "1GiB",
    ssd: SsdSize = "",
    policy: PolicyName = "",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Keep the pool's contents: metadata and logs in DIR, objects in memory, in"
            " /dev/shm/cenote-UID-HASH of that DIR, until a reboot or until you remove both.",
        ),
    ] = None,
    port: Port = _PORT_DEFAULT,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Go on in the background; `cenote down` ends it.")
    ] = False,
    ready_line: Annotated[bool, typer.Option("--ready-line", hidden=True)] = False,
) -> int:
    """Start a whole pool on this machine: a master and store daemons. Ctrl-C stops all of it.

    Without --dir nothing is left of it. With it, memory stays in use after the end.

    What is kept, its size and how to remove it is printed then, and by `cenote down`.

    All of it stops, with exit code 1, when one daemon ends by itself: which one and how is said.
    """
    from cenote.runtime.units import parse_size_bytes

    from .interrupts import current_interrupts
    from .local_pool import PoolPlan, running_pool
    from .output import note

    dram_bytes = parse_size_bytes(dram)
    ssd_bytes = parse_size_bytes(ssd) if ssd else 0
    tuning = {"ssd": ssd or None, "policy": policy or None}
    if detach:
        return _detach({"nodes": nodes, "dram": dram, **tuning, "dir": directory}, port)
    plan = PoolPlan(
        nodes=nodes,
        dram_bytes=dram_bytes,
        lane_port=port,
        grpc_port=port + 1 if port else 0,
        directory=directory,
        dram_directory=None if directory is None else _kept_memory(directory),
        distinct_domains=True,
        master_flags=(("policy", policy),) if policy else (),
        ssd_directory=_ssd_directory(directory) if ssd_bytes else None,
        ssd_bytes=ssd_bytes,
    )
    code = EXIT_OK
    again = ["cenote", "up", "--nodes", str(nodes), "--dram", dram]
    again += [word for name, value in tuning.items() if value for word in (f"--{name}", value)]
    again += ["--dir", str(directory)]
    again += ["--port", str(port)] if port != _PORT_DEFAULT else []
    kept: _Kept | None = None
    if plan.directory is not None and plan.dram_directory is not None:
        kept = plan.directory.resolve(), plan.dram_directory, shlex.join(again)
    with _registered(port, kept):
        try:
            with running_pool(plan, current_interrupts()) as pool:
                _announce(pool, plan, dram, ready_line=ready_line)
                code = _watch(pool)
        except KeyboardInterrupt:
            note("stopped")
        finally:
            _say_what_is_kept(kept)
    return code


def _ssd_directory(directory: Path | None) -> Path:
    """On a disk, which the directory of scratch files may not be."""
    return Path("/var/tmp") if directory is None else directory / "ssd"


def _say_what_is_kept(kept: _Kept | None) -> None:
    from cenote.runtime.units import format_size

    from .output import note

    if kept is None:
        return
    directory, dram_directory, again = kept
    with contextlib.suppress(OSError):  # not empty, or never made
        dram_directory.rmdir()
    if dram_directory.exists():
        metadata, objects = (format_size(_held_bytes(d)) for d in (directory, dram_directory))
        note(f"kept: {objects} of memory in {dram_directory}, {metadata} of disk in {directory}")
        note("go on with it:  " + again)
        note("be rid of it:   " + shlex.join(["rm", "-r", str(directory), str(dram_directory)]))


def _held_bytes(directory: Path) -> int:
    """What the files in it take up, which for a sparse one is less than its length."""
    held_bytes = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            held_bytes += path.lstat().st_blocks * 512
    return held_bytes


def _announce(pool: LocalPool, plan: PoolPlan, dram: str, *, ready_line: bool) -> None:
    from cenote.runtime.harness import ready_line as make_ready_line
    from cenote.runtime.units import format_size

    from .output import counted, note, print_pairs

    if ready_line:
        fields = {"lane": pool.lane, "grpc": pool.grpc, "memory": pool.dram_directory}
        print(make_ready_line(fields), flush=True)
        return
    pairs: list[tuple[str, str | int | float | None]] = [
        ("master", pool.lane),
        ("gRPC", pool.grpc),
    ]
    pairs += [(store.name, store.ready["data"].removeprefix("tcp://")) for store in pool.stores]
    pairs.append(("logs", str(pool.directory)))
    print_pairs(pairs)
    if plan.lane_port != _PORT_DEFAULT:
        note(f"export CENOTE_MASTER={pool.lane} CENOTE_GRPC={pool.grpc}")
    daemons = counted(plan.nodes, "store daemon")
    each = f"{dram} and an SSD of {format_size(plan.ssd_bytes)}" if plan.ssd_bytes else dram
    note(f"A master and {daemons} of {each} serve. Ctrl-C stops all. Try: cenote status")


def _watch(pool: LocalPool) -> int:
    """Until a daemon ends by itself (or Ctrl-C)."""
    from .output import note

    while True:
        dead = pool.first_dead()
        if dead is not None:
            why = dead.last_trouble()
            note(
                f"cenote: {dead.name} {dead.how_it_ended()}{_STOPPED_TOO}"
                + (f": {why}" if why else "")
            )
            return EXIT_ERROR
        time.sleep(_POLL_S)


def _kept_memory(directory: Path) -> Path:
    """Where segments of a pool that is kept lie: the same place for the same --dir."""
    from .scratch import MEMORY_DIRECTORY

    path = str(directory.resolve())
    return (
        MEMORY_DIRECTORY / f"cenote-{os.getuid()}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    )


def _detach(flags: dict[str, object], port: int) -> int:
    from cenote.api.errors import InvalidArgument

    from .daemons import Daemon, DaemonSpec
    from .output import note, print_pairs

    if not port:
        raise InvalidArgument(
            "--detach needs a --port, by which `cenote down` finds the pool again",
            remedy="leave --port out, or choose one",
        )
    flags = flags | {"port": port}
    spec = DaemonSpec(
        f"up-{port}", "cenote.cli.main", flags, before=("up", "--ready-line"), title="the pool"
    )
    daemon = Daemon(spec, _runtime_directory(), environment=os.environ, outlive_parent=True)
    daemon.start()
    ready = daemon.wait_ready(_DETACH_TIMEOUT_S)
    print_pairs(
        [
            *(("master", ready["lane"]), ("gRPC", ready["grpc"]), ("pid", daemon.pid)),
            ("log", str(daemon.log_path)),
        ]
    )
    note("it goes on in the background; stop it: cenote down" + _port_option(port))
    return EXIT_OK


def _port_option(port: int) -> str:
    return "" if port == _PORT_DEFAULT else f" --port {port}"


# ---- down ------------------------------------------------------------------------------------


def down(port: Port = _PORT_DEFAULT) -> int:
    """Stop what `cenote up` started on this port; says what a --dir keeps, and how to remove it."""
    from cenote.api.errors import DeadlineExceeded

    from .output import note

    path = _lock_path(port)
    pid, kept = _holder(path)
    if not pid:
        note(f"cenote: no pool of `cenote up{_port_option(port)}` runs here")
        _say_how_it_ended(path.with_suffix(".log"))
        return EXIT_NOT_FOUND
    os.kill(pid, signal.SIGTERM)
    end_s = time.monotonic() + _DOWN_TIMEOUT_S
    while _holder(path)[0] == pid:
        if time.monotonic() > end_s:
            raise DeadlineExceeded(
                f"the pool of pid {pid} did not stop in {_DOWN_TIMEOUT_S:g} s",
                remedy=f"kill -9 {pid}",
            )
        time.sleep(_POLL_S)
    note("stopped")
    _say_what_is_kept(kept)
    return EXIT_OK


def _say_how_it_ended(log_path: Path) -> None:
    """Nobody looked at a pool in the background when it ended by itself: why is in its log."""
    from .output import note

    with contextlib.suppress(OSError):
        lines = log_path.read_text(errors="replace")[-_LOG_CHARS_MAX:].splitlines()
        ends = [line for line in lines if line == "stopped" or _STOPPED_TOO in line]
        if ends and ends[-1] != "stopped":
            note(f"the last one ended by itself: {ends[-1].removeprefix('cenote: ')} ({log_path})")


def _runtime_directory() -> Path:
    """A directory of this user alone, for pids. Raises ResourceUnavailable."""
    from cenote.api.errors import ResourceUnavailable

    path = Path(tempfile.gettempdir()) / f"cenote-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid() or path.is_symlink():
        raise ResourceUnavailable(f"{path} belongs to somebody else", remedy="set TMPDIR")
    return path


def _lock_path(port: int) -> Path:
    return _runtime_directory() / f"up-{port}.lock"


@contextmanager
def _registered(port: int, kept: _Kept | None) -> Iterator[None]:
    """Be the one that `cenote down` on this port means."""
    from cenote.api.errors import ResourceUnavailable

    if not port:  # of several on free ports, none can be meant
        yield
        return
    fd = os.open(_lock_path(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceUnavailable(
                f"a pool of `cenote up` has port {port} already, pid {_written_in(fd)[0]}",
                remedy="stop it with `cenote down`, or choose another --port",
            ) from None
        os.ftruncate(fd, 0)
        words = [str(os.getpid()), *map(str, kept or ())]
        os.pwrite(fd, b"\0".join(map(os.fsencode, words)), 0)
        yield
    finally:
        os.close(fd)


def _holder(path: Path) -> tuple[int, _Kept | None]:
    """The pid that holds the lock, 0 where nobody does; what its --dir keeps."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _written_in(fd)
        finally:
            os.close(fd)
    return 0, None


def _written_in(fd: int) -> tuple[int, _Kept | None]:
    pid, *words = map(os.fsdecode, os.pread(fd, _LOCK_BYTES_MAX, 0).split(b"\0"))
    kept = (Path(words[0]), Path(words[1]), words[2]) if len(words) == 3 else None
    return (int(pid) if pid.isdigit() else 0), kept


# ---- single daemons --------------------------------------------------------------------------


def master(context: typer.Context) -> int:
    """Run a master: the same as `cenote-master`, with its flags (--help) and exit codes."""
    from cenote.master.__main__ import main

    return main(context.args)


def store(context: typer.Context) -> int:
    """Run a store daemon: the same as `cenote-store`, with its flags (--help) and exit codes."""
    from cenote.store.__main__ import main

    return int(main(context.args))
