"""What the kernel says about routes, in a network namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from ipaddress import ip_address

import pytest

from cenote.transport.nics.routing import Route, RouteQuery, ask_route

TIMEOUT_S = 30.0
SET_UP = """
set -e
ip link set lo up
for n in 0 1; do ip link add nic$n type veth peer name far$n; ip link set far$n up; done
ip address add 10.0.0.1/24 dev nic0
ip address add 10.0.1.1/24 dev nic1
ip address add fd00:1::1/64 dev nic0 nodad
ip link set nic0 up
ip link set nic1 up
ip route add default via 10.0.0.254 dev nic0
ip route add 10.9.0.0/16 via 10.0.1.254 dev nic1
ip route add unreachable 10.8.0.0/16
ip route add default via 10.0.1.254 dev nic1 table 101
ip rule add from 10.0.1.1 to 10.7.0.0/16 table 101
exec "$@"
"""
QUESTIONS = {
    # source, device, target: the answer
    ("10.0.0.1", "nic0", "10.0.0.2"): Route.DIRECT,
    ("10.0.1.1", "nic1", "10.0.1.2"): Route.DIRECT,
    ("10.0.0.1", "nic0", "10.0.0.1"): Route.LOCAL,
    ("10.0.0.1", "nic0", "192.0.2.1"): Route.GATEWAY,
    ("10.0.1.1", "nic1", "10.9.0.1"): Route.GATEWAY,
    ("10.0.1.1", "nic1", "10.7.0.1"): Route.GATEWAY,  # by a rule, in another table
    ("10.0.1.1", "nic1", "192.0.2.1"): Route.NONE,  # the default route goes over the other NIC
    ("10.0.1.1", "nic1", "10.0.0.2"): Route.NONE,
    ("10.0.0.1", "nic0", "10.8.0.1"): Route.NONE,
    ("fd00:1::1", "nic0", "fd00:1::2"): Route.DIRECT,
    ("fd00:1::1", "nic0", "fd00:2::2"): Route.NONE,
    ("10.0.0.1", "nic0", "fd00:1::2"): Route.NONE,
    ("10.0.0.1", "nic7", "10.0.0.2"): Route.NONE,
}
PROGRAM = """
import sys
from ipaddress import ip_address
from cenote.transport.nics.routing import RouteQuery, ask_route
for line in sys.stdin:
    source, netdev, target = line.split()
    print(ask_route(RouteQuery(ip_address(source), netdev, ip_address(target))).name)
"""


def test_the_kernel_is_asked_by_source_address_and_device() -> None:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs root, iproute2 and unshare: it makes a network namespace")
    command = ["unshare", "--net", "sh", "-c", SET_UP, "sh", sys.executable, "-c", PROGRAM]
    asked = "".join(" ".join(question) + "\n" for question in QUESTIONS)
    found = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S)
    if found.returncode and "not supported" in found.stderr:
        pytest.skip(f"this kernel can't set the network up: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    answers = dict(zip(QUESTIONS, found.stdout.split(), strict=True))
    assert answers == {question: route.name for question, route in QUESTIONS.items()}


def test_loopback_is_this_host() -> None:
    here = ip_address("127.0.0.1")
    assert ask_route(RouteQuery(here, "lo", here)) is Route.LOCAL
