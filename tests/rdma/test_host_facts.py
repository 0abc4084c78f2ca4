"""What is read of NICs and limits, against real devices (soft-RoCE in the emulated machine)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from cenote.transport.nics.choice import advertised, choose_paths, usable_ports
from cenote.transport.nics.routing import Route, ask_route
from cenote.transport.nics.sysfs import read_counters, read_netdevs, read_ports

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(not read_ports(), reason="this host has no RDMA device"),
]

TIMEOUT_S = 60.0


def test_each_device_finds_a_way_to_itself() -> None:
    ports = read_ports()
    usable, refused = usable_ports(ports, netdevs=read_netdevs())
    if not usable:
        pytest.skip("no port is up: " + "; ".join(map(str, refused)))
    paths = choose_paths(usable, advertised(usable), ask_route).paths
    assert sorted(path.local.name for path in paths) == sorted(port.name for port in usable)
    for path in paths:
        if path.local.link_layer == "Ethernet":
            assert path.route is Route.LOCAL
            assert path.local_gid.type == "RoCE v2"
            assert path.local_gid.address == path.peer_gid.address


def test_devices_count() -> None:
    assert all(read_counters(port) for port in read_ports())


# As an ordinary user with a limit of 1 MiB: 512 KiB, 256 KiB, and 512 KiB that are too much.
PROGRAM = """
import ctypes, errno, mmap, os, resource
import ibverbs
from cenote.runtime.memlock import pinning_error, pinning_refusal, read_memlock
pd = ibverbs.get_device_list()[0].open().alloc_pd()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
keep = []
for size, fits in ((1 << 19, True), (1 << 18, True), (1 << 19, False)):
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    expected = pinning_refusal(read_memlock(), size, "x")
    try:
        keep.append((memory, pd.reg_mr(address, size, 1)))
        registered = True
    except ibverbs.VerbsError as error:
        assert error.errno == errno.ENOMEM, error
        assert "RLIMIT_MEMLOCK" in str(pinning_error(error.errno, size, "x"))
        registered = False
    assert registered is fits and (expected is None) is fits, (size, registered, expected)
assert read_memlock().pinned_bytes == 3 << 18
os._exit(0)  # the devices are closed with the process
"""


def test_registration_goes_by_the_limit_that_is_told() -> None:
    if os.geteuid():
        pytest.skip("needs root: it gives up its rights in a process of its own")
    if importlib.util.find_spec("ibverbs") is None:
        pytest.skip("needs ibverbs: pip install 'cenote[rdma]'")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_the_doctor_finds_the_devices_fit() -> None:
    command = [sys.executable, "-m", "cenote.cli.main", "doctor", "--json", "--deadline", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * TIMEOUT_S)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    for port in read_ports():
        assert found[f"rdma {port.name}"]["verdict"] == "ok", found
        assert "GID" in found[f"rdma {port.name}"]["found"]
    assert found["rdma library"]["verdict"] in ("ok", "warn")
    assert found["rdma losses"]["verdict"] in ("ok", "warn")
