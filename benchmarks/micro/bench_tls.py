"""The CPU time that TLS takes on a socket: bulk, small round trips, handshakes.

    PYTHONPATH=tests python benchmarks/micro/bench_tls.py [--mib 256] [--rounds 3]

A TCP connection over loopback between two threads, plain and as a `TlsSocket`, by turns. Told is
the CPU time of each thread, not how long it took: other load on the machine matters little then.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from cenote.security.tls import Tls
from cenote.security.tls_socket import TlsSocket, begin_tls
from tls_kit import Authority

CALLS: Final = 2000
SMALL: Final = 100
HANDSHAKES: Final = 40
LIMIT_S: Final = 120.0
_WAITALL: Final = int(socket.MSG_WAITALL)

Socket = socket.socket | TlsSocket


def connected(server: Tls | None, client: Tls | None) -> tuple[Socket, Socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for one in (near, far):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server is None or client is None:
        return near, far
    made: list[TlsSocket] = []
    until_s = time.monotonic() + LIMIT_S
    thread = threading.Thread(
        target=lambda: made.append(begin_tls(far, server, "client", until_s, server_side=True))
    )
    thread.start()
    mine = begin_tls(near, client, "server", until_s, host="127.0.0.1")
    thread.join()
    return mine, made[0]


def cpu_of(*work: Callable[[], None]) -> list[float]:
    """CPU seconds of each, in threads of their own."""
    took = [0.0] * len(work)

    def run(index: int) -> None:
        began_s = time.thread_time()
        work[index]()
        took[index] = time.thread_time() - began_s

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def measure(near: Socket, far: Socket, mib: int) -> dict[str, float]:
    block, into = bytes(1 << 20), bytearray(1 << 20)
    message, reply, request = bytes(SMALL), bytearray(SMALL), bytearray(SMALL)

    def send() -> None:
        for _ in range(mib):
            near.sendall(block)

    def receive() -> None:
        for _ in range(mib):
            far.recv_into(into, len(into), _WAITALL)

    def ask() -> None:
        for _ in range(CALLS):
            near.sendall(message)
            near.recv_into(reply, SMALL, _WAITALL)

    def answer() -> None:
        for _ in range(CALLS):
            far.recv_into(request, SMALL, _WAITALL)
            far.sendall(message)

    sent_s, received_s = cpu_of(send, receive)
    asked_s, _ = cpu_of(ask, answer)
    return {
        "sending, ms a GiB": sent_s * 1024 / mib * 1e3,
        "receiving, ms a GiB": received_s * 1024 / mib * 1e3,
        "a round trip of 100 B, µs a side": asked_s / CALLS * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="the CPU time that TLS takes on a socket")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        server = authority.server(authority.issue("server"))
        client = authority.client(authority.issue("client"))
        found: dict[str, list[dict[str, float]]] = {"plain": [], "TLS": []}
        for _ in range(options.rounds):
            for kind, pair in (("plain", (None, None)), ("TLS", (server, client))):
                near, far = connected(*pair)
                found[kind].append(measure(near, far, options.mib))
                near.close()
                far.close()
        for what in found["plain"][0]:
            plain, tls = (
                statistics.median(row[what] for row in found[kind]) for kind in ("plain", "TLS")
            )
            print(f"{what:34} plain {plain:7.1f}  TLS {tls:7.1f}  x{tls / plain:.1f}")
        began_s = time.process_time()
        for _ in range(HANDSHAKES):
            for one in connected(server, client):
                one.close()
        each_ms = (time.process_time() - began_s) / HANDSHAKES * 1e3
        print(f"a handshake, both sides together: {each_ms:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
