"""What this machine can do at best, in the shape of the work: the yardsticks' denominators."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from peers import MIB

BLOCK = 2560 * 1024

# Answers each request byte with a block from a shared-memory file, as a store daemon would.
BLOCK_SERVER = """
import mmap, socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
f = open(sys.argv[2], "r+b")
m = memoryview(mmap.mmap(f.fileno(), 0))
n, i, block = len(m), 0, int(sys.argv[3])
while s.recv(1):
    s.sendall(m[i : i + block])
    i = (i + block) % (n - block)
"""
ECHO = """
import socket, sys
a = sys.argv[1]
s = socket.socket(socket.AF_UNIX) if a.startswith("/") else socket.socket()
s.connect(a if a.startswith("/") else ("127.0.0.1", int(a)))
if not a.startswith("/"):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while d := s.recv(64):
    s.sendall(d)
"""


def _address(memory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def memmove_shm_GBps(seconds: float) -> float:
    """2.5 MiB blocks from a shared-memory file into a private buffer, neither in cache."""
    size = 256 * MIB
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        source, target = mmap.mmap(file.fileno(), size), mmap.mmap(-1, size)
        src, dst = _address(source), _address(target)
        ctypes.memset(src, 1, size)
        ctypes.memset(dst, 1, size)
        steps, times, end, i = size // BLOCK, [], time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            at = (i * 37 % steps) * BLOCK
            start = time.perf_counter()
            ctypes.memmove(dst + at, src + at, BLOCK)
            times.append(time.perf_counter() - start)
            i += 1
    return BLOCK / statistics.median(times) / 1e9


def raw_tcp_GBps(seconds: float) -> float:
    """One request byte, then one 2.5 MiB block back, over loopback; plain blocking sockets."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as file,
    ):
        file.truncate(256 * MIB)
        os.posix_fallocate(file.fileno(), 0, 256 * MIB)
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                BLOCK_SERVER,
                str(server.getsockname()[1]),
                file.name,
                str(BLOCK),
            ]
        )
        client, _ = server.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            target = memoryview(bytearray(256 * MIB))
            times, i, end = [], 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                view = target[i * BLOCK % (250 * MIB) :][:BLOCK]
                start = time.perf_counter()
                client.sendall(b"x")
                got = 0
                while got < BLOCK:
                    got += client.recv_into(view[got:], 0, socket.MSG_WAITALL)
                times.append(time.perf_counter() - start)
                i += 1
        child.wait(10)
    return BLOCK / statistics.median(times) / 1e9


def round_trip_us(family: str, calls: int = 2000) -> float:
    """p50 of one byte there and back between two Python processes."""
    with tempfile.TemporaryDirectory() as folder:
        if family == "unix":
            path = os.path.join(folder, "s")
            server = socket.socket(socket.AF_UNIX)
            server.bind(path)
            server.listen()
            argument = path
        else:
            server = socket.create_server(("127.0.0.1", 0))
            argument = str(server.getsockname()[1])
        with server:
            child = subprocess.Popen([sys.executable, "-c", ECHO, argument])
            client, _ = server.accept()
            with client:
                if family == "tcp":
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                times = []
                for _ in range(calls):
                    start = time.perf_counter()
                    client.sendall(b"x")
                    client.recv(64)
                    times.append(time.perf_counter() - start)
            child.wait(10)
    return statistics.median(times) * 1e6


def measure(seconds: float = 1.0) -> dict[str, float]:
    return {
        "memmove shm 2.5MiB GB/s": memmove_shm_GBps(seconds),
        "raw tcp request/response 2.5MiB GB/s": raw_tcp_GBps(seconds),
        "tcp round trip p50 us": round_trip_us("tcp"),
        "unix round trip p50 us": round_trip_us("unix"),
    }
