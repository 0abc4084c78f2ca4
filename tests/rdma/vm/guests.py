"""Emulated machines with software RDMA devices, steered from outside: commands, cables, power.

    with Cluster(guests=2, nics=2) as vms:
        server = vms[1].spawn([sys.executable, "server.py"])  # Command: poll, wait, output, signal
        result = vms[0].run([sys.executable, "client.py"])
        vms[0].link(0, up=False)  # pull the cable of NIC 0
        vms[1].pause()
        vms[1].kill()  # power cut

A guest sees the host's files, read only, under the same paths, with a throw-away layer on top. NIC
i is the network device `rnic<i>`, the RDMA device `rxe<i>`, the address 10.77.<i>.<rank + 1>/24.
One guest: each device talks to itself. Two: NIC i of one is wired to NIC i of the other.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from waiting import wait_until

from .boot_files import CMDLINE, VMError, VMTimeout, prepare

__all__ = ["Cluster", "Command", "Guest", "Result", "kill_all"]

_LATE_OUTPUT_S = 3.0


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclasses.dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


class Command:
    """A command that runs in a guest. Its output grows in files of the host."""

    def __init__(self, guest: Guest, number: int) -> None:
        self.guest = guest
        self.number = number
        self._marker = f"\x1e@@rdmavm-end-{number}@@".encode()
        self._read = {"out": 0, "err": 0}
        self._ended = {"out": False, "err": False}

    def _file(self, kind: str) -> Path:
        return self.guest.control / f"{kind}.{self.number}"

    def _next(self, kind: str) -> bytes:
        """What the command has written since the last call."""
        if self._ended[kind]:
            return b""
        try:
            with open(self._file(kind), "rb") as stream:
                stream.seek(self._read[kind])
                data = stream.read(1 << 20)
        except FileNotFoundError:
            return b""
        end = data.find(self._marker)
        if end >= 0:
            data = data[:end]
            self._ended[kind] = True
        else:  # hold back what may be the marker's beginning
            tail = data.rfind(self._marker[:1], max(0, len(data) - len(self._marker)))
            if tail >= 0 and self._marker.startswith(data[tail:]):
                data = data[:tail]
        self._read[kind] += len(data)
        return data

    def poll(self) -> int | None:
        """The exit status (negative: -signal), or None while it runs."""
        try:
            status = int(self._file("rc").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return status

    def wait(
        self,
        timeout_s: float,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
    ) -> int:
        """Wait for the end: its status. Its output is copied meanwhile.

        Raises VMTimeout, and VMError where the guest died.
        """
        streams = [("out", stdout), ("err", stderr)]
        ended_at: list[float] = []

        def look() -> bool:
            for kind, stream in streams:
                while stream is not None and (data := self._next(kind)):
                    stream.write(data)
                    stream.flush()
            if self.poll() is None:
                if not self.guest.alive:
                    raise VMError(f"guest {self.guest.rank} died\n{self.guest.console_tail()}")
                return False
            ended_at.append(time.monotonic())
            complete = all(self._ended[kind] for kind, stream in streams if stream)
            return complete or ended_at[-1] - ended_at[0] > _LATE_OUTPUT_S

        try:
            wait_until(look, timeout_s, what="the end of a command in the guest")
        except AssertionError as error:
            raise VMTimeout(f"guest {self.guest.rank}: {error}") from error
        status = self.poll()
        assert status is not None
        return status

    def output(self) -> tuple[str, str]:
        """All that it has written so far."""
        texts = []
        for kind in ("out", "err"):
            try:
                data = self._file(kind).read_bytes()
            except FileNotFoundError:
                data = b""
            texts.append(data.split(self._marker)[0].decode(errors="replace"))
        return texts[0], texts[1]

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the command's process group."""
        self.guest._say(f"KILL {self.number} {int(number)}")


def _share(tag: str, path: str, readonly: bool = False) -> list[str]:
    escaped = path.replace(",", ",,")
    flags = ",readonly=on" if readonly else ""
    return [
        "-fsdev", f"local,id={tag},path={escaped},security_model=none,multidevs=remap{flags}",
        "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]  # fmt: skip


class Guest:
    """One machine; its own constructor boots it, `wait_boot` waits."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        nics: int = 1,
        links: Sequence[socket.socket] = (),
        rdma: str = "rxe",
        smp: int = 1,
        memory: int = 2048,
        hugepages: int = 0,
        rw: Iterable[str] = (),
        mtu: int = 9000,
        lifetime: float = 3600,
    ) -> None:
        self.rank = rank
        self.folder = Path(tempfile.mkdtemp(prefix=f"rdmavm-{rank}-"))
        self.control = self.folder / "ctl"
        self.control.mkdir()
        self.console = self.folder / "console.log"
        self.started = time.monotonic()
        self.booted: float | None = None
        self._count = 0
        self._lock = threading.Lock()
        self._rw = [os.path.realpath(p) for p in rw]
        config = {
            "RANK": rank, "WORLD": world, "NICS": nics, "RDMA": rdma, "MTU": mtu,
            "MODE": "virtio" if links else "dummy", "LIFETIME": int(lifetime),
            "RW": " ".join(f"rw{i}" for i in range(len(self._rw))),
        }  # fmt: skip
        for i, path in enumerate(self._rw):
            (self.control / f"rw{i}").write_text(path)
        text = "".join(f"{k}={shlex.quote(str(v))}\n" for k, v in config.items())
        (self.control / "config").write_text(text)

        self._trigger, trigger = socket.socketpair()
        self._qmp, qmp = socket.socketpair()
        argv = [
            *self._machine(smp, memory, f" hugepages={hugepages}" if hugepages else ""),
            "-chardev", f"socket,id=trg,fd={trigger.fileno()}", "-serial", "chardev:trg",
            "-chardev", f"socket,id=qmp,fd={qmp.fileno()}", "-mon", "chardev=qmp,mode=control",
            *self._nics(links, mtu),
        ]  # fmt: skip
        self.qemu_log = self.folder / "qemu.log"
        with open(self.qemu_log, "wb") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                pass_fds=[trigger.fileno(), qmp.fileno(), *(s.fileno() for s in links)],
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        trigger.close()
        qmp.close()
        self._qmp_ready = False
        self._qmp_stream = self._qmp.makefile("rwb", buffering=0)
        _LIVE.add(self)

    def _machine(self, smp: int, memory: int, extra: str) -> list[str]:
        boot = prepare()
        qemu = shutil.which("qemu-system-x86_64")
        if not qemu:
            raise VMError("no qemu-system-x86_64 here: apt-get install qemu-system-x86")
        shares = _share("host", "/", readonly=True) + _share("ctl", str(self.control))
        for i, path in enumerate(self._rw):
            shares += _share(f"rw{i}", path)
        return [
            qemu, "-name", f"rdmavm-{self.rank}",
            "-M", "q35,sata=off,smbus=off,usb=off,vmport=off,graphics=off",
            # Without erms the guest copies in vector registers, not byte by byte.
            "-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm",
            "-smp", str(smp), "-m", f"{memory}M",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", str(boot.kernel), "-initrd", str(boot.initrd), "-append", CMDLINE + extra,
            "-chardev", f"file,id=con,path={self.console}", "-serial", "chardev:con",
            *shares,
        ]  # fmt: skip

    def _nics(self, links: Sequence[socket.socket], mtu: int) -> list[str]:
        found = []
        for i, link in enumerate(links):
            mac = f"52:54:00:77:{i:02x}:{self.rank + 1:02x}"
            found += [
                "-netdev", f"dgram,id=net{i},local.type=fd,local.str={link.fileno()}",
                "-device", f"virtio-net-pci,id=nic{i},netdev=net{i},mac={mac},host_mtu={mtu},"
                f"speed=10000,duplex=full,romfile=",
            ]  # fmt: skip
        return found

    # -- life ---------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_boot(self, timeout_s: float = 120) -> None:

        def is_up() -> bool:
            if not self.alive:
                raise VMError(f"guest {self.rank} died while booting\n{self.console_tail()}")
            return (self.control / "ready").exists()

        try:
            wait_until(is_up, timeout_s, what="the guest to boot")
        except AssertionError as error:
            raise VMTimeout(f"guest {self.rank}: {error}\n{self.console_tail()}") from error
        self.booted = self.booted or time.monotonic()
        problem = (self.control / "ready").read_text().strip()
        if problem != "ok":
            raise VMError(f"guest {self.rank}: {problem}\n{self.console_tail()}")

    def console_tail(self, lines: int = 60) -> str:
        out = []
        for title, path in (("guest console", self.console), ("qemu", self.qemu_log)):
            with contextlib.suppress(FileNotFoundError):
                text = path.read_text(errors="replace").replace("\r", "").rstrip()
                if text:
                    out += [f"--- {title} ({path}) ---", *text.split("\n")[-lines:]]
        return "\n".join(out)

    def kill(self) -> None:
        """A power cut."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Freeze the whole guest: for its peer it has gone silent."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self, keep: bool = False) -> None:
        self.kill()
        self._trigger.close()
        self._qmp_stream.close()
        self._qmp.close()
        _LIVE.discard(self)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- commands -----------------------------------------------------------

    def _say(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._trigger.sendall(line.encode() + b"\n")

    def spawn(
        self,
        argv: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Command:
        """Start a command (a list, or a string for the shell)."""
        self.wait_boot()
        with self._lock:
            self._count += 1
            number = self._count
        environment = dict(os.environ if env is None else env)
        for name in ("_", "PWD", "OLDPWD", "SHLVL"):
            environment.pop(name, None)
        lines = [
            f"export {k}={shlex.quote(v)}"
            for k, v in environment.items()
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", k)
        ]
        lines.append(". /run/rdmavm/env")
        lines.append(f"cd {shlex.quote(os.path.abspath(cwd or os.getcwd()))} || exit 126")
        if isinstance(argv, str):
            lines.append(f"exec /bin/sh -c {shlex.quote(argv)}")
        else:
            lines.append(f"exec {shlex.join(argv)}")
        script = self.control / f"cmd.{number}"
        temporary = self.control / f".cmd.{number}"
        temporary.write_text("\n".join(lines) + "\n")
        temporary.rename(script)
        self._say(f"RUN {number}")
        return Command(self, number)

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        timeout_s: float = 300,
        check: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        command = self.spawn(argv, cwd=cwd, env=env)
        out, err = io.BytesIO(), io.BytesIO()
        try:
            status = command.wait(timeout_s, out, err)
        except VMTimeout:
            command.signal(signal.SIGKILL)
            raise
        result = Result(
            status, out.getvalue().decode(errors="replace"), err.getvalue().decode(errors="replace")
        )
        if check and status:
            raise VMError(f"{argv!r} ended with {status}\n{result.stdout}\n{result.stderr}")
        return result

    # -- faults ---------------------------------------------------------------

    def qmp(self, execute: str, **arguments: object) -> Any:
        with self._lock:
            if not self._qmp_ready:
                self._qmp_stream.readline()
                self._qmp_stream.write(b'{"execute":"qmp_capabilities"}\n')
                self._qmp_answer()
                self._qmp_ready = True
            call = {"execute": execute, "arguments": arguments}
            self._qmp_stream.write(json.dumps(call).encode() + b"\n")
            return self._qmp_answer()

    def _qmp_answer(self) -> Any:
        while line := self._qmp_stream.readline():
            message = json.loads(line)
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise VMError(str(message["error"]))
        raise VMError("qemu closed its monitor")

    def link(self, nic: int, up: bool) -> None:
        """Pull or plug the cable of a NIC (guests that are linked only)."""
        self.qmp("set_link", name=f"nic{nic}", up=up)


_LIVE: set[Guest] = set()


@atexit.register
def kill_all() -> None:
    """Power all guests of this process off."""
    for guest in list(_LIVE):
        with contextlib.suppress(OSError):
            guest.close()


class Cluster:
    """One guest, or several whose NIC i are pairwise linked (two at most)."""

    def __init__(
        self, guests: int = 1, nics: int = 1, boot_timeout_s: float = 120, **options: Any
    ) -> None:
        if guests not in (1, 2):
            raise ValueError("one or two guests")
        pairs = []
        if guests == 2:
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(nics)]
            for pair in pairs:
                for end in pair:
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                        end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.guests: list[Guest] = []
        self.boot_timeout_s = boot_timeout_s
        try:
            for rank in range(guests):
                links = [pair[rank] for pair in pairs]
                guest = Guest(rank=rank, world=guests, nics=nics, links=links, **options)
                self.guests.append(guest)
        except BaseException:
            self.close()
            raise
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def __getitem__(self, rank: int) -> Guest:
        return self.guests[rank]

    def __len__(self) -> int:
        return len(self.guests)

    def __iter__(self) -> Iterator[Guest]:
        return iter(self.guests)

    def wait_boot(self) -> None:
        for guest in self.guests:
            guest.wait_boot(self.boot_timeout_s)

    def __enter__(self) -> Self:
        try:
            self.wait_boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, keep: bool = False) -> None:
        for guest in self.guests:
            guest.close(keep)
