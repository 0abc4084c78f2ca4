"""What the emulated machine boots: Debian's own kernel, unpacked and never installed, and an
initramfs with the modules that software RDMA needs. Made once, kept in a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import lzma
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["APT_PACKAGES", "CMDLINE", "BootFiles", "VMError", "VMTimeout", "prepare", "setup"]

HERE = Path(__file__).resolve().parent
CACHE = Path(
    os.environ.get("RDMAVM_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdmavm"
)
#: Debian packages that a host needs (the kernel is only unpacked, never installed).
APT_PACKAGES = (
    "qemu-system-x86",
    "busybox-static",
    "iproute2",
    "ibverbs-providers",
    "ibverbs-utils",
    "librdmacm1",
    "python3-pyverbs",
)
KERNEL_META_PACKAGE = os.environ.get("RDMAVM_KERNEL_PACKAGE", "linux-image-amd64")

#: Modules loaded in the guest, with what they depend on. "?" marks optional ones.
MODULES = (
    *("virtio_pci", "9p", "9pnet_virtio", "overlay", "dummy", "virtio_net"),
    *("?crc32_generic", "?crc32c_generic", "?libcrc32c"),
    *("rdma_rxe", "ib_uverbs", "rdma_cm", "rdma_ucm"),
    "?vgem",  # dma-bufs
)

CMDLINE = (
    "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic nokaslr mitigations=off "
    "random.trust_cpu=on tsc=reliable no_timer_check cryptomgr.notests init_on_alloc=0 "
    "dummy.numdummies=0 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 apparmor=0 audit=0 "
    "initcall_blacklist=init_kprobe_trace,init_zswap,load_system_certificate_list,"
    "init_trace_printk_function_export"
)


class VMError(RuntimeError):
    """The virtual machine could not be made, booted, or it died."""


class VMTimeout(VMError):
    """A boot or a command took longer than it may."""


@dataclasses.dataclass(frozen=True)
class BootFiles:
    kernel: Path
    initrd: Path
    release: str


def _run(*argv: str, cwd: Path | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise VMError(f"{shlex.join(argv)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def _busybox() -> Path:
    for candidate in ("/bin/busybox", "/usr/bin/busybox", "/bin/busybox.static"):
        path = Path(candidate)
        # A static program has no PT_INTERP, so no loader's name in its first page.
        if path.is_file() and b"ld-linux" not in path.read_bytes()[:4096]:
            return path
    raise VMError("no static busybox here: apt-get install busybox-static")


def _kernel_of(deb_root: Path) -> tuple[Path, Path, str]:
    for modules in sorted((deb_root / "lib/modules").glob("*"), reverse=True):
        image = deb_root / f"boot/vmlinuz-{modules.name}"
        if image.is_file() and any(modules.rglob("rdma_rxe.ko*")):
            return image, modules, modules.name
    raise VMError(f"no kernel with the rdma_rxe module under {deb_root}")


def _download_kernel(into: Path) -> Path:
    """Fetch and unpack Debian's kernel package without installing it."""
    wanted = KERNEL_META_PACKAGE
    if not re.match(r"linux-image-\d", wanted):  # a meta package: follow it to the real one
        depends = re.findall(r"Depends: (linux-image-\d\S*)", _run("apt-cache", "depends", wanted))
        if not depends:
            raise VMError(f"apt knows no kernel package behind {wanted}: run apt-get update first")
        wanted = sorted(depends)[-1]
    _run("apt-get", "download", "-q", wanted, cwd=into)
    deb = next(into.glob("*.deb"))
    _run("dpkg-deb", "-x", str(deb), str(into / "root"))
    deb.unlink()
    return into / "root"


def _vmlinux(image: bytes) -> bytes | None:
    """The ELF kernel inside a bzImage: qemu starts it at once (PVH), which
    saves emulating the decompression."""
    start = image.find(b"\xfd7zXZ\x00")
    while start >= 0:
        with contextlib.suppress(lzma.LZMAError):
            elf = lzma.LZMADecompressor().decompress(image[start:])
            if elf[:4] == b"\x7fELF":
                return elf
        start = image.find(b"\xfd7zXZ\x00", start + 1)
    return None


def _unsigned(module: bytes) -> bytes:
    """Drop the appended signature: checking it is slow when emulated."""
    magic = b"~Module signature appended~\n"
    if not module.endswith(magic):
        return module
    info = module[-len(magic) - 12 : -len(magic)]
    (length,) = struct.unpack(">I", info[8:12])
    return module[: -len(magic) - 12 - length]


def _read_module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    return _unsigned(data)


def _module_set(modules: Path) -> dict[str, tuple[bytes, list[str]]]:
    def name_of(path: str) -> str:
        return re.sub(r"\.ko(\.\w+)?$", "", os.path.basename(path)).replace("-", "_")

    files = {name_of(p.name): p for p in modules.rglob("*.ko*")}
    builtin = {name_of(line.strip()) for line in (modules / "modules.builtin").open()}
    chosen: dict[str, tuple[bytes, list[str]]] = {}

    def add(name: str, optional: bool) -> bool:
        name = name.replace("-", "_")
        if name in builtin:
            return False
        if name in chosen:
            return True
        if name not in files:
            if optional:
                return False
            raise VMError(f"the kernel in {modules} has no module {name}")
        data = _read_module(files[name])
        found = re.search(rb"\0depends=([^\0]*)\0", data)
        depends = [d for d in (found.group(1).decode().split(",") if found else []) if d]
        depends = [d.replace("-", "_") for d in depends if add(d, False)]
        chosen[name] = (data, depends)
        return True

    for wanted in MODULES:
        add(wanted.lstrip("?"), wanted.startswith("?"))
    return chosen


class _Cpio:
    """A writer of the "newc" archives that the kernel unpacks at boot."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.inode = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        self.inode += 1
        fields = (self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % f for f in fields) + name.encode() + b"\0"
        self.parts += [head, b"\0" * (-len(head) % 4), data, b"\0" * (-len(data) % 4)]

    def bytes(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self.parts)


_APPLETS = [
    "sh",
    "mount",
    "mkdir",
    "modprobe",
    "switch_root",
    "cp",
    "cat",
    "ip",
    "stty",
    "sleep",
    "poweroff",
    "setsid",
    "mkfifo",
    "mv",
    "rm",
    "kill",
    "sync",
    "ln",
    "chmod",
    "sysctl",
    "hostname",
    "date",
    "tail",
    "mknod",
    "basename",
    "seq",
]


def _initramfs(modules: dict[str, tuple[bytes, list[str]]], release: str) -> bytes:
    cpio = _Cpio()
    folder = f"lib/modules/{release}"
    for path in ("bin", "dev", "proc", "sys", "new", "lib", "lib/modules", folder):
        cpio.add(path, 0o040755)
    cpio.add("bin/busybox", 0o100755, _busybox().read_bytes())
    for applet in _APPLETS:
        cpio.add(f"bin/{applet}", 0o120777, b"busybox")
    order, lines = [], []
    for name, (data, _) in modules.items():
        cpio.add(f"{folder}/{name}.ko", 0o100644, data)
        lines.append(f"{name}.ko: {' '.join(f'{d}.ko' for d in _closure(name, modules))}".rstrip())
        order.append(name)
    cpio.add(f"{folder}/modules.dep", 0o100644, ("\n".join(lines) + "\n").encode())
    cpio.add("modules", 0o100644, (" ".join(order) + "\n").encode())
    cpio.add("init", 0o100755, (HERE / "guest-init.sh").read_bytes())
    cpio.add("agent", 0o100755, (HERE / "guest-agent.sh").read_bytes())
    return cpio.bytes()


def _closure(name: str, modules: dict[str, tuple[bytes, list[str]]]) -> list[str]:
    out: list[str] = []
    for depend in modules[name][1]:
        for item in (depend, *_closure(depend, modules)):
            if item in out:
                out.remove(item)
            out.append(item)
    return out


def prepare() -> BootFiles:
    """Make (once) and return the boot files. Safe to call from many processes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wish = f"{KERNEL_META_PACKAGE} {MODULES}".encode()
        kernels = CACHE / f"kernel-{hashlib.sha256(wish).hexdigest()[:12]}"
        if not (kernels / "release").is_file():
            _unpack_kernel(kernels)
        release = (kernels / "release").read_text().strip()
        scripts = b"".join((HERE / f"guest-{n}.sh").read_bytes() for n in ("init", "agent"))
        key = hashlib.sha256(scripts + Path(__file__).read_bytes())
        initrd = CACHE / f"initrd-{release}-{key.hexdigest()[:12]}"
        if not initrd.is_file():
            chosen = _module_set(kernels / "modules")
            temporary = initrd.with_suffix(".tmp")
            temporary.write_bytes(_initramfs(chosen, release))
            temporary.rename(initrd)
            for old in CACHE.glob("initrd-*"):
                if old != initrd and time.time() - old.stat().st_mtime > 3600:
                    old.unlink(missing_ok=True)
        return BootFiles(kernels / "vmlinux", initrd, release)


def _unpack_kernel(kernels: Path) -> None:
    shutil.rmtree(kernels, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch_name:
        scratch = Path(scratch_name)
        try:  # a kernel that is installed here will do
            image, modules, release = _kernel_of(Path("/"))
        except VMError:
            image, modules, release = _kernel_of(_download_kernel(scratch))
        new = scratch / "kernel"
        new.mkdir()
        data = image.read_bytes()
        (new / "vmlinux").write_bytes(_vmlinux(data) or data)
        # Keep only the modules needed (some 5 of 390 MB), found by a dry run.
        (new / "modules").mkdir()
        shutil.copy(modules / "modules.builtin", new / "modules")
        wanted = _module_set(modules)
        for name, (code, _) in wanted.items():
            (new / "modules" / f"{name}.ko").write_bytes(code)
        (new / "release").write_text(release + "\n")
        new.rename(kernels)


def setup() -> None:
    """Install what is missing (Debian, as root) and make the boot files."""
    missing = [
        name
        for name in APT_PACKAGES
        if subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status}", name], capture_output=True, text=True
        ).stdout
        != "installed"
    ]
    if missing:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
        if subprocess.run(install, env=env).returncode:
            subprocess.run(["apt-get", "update", "-q"], check=True)
            subprocess.run(install, env=env, check=True)
    try:
        prepare()
    except VMError:
        subprocess.run(["apt-get", "update", "-q"], check=True)
        prepare()
